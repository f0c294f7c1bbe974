"""`find`: everything that sources hold, as one lazy stream in bounded memory.

path/to/image.png  photos/  'scans/**/*.tif'  https://…/cat.jpg  shard-000.tar  set.zip  set.parquet
set.arrow  requests.jsonl  @list.txt  -        # and, in Python, bytes and PIL images
"""

from __future__ import annotations

import glob
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

from featcache.engine.warm.addresses import Addresses, expanded
from featcache.engine.warm.archives import tar_items, zip_items
from featcache.engine.warm.folders import unreadable, walk
from featcache.engine.warm.items import Found, PassedOver, SourceItem, Unreadable, held
from featcache.engine.warm.kinds import (
    HEAD_BYTES,
    begins_image,
    container_of,
    has_image_suffix,
    other_type,
)
from featcache.engine.warm.rows import row_items
from featcache.engine.warm.tables import table_items
from featcache.engine.warm.web import Web, is_url
from featcache.errors import ConfigError, FeatcacheError
from featcache.images import ImageLimits, ImageSource, describe, read_source

Source: TypeAlias = ImageSource
STDIN = "-"

_MAX_LIST_LINE = 1 << 16  # bytes of one path or URL
_SHUFFLED_ITEMS, _SHUFFLED_BYTES = 65_536, 256 << 20


def find(sources: Iterable[Source], web: Web, limits: ImageLimits) -> Iterator[Found]:
    """What `sources` hold, in order. Nothing raises: what can't be read is in the stream as Unreadable."""
    for source in sources:
        if isinstance(source, (str, os.PathLike)):
            yield from _named(os.fsdecode(source), web, limits)
        elif isinstance(source, (bytes, bytearray, memoryview)):
            yield held(describe(source), "", bytes(source))
        else:
            yield held(describe(source), "", source)


def shuffled(found: Iterable[Found], seed: int) -> Iterator[Found]:
    """In random order, the same for the same seed; within a window if there is more than fits in memory."""
    generator = random.Random(seed)
    window: list[Found] = []
    held_bytes = 0
    for item in found:
        window.append(item)
        held_bytes += _held(item)
        while len(window) > _SHUFFLED_ITEMS or (held_bytes > _SHUFFLED_BYTES and len(window) > 1):
            out = _taken(window, generator)
            held_bytes -= _held(out)
            yield out
    while window:
        yield _taken(window, generator)


def _taken(window: list[Found], generator: random.Random) -> Found:
    at = generator.randrange(len(window))
    window[at], window[-1] = window[-1], window[at]
    return window.pop()


def _held(item: Found) -> int:
    return item.held_bytes if isinstance(item, SourceItem) else 0


def _named(name: str, web: Web, limits: ImageLimits) -> Iterator[Found]:
    """A source as a person names it on the command line."""
    here = str(Path.cwd())
    if name == STDIN:
        yield from _listed(sys.stdin.buffer, "standard input", Addresses((here,), web, limits))
    elif name.startswith("@"):
        path = expanded(name[1:])
        try:
            with Path(path).open("rb") as file:
                yield from _listed(file, path, Addresses((here, _folder(path)), web, limits))
        except OSError as exc:
            yield unreadable(path, exc)
    else:
        yield from _address(name, web, limits, globs=True)


def _address(name: str, web: Web, limits: ImageLimits, *, globs: bool) -> Iterator[Found]:
    if is_url(name):
        yield from _url(name, web, limits)
        return
    path = expanded(name)
    if Path(path).is_dir():
        for found in walk(path):
            yield from _in_folder(found, web, limits) if isinstance(found, str) else iter((found,))
    elif globs and not os.path.lexists(path) and glob.has_magic(path):
        yield from _globbed(path, web, limits)
    elif kind := container_of(path):
        yield from _container(kind, path, web, limits)
    else:
        yield _file(path, limits)


def _folder(path: str) -> str:
    return str(Path(path).absolute().parent)


def _globbed(pattern: str, web: Web, limits: ImageLimits) -> Iterator[Found]:
    is_empty = True
    for path in glob.iglob(pattern, recursive=True):  # noqa: PTH207 (absolute patterns too)
        is_empty = False
        if not Path(path).is_dir():
            yield from _in_folder(path, web, limits)
        elif "**" not in pattern:  # which names the files in the folders too
            yield from _address(path, web, limits, globs=False)
    if is_empty:
        yield Unreadable(pattern, "", ConfigError(f"{pattern}: no file or folder matches"))


