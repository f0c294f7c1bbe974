"""Which records leave the disk tier: S3-FIFO, or LRU, inside a write transaction.

As in `featcache.eviction`, but the queues are tables, since several processes share them, and they outlive
them all. Hits are noted by each process in memory and written with its next batch. LRU has one queue, `main`,
ordered by the hits that were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lmdb

from featcache.errors import RecordError
from featcache.eviction import MAX_FREQUENCY, PROMOTE_AT, SMALL_SHARE
from featcache.tiers.schema import (
    MAIN,
    SMALL,
    Entry,
    Totals,
    number_key,
    pack_access,
    unpack_access,
)

MIN_GHOSTS = 1024


class Queues:
    """The queues as one write transaction sees them."""

    def __init__(
        self,
        txn: lmdb.Transaction,
        tables: Mapping[str, Any],
        totals: Totals,
        *,
        is_lru: bool,
        max_bytes: int,
    ) -> None:
        self._txn = txn
        self._tables = tables
        self._totals = totals
        self._is_lru = is_lru
        self._max_bytes = max_bytes

    def add(self, key: bytes, file_bytes: int) -> tuple[int, int]:
        """Put a new key at a queue's end. Returns (queue, sequence)."""
        sequence = self._totals.number()
        is_small_full = self._totals.small_bytes + file_bytes > SMALL_SHARE * self._max_bytes
        is_filling = self._totals.evicted == 0  # there is room for all: see S3FIFO
        if self._is_lru or self._was_ghost(key) or (is_filling and is_small_full):
            self._txn.put(number_key(sequence), key, db=self._tables["main"])
            return MAIN, sequence
        self._txn.put(number_key(sequence), key, db=self._tables["small"])
        self._totals.small_bytes += file_bytes
        return SMALL, sequence

    def _was_ghost(self, key: bytes) -> bool:
        ghost = self._txn.pop(key, db=self._tables["ghost"])
        if ghost is None:
            return False
        self._txn.delete(bytes(ghost), db=self._tables["ghost_order"])
        self._totals.ghosts -= 1
        return True

    def remove(self, entry: Entry) -> None:
        table = self._tables["small" if entry.queue == SMALL else "main"]
        self._txn.delete(number_key(entry.sequence), db=table)
        if entry.queue == SMALL:
            self._totals.small_bytes -= entry.file_bytes

    def touch(self, key: bytes) -> None:
        """A hit was noted in `access`."""
        if self._is_lru:
            self._move_to_main(key)

    def victims(self) -> Iterator[bytes]:
        """Keys in the order of leaving; the caller removes each before it asks for the next."""
        rounds = (MAX_FREQUENCY + 2) * (self._totals.entries + 1)
        for _ in range(rounds):
            is_small_full = self._totals.small_bytes > SMALL_SHARE * self._max_bytes
            small, main = self._head("small"), self._head("main")
            if small is not None and (is_small_full or main is None):
                victim = self._from_small(small)
            elif main is not None:
                victim = self._from_main(main)
            else:
                return
            if victim is not None:
                yield victim

    def _head(self, name: str) -> bytes | None:
        """The first key of a queue; places whose record is gone (its metadata was damaged) are dropped."""
        with self._txn.cursor(db=self._tables[name]) as cursor:
            while cursor.first():
                key = bytes(cursor.value())
                if self._txn.get(key, db=self._tables["meta"]) is not None:
                    return key
                cursor.delete()
        return None

    def _from_small(self, key: bytes) -> bytes | None:
        if self._is_lru:
            return key
        if self._hits(key) >= PROMOTE_AT:
            return None if self._move_to_main(key, hits=0) else key
        self._remember(key)
        return key

    def _from_main(self, key: bytes) -> bytes | None:
        hits = self._hits(key)
        if hits == 0 or self._is_lru:
            return key
        return None if self._move_to_main(key, hits=min(hits, MAX_FREQUENCY) - 1) else key

    def _hits(self, key: bytes) -> int:
        return unpack_access(self._txn.get(key, db=self._tables["access"]))[0]

    def _move_to_main(self, key: bytes, *, hits: int | None = None) -> bool:
        """To the end of the main queue, with `hits` left. False if the key's metadata is damaged."""
        row = self._txn.get(key, db=self._tables["meta"])
        try:
            entry = Entry.unpack(key, row or b"")
        except RecordError:
            return False
        self.remove(entry)
        moved = entry._replace(queue=MAIN, sequence=self._totals.number())
        self._txn.put(number_key(moved.sequence), key, db=self._tables["main"])
        self._txn.put(key, moved.pack(key), db=self._tables["meta"])
        if hits is not None:
            _, when = unpack_access(self._txn.get(key, db=self._tables["access"]))
            self._txn.put(key, pack_access(hits, when), db=self._tables["access"])
        return True

    def _remember(self, key: bytes) -> None:
        number = number_key(self._totals.number())
        self._txn.put(key, number, db=self._tables["ghost"])
        self._txn.put(number, key, db=self._tables["ghost_order"])
        self._totals.ghosts += 1
        limit = max(MIN_GHOSTS, self._totals.entries)
        with self._txn.cursor(db=self._tables["ghost_order"]) as cursor:
            while self._totals.ghosts > limit and cursor.first():
                self._txn.delete(bytes(cursor.value()), db=self._tables["ghost"])
                cursor.delete()
                self._totals.ghosts -= 1
