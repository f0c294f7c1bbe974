"""Checking a disk tier: every record against its checksum, every table against the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import lmdb

from featcache.errors import RecordError
from featcache.features import Header
from featcache.tiers.schema import MAIN, SMALL, Entry, Totals, number_key, number_of

if TYPE_CHECKING:
    from featcache.tiers.disk import DiskTier
    from featcache.tiers.environment import Environment

Progress: TypeAlias = Callable[[int, int], None]

PORTION = 256


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """damaged: why, by key. problems: of the tables. removed: records deleted by a repair."""

    checked: int
    checked_bytes: int
    damaged: Mapping[bytes, str]
    problems: tuple[str, ...]
    removed: int

    @property
    def is_clean(self) -> bool:
        return not self.damaged and not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "checked": self.checked,
            "checked_bytes": self.checked_bytes,
            "damaged": [{"key": key.hex(), "reason": reason} for key, reason in self.damaged.items()],
            "problems": list(self.problems),
            "removed": self.removed,
            "is_clean": self.is_clean,
        }


def verify(
    tier: DiskTier, environment: Environment, *, repair: bool, progress: Progress | None
) -> VerifyReport:
    """See DiskTier.verify. One record is in memory at a time, and no transaction stays open between two."""
    keys = _keys(environment)
    damaged: dict[bytes, str] = {}
    checked_bytes = 0
    buffer = bytearray()

    def into(header: Header) -> memoryview:
        nonlocal buffer
        if len(buffer) < header.data_bytes:
            buffer = bytearray(header.data_bytes)
        return memoryview(buffer)[: header.data_bytes]

    for number, key in enumerate(keys, start=1):
        try:
            header = tier.read_checked(key, into)
            checked_bytes += 0 if header is None else header.data_bytes
        except RecordError as exc:
            damaged[key] = str(exc)
        if progress is not None:
            progress(number, len(keys))
    problems = check(environment)
    removed = 0
    if repair and (damaged or problems):
        removed = tier.delete(damaged)
        tier.repair_tables()
    return VerifyReport(len(keys), checked_bytes, damaged, tuple(problems), removed)


def _keys(environment: Environment) -> list[bytes]:
    with environment.read() as txn, txn.cursor(db=environment.tables["meta"]) as cursor:
        return [bytes(key) for key in cursor.iternext(keys=True, values=False)]


def check(environment: Environment) -> list[str]:
    """Recount the tables in one transaction; what doesn't add up."""
    with environment.read() as txn:
        tables = environment.tables
        entries = _entries(txn, tables)
        totals = Totals.unpack(txn.get(b"totals", db=tables["info"]))
        counted = _count(txn, tables, entries)
        problems = [
            f"totals: {name} is {getattr(totals, name)}, counted {number}"
            for name, number in counted.items()
            if getattr(totals, name) != number
        ]
        for name, places in _places(entries).items():
            problems += _compare(txn, tables[name], places, name)
        orphans = sum(1 for _ in orphan_chunks(txn, tables))
        if orphans and not totals.lost_bytes:
            problems.append(f"payload: {orphans} chunks belong to no record")
        return problems


def _count(
    txn: lmdb.Transaction, tables: Mapping[str, Any], entries: Mapping[bytes, Entry]
) -> dict[str, int]:
    return {
        "entries": len(entries),
        "data_bytes": sum(entry.data_bytes for entry in entries.values()),
        "file_bytes": sum(entry.file_bytes for entry in entries.values()),
        "small_bytes": sum(entry.file_bytes for entry in entries.values() if entry.queue == SMALL),
        "ghosts": txn.stat(tables["ghost"])["entries"],
        "aliases": txn.stat(tables["aliases"])["entries"],
    }


def check_entries(txn: lmdb.Transaction, tables: Mapping[str, Any], totals: Totals) -> None:
    """Set `totals` to what is counted, and the queues and `records` to what the metadata says."""
    entries = _entries(txn, tables)
    for name, places in _places(entries).items():
        for number in {number_of(raw) for raw, _ in txn.cursor(db=tables[name])} - places.keys():
            txn.delete(number_key(number), db=tables[name])
        for number, key in places.items():
            txn.put(number_key(number), key, db=tables[name])
    for name, number in _count(txn, tables, entries).items():
        setattr(totals, name, number)


def _places(entries: Mapping[bytes, Entry]) -> dict[str, dict[int, bytes]]:
    """What the queues and `records` hold, by table."""
    return {
        "small": {entry.sequence: key for key, entry in entries.items() if entry.queue == SMALL},
        "main": {entry.sequence: key for key, entry in entries.items() if entry.queue == MAIN},
        "records": {entry.record: key for key, entry in entries.items()},
    }


def _entries(txn: lmdb.Transaction, tables: Mapping[str, Any]) -> dict[bytes, Entry]:
    found = {}
    for key, row in txn.cursor(db=tables["meta"]):
        try:
            found[bytes(key)] = Entry.unpack(row)[0]
        except RecordError:
            continue
    return found


def _compare(txn: lmdb.Transaction, table: Any, expected: Mapping[int, bytes], name: str) -> list[str]:
    found = {number_of(number): bytes(key) for number, key in txn.cursor(db=table)}
    if found == expected:
        return []
    wrong = sum(1 for number in found.keys() | expected.keys() if found.get(number) != expected.get(number))
    return [f"{name}: {wrong} places don't agree with the metadata"]


def orphan_chunks(txn: lmdb.Transaction, tables: Mapping[str, Any]) -> Any:
    """Keys of chunks whose record isn't there."""
    last, is_orphan = b"", False
    with txn.cursor(db=tables["payload"]) as cursor:
        for raw in cursor.iternext(keys=True, values=False):
            chunk = bytes(raw)
            if chunk[:8] != last:
                last = chunk[:8]
                is_orphan = txn.get(number_key(number_of(last)), db=tables["records"]) is None
            if is_orphan:
                yield chunk
