"""Is the page header before a stored chunk whole? Asked before the chunk is deleted.

LMDB trusts the header of a multi-page value when it frees its pages: with a damaged count it would free pages
of other records. Such a chunk is left where it is, and counted as lost.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

from featcache.tiers.schema import PAGE, PAGE_HEADER, pages

_HEADER = struct.Struct("<QHHI")  # page number, padding, flags, pages: MDB_page of LMDB 0.9
_P_OVERFLOW = 0x04
MAP_LIMIT = 1 << 46


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(view: memoryview) -> int:
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def map_base(data_file: Path) -> int | None:
    """Where this process has mapped the database file; None where the system doesn't tell."""
    try:
        inode = data_file.stat().st_ino
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split()
            if fields[4] == str(inode) and int(fields[2], 16) == 0:
                return int(fields[0].split("-")[0], 16)
    except OSError:
        pass
    return None


def is_whole(value: memoryview, base: int | None) -> bool:
    """Whether a value read from the map, in a transaction that is still open, may be deleted."""
    address = _address(value)
    if address % PAGE != PAGE_HEADER or (base is not None and not base <= address < base + MAP_LIMIT):
        return True  # small enough to stand in a leaf page, or in a page that this transaction has written
    page, _, flags, count = _HEADER.unpack(ctypes.string_at(address - PAGE_HEADER, PAGE_HEADER))
    is_right_page = base is None or page == (address - base) // PAGE
    return bool(flags == _P_OVERFLOW and count == pages(len(value)) and is_right_page)
