"""What a run of warming did: counted while it runs, reported when it ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

KEPT_FAILURES = 1000  # in the report; the callback gets them all

Stopped: TypeAlias = Literal["interrupted", "too many failures"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An image, or a source, that couldn't be read or encoded."""

    source: str
    member: str
    error: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands. total: how many images there are, if that is known."""

    seen: int
    done: int
    cached: int
    encoded: int
    duplicates: int
    failed: int
    bytes_read: int
    feature_bytes: int
    seconds: float
    total: int | None = None


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a run did.

    seen: images met, and sources and members that were meant to be and couldn't be read. Each is one of
        cached: held before, and neither decoded nor encoded,
        encoded: by this run,
        duplicates: with the pixels of an image that this run has encoded,
        shared: encoded by another run meanwhile,
        failed, or
        unfinished: the run was stopped first.
    passed_over: what isn't meant to be an image.
    bytes_read: of encoded images. feature_bytes: of the features that this run made.
    not_kept: encoded, but there was no room, or the disk failed. evicted: entries that had to leave the disk.
    seconds: in all. seconds_by_stage: "read", "identify", "prepare" are sums over the workers; "tower" and
        "flush" are of the one thread that encodes, the tower's waiting for the disk included.
    tower_busy: the share of all seconds in which the tower worked, or handed over what it made.
    """

    seen: int
    cached: int
    encoded: int
    duplicates: int
    shared: int
    failed: int
    unfinished: int
    passed_over: int
    bytes_read: int
    feature_bytes: int
    not_kept: int
    evicted: int
    tower_calls: int
    seconds: float
    seconds_by_stage: dict[str, float]
    tower_busy: float
    stopped: Stopped | None
    failures: tuple[Failure, ...] = ()

    @property
    def images_per_second(self) -> float:
        return (self.seen - self.unfinished) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        doc = asdict(self)
        doc["images_per_second"] = self.images_per_second
        doc["failures"] = [failure.to_json() for failure in self.failures]
        return doc

    @classmethod
    def sum(cls, reports: list[WarmReport], seconds: float) -> WarmReport:
        """One report of runs that were beside each other."""
        assert reports
        stages: dict[str, float] = {}
        for report in reports:
            for name, stage_s in report.seconds_by_stage.items():
                stages[name] = stages.get(name, 0.0) + stage_s
        added = {name: sum(getattr(report, name) for report in reports) for name in _ADDED}
        failures = tuple(failure for report in reports for failure in report.failures)[:KEPT_FAILURES]
        return cls(
            **added,
            seconds=seconds,
            seconds_by_stage=stages,
            tower_busy=sum(report.tower_busy for report in reports) / len(reports),
            stopped=next((report.stopped for report in reports if report.stopped), None),
            failures=failures,
        )


_ADDED = (
    *("seen", "cached", "encoded", "duplicates", "shared", "failed", "unfinished", "passed_over"),
    *("bytes_read", "feature_bytes", "not_kept", "evicted", "tower_calls"),
)
_OUTCOMES = ("cached", "encoded", "duplicates", "shared", "failed")


@dataclass(slots=True)
class Tally:
    """The counts of a run under way. Thread-safe.

    on_failure: called for each failure, one at a time.
    """

    on_failure: Callable[[Failure], None] | None = None
    total: int | None = None
    _counts: Counter[str] = field(default_factory=Counter)
    _seconds: dict[str, float] = field(default_factory=dict)
    _failures: list[Failure] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # guards all above
    _started: float = field(default_factory=time.perf_counter)

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def fail(self, failure: Failure) -> None:
        with self._lock:
            self._counts["failed"] += 1
            if len(self._failures) < KEPT_FAILURES:
                self._failures.append(failure)
            if self.on_failure is not None:
                self.on_failure(failure)

    @property
    def failed(self) -> int:
        with self._lock:
            return self._counts["failed"]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - started
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + passed

    def progress(self) -> Progress:
        with self._lock:
            c = self._counts
            return Progress(
                seen=c["seen"],
                done=sum(c[name] for name in _OUTCOMES),
                cached=c["cached"],
                encoded=c["encoded"],
                duplicates=c["duplicates"] + c["shared"],
                failed=c["failed"],
                bytes_read=c["bytes_read"],
                feature_bytes=c["feature_bytes"],
                seconds=time.perf_counter() - self._started,
                total=self.total,
            )

    def report(self, stopped: Stopped | None) -> WarmReport:
        with self._lock:
            seconds = time.perf_counter() - self._started
            counts = {name: self._counts[name] for name in _ADDED}
            counts["unfinished"] = counts["seen"] - sum(counts[name] for name in _OUTCOMES)
            return WarmReport(
                **counts,
                seconds=seconds,
                seconds_by_stage=dict(self._seconds),
                tower_busy=self._seconds.get("tower", 0.0) / seconds,
                stopped=stopped,
                failures=tuple(self._failures),
            )