def _in_folder(path: str, web: Web, limits: ImageLimits) -> Iterator[Found]:
    """A file that nobody has named: an image or a container of images, or passed over."""
    kind = container_of(path)
    if kind == "jsonl":
        yield PassedOver(path, "", "is a .jsonl file; name it itself to have its images read")
    elif kind:
        yield from _container(kind, path, web, limits)
    elif has_image_suffix(path):
        yield _file(path, limits)
    elif known := other_type(path):
        yield PassedOver(path, "", f"is {known}")
    else:
        yield _sniffed(path, limits)


def _sniffed(path: str, limits: ImageLimits) -> Found:
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            head = file.read(HEAD_BYTES)
    except OSError as exc:
        return unreadable(path, exc)
    return _file(path, limits) if begins_image(head) else PassedOver(path, "", "is no image")


def _file(path: str, limits: ImageLimits) -> SourceItem:
    return SourceItem(path, "", lambda: read_source(path, limits))


def _container(kind: str, path: str, web: Web, limits: ImageLimits) -> Iterator[Found]:
    addresses = Addresses((_folder(path), str(Path.cwd())), web, limits)
    if kind == "zip":
        yield from zip_items(path, path, limits)
    elif kind in ("parquet", "arrow"):
        yield from table_items(path, path, kind, addresses)
    else:
        try:
            with Path(path).open("rb") as file:
                yield from _streamed(kind, path, file, addresses, limits)
        except OSError as exc:
            yield unreadable(path, exc)


def _streamed(
    kind: str, name: str, stream: IO[bytes], addresses: Addresses, limits: ImageLimits
) -> Iterator[Found]:
    if kind == "tar":
        yield from tar_items(name, stream, limits)
    else:
        yield from row_items(name, stream, addresses, gzipped=name.lower().endswith(".gz"))


def _url(url: str, web: Web, limits: ImageLimits) -> Iterator[Found]:
    kind = container_of(url.partition("?")[0].partition("#")[0])
    if kind in ("tar", "jsonl"):
        try:
            with web.open(url, url) as stream:
                yield from _streamed(kind, url, stream, Addresses((str(Path.cwd()),), web, limits), limits)
        except FeatcacheError as exc:
            yield Unreadable(url, "", exc)
    elif kind:
        error = ConfigError(f"{url}: a .{kind} can't be read over the network; download it first")
        yield Unreadable(url, "", error)
    else:
        yield SourceItem(url, "", lambda: web.fetch(url, url))


def _listed(file: IO[bytes], name: str, addresses: Addresses) -> Iterator[Found]:
    """A list of paths and URLs, one a line; or ended by NUL, as `find -print0` writes names with newlines."""
    for number, entry in enumerate(_entries(file), start=1):
        if entry is None:
            what = f"more than {_MAX_LIST_LINE} bytes, which is no path or URL"
            yield Unreadable(name, f"entry {number}", ConfigError(f"{name}, entry {number}: {what}"))
        elif entry.strip():
            text = os.fsdecode(entry)
            path = text if is_url(text) else addresses.find(text)
            yield from _address(path, addresses.web, addresses.limits, globs=False)


def _entries(file: IO[bytes]) -> Iterator[bytes | None]:
    """The entries of a list; None for one that is too long to be held."""
    rest, separator, is_skipping = b"", None, False
    while chunk := _some(file):
        separator = separator or (b"\0" if b"\0" in chunk else b"\n" if b"\n" in chunk else None)
        rest += chunk
        if separator:
            *entries, rest = rest.split(separator)
            for entry in entries:
                yield None if is_skipping or len(entry) > _MAX_LIST_LINE else _trimmed(entry, separator)
                is_skipping = False
        if len(rest) > _MAX_LIST_LINE:
            rest, is_skipping = b"", True
    if is_skipping:
        yield None
    elif rest:
        yield _trimmed(rest, separator)


def _some(file: IO[bytes]) -> bytes:
    read1 = getattr(file, "read1", file.read)  # what a pipe has now, without waiting for more
    data: bytes = read1(1 << 16)
    return data


def _trimmed(entry: bytes, separator: bytes | None) -> bytes:
    return entry if separator == b"\0" else entry.removesuffix(b"\r")


def count_files(sources: Iterable[Source]) -> int | None:
    """How many images there are, if that is soon known (files, folders); None if there is anything else."""
    total = 0
    for source in sources:
        if not isinstance(source, (str, os.PathLike)):
            total += 1
            continue
        name = expanded(os.fsdecode(source))
        if Path(name).is_dir():
            files = [found for found in walk(name) if isinstance(found, str)]
            if any(container_of(path) not in (None, "jsonl") for path in files):
                return None
            total += sum(has_image_suffix(path) for path in files)
        elif container_of(name) or not Path(name).exists():
            return None
        else:
            total += 1
    return total
