"""Folders, walked lazily: in order, without end in loops, in memory that doesn't grow with them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from featcache.engine.warm.items import PassedOver, Unreadable
from featcache.engine.warm.kinds import is_junk
from featcache.errors import ConfigError

_SORTED_AT_ONCE = 65_536  # names of one folder; a larger one comes in sorted runs of this many

_Listing = Iterator["os.DirEntry[str] | Unreadable"]


def walk(folder: str) -> Iterator[str | PassedOver | Unreadable]:
    """The paths of all files below `folder`. Links are followed, but no folder is entered twice.

    Hidden files and folders are passed over, as are pipes, sockets and devices.
    """
    entered: set[tuple[int, int]] = set()
    stack: list[_Listing] = [_listing(folder, entered)]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
        elif isinstance(entry, Unreadable):
            yield entry
        elif is_junk(entry.name):
            yield PassedOver(entry.path, "", "is hidden")
        else:
            try:
                is_folder = entry.is_dir()
                if is_folder and _identity(entry.path) in entered:
                    yield PassedOver(entry.path, "", "is a link to a folder that was read already")
                elif is_folder:
                    stack.append(_listing(entry.path, entered))
                elif entry.is_file() or entry.is_symlink():  # a dangling link is for its reader to report
                    yield entry.path
                else:
                    yield PassedOver(entry.path, "", "is not a regular file, but a pipe, socket or device")
            except OSError as exc:
                yield unreadable(entry.path, exc)


def _listing(folder: str, entered: set[tuple[int, int]]) -> _Listing:
    try:
        entered.add(_identity(folder))
        with os.scandir(folder) as entries:
            while run := sorted(islice(entries, _SORTED_AT_ONCE), key=lambda entry: entry.name):
                yield from run
    except OSError as exc:
        yield unreadable(folder, exc)


def _identity(folder: str) -> tuple[int, int]:
    status = Path(folder).stat()
    return status.st_dev, status.st_ino


def unreadable(path: str, exc: OSError) -> Unreadable:
    is_loop = exc.errno == errno.ELOOP
    reason = "is a link that leads back to itself" if is_loop else f"can't be read: {exc.strerror}"
    return Unreadable(path, "", ConfigError(f"{path!r} {reason}"))
