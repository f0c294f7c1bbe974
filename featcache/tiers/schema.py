"""The disk tier's tables, and what stands in them.

    meta      key -> Entry (packed)
    payload   record id, chunk number -> a chunk of the tensor data
    records   record id -> key, in the order of insertion
    small, main  sequence -> key: the two queues of S3-FIFO;  ghost, ghost_order: what left `small` lately
    access    key -> times hit since the last eviction pass, time of the last hit
    aliases   alias key -> sequence + value;  alias_order: sequence -> alias key
    encoders  fingerprint -> JSON: description, entries, bytes
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

import xxhash

from featcache.errors import RecordError, SchemaError
from featcache.features import DTYPES, Header, Layout, TensorSpec

SCHEMA_VERSION = 1
TABLES = (
    "meta", "payload", "records", "small", "main", "ghost", "ghost_order", "access",
    "aliases", "alias_order", "encoders", "info",
)  # fmt: skip

PAGE = 4096
PAGE_HEADER = 16
CHUNK_PAGES = 64
CHUNK = CHUNK_PAGES * PAGE - PAGE_HEADER
# What rows take of the file in half-full pages (measured: bench/store_disk.py, metadata and test_disk.py).
ROW_BYTES = 1024  # of a record, in all tables but payload
ALIAS_BYTES = 384
GHOST_BYTES = 256

_CHECK = struct.Struct("<8s")
_BODY = struct.Struct("<BQQQd16s32s")
_CHUNK_KEY = struct.Struct(">QI")
_NUMBER = struct.Struct(">Q")
_ACCESS = struct.Struct("<Bd")

SMALL, MAIN = 0, 1


class Entry(NamedTuple):
    """A row of `meta`.

    queue: SMALL or MAIN. sequence: its place there. record: id of its chunks. data_bytes: of tensor data.
    created: seconds since 1970. checksum: xxh3-128 of the tensor data. form: layout and tensors, as JSON.
    """

    queue: int
    sequence: int
    record: int
    data_bytes: int
    created: float
    checksum: bytes
    fingerprint: bytes
    form: bytes

    @classmethod
    def of(
        cls, header: Header, *, queue: int, sequence: int, record: int, created: float, checksum: bytes
    ) -> Entry:
        form = [header.layout.to_json(), [[name, *spec] for name, spec in header.specs.items()]]
        text = json.dumps(form, separators=(",", ":")).encode()
        return cls(queue, sequence, record, header.data_bytes, created, checksum, header.fingerprint, text)

    @property
    def file_bytes(self) -> int:
        return file_bytes(self.data_bytes)

    @property
    def num_chunks(self) -> int:
        return -(-self.data_bytes // CHUNK)

    def pack(self, key: bytes) -> bytes:
        body = _BODY.pack(*self[:-1]) + self.form
        return xxhash.xxh3_64_digest(key + body) + body

    @classmethod
    def unpack(cls, key: bytes, row: bytes | memoryview) -> Entry:
        """Raises RecordError if it isn't what was written for this key."""
        row = bytes(row)
        body = row[_CHECK.size :]
        if len(body) < _BODY.size or xxhash.xxh3_64_digest(key + body) != row[: _CHECK.size]:
            raise RecordError("its metadata is damaged")
        queue, sequence, record, data_bytes, created, checksum, fingerprint = _BODY.unpack_from(body)
        form = body[_BODY.size :]
        return cls(queue, sequence, record, data_bytes, created, checksum, fingerprint, form)

    def header(self, key: bytes) -> Header:
        """Raises RecordError if it is of a kind that this featcache doesn't write."""
        try:
            layout, tensors = json.loads(self.form)
            specs = {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in tensors}
        except (ValueError, TypeError) as exc:
            raise RecordError(f"its metadata is not what featcache writes: {exc!r}") from exc
        if any(spec.dtype not in DTYPES for spec in specs.values()):
            raise RecordError("holds a tensor of a dtype that featcache never writes")
        return Header(key, self.fingerprint, Layout.from_json(layout), specs)


@dataclass(slots=True)
class Totals:
    """Sums over the whole store, kept with every transaction so that nobody has to count.

    lost_bytes: chunks that can't be freed safely, see `overflow`.
    """

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

    @property
    def used_bytes(self) -> int:
        """What of the file is not free."""
        rows = self.aliases * ALIAS_BYTES + self.ghosts * GHOST_BYTES
        return self.file_bytes + self.lost_bytes + rows

    def number(self) -> int:
        """A fresh number: of a record, or a place in a queue."""
        self.next_number += 1
        return self.next_number

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, row: bytes | memoryview | None) -> Totals:
        """Raises RecordError if the row is damaged."""
        try:
            doc: dict[str, Any] = {} if row is None else json.loads(bytes(row))
            return cls(**{f.name: int(doc[f.name]) for f in fields(cls) if row is not None})
        except (ValueError, LookupError, TypeError) as exc:
            raise RecordError(f"the store's totals are damaged: {exc!r}") from exc


def file_bytes(data_bytes: int) -> int:
    """What a record of this much data takes of the file: whole pages, and its rows in the tables."""
    full, rest = divmod(data_bytes, CHUNK)
    return (full * CHUNK_PAGES + pages(rest)) * PAGE + ROW_BYTES


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
    """(hits, time of the last one); of a row that is damaged or not there, (0, 0.0)."""
    if row is None or len(row) != _ACCESS.size:
        return 0, 0.0
    hits, when = _ACCESS.unpack_from(row)
    return hits, when


def check_schema(found: bytes | memoryview | None, path: str) -> None:
    """Raise SchemaError unless `found` is this version's mark (or None, of a new store)."""
    if found is None or bytes(found) == str(SCHEMA_VERSION).encode():
        return
    raise SchemaError(
        f"{path}: made by another version of featcache (schema {bytes(found).decode(errors='replace')}, "
        f"this one has {SCHEMA_VERSION}). Nothing was changed. Use another --store; or `featcache export` with "
        "the version that made it and `featcache import` with this one; or delete the folder: it is a cache"
    )
