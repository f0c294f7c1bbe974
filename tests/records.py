"""Records whose every byte follows from their key, so that a reader can tell a wrong one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from featcache.features import Header, Layout, TensorSpec
from featcache.tiers.disk import DiskTier, Record

HIDDEN = 1024  # values of two bytes in a row
ROW_BYTES = 2 * HIDDEN
MIB = 1 << 20


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data_of(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


def header_of(number: int, nbytes: int) -> Header:
    """Of a record of about `nbytes`, in whole rows."""
    rows = max(1, nbytes // ROW_BYTES)
    spec = TensorSpec("BF16", (rows, HIDDEN))
    return Header.of(key_of(number), b"\x07" * 32, Layout(rows, 640, 480, grid=(1, 2, rows)), {"rows": spec})


def record_of(number: int, nbytes: int = 64 << 10) -> Record:
    header = header_of(number, nbytes)
    return header, [memoryview(data_of(number, header.data_bytes))]


def read(tier: DiskTier, number: int) -> bytes | None:
    """The tensor data of a record as the tier gives it out."""
    buffers: list[bytearray] = []

    def into(header: Header) -> memoryview:
        buffers.append(bytearray(header.data_bytes))
        return memoryview(buffers[0])

    return bytes(buffers[0]) if tier.read(key_of(number), into) is not None else None


def is_right(number: int, data: bytes) -> bool:
    return data == data_of(number, len(data))


def places_of(path: Path, data: bytes, part: slice) -> Sequence[int]:
    """Where in the database file these bytes of `data` stand."""
    content = path.read_bytes()
    found, needle, start = [], data[part], 0
    while (at := content.find(needle, start)) >= 0:
        found.append(at)
        start = at + 1
    return found
