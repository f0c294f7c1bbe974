"""Images in .jsonl files: OpenAI chat and batch requests, and rows with image fields."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import IO, Any, cast

from featcache.engine.families.base import ImageOptions
from featcache.engine.messages import SourceRules, read_messages
from featcache.engine.warm.addresses import Addresses
from featcache.engine.warm.items import Found, PassedOver, SourceItem, Unreadable
from featcache.engine.warm.tables import cell_items
from featcache.errors import ConfigError, FeatcacheError

MAX_LINE_BYTES = 512 << 20  # of base64 there may be a third more than of the image

_IN_MARK = {"type", "text", "index"}
_TEXTS = ("text", "input_text", "output_text", "refusal")
FIELDS = (
    *("image", "images", "image_url", "image_urls", "image_path", "image_paths", "image_base64"),
    *("image_bytes", "file_name"),
)


def row_items(
    source: str, stream: IO[bytes], addresses: Addresses, *, gzipped: bool = False
) -> Iterator[Found]:
    """The images of a file of one JSON object a line; a bad line harms no other."""
    file = cast("IO[bytes]", gzip.GzipFile(fileobj=stream)) if gzipped else stream
    number = 0
    try:
        for line in _lines(file):
            number += 1
            member = f"line {number}"
            if line is None:
                what = f"more than {MAX_LINE_BYTES} bytes in one line"
                yield Unreadable(source, member, ConfigError(f"{member}: {what}"))
            elif line.strip():
                yield from _line_items(source, member, line, addresses)
    except (EOFError, zlib.error, OSError) as exc:
        error = ConfigError(f"can't be read on after line {number}: {exc}")
        yield Unreadable(source, f"after line {number}", error)


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines, and None in place of one that is too long to be held."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None


def _line_items(source: str, member: str, line: bytes, addresses: Addresses) -> Iterator[Found]:
    try:
        row = json.loads(line)
        if isinstance(row, list):
            row = {"messages": row}
        if not isinstance(row, Mapping):
            raise ConfigError(f"{member}: a {type(row).__name__}; a row is a JSON object")
        found = _row_items(source, member, row, addresses)
    except (ValueError, RecursionError) as exc:
        error = exc if isinstance(exc, FeatcacheError) else ConfigError(f"{member}: not JSON: {exc}")
        yield Unreadable(source, member, error)
        return
    yield from found or [PassedOver(source, member, "holds no image")]


def _row_items(source: str, member: str, row: Mapping[str, Any], addresses: Addresses) -> list[Found]:
    body = row["body"] if isinstance(row.get("body"), Mapping) else row  # a batch file's line
    found: list[Found] = []
    is_request = False
    for name in ("messages", "input"):
        if isinstance(messages := body.get(name), list):
            is_request = True
            found += _message_items(source, f"{member}: ", messages, addresses)
    for name in FIELDS:
        if row.get(name) is not None:
            found += cell_items(source, f"{member}: {name}", row[name], addresses)
    if is_request:
        images = sum(isinstance(item, SourceItem) for item in found)
        found = [replace(item, num_images=images) if isinstance(item, SourceItem) else item for item in found]
    return found


def _message_items(source: str, prefix: str, messages: list[Any], addresses: Addresses) -> Iterator[Found]:
    messages = [_with_sources(message) for message in messages]
    if not any(_may_hold_images(message) for message in messages):
        return
    for image in read_messages(messages, ImageOptions(), SourceRules(fetch=_not_yet)).images:
        asked = {name: value for name, value in asdict(image.options).items() if value is not None}
        yield addresses.item(source, prefix + image.where, image.source, options=asked)


def _with_sources(message: Any) -> Any:
    """A message without those parts that only mark where an image of the row's own fields stands."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if not _is_mark(part)]}


def _is_mark(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and part.keys() <= _IN_MARK


def _may_hold_images(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return False
    return any(isinstance(part, Mapping) and part.get("type") not in _TEXTS for part in content)


def _not_yet(url: str) -> bytes:
    """The address itself: images are fetched later, several at once."""
    return cast(bytes, url)
