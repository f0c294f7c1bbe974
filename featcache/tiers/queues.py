"""S3-FIFO inside a write transaction: which records leave the disk tier.

As in `featcache.eviction`, but the queues are tables, since several processes share them, and they outlive
them all. Hits are noted by each process in memory and written with its next batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lmdb

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

    def __init__(self, txn: lmdb.Transaction, tables: dict[str, Any], totals: Totals) -> None:
        self._txn = txn
        self._tables = tables
        self._totals = totals

    def add(self, key: bytes, file_bytes: int) -> tuple[int, int]:
        """Put a new key at a queue's end. Returns (queue, sequence)."""
        ghost = self._txn.pop(key, db=self._tables["ghost"])
        sequence = self._totals.number()
        if ghost is not None:
            self._txn.delete(bytes(ghost), db=self._tables["ghost_order"])
            self._totals.ghosts -= 1
            self._txn.put(number_key(sequence), key, db=self._tables["main"])
            return MAIN, sequence
        self._txn.put(number_key(sequence), key, db=self._tables["small"])
        self._totals.small_bytes += file_bytes
        return SMALL, sequence

    def remove(self, entry: Entry) -> None:
        table = self._tables["small" if entry.queue == SMALL else "main"]
        self._txn.delete(number_key(entry.sequence), db=table)
        if entry.queue == SMALL:
            self._totals.small_bytes -= entry.file_bytes

    def victims(self, max_bytes: int) -> Iterator[bytes]:
        """Keys in the order of leaving; the caller removes each before it asks for the next."""
        rounds = (MAX_FREQUENCY + 2) * (self._totals.entries + 1)
        for _ in range(rounds):
            is_small_full = self._totals.small_bytes > SMALL_SHARE * max_bytes
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
        if self._hits(key) >= PROMOTE_AT:
            self._move_to_main(key, hits=0)
            return None
        self._remember(key)
        return key

    def _from_main(self, key: bytes) -> bytes | None:
        hits = self._hits(key)
        if hits == 0:
            return key
        self._move_to_main(key, hits=min(hits, MAX_FREQUENCY) - 1)
        return None

    def _hits(self, key: bytes) -> int:
        return unpack_access(self._txn.get(key, db=self._tables["access"]))[0]

    def _move_to_main(self, key: bytes, *, hits: int) -> None:
        row = self._txn.get(key, db=self._tables["meta"])
        assert row is not None, key.hex()
        entry, head = Entry.unpack(row)
        self.remove(entry)
        moved = entry._replace(queue=MAIN, sequence=self._totals.number())
        self._txn.put(number_key(moved.sequence), key, db=self._tables["main"])
        self._txn.put(key, moved.pack(head), db=self._tables["meta"])
        _, when = unpack_access(self._txn.get(key, db=self._tables["access"]))
        self._txn.put(key, pack_access(hits, when), db=self._tables["access"])

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
