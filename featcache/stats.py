"""`StoreStats`: what a store holds and has done since it was opened."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcache.tiers.disk import DiskStats
from featcache.tiers.memory import TierStats
from featcache.tiers.writer import WriterStats

COUNTERS = (
    "hits_device",
    "hits_host",
    "hits_disk",
    "misses",
    "puts",  # features handed over, by `put` or by a computation
    "computed",  # keys that a computation of this store was asked for
    "joined",  # keys for which a call waited for the computation of another
    "no_room",  # features that the host tier had no room for
    "unwritten",  # features that were not written to disk because too many waited for it
    "failed_copies",
    "failed_writes",  # features that the disk tier did not take: full, gone, read-only, or larger than it
    "rejected",  # records that weren't what their key says, and were taken for misses
)


class Counts:
    """Counters by the names in COUNTERS. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _counts
        self._counts = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Each tier's own account (None if there is no such tier), and the store's.

    counts: since opening, by the names in COUNTERS. backlog_bytes: on their way to the disk.
    num_aliases: held in memory. num_computing: keys being computed now.
    disk_error: why there is no disk tier, or only one to read, although a path was given; or its last error.
    """

    device: TierStats | None
    host: TierStats | None
    disk: DiskStats | None
    writer: WriterStats | None
    counts: Mapping[str, int]
    backlog_bytes: int
    num_aliases: int
    num_computing: int
    disk_error: str | None

    def to_json(self) -> dict[str, Any]:
        tiers = {name: getattr(self, name) for name in ("device", "host", "disk", "writer")}
        return {
            **{name: None if tier is None else tier.to_json() for name, tier in tiers.items()},
            **self.counts,
            "backlog_bytes": self.backlog_bytes,
            "num_aliases": self.num_aliases,
            "num_computing": self.num_computing,
            "disk_error": self.disk_error,
        }
