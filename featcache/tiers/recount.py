"""Counting a disk tier's tables against its metadata: to find what doesn't add up, or to put it right.

One row is in memory at a time, so that a store of any size can be counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import lmdb

from featcache.errors import RecordError
from featcache.tiers.environment import Environment
from featcache.tiers.overflow import is_whole
from featcache.tiers.schema import CHUNK, SMALL, Entry, Totals, number_key, number_of

Tables = Mapping[str, Any]
Encoders = dict[bytes, tuple[int, int]]  # fingerprint -> entries, bytes


def problems_of(txn: lmdb.Transaction, environment: Environment) -> list[str]:
    """What doesn't add up; empty if all does. Reads no tensor data."""
    tables = environment.tables
    try:
        totals = Totals.unpack(txn.get(b"totals", db=tables["info"]))
    except RecordError as exc:
        return [str(exc)]
    counted, encoders, misplaced = _count(txn, tables)
    problems = [
        f"totals: {name} is {getattr(totals, name)}, counted {number}"
        for name, number in counted.items()
        if getattr(totals, name) != number
    ]
    problems += [f"{name}: {wrong} places don't agree with the metadata" for name, wrong in misplaced.items()]
    problems += [
        f"encoders: {fingerprint.hex()[:12]} has {found}, counted {encoders.get(fingerprint, (0, 0))}"
        for fingerprint, found in _encoders(txn, tables)
        if found != encoders.get(fingerprint, (0, 0))
    ]
    orphans = sum(1 for _ in orphan_chunks(txn, tables))
    if orphans * CHUNK > totals.lost_bytes:
        problems.append(f"payload: {orphans} chunks belong to no record")
    return problems


def recount(txn: lmdb.Transaction, environment: Environment, totals: Totals) -> None:
    """Make the places of `records` and the queues those of the metadata, delete chunks of no record where
    that is safe, and set `totals` to what is counted."""
    tables = environment.tables
    for key, entry in _entries(txn, tables):
        for name, number in _places(entry):
            if txn.get(number_key(number), db=tables[name]) != key:
                txn.put(number_key(number), key, db=tables[name])
    for name in ("records", "small", "main"):
        for place in list(_extra_places(txn, tables, name)):
            txn.delete(place, db=tables[name])
    totals.lost_bytes = 0
    for chunk in list(orphan_chunks(txn, tables)):
        if is_whole(memoryview(txn.get(chunk, db=tables["payload"]) or b""), environment.map_base):
            txn.delete(chunk, db=tables["payload"])
        else:
            totals.lost_bytes += CHUNK
    for name, amount in _count(txn, tables)[0].items():
        setattr(totals, name, amount)
    totals.next_number = max(totals.next_number, _largest_number(txn, tables))


def count_encoders(txn: lmdb.Transaction, tables: Tables) -> None:
    """Set the encoders' sums to what is counted."""
    counted = _count(txn, tables)[1]
    known = {fingerprint for fingerprint, _ in _encoders(txn, tables)}
    for fingerprint in known | counted.keys():
        doc = parse_encoder(txn.get(fingerprint, db=tables["encoders"]))
        doc["entries"], doc["data_bytes"] = counted.get(fingerprint, (0, 0))
        txn.put(fingerprint, json.dumps(doc).encode(), db=tables["encoders"])


def parse_encoder(row: bytes | memoryview | None) -> dict[str, Any]:
    """A row of `encoders`; of one that is damaged or not there, what a new one is."""
    empty: dict[str, Any] = {"description": {}, "entries": 0, "data_bytes": 0}
    try:
        doc = {**empty, **({} if row is None else json.loads(bytes(row)))}
        return {**doc, "entries": int(doc["entries"]), "data_bytes": int(doc["data_bytes"])}
    except (ValueError, TypeError, AttributeError):
        return empty


def _count(txn: lmdb.Transaction, tables: Tables) -> tuple[dict[str, int], Encoders, Counter[str]]:
    """(sums by the names of Totals, sums by encoder, places that are wrong by table)."""
    sums = Counter(entries=0, data_bytes=0, file_bytes=0, small_bytes=0)
    encoders: Encoders = {}
    misplaced, places = Counter[str](), Counter[str]()
    for key, entry in _entries(txn, tables):
        sums.update(entries=1, data_bytes=entry.data_bytes, file_bytes=entry.file_bytes)
        sums["small_bytes"] += entry.file_bytes if entry.queue == SMALL else 0
        entries, data_bytes = encoders.get(entry.fingerprint, (0, 0))
        encoders[entry.fingerprint] = entries + 1, data_bytes + entry.data_bytes
        for name, number in _places(entry):
            places[name] += 1
            misplaced[name] += txn.get(number_key(number), db=tables[name]) != key
    for name in ("records", "small", "main"):
        misplaced[name] += abs(txn.stat(tables[name])["entries"] - places[name])
    counted = dict(sums)
    for name, table in (("ghosts", "ghost"), ("aliases", "aliases")):
        counted[name] = txn.stat(tables[table])["entries"]
    return counted, encoders, +misplaced


def _entries(txn: lmdb.Transaction, tables: Tables) -> Iterator[tuple[bytes, Entry]]:
    """All that can be read; `verify` tells of the others."""
    with txn.cursor(db=tables["meta"]) as cursor:
        for raw, row in cursor:
            key = bytes(raw)
            try:
                yield key, Entry.unpack(key, row)
            except RecordError:
                continue


def _places(entry: Entry) -> Iterator[tuple[str, int]]:
    yield "records", entry.record
    yield ("small" if entry.queue == SMALL else "main"), entry.sequence


def _extra_places(txn: lmdb.Transaction, tables: Tables, name: str) -> Iterator[bytes]:
    """Places of a table whose key isn't there, or is somewhere else."""
    with txn.cursor(db=tables[name]) as cursor:
        for raw, value in cursor:
            place, key = bytes(raw), bytes(value)
            row = txn.get(key, db=tables["meta"])
            try:
                is_right = row is not None and (name, number_of(place)) in _places(Entry.unpack(key, row))
            except RecordError:
                is_right = False
            if not is_right:
                yield place


def _encoders(txn: lmdb.Transaction, tables: Tables) -> Iterator[tuple[bytes, tuple[int, int]]]:
    with txn.cursor(db=tables["encoders"]) as cursor:
        for fingerprint, row in cursor:
            doc = parse_encoder(row)
            yield bytes(fingerprint), (doc["entries"], doc["data_bytes"])


def _largest_number(txn: lmdb.Transaction, tables: Tables) -> int:
    """Of all places and records: new ones are counted up from there."""
    largest = 0
    for name in ("records", "small", "main", "payload", "alias_order", "ghost_order"):
        with txn.cursor(db=tables[name]) as cursor:
            if cursor.last():
                largest = max(largest, number_of(cursor.key()))
    return largest


def orphan_chunks(txn: lmdb.Transaction, tables: Tables) -> Iterator[bytes]:
    """Keys of chunks whose record isn't there."""
    last, is_orphan = -1, False
    with txn.cursor(db=tables["payload"]) as cursor:
        for raw in cursor.iternext(keys=True, values=False):
            record = number_of(raw)
            if record != last:
                last, is_orphan = record, txn.get(number_key(record), db=tables["records"]) is None
            if is_orphan:
                yield bytes(raw)
