"""The disk tier's tables, and what stands in them.

    meta      key -> Entry (packed) + the record's head (see features.Header.to_bytes)
    payload   record id, chunk number -> a chunk of the tensor data
    records   record id -> key, in the order of insertion
    small, main  sequence -> key: the two queues of S3-FIFO;  ghost, ghost_order: what left `small` lately
    access    key -> times hit since the last eviction pass, time of the last hit
    aliases   alias key -> sequence + value;  alias_order: sequence -> alias key
    encoders  fingerprint -> JSON: description, entries, bytes
    claims    key -> who is computing it, and until when
    info      "schema", "totals"

Chunks are of one size that fills whole pages with LMDB's page header: a value that spans pages needs free
pages in a row, and freed rows of one length always fit the next record. With values of all lengths the file
grows far beyond what it holds.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from featcache.errors import RecordError, SchemaError

SCHEMA_VERSION = 1
TABLES = (
    "meta", "payload", "records", "small", "main", "ghost", "ghost_order", "access",
    "aliases", "alias_order", "encoders", "claims", "info",
)  # fmt: skip

PAGE = 4096
PAGE_HEADER = 16
CHUNK_PAGES = 64
CHUNK = CHUNK_PAGES * PAGE - PAGE_HEADER

_ENTRY = struct.Struct("<BQQQdQ")
_CHUNK_KEY = struct.Struct(">QI")
_NUMBER = struct.Struct(">Q")
_ACCESS = struct.Struct("<Bd")

SMALL, MAIN = 0, 1


class Entry(NamedTuple):
    """A row of `meta`, before the record's head.

    queue: SMALL or MAIN. sequence: its place there. record: id of its chunks. data_bytes: of tensor data.
    created: seconds since 1970. file_bytes: what it takes of the file.
    """

    queue: int
    sequence: int
    record: int
    data_bytes: int
    created: float
    file_bytes: int

    def pack(self, head: bytes) -> bytes:
        return _ENTRY.pack(*self) + head

    @classmethod
    def unpack(cls, row: bytes | memoryview) -> tuple[Entry, bytes]:
        """Raises RecordError if it is too short to be one."""
        if len(row) < _ENTRY.size:
            raise RecordError(f"{len(row)} bytes of metadata are too few")
        return cls(*_ENTRY.unpack_from(row)), bytes(row[_ENTRY.size :])


@dataclass(slots=True)
class Totals:
    """Sums over the whole store, kept with every transaction so that nobody has to count."""

    entries: int = 0
    data_bytes: int = 0
    file_bytes: int = 0
    small_bytes: int = 0
    ghosts: int = 0
    aliases: int = 0
    next_number: int = 1
    evicted: int = 0
    evicted_bytes: int = 0
    quarantined: int = 0
    lost_bytes: int = 0

    def number(self) -> int:
        """A fresh number: of a record, or a place in a queue."""
        self.next_number += 1
        return self.next_number

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, row: bytes | memoryview | None) -> Totals:
        doc: dict[str, Any] = json.loads(bytes(row)) if row else {}
        return cls(**{f.name: doc[f.name] for f in fields(cls) if f.name in doc})


def file_bytes(data_bytes: int) -> int:
    """What a record of this much data takes of the file: whole pages, and its rows in the tables."""
    full, rest = divmod(data_bytes, CHUNK)
    return full * CHUNK_PAGES * PAGE + pages(rest) * PAGE + PAGE // 2


def pages(value_bytes: int) -> int:
    """Pages that a value of this size takes of its own."""
    return -(-(value_bytes + PAGE_HEADER) // PAGE) if value_bytes else 0


def chunk_key(record: int, number: int) -> bytes:
    return _CHUNK_KEY.pack(record, number)


def number_key(number: int) -> bytes:
    return _NUMBER.pack(number)


def number_of(key: bytes | memoryview) -> int:
    value: int = _NUMBER.unpack_from(key)[0]
    return value


def pack_access(hits: int, when: float) -> bytes:
    return _ACCESS.pack(min(hits, 255), when)


def unpack_access(row: bytes | memoryview | None) -> tuple[int, float]:
    if row is None:
        return 0, 0.0
    hits, when = _ACCESS.unpack_from(row)
    return hits, when


def check_schema(found: bytes | None, path: str) -> None:
    """Raise SchemaError unless `found` is this version's mark (or None, of a new store)."""
    if found is None or found == str(SCHEMA_VERSION).encode():
        return
    raise SchemaError(
        f"{path}: made by another version of featcache (schema {found.decode(errors='replace')}, this one "
        f"has {SCHEMA_VERSION}). Nothing was changed. Use another --store; or `featcache export` with the "
        "version that made it and `featcache import` with this one; or delete the folder: it is a cache"
    )
