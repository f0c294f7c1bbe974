"""The disk tier: records in LMDB, shared by all processes that open the same path.

Reads run on any thread, each in a short transaction of its own, and copy out of the map while checking the
sum. Writes come from one thread a process (`writer.DiskWriter`), a batch a transaction; LMDB lets one process
write at a time. Whatever is wrong with a stored record makes it a miss.

A commit is on the disk before it counts (but for LMDB's own meta page, which `sync` adds): a power cut leaves
a whole database, with all that `sync` had confirmed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import lmdb
import xxhash

from featcache.errors import ConfigError, RecordError, StoreClosedError, StoreError
from featcache.features import Header
from featcache.sizes import format_size
from featcache.tiers.batch import Batch
from featcache.tiers.environment import Environment, open_environment
from featcache.tiers.health import Health
from featcache.tiers.recount import parse_encoder, problems_of
from featcache.tiers.schema import (
    ALIAS_BYTES,
    CHUNK,
    Entry,
    Totals,
    chunk_key,
    file_bytes,
    number_key,
    number_of,
    unpack_access,
)

if TYPE_CHECKING:
    from featcache.tiers.verify import Progress, VerifyReport

log = logging.getLogger("featcache")

MIN_BYTES = 32 << 20
MAX_BATCH_BYTES = 64 << 20
MAX_ALIASES = 1_000_000
MAX_NOTED = 100_000  # hits, and damaged records, that wait to be written
PORTION = 512  # rows listed in one read transaction
LOOK_S = 1.0  # between two looks whether the files are still there
PATIENCE_S = 1.0  # for a reader that keeps freed pages from being used again

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
    """Records in LMDB under a byte budget. Made by `DiskTier.open`; thread-safe."""

    def __init__(self, environment: Environment, *, max_bytes: int, is_lru: bool, sync: bool) -> None:
        self._environment = environment
        self.path = environment.path
        self.readonly = environment.readonly
        self.max_bytes = max_bytes
        self._is_lru = is_lru
        self._sync = sync
        self._is_closed = False
        self._look_at = 0.0
        self._moving = threading.Lock()  # held while _environment is replaced
        self._lock = threading.Lock()  # guards the three fields below; nothing is called under it
        self._touched: dict[bytes, int] = {}
        self._condemned: dict[bytes, int | None] = {}  # damaged: key -> record id, if known
        self._counts = {"hits": 0, "misses": 0, "damaged": 0, "dropped": 0}
        self._health = Health()
        self._soft_limit: int | None = None  # below the budget, when the disk is full earlier

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        readonly: bool = False,
        policy: Literal["s3fifo", "lru"] = "s3fifo",
        sync: bool = True,
    ) -> DiskTier:
        """Open the store's folder, made if it isn't there (unless readonly).

        sync: whether commits reach the disk before they count; without it a power cut may cost the whole
            store, while a killed process costs nothing either way.

        Raises ConfigError, StoreError or SchemaError.
        """
        if not readonly and max_bytes < MIN_BYTES:
            raise ConfigError(f"disk_bytes={max_bytes}: it needs {format_size(MIN_BYTES)} at least")
        if policy not in ("s3fifo", "lru"):
            raise ConfigError(f"policy={policy!r}: it is 's3fifo' or 'lru'")
        folder = Path(path).expanduser()
        environment = open_environment(folder, max_bytes=max_bytes, readonly=readonly, sync=sync)
        return cls(environment, max_bytes=max_bytes, is_lru=policy == "lru", sync=sync)

    # Reading: any thread

    def contains(self, key: bytes) -> bool:
        env = self._env
        with env.read() as txn:
            row = txn.get(key, db=env.tables["meta"])
            return row is not None and not self._is_condemned(key, row)

    def header(self, key: bytes) -> Header | None:
        """What a record is, from the metadata alone."""
        env = self._env
        with env.read() as txn:
            row = txn.get(key, db=env.tables["meta"])
            if row is None or self._is_condemned(key, row):
                return None
            record = None
            try:
                entry = Entry.unpack(key, row)
                record = entry.record
                return entry.header(key)
            except RecordError as exc:
                self._condemn(key, record, str(exc))
                return None

    def read(self, key: bytes, into: Callable[[Header], memoryview | None]) -> Header | None:
        """Copy a record's tensor data out of the map.

        into: given the header, returns a writable buffer of `header.data_bytes`, or None if there is no room.
            It is called in the read transaction, so it should not wait.

        Returns the header, or None if there is no such record, no room, or the record is damaged; a damaged
        one is counted, and deleted with the next write.
        """
        header = self._read(key, into)
        with self._lock:
            self._counts["misses" if header is None else "hits"] += 1
        if header is not None:
            self.touch(key)
        return header

    def _read(self, key: bytes, into: Callable[[Header], memoryview | None]) -> Header | None:
        env = self._env
        with env.read() as txn:
            row = txn.get(key, db=env.tables["meta"])
            if row is None or self._is_condemned(key, row):
                return None
            record = None
            try:
                entry = Entry.unpack(key, row)
                record = entry.record
                header = entry.header(key)
                buffer = into(header)
                if buffer is None:
                    return None
                copy_out(txn, env, entry, buffer)
                return header
            except RecordError as exc:
                self._condemn(key, record, str(exc))
                return None

    def alias(self, alias_key: bytes) -> bytes | None:
        env = self._env
        with env.read() as txn:
            row = txn.get(alias_key, db=env.tables["aliases"])
            return None if row is None else bytes(row[8:])

    def encoders(self) -> dict[bytes, dict[str, Any]]:
        """By fingerprint: {"description": …, "entries": …, "data_bytes": …}."""
        env = self._env
        with env.read() as txn, txn.cursor(db=env.tables["encoders"]) as cursor:
            return {bytes(key): parse_encoder(row) for key, row in cursor}

    def touch(self, key: bytes) -> None:
        """Note a hit; it is written with the next batch."""
        with self._lock:
            if key in self._touched or len(self._touched) < MAX_NOTED:
                self._touched[key] = self._touched.get(key, 0) + 1

    # Listing

    def entries(self, *, newest_first: bool = True, limit: int | None = None) -> Iterator[EntryInfo]:
        """Records in the order in which they were stored. Reads in portions, so no transaction stays open."""
        last: int | None = None
        left = limit
        while left is None or left > 0:
            portion = self._portion(last, newest_first, min(left or PORTION, PORTION))
            if not portion:
                return
            last = portion[-1][0]
            yield from (info for _, info in portion if info is not None)
            if left is not None:
                left -= len(portion)

    def _portion(self, last: int | None, newest_first: bool, size: int) -> list[tuple[int, EntryInfo | None]]:
        found: list[tuple[int, EntryInfo | None]] = []
        env = self._env
        with env.read() as txn, txn.cursor(db=env.tables["records"]) as cursor:
            if last is None:
                more = cursor.last() if newest_first else cursor.first()
            else:
                more = cursor.set_range(number_key(last if newest_first else last + 1))
                if newest_first:
                    more = cursor.prev() if more else cursor.last()
            while more and len(found) < size:
                found.append((number_of(cursor.key()), _info(txn, env, bytes(cursor.value()))))
                more = cursor.prev() if newest_first else cursor.next()
        return found

    def info(self, key: bytes) -> EntryInfo | None:
        env = self._env
        with env.read() as txn:
            return _info(txn, env, key)

    def keys_with_prefix(self, prefix: bytes, limit: int = 2) -> list[bytes]:
        env = self._env
        with env.read() as txn, txn.cursor(db=env.tables["meta"]) as cursor:
            found: list[bytes] = []
            more = cursor.set_range(prefix)
            while more and len(found) < limit and bytes(cursor.key()).startswith(prefix):
                found.append(bytes(cursor.key()))
                more = cursor.next()
            return found

    # Writing: one thread a process

    @property
    def batch_bytes(self) -> int:
        """How much a batch should hold at most: pages that one transaction frees are used again by the one
        after the next, so twice this is kept free below the budget."""
        return min(MAX_BATCH_BYTES, self.max_bytes // 16)

    def write(self, records: Sequence[Record], aliases: Mapping[bytes, bytes] | None = None) -> WriteResult:
        """Store a batch in one transaction, evicting down to the budget first.

        A record that is there already counts as stored; one that is larger than the budget, or whose pieces
        aren't what its header tells of, is refused. If the disk is full, gone or read-only, the batch is
        dropped and counted, there is one warning, and later writes try again.
        """
        if self.readonly or not self._health.may_try():
            return self._result([False] * len(records))
        try:
            outcomes = self._write(records, aliases or {})
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._health.failed(exc)
            self._make_room(exc)
            return self._result([False] * len(records))
        self._health.succeeded()
        if self._soft_limit is not None and self._free_disk_bytes() > 2 * MAX_BATCH_BYTES:
            self._soft_limit = None
        return self._result(outcomes)

    def _result(self, outcomes: Sequence[bool]) -> WriteResult:
        with self._lock:
            self._counts["dropped"] += outcomes.count(False)
        return WriteResult(tuple(outcomes))

    def _write(self, records: Sequence[Record], aliases: Mapping[bytes, bytes]) -> list[bool]:
        self._stay_in_place()
        self._await_readers()
        self._make_way(sum(file_bytes(header.data_bytes) for header, _ in records))
        with self._lock:
            touched, self._touched = self._touched, {}
            condemned = dict(self._condemned)
        with self._batch() as batch:
            batch.note_hits(touched)
            batch.quarantine(condemned)
            limit = self._limit()
            outcomes = [batch.store(header, pieces, limit) for header, pieces in records]
            batch.put_aliases(aliases, min(MAX_ALIASES, self.max_bytes // (16 * ALIAS_BYTES)))
        self._acquit(condemned)
        return outcomes

    @contextmanager
    def _batch(self) -> Iterator[Batch]:
        env = self._env
        with env.write() as txn:
            batch = Batch(txn, env, is_lru=self._is_lru, max_bytes=self.max_bytes)
            yield batch
            batch.finish()

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records; returns how many there were. Raises StoreError if it can't be written."""
        keys = list(keys)
        with self._batch() as batch:
            removed = sum(batch.remove(key) for key in keys)
        with self._lock:
            for key in keys:
                self._condemned.pop(key, None)
        return removed

    def put_encoder(self, fingerprint: bytes, description: Mapping[str, Any]) -> None:
        """Remember what a fingerprint stands for. Raises StoreError if it can't be written."""
        if not self.readonly:
            with self._batch() as batch:
                batch.describe_encoder(fingerprint, description)

    @property
    def has_pending(self) -> bool:
        """Whether hits or damaged records wait to be written."""
        return bool(self._touched or self._condemned)

    # Room

    def _limit(self) -> int:
        """What may be in use of the file."""
        limit = self.max_bytes - 2 * self.batch_bytes
        return limit if self._soft_limit is None else min(limit, self._soft_limit)

    def _make_way(self, needed: int) -> None:
        """For a batch larger than what is kept free: evict before it, in transactions of their own."""
        limit = self._limit() - needed
        if needed <= 2 * self.batch_bytes or limit < 0 or self._totals().used_bytes <= limit:
            return
        for _ in range(2):
            with self._batch() as batch:
                batch.evict(limit)

    def _await_readers(self) -> None:
        """Wait for a reader that makes the file outgrow its budget, since what was freed after it began can't
        be used again; a StoreError if it goes on."""
        env = self._env
        end = time.monotonic() + PATIENCE_S
        while env.used_bytes() > self.max_bytes + self.max_bytes // 20 and env.stalled_transactions() > 2:
            if time.monotonic() > end:
                raise StoreError(
                    f"{self.path}: a process reads without end, and would make the file outgrow its budget"
                )
            time.sleep(PATIENCE_S / 20)

    def _make_room(self, exc: StoreError) -> None:
        """On a full disk, free pages inside the file, which needs few new ones: fewer than the write that
        failed has got already, past the end of what is committed. LMDB reports a short write as EIO, so that
        the error alone doesn't tell.
        """
        if not isinstance(exc.__cause__, lmdb.MapFullError) and self._free_disk_bytes() >= MAX_BATCH_BYTES:
            return
        try:
            with self._batch() as batch:
                used = batch.totals.used_bytes
                limit = max(0, used - max(used // 8, 2 * CHUNK))
                batch.evict(limit)
            self._soft_limit = limit
        except StoreError as error:
            log.debug("disk tier: no room could be made: %s", error)

    def _free_disk_bytes(self) -> int:
        try:
            status = os.statvfs(self.path)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    # The files, which somebody may delete, replace or unmount

    @property
    def _env(self) -> Environment:
        """The environment, opened anew if its files are no longer those at the path."""
        if self._is_closed:
            raise StoreClosedError(f"{self.path}: the store is closed")
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            with suppress(StoreError):  # what is open can still be read
                self._stay_in_place()
        return self._environment

    def _stay_in_place(self) -> None:
        """Raise StoreError if the files at the path are gone, and can't be made anew."""
        if self._environment.is_inherited or self._environment.is_in_place():
            return
        with self._moving:
            old = self._environment
            if self._is_closed or old.is_in_place():
                return
            if not old.is_mounted():  # nothing is written to the disk beneath a mount that is gone
                raise StoreError(f"{self.path}: what was mounted here is gone")
            self._environment = open_environment(
                self.path, max_bytes=self.max_bytes, readonly=self.readonly, sync=self._sync
            )
            with self._lock:
                self._touched, self._condemned = {}, {}
        log.warning("disk tier: %s was deleted or replaced, and is opened anew", self.path)
        old.close()

    # Damage

    def _is_condemned(self, key: bytes, row: bytes | memoryview) -> bool:
        """Whether this very record was found damaged before, and only waits to be deleted."""
        if key not in self._condemned:
            return False
        try:
            record = Entry.unpack(key, row).record
        except RecordError:
            return True
        return self._condemned.get(key, -1) == record

    def _condemn(self, key: bytes, record: int | None, reason: str) -> None:
        with self._lock:
            is_new = self._condemned.get(key, -1) != record
            if is_new and len(self._condemned) < MAX_NOTED:
                self._condemned[key] = record
            self._counts["damaged"] += is_new
        if is_new:
            log.warning("disk tier: record %s is damaged (%s); it will be made again", key.hex()[:12], reason)

    def _acquit(self, condemned: Mapping[bytes, int | None]) -> None:
        """They are deleted."""
        with self._lock:
            for key, record in condemned.items():
                if self._condemned.get(key, -1) == record:
                    del self._condemned[key]

    # Accounts

    def verify(self, *, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read every record and check it against its sum and the tables against each other.

        repair: delete what is damaged, and chunks that belong to no record. progress: called with (records
            checked, records in all).
        """
        from featcache.tiers.verify import verify

        return verify(self, self._env, repair=repair, progress=progress)

    def repair_tables(self) -> None:
        """Count everything anew, and delete chunks that belong to no record where that is safe."""
        with self._batch() as batch:
            batch.recount()

    def check(self) -> list[str]:
        """Recount the tables; what doesn't add up. Reads no tensor data."""
        env = self._env
        with env.read() as txn:
            return problems_of(txn, env)

    def _totals(self) -> Totals:
        """The sums; zeros while they are damaged, until the next write counts them anew."""
        env = self._env
        with env.read() as txn:
            try:
                return Totals.unpack(txn.get(b"totals", db=env.tables["info"]))
            except RecordError:
                return Totals()

    def stats(self) -> DiskStats:
        totals = self._totals()
        with self._lock:
            counts = dict(self._counts)
        return DiskStats(
            entries=totals.entries,
            data_bytes=totals.data_bytes,
            file_bytes=self._env.used_bytes(),
            max_bytes=self.max_bytes,
            aliases=totals.aliases,
            evicted=totals.evicted,
            evicted_bytes=totals.evicted_bytes,
            quarantined=totals.quarantined,
            lost_bytes=totals.lost_bytes,
            write_errors=self._health.errors,
            is_degraded=self._health.is_degraded,
            **counts,
        )

    def sync(self) -> None:
        """Make everything committed survive a power cut. Raises StoreError."""
        if not self.readonly:
            self._env.sync()

    def close(self) -> None:
        """Give the files back. A second call does nothing."""
        with self._moving:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._environment.close()


def chunks_of(txn: lmdb.Transaction, env: Environment, entry: Entry) -> Iterator[memoryview]:
    """A record's tensor data in the map. Raises RecordError if it isn't all there."""
    left = entry.data_bytes
    for number in range(entry.num_chunks):
        chunk = txn.get(chunk_key(entry.record, number), db=env.tables["payload"])
        if chunk is None or len(chunk) != min(left, CHUNK):
            raise RecordError(f"chunk {number} of its {entry.num_chunks} is missing or of another size")
        left -= len(chunk)
        yield memoryview(chunk)


def copy_out(txn: lmdb.Transaction, env: Environment, entry: Entry, buffer: memoryview) -> None:
    """Copy and check chunk by chunk: what was just copied is still in the processor's cache."""
    hasher = xxhash.xxh3_128()
    start = 0
    for chunk in chunks_of(txn, env, entry):
        end = start + len(chunk)
        buffer[start:end] = chunk
        hasher.update(buffer[start:end])
        start = end
    if hasher.digest() != entry.checksum:
        raise RecordError("its checksum does not match")


def _info(txn: lmdb.Transaction, env: Environment, key: bytes) -> EntryInfo | None:
    row = txn.get(key, db=env.tables["meta"])
    if row is None:
        return None
    try:
        entry = Entry.unpack(key, row)
        header = entry.header(key)
    except RecordError:
        return None
    _, accessed = unpack_access(txn.get(key, db=env.tables["access"]))
    return EntryInfo(
        key, header, entry.data_bytes, entry.file_bytes, entry.created, max(accessed, entry.created)
    )
