"""Write-behind: one thread that takes records from a bounded queue and stores them in batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from featcache.errors import StoreClosedError, StoreError
from featcache.features import Header
from featcache.tiers.disk import DiskTier

log = logging.getLogger("featcache")

BATCH_RECORDS = 256
CLOSE_S = 60.0
IDLE_S = 2.0  # after which hits and damaged records are written without waiting for a record
MAX_WAITING_ALIASES = 65_536

OnDone = Callable[[bool], None]


class _Waiting(NamedTuple):
    header: Header
    pieces: Sequence[memoryview]
    on_done: OnDone


@dataclass(frozen=True, slots=True)
class WriterStats:
    """waiting, waiting_bytes: queued or being written now. dropped: refused because the queue was full.
    failed: taken, and not stored.
    """

    waiting: int
    waiting_bytes: int
    max_bytes: int
    written: int
    dropped: int
    failed: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DiskWriter:
    """The one thread of a process that writes to its disk tier."""

    def __init__(self, tier: DiskTier, *, max_bytes: int) -> None:
        self._tier = tier
        self._max_bytes = max_bytes
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[_Waiting] = deque()
        self._aliases: dict[bytes, bytes] = {}
        self._bytes = 0  # of the queue and the batch under way
        self._under_way = 0
        self._submitted = 0  # counts records and aliases, for flush
        self._finished = 0
        self._written = 0
        self._dropped = 0
        self._failed = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="featcache-writer", daemon=True)
        self._thread.start()

    def submit(
        self, header: Header, pieces: Sequence[memoryview], on_done: OnDone, *, wait: bool = False
    ) -> bool:
        """Queue a record.

        pieces: its tensor data, valid and unchanged until on_done, which is called once, on the writer's
            thread, with whether it is stored.
        wait: wait for room instead of dropping it.

        Returns False, and never calls on_done, if the queue is full. Raises StoreClosedError after close().
        """
        size = header.data_bytes
        with self._changed:
            while self._bytes and self._bytes + size > self._max_bytes:
                self._check_open()
                if not wait:
                    self._dropped += 1
                    return False
                self._changed.wait()
            self._check_open()
            self._queue.append(_Waiting(header, pieces, on_done))
            self._bytes += size
            self._submitted += 1
            self._changed.notify_all()
        return True

    def submit_alias(self, alias_key: bytes, value: bytes) -> None:
        """Queue an alias. One too many is dropped: an alias saves a decode, and nothing depends on it."""
        with self._changed:
            if self._closing or len(self._aliases) >= MAX_WAITING_ALIASES:
                return
            self._aliases[alias_key] = value
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that was submitted before is stored and safe; StoreError if that takes longer."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            target = self._submitted
            while self._finished < target or self._aliases:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._thread.is_alive():
                    late = target - self._finished
                    raise StoreError(f"{late} records were not yet written after {timeout_s} s")
                self._changed.wait(left)
        self._tier.sync()

    def _check_open(self) -> None:
        if self._closing:
            raise StoreClosedError("the store is closed")
        if not self._thread.is_alive():
            raise StoreClosedError("opened before this process was forked; open the store again in the child")

    def _run(self) -> None:
        while True:
            batch, aliases, is_last = self._next_batch()
            if batch or aliases or self._tier.has_pending:
                self._finish(batch, self._write(batch, aliases))
            if is_last:
                return

    def _next_batch(self) -> tuple[list[_Waiting], dict[bytes, bytes], bool]:
        with self._changed:
            if not self._queue and not self._aliases and not self._closing:
                self._changed.wait(IDLE_S)
            batch: list[_Waiting] = []
            size = 0
            while self._queue and len(batch) < BATCH_RECORDS:
                size += self._queue[0].header.data_bytes
                if batch and size > self._tier.batch_bytes:
                    break
                batch.append(self._queue.popleft())
            aliases, self._aliases_under_way = dict(self._aliases), set(self._aliases)
            self._under_way = len(batch)
            return batch, aliases, self._closing and not self._queue

    def _write(self, batch: list[_Waiting], aliases: dict[bytes, bytes]) -> Sequence[bool]:
        try:
            return self._tier.write([(w.header, w.pieces) for w in batch], aliases).outcomes
        except Exception:  # one bad record must not take the others along, nor end the thread
            if len(batch) + len(aliases) <= 1:
                log.exception("disk tier: a record was dropped")
                return [False] * len(batch)
            log.exception("disk tier: a batch failed; its records are written one by one")
        for alias_key, value in aliases.items():
            self._write([], {alias_key: value})
        return [self._write([waiting], {})[0] for waiting in batch]

    def _finish(self, batch: list[_Waiting], outcomes: Sequence[bool]) -> None:
        for waiting, stored in zip(batch, outcomes, strict=True):
            try:
                waiting.on_done(stored)
            except Exception:  # a bug of the caller's must not end the thread that others wait for
                log.exception("disk tier: what should follow a write failed")
        with self._changed:
            self._bytes -= sum(waiting.header.data_bytes for waiting in batch)
            self._under_way = 0
            self._finished += len(batch)
            self._written += sum(outcomes)
            self._failed += outcomes.count(False)
            for alias_key in self._aliases_under_way:
                self._aliases.pop(alias_key, None)
            self._changed.notify_all()

    def stats(self) -> WriterStats:
        with self._changed:
            return WriterStats(
                waiting=len(self._queue) + self._under_way,
                waiting_bytes=self._bytes,
                max_bytes=self._max_bytes,
                written=self._written,
                dropped=self._dropped,
                failed=self._failed,
            )

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Write what is queued, then end the thread, however long that takes while it gets on.

        False if nothing is written for so long, as when another process keeps LMDB's write lock: the thread
        still uses the tier then, and what it can't write any more is lost.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        before = -1
        while self._thread.is_alive() and before < self._finished:
            before = self._finished
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning(
                "disk tier: closing with %d records not written, and none written for %.0f s; "
                "does another process hold the store's write lock?",
                self.stats().waiting,
                timeout_s,
            )
            return False
        return True
