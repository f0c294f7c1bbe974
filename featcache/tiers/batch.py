"""One write transaction of the disk tier: what it changes, and the sums that change with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lmdb
import xxhash

from featcache.errors import RecordError
from featcache.features import Header
from featcache.tiers.environment import Environment
from featcache.tiers.overflow import is_whole
from featcache.tiers.queues import Queues
from featcache.tiers.recount import count_encoders, parse_encoder, recount
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


class Batch:
    """Changes within `txn`. Call `finish` last; without it, or if the transaction fails, nothing happened.

    max_bytes: the tier's budget, by which the queues are divided.
    """

    def __init__(
        self, txn: lmdb.Transaction, environment: Environment, *, is_lru: bool, max_bytes: int
    ) -> None:
        self._txn = txn
        self._environment = environment
        self._tables: Mapping[str, Any] = environment.tables
        self._needs_recount = False
        try:
            self.totals = Totals.unpack(txn.get(b"totals", db=self._tables["info"]))
        except RecordError:
            self.totals = Totals()
            self._needs_recount = True
        if self._needs_recount:
            recount(txn, environment, self.totals)
        self._queues = Queues(txn, self._tables, self.totals, is_lru=is_lru, max_bytes=max_bytes)
        self._of_encoders: dict[bytes, tuple[int, int]] = {}  # fingerprint -> change of entries, of bytes

    def finish(self) -> None:
        """Write the sums."""
        if self._needs_recount:
            recount(self._txn, self._environment, self.totals)
            count_encoders(self._txn, self._tables)
        else:
            for fingerprint, (entries, data_bytes) in self._of_encoders.items():
                doc = self._encoder(fingerprint)
                doc["entries"] += entries
                doc["data_bytes"] += data_bytes
                self._put_encoder(fingerprint, doc)
        self._txn.put(b"totals", self.totals.pack(), db=self._tables["info"])

    def recount(self) -> None:
        """Have `finish` count everything anew, and collect chunks that belong to no record."""
        self._needs_recount = True

    # Records

    def store(self, header: Header, pieces: Sequence[memoryview], limit: int) -> bool:
        """Store a record, evicting what is needed to stay within `limit` bytes of the file.

        Returns True if it is stored, now or before; False if it can't be.
        """
        key = header.key
        if self._txn.get(key, db=self._tables["meta"]) is not None:
            return True
        needed = file_bytes(header.data_bytes)
        if needed > limit or sum(piece.nbytes for piece in pieces) != header.data_bytes:
            return False
        self.evict(limit - needed)
        record = self.totals.number()
        checksum = self._put_chunks(record, pieces)
        queue, sequence = self._queues.add(key, needed)
        entry = Entry.of(
            header, queue=queue, sequence=sequence, record=record, created=time.time(), checksum=checksum
        )
        self._txn.put(key, entry.pack(key), db=self._tables["meta"])
        self._txn.put(number_key(record), key, db=self._tables["records"], append=True)
        self._account(entry, 1)
        return True

    def _put_chunks(self, record: int, pieces: Sequence[memoryview]) -> bytes:
        hasher = xxhash.xxh3_128()
        for number, chunk in enumerate(cut(pieces)):
            hasher.update(chunk)
            is_new = self._txn.put(chunk_key(record, number), chunk, db=self._tables["payload"], append=True)
            assert is_new, f"record number {record} was used before"
        return hasher.digest()

    def evict(self, limit: int) -> None:
        """Evict until no more than `limit` bytes of the file are in use, or nothing is left."""
        if self.totals.used_bytes <= limit:
            return
        for victim in self._queues.victims():
            before = self.totals.file_bytes
            self.remove(victim)
            self.totals.evicted += 1
            self.totals.evicted_bytes += before - self.totals.file_bytes
            if self.totals.used_bytes <= limit:
                return

    def remove(self, key: bytes, *, record: int | None = None) -> bool:
        """Delete a record; returns whether it was there. record: only if it is still this one."""
        row = self._txn.get(key, db=self._tables["meta"])
        if row is None:
            return False
        try:
            entry = Entry.unpack(key, row)
        except RecordError:  # where its chunks and places are can't be told from here
            self._txn.delete(key, db=self._tables["meta"])
            self._needs_recount = True
            return True
        if record is not None and entry.record != record:
            return False
        self._queues.remove(entry)
        self.totals.lost_bytes += self._remove_chunks(entry)
        self._txn.delete(number_key(entry.record), db=self._tables["records"])
        self._txn.delete(key, db=self._tables["access"])
        self._txn.delete(key, db=self._tables["meta"])
        self._account(entry, -1)
        return True

    def _remove_chunks(self, entry: Entry) -> int:
        """Delete a record's chunks. Returns the bytes of those that had to be left behind."""
        lost = 0
        for number in range(entry.num_chunks):
            name = chunk_key(entry.record, number)
            chunk = self._txn.get(name, db=self._tables["payload"])
            if chunk is None:
                continue
            if is_whole(memoryview(chunk), self._environment.map_base):
                self._txn.delete(name, db=self._tables["payload"])
            else:
                lost += CHUNK
        return lost

    def quarantine(self, condemned: Mapping[bytes, int | None]) -> None:
        """Delete records that were found damaged, by key and record id, unless made anew meanwhile."""
        for key, record in condemned.items():
            self.totals.quarantined += self.remove(key, record=record)

    def _account(self, entry: Entry, sign: int) -> None:
        self.totals.entries += sign
        self.totals.data_bytes += sign * entry.data_bytes
        self.totals.file_bytes += sign * entry.file_bytes
        entries, data_bytes = self._of_encoders.get(entry.fingerprint, (0, 0))
        self._of_encoders[entry.fingerprint] = entries + sign, data_bytes + sign * entry.data_bytes

    # The rest

    def note_hits(self, touched: Mapping[bytes, int]) -> None:
        """Add up the times that records were hit."""
        now = time.time()
        for key, hits in touched.items():
            if self._txn.get(key, db=self._tables["meta"]) is not None:
                before, _ = unpack_access(self._txn.get(key, db=self._tables["access"]))
                self._txn.put(key, pack_access(before + hits, now), db=self._tables["access"])
                self._queues.touch(key)

    def put_aliases(self, aliases: Mapping[bytes, bytes], limit: int) -> None:
        """Set aliases; of more than `limit` in all, the oldest leave."""
        table, order = self._tables["aliases"], self._tables["alias_order"]
        for alias_key, value in aliases.items():
            before = self._txn.get(alias_key, db=table)
            if before is not None:
                self._txn.delete(bytes(before[:8]), db=order)
                self.totals.aliases -= 1
            sequence = number_key(self.totals.number())
            self._txn.put(alias_key, sequence + value, db=table)
            self._txn.put(sequence, alias_key, db=order)
            self.totals.aliases += 1
        with self._txn.cursor(db=order) as cursor:
            while self.totals.aliases > limit and cursor.first():
                self._txn.delete(bytes(cursor.value()), db=table)
                cursor.delete()
                self.totals.aliases -= 1

    def describe_encoder(self, fingerprint: bytes, description: Mapping[str, Any]) -> None:
        self._put_encoder(fingerprint, {**self._encoder(fingerprint), "description": dict(description)})

    def _encoder(self, fingerprint: bytes) -> dict[str, Any]:
        return parse_encoder(self._txn.get(fingerprint, db=self._tables["encoders"]))

    def _put_encoder(self, fingerprint: bytes, doc: Mapping[str, Any]) -> None:
        self._txn.put(fingerprint, json.dumps(doc).encode(), db=self._tables["encoders"])


def cut(pieces: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
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
