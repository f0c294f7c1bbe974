"""Checking a disk tier: every record against its checksum, every table against the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import xxhash

from featcache.errors import RecordError
from featcache.tiers.disk import DiskTier, chunks_of
from featcache.tiers.environment import Environment
from featcache.tiers.schema import Entry

Progress: TypeAlias = Callable[[int, int], None]

PORTION = 1024


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
    """See DiskTier.verify. No transaction stays open from one record to the next."""
    damaged: dict[bytes, str] = {}
    checked = checked_bytes = 0
    total = tier.stats().entries
    for key in _keys(environment):
        try:
            nbytes = _check(environment, key)
        except RecordError as exc:
            damaged[key] = str(exc)
        else:
            if nbytes is None:  # evicted meanwhile
                continue
            checked_bytes += nbytes
        checked += 1
        if progress is not None:
            progress(checked, max(checked, total))
    problems = tier.check()
    removed = 0
    if repair and (damaged or problems):
        removed = tier.delete(damaged)
        tier.repair_tables()
    return VerifyReport(checked, checked_bytes, damaged, tuple(problems), removed)


def _keys(environment: Environment) -> Iterator[bytes]:
    """Keys in order, read in portions."""
    last = b""
    while True:
        with environment.read() as txn, txn.cursor(db=environment.tables["meta"]) as cursor:
            portion: list[bytes] = []
            more = cursor.set_range(last + b"\0") if last else cursor.first()
            while more and len(portion) < PORTION:
                portion.append(bytes(cursor.key()))
                more = cursor.next()
        if not portion:
            return
        yield from portion
        last = portion[-1]


def _check(environment: Environment, key: bytes) -> int | None:
    """The bytes of a record that is whole; None if it isn't there. Raises RecordError."""
    with environment.read() as txn:
        row = txn.get(key, db=environment.tables["meta"])
        if row is None:
            return None
        entry = Entry.unpack(key, row)
        if entry.header(key).data_bytes != entry.data_bytes:
            raise RecordError("its metadata tells of two sizes")
        hasher = xxhash.xxh3_128()
        for chunk in chunks_of(txn, environment, entry):
            hasher.update(chunk)
        if hasher.digest() != entry.checksum:
            raise RecordError("its checksum does not match")
        return entry.data_bytes
