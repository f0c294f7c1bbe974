"""The disk tier: records in LMDB, shared by all processes that open the same path.

Reads run on any thread, each in a short transaction of its own, and copy out of the map while checking the
sum. Writes come from one thread a process (`writer.DiskWriter`), a batch a transaction; LMDB lets one process
write at a time. Whatever is wrong with a stored record makes it a miss.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import xxhash

from featcache.errors import ConfigError, RecordError, StoreError
from featcache.features import Header
from featcache.sizes import format_size
from featcache.tiers.environment import Environment, open_environment
from featcache.tiers.overflow import is_whole, map_base
from featcache.tiers.queues import Queues
from featcache.tiers.schema import (
    CHUNK,
    Entry,
    Totals,
    chunk_key,
    file_bytes,
    number_key,
    pack_access,
    unpack_access,
)

if TYPE_CHECKING:
    from featcache.tiers.verify import Progress, VerifyReport

log = logging.getLogger("featcache")

MIN_BYTES = 32 << 20
MAX_ALIASES = 1_000_000
MAX_TOUCHED = 100_000
MAX_BATCH_BYTES = 64 << 20
RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0)  # waits before the next attempt after a failed write

Record = tuple[Header, Sequence[memoryview]]


class EntryInfo(NamedTuple):
    """One record as `ls` shows it."""

    key: bytes
    header: Header
    data_bytes: int
    file_bytes: int
    created: float
    accessed: float


class WriteResult(NamedTuple):
    """Whether each record of a batch is stored, in order."""

    outcomes: tuple[bool, ...]

    @property
    def stored(self) -> int:
        return sum(self.outcomes)

    @property
    def dropped(self) -> int:
        return len(self.outcomes) - self.stored


@dataclass(frozen=True, slots=True)
class DiskStats:
    """entries … lost_bytes: of the store, over all processes. The rest: of this process, since opening."""

    entries: int
    data_bytes: int
    file_bytes: int
    max_bytes: int
    aliases: int
    evicted: int
    evicted_bytes: int
    quarantined: int
    lost_bytes: int
    hits: int
    misses: int
    damaged: int
    dropped: int
    write_errors: int
    is_degraded: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DiskTier:
    """Records in LMDB under a byte budget. Made by `DiskTier.open`."""

    def __init__(self, environment: Environment, max_bytes: int) -> None:
        self._env = environment
        self.path = environment.path
        self.readonly = environment.readonly
        self.max_bytes = max_bytes
        self._base = map_base(self.path / "data.mdb")
        self._lock = threading.Lock()  # guards the fields below; nothing is called under it
        self._touched: dict[bytes, int] = {}
        self._condemned: dict[bytes, str] = {}  # damaged records that wait to be deleted, and why
        self._counts = {"hits": 0, "misses": 0, "damaged": 0, "dropped": 0, "write_errors": 0}
        self._failures = 0  # writes that failed in a row
        self._retry_at = 0.0
        self._soft_limit: int | None = None  # below the budget, when the disk is full earlier

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, max_bytes: int, readonly: bool = False, sync: bool = True
    ) -> DiskTier:
        """Open the store's folder, made if it isn't there (unless readonly).

        sync: whether commits reach the disk before they count; without it a power cut may cost the whole
            store, while a killed process costs nothing either way.

        Raises ConfigError, StoreError or SchemaError.
        """
        if not readonly and max_bytes < MIN_BYTES:
            raise ConfigError(f"disk_bytes={max_bytes}: it needs {format_size(MIN_BYTES)} at least")
        folder = Path(path).expanduser()
        return cls(open_environment(folder, max_bytes=max_bytes, readonly=readonly, sync=sync), max_bytes)

    # Reading: any thread

    def contains(self, key: bytes) -> bool:
        with self._env.read() as txn:
            found = txn.get(key, db=self._env.tables["meta"]) is not None
        return found and key not in self._condemned

    def header(self, key: bytes) -> Header | None:
        """What a record is, from the metadata alone."""
        with self._env.read() as txn:
            row = txn.get(key, db=self._env.tables["meta"])
            found = None if row is None else Entry.unpack(row)[1]
        if found is None or key in self._condemned:
            return None
        try:
            return _parsed(key, found)[0]
        except RecordError as exc:
            self._condemn(key, str(exc))
            return None

    def read(self, key: bytes, into: Callable[[Header], memoryview | None]) -> Header | None:
        """Copy a record's tensor data out of the map.

        into: given the header, returns a writable buffer of `header.data_bytes`, or None if there is no room.

        Returns the header, or None if there is no such record, no room, or the record is damaged; a damaged
        one is counted, and deleted with the next write.
        """
        if key in self._condemned:
            self._count("misses")
            return None
        try:
            header = self.read_checked(key, into)
        except RecordError as exc:
            self._condemn(key, str(exc))
            header = None
        self._count("misses" if header is None else "hits")
        if header is not None:
            self.touch(key)
        return header

    def read_checked(self, key: bytes, into: Callable[[Header], memoryview | None]) -> Header | None:
        """As `read`, but a damaged record is a RecordError, and nothing is counted."""
        with self._env.read() as txn:
            row = txn.get(key, db=self._env.tables["meta"])
            if row is None:
                return None
            entry, head = Entry.unpack(row)
            header, checksum = _parsed(key, head)
            buffer = into(header)
            if buffer is not None:
                self._copy(txn, entry, header, checksum, buffer)
            return None if buffer is None else header

    def _copy(
        self, txn: lmdb.Transaction, entry: Entry, header: Header, checksum: bytes, buffer: memoryview
    ) -> None:
        """Copy and check chunk by chunk: what was just copied is still in the processor's cache."""
        hasher: xxhash.xxh3_128 = header.hasher()
        done = 0
        for chunk in self._chunks(txn, entry):
            end = done + len(chunk)
            if end > header.data_bytes:
                break
            buffer[done:end] = chunk
            hasher.update(buffer[done:end])
            done = end
        if done != header.data_bytes:
            raise RecordError(f"{done} bytes of tensor data where the header tells of {header.data_bytes}")
        if hasher.digest() != checksum:
            raise RecordError("checksum does not match")

    def _chunks(self, txn: lmdb.Transaction, entry: Entry) -> Iterator[memoryview]:
        if entry.data_bytes == 0:
            return
        prefix = number_key(entry.record)
        with txn.cursor(db=self._env.tables["payload"]) as cursor:
            found = cursor.set_range(prefix)
            while found and bytes(cursor.key()[:8]) == prefix:
                yield memoryview(cursor.value())
                found = cursor.next()

    def alias(self, alias_key: bytes) -> bytes | None:
        with self._env.read() as txn:
            row = txn.get(alias_key, db=self._env.tables["aliases"])
            return None if row is None else bytes(row[8:])

    def encoders(self) -> dict[bytes, dict[str, Any]]:
        """By fingerprint: {"description": …, "entries": …, "data_bytes": …}."""
        with self._env.read() as txn, txn.cursor(db=self._env.tables["encoders"]) as cursor:
            return {bytes(key): json.loads(bytes(row)) for key, row in cursor}

    def entries(self, *, newest_first: bool = True, limit: int | None = None) -> Iterator[EntryInfo]:
        """Records in the order in which they were stored. Reads in portions, so no transaction stays open."""
        last: int | None = None
        left = limit
        while left is None or left > 0:
            portion = self._portion(last, newest_first, min(left or 512, 512))
            if not portion:
                return
            last = portion[-1][0]
            yield from (info for _, info in portion if info is not None)
            if left is not None:
                left -= len(portion)

    def _portion(self, last: int | None, newest_first: bool, size: int) -> list[tuple[int, EntryInfo | None]]:
        found: list[tuple[int, EntryInfo | None]] = []
        with self._env.read() as txn, txn.cursor(db=self._env.tables["records"]) as cursor:
            if last is None:
                more = cursor.last() if newest_first else cursor.first()
            else:
                more = cursor.set_range(number_key(last if newest_first else last + 1))
                if newest_first:
                    more = cursor.prev() if more else cursor.last()
            while more and len(found) < size:
                number = int.from_bytes(cursor.key(), "big")
                found.append((number, self._info(txn, bytes(cursor.value()))))
                more = cursor.prev() if newest_first else cursor.next()
        return found

    def info(self, key: bytes) -> EntryInfo | None:
        with self._env.read() as txn:
            return self._info(txn, key)

    def _info(self, txn: lmdb.Transaction, key: bytes) -> EntryInfo | None:
        row = txn.get(key, db=self._env.tables["meta"])
        if row is None:
            return None
        try:
            entry, head = Entry.unpack(row)
            header = _parsed(key, head)[0]
        except RecordError:
            return None
        _, accessed = unpack_access(txn.get(key, db=self._env.tables["access"]))
        return EntryInfo(
            key, header, entry.data_bytes, entry.file_bytes, entry.created, max(accessed, entry.created)
        )

    def keys_with_prefix(self, prefix: bytes, limit: int = 2) -> list[bytes]:
        with self._env.read() as txn, txn.cursor(db=self._env.tables["meta"]) as cursor:
            found: list[bytes] = []
            more = cursor.set_range(prefix)
            while more and len(found) < limit and bytes(cursor.key()).startswith(prefix):
                found.append(bytes(cursor.key()))
                more = cursor.next()
            return found

    def touch(self, key: bytes) -> None:
        """Note a hit; it is written with the next batch."""
        with self._lock:
            if key in self._touched or len(self._touched) < MAX_TOUCHED:
                self._touched[key] = self._touched.get(key, 0) + 1

    # Writing: one thread a process

    def write(self, records: Sequence[Record], aliases: Mapping[bytes, bytes] | None = None) -> WriteResult:
        """Store a batch in one transaction, evicting down to the budget first.

        A record that is there already counts as stored; one that is larger than the budget, or whose pieces
        aren't what its header tells of, is refused. If the disk is full, gone
        or read-only, the batch is dropped and counted, there is one warning, and later writes try again.
        """
        if not self._may_write():
            return self._dropped(records)
        try:
            with self._env.write() as txn:
                result = WriteResult(self._write(txn, records, aliases or {}))
        except StoreError as exc:
            self._failed(exc)
            return self._dropped(records)
        self._succeeded()
        self._count("dropped", result.dropped)
        return result

    def _dropped(self, records: Sequence[Record]) -> WriteResult:
        self._count("dropped", len(records))
        return WriteResult((False,) * len(records))

    def _write(
        self, txn: lmdb.Transaction, records: Sequence[Record], aliases: Mapping[bytes, bytes]
    ) -> tuple[bool, ...]:
        with self._lock:
            touched, self._touched = self._touched, {}
            condemned = list(self._condemned)
        totals = self._totals(txn)
        self._write_touched(txn, touched)
        for key in condemned:
            totals.quarantined += self._remove(txn, totals, key)
        queues = Queues(txn, self._env.tables, totals)
        stored = tuple([self._store(txn, totals, queues, header, pieces) for header, pieces in records])
        self._write_aliases(txn, totals, aliases)
        txn.put(b"totals", totals.pack(), db=self._env.tables["info"])
        with self._lock:
            for key in condemned:
                self._condemned.pop(key, None)
        return stored

    def _store(
        self,
        txn: lmdb.Transaction,
        totals: Totals,
        queues: Queues,
        header: Header,
        pieces: Sequence[memoryview],
    ) -> bool:
        tables = self._env.tables
        if txn.get(header.key, db=tables["meta"]) is not None:
            return True
        needed = file_bytes(header.data_bytes)
        limit = self._limit()
        if needed > limit or sum(piece.nbytes for piece in pieces) != header.data_bytes:
            return False
        self._evict(txn, totals, queues, limit - needed)
        record = totals.number()
        checksum = self._put_chunks(txn, record, header, pieces)
        queue, sequence = queues.add(header.key, needed)
        entry = Entry(queue, sequence, record, header.data_bytes, time.time(), needed)
        txn.put(header.key, entry.pack(header.to_bytes(checksum)), db=tables["meta"])
        txn.put(number_key(record), header.key, db=tables["records"], append=True)
        self._count_encoder(txn, header.fingerprint, 1, header.data_bytes)
        totals.entries += 1
        totals.data_bytes += header.data_bytes
        totals.file_bytes += needed
        return True

    def _put_chunks(
        self, txn: lmdb.Transaction, record: int, header: Header, pieces: Sequence[memoryview]
    ) -> bytes:
        hasher = header.hasher()
        payload = self._env.tables["payload"]
        for number, chunk in enumerate(_cut(pieces)):
            hasher.update(chunk)
            txn.put(chunk_key(record, number), chunk, db=payload, append=True)
        return bytes(hasher.digest())

    def _evict(self, txn: lmdb.Transaction, totals: Totals, queues: Queues, limit: int) -> None:
        if totals.file_bytes + totals.lost_bytes <= limit:
            return
        for victim in queues.victims(self.max_bytes):
            before = totals.file_bytes
            self._remove(txn, totals, victim)
            totals.evicted += 1
            totals.evicted_bytes += before - totals.file_bytes
            if totals.file_bytes + totals.lost_bytes <= limit:
                return

    def _remove(self, txn: lmdb.Transaction, totals: Totals, key: bytes) -> bool:
        tables = self._env.tables
        row = txn.get(key, db=tables["meta"])
        if row is None:
            return False
        try:
            entry, head = Entry.unpack(row)
        except RecordError:  # its chunks can't be found from here: `verify --repair` collects them
            txn.delete(key, db=tables["meta"])
            totals.entries -= 1
            return True
        Queues(txn, tables, totals).remove(entry)
        totals.lost_bytes += self._remove_chunks(txn, entry.record)
        txn.delete(number_key(entry.record), db=tables["records"])
        txn.delete(key, db=tables["access"])
        txn.delete(key, db=tables["meta"])
        self._count_encoder(txn, _fingerprint(head), -1, -entry.data_bytes)
        totals.entries -= 1
        totals.data_bytes -= entry.data_bytes
        totals.file_bytes -= entry.file_bytes
        return True

    def _remove_chunks(self, txn: lmdb.Transaction, record: int) -> int:
        """Delete a record's chunks. Returns the bytes of those that had to be left behind."""
        prefix = number_key(record)
        lost = 0
        with txn.cursor(db=self._env.tables["payload"]) as cursor:
            more = cursor.set_range(prefix)
            while more and bytes(cursor.key()[:8]) == prefix:
                if is_whole(memoryview(cursor.value()), self._base):
                    more = cursor.delete()
                else:
                    lost += CHUNK
                    more = cursor.next()
        return lost

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records; returns how many there were. Raises StoreError if it can't be written."""
        keys = list(keys)
        with self._env.write() as txn:
            totals = self._totals(txn)
            removed = sum(self._remove(txn, totals, key) for key in keys)
            txn.put(b"totals", totals.pack(), db=self._env.tables["info"])
        with self._lock:
            for key in keys:
                self._condemned.pop(key, None)
        return removed

    def repair_tables(self) -> None:
        """Count everything anew, and delete chunks that belong to no record where that is safe."""
        from featcache.tiers.verify import check_entries, orphan_chunks

        tables = self._env.tables
        with self._env.write() as txn:
            totals = self._totals(txn)
            check_entries(txn, tables, totals)
            totals.lost_bytes = 0
            for chunk in list(orphan_chunks(txn, tables)):
                if is_whole(memoryview(txn.get(chunk, db=tables["payload"]) or b""), self._base):
                    txn.delete(chunk, db=tables["payload"])
                else:
                    totals.lost_bytes += CHUNK
            txn.put(b"totals", totals.pack(), db=tables["info"])

    def shrink(self, max_bytes: int) -> tuple[int, int]:
        """Evict until the records take `max_bytes` or less. Returns (records, bytes) evicted."""
        with self._env.write() as txn:
            totals = self._totals(txn)
            before = totals.evicted, totals.evicted_bytes
            self._evict(txn, totals, Queues(txn, self._env.tables, totals), max_bytes)
            txn.put(b"totals", totals.pack(), db=self._env.tables["info"])
        return totals.evicted - before[0], totals.evicted_bytes - before[1]

    def put_encoder(self, fingerprint: bytes, description: Mapping[str, Any]) -> None:
        """Remember what a fingerprint stands for."""
        if self.readonly:
            return
        with self._env.write() as txn:
            doc = self._encoder(txn, fingerprint)
            doc["description"] = dict(description)
            txn.put(fingerprint, json.dumps(doc).encode(), db=self._env.tables["encoders"])

    def _encoder(self, txn: lmdb.Transaction, fingerprint: bytes) -> dict[str, Any]:
        row = txn.get(fingerprint, db=self._env.tables["encoders"])
        empty: dict[str, Any] = {"description": {}, "entries": 0, "data_bytes": 0}
        return empty if row is None else {**empty, **json.loads(bytes(row))}

    def _count_encoder(
        self, txn: lmdb.Transaction, fingerprint: bytes, entries: int, data_bytes: int
    ) -> None:
        doc = self._encoder(txn, fingerprint)
        doc["entries"] += entries
        doc["data_bytes"] += data_bytes
        txn.put(fingerprint, json.dumps(doc).encode(), db=self._env.tables["encoders"])

    def _write_touched(self, txn: lmdb.Transaction, touched: Mapping[bytes, int]) -> None:
        access, now = self._env.tables["access"], time.time()
        for key, hits in touched.items():
            if txn.get(key, db=self._env.tables["meta"]) is not None:
                before, _ = unpack_access(txn.get(key, db=access))
                txn.put(key, pack_access(before + hits, now), db=access)

    def _write_aliases(self, txn: lmdb.Transaction, totals: Totals, aliases: Mapping[bytes, bytes]) -> None:
        table, order = self._env.tables["aliases"], self._env.tables["alias_order"]
        for alias_key, value in aliases.items():
            before = txn.get(alias_key, db=table)
            if before is not None:
                txn.delete(bytes(before[:8]), db=order)
                totals.aliases -= 1
            sequence = number_key(totals.number())
            txn.put(alias_key, sequence + value, db=table)
            txn.put(sequence, alias_key, db=order)
            totals.aliases += 1
        with txn.cursor(db=order) as cursor:
            while totals.aliases > MAX_ALIASES and cursor.first():
                txn.delete(bytes(cursor.value()), db=table)
                cursor.delete()
                totals.aliases -= 1

    # Limits and trouble

    def _limit(self) -> int:
        """What records may take: pages freed by one transaction are used again by the one after the next,
        so two batches of room are kept free below the budget."""
        spare = min(2 * MAX_BATCH_BYTES, self.max_bytes // 8)
        limit = self.max_bytes - spare
        return limit if self._soft_limit is None else min(limit, self._soft_limit)

    def _may_write(self) -> bool:
        return not self.readonly and time.monotonic() >= self._retry_at

    def _failed(self, exc: StoreError) -> None:
        with self._lock:
            self._counts["write_errors"] += 1
            wait = RETRY_S[min(self._failures, len(RETRY_S) - 1)]
            self._failures += 1
            self._retry_at = time.monotonic() + wait
            is_first = self._failures == 1
        if is_first:
            log.warning("disk tier: can't write (%s); going on without it, and trying again", exc)
        if isinstance(exc.__cause__, lmdb.MapFullError) or self._free_disk_bytes() < MAX_BATCH_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        """On a full disk, free pages inside the file, which needs few new ones: fewer than the write that
        failed has got already, past the end of what is committed. LMDB reports a short write as EIO, so that
        the error alone doesn't tell.
        """
        try:
            with self._env.write() as txn:
                totals = self._totals(txn)
                limit = max(0, totals.file_bytes - max(totals.file_bytes // 8, 2 * CHUNK))
                self._evict(txn, totals, Queues(txn, self._env.tables, totals), limit)
                txn.put(b"totals", totals.pack(), db=self._env.tables["info"])
            self._soft_limit = limit
        except StoreError as exc:
            log.debug("disk tier: no room could be made: %s", exc)

    def _succeeded(self) -> None:
        with self._lock:
            recovered, self._failures = self._failures > 0, 0
        if recovered:
            log.warning("disk tier: writing again")
        if self._soft_limit is not None and self._free_disk_bytes() > 2 * MAX_BATCH_BYTES:
            self._soft_limit = None

    def _free_disk_bytes(self) -> int:
        try:
            status = os.statvfs(self.path)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    def _condemn(self, key: bytes, reason: str) -> None:
        with self._lock:
            is_new = key not in self._condemned
            self._condemned[key] = reason
            self._counts["damaged"] += is_new
        if is_new:
            log.warning("disk tier: record %s is damaged (%s); it will be made again", key.hex()[:12], reason)

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    @property
    def has_pending(self) -> bool:
        """Whether hits or damaged records wait to be written."""
        return bool(self._touched or self._condemned)

    # Accounts

    def verify(self, *, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read every record and check it against its sum and the tables against each other.

        repair: delete what is damaged, and chunks that belong to no record. progress: called with (records
            checked, records in all).
        """
        from featcache.tiers.verify import verify

        return verify(self, self._env, repair=repair, progress=progress)

    def check(self) -> list[str]:
        """Recount the tables; what doesn't add up. Reads no tensor data."""
        from featcache.tiers.verify import check

        return check(self._env)

    def _totals(self, txn: lmdb.Transaction) -> Totals:
        return Totals.unpack(txn.get(b"totals", db=self._env.tables["info"]))

    def stats(self) -> DiskStats:
        with self._env.read() as txn:
            totals = self._totals(txn)
        with self._lock:
            counts = dict(self._counts)
        return DiskStats(
            entries=totals.entries,
            data_bytes=totals.data_bytes,
            file_bytes=self._env.map_used_bytes(),
            max_bytes=self.max_bytes,
            aliases=totals.aliases,
            evicted=totals.evicted,
            evicted_bytes=totals.evicted_bytes,
            quarantined=totals.quarantined,
            lost_bytes=totals.lost_bytes,
            is_degraded=self._failures > 0,
            **counts,
        )

    def sync(self) -> None:
        """Make everything committed survive a power cut."""
        if not self.readonly:
            self._env.sync()

    def close(self) -> None:
        self._env.close()


def _parsed(key: bytes, head: bytes) -> tuple[Header, bytes]:
    header, checksum, _ = Header.from_bytes(head)
    if header.key != key:
        raise RecordError(f"stored under {key.hex()[:12]}, but its key is {header.key.hex()[:12]}")
    return header, checksum


def _fingerprint(head: bytes) -> bytes:
    try:
        return Header.from_bytes(head)[0].fingerprint
    except RecordError:
        return bytes(32)


def _cut(pieces: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
    """The pieces, one after another, as chunks of CHUNK bytes; copied only where two pieces meet."""
    rest = b""
    for piece in pieces:
        view = piece.cast("B") if piece.nbytes else memoryview(b"")
        start = 0
        if rest:
            start = min(CHUNK - len(rest), len(view))
            rest += bytes(view[:start])
            if len(rest) < CHUNK:
                continue
            yield rest
            rest = b""
        while len(view) - start >= CHUNK:
            yield view[start : start + CHUNK]
            start += CHUNK
        rest = bytes(view[start:])
    if rest:
        yield rest
