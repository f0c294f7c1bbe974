"""One process a device. They split what is found between them, and share the store and its claims.

A process knows its part by counting: with n devices, the i-th takes every n-th item of the same stream. One
that dies takes nothing with it but its part, which the next run makes up for.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from featcache.engine.warm.items import PassedOver
from featcache.engine.warm.job import NOBODY, Job, Listeners, cores, run_job
from featcache.engine.warm.report import Failure, Progress, WarmReport
from featcache.errors import FeatcacheError, StoreError

_TICK_S = 0.1

# Not forked from this process, whose CUDA and LMDB wouldn't survive it, but from a clean one that has only
# imported what all of them need.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])

_ADDED = [field.name for field in fields(Progress) if field.name not in ("seconds", "total")]


@dataclass(slots=True)
class _Part:
    """One device's process, as its parent knows it."""

    device: str
    process: Any
    connection: Connection
    progress: Progress | None = None
    report: WarmReport | None = None
    error: str | None = None


def run_on_devices(
    job: Job, devices: Sequence[str], listeners: Listeners = NOBODY, stop: threading.Event | None = None
) -> WarmReport:
    """Run a job on several devices of this machine, a process each.

    Raises StoreError, after all others have ended, if one of the processes failed.
    """
    started = time.perf_counter()
    stop = stop or threading.Event()
    parts = [_start(job, devices, index) for index in range(len(devices))]
    parent = _Parent(parts, job, listeners, stop)
    try:
        parent.attend()
    finally:
        for part in parts:
            part.connection.close()  # which tells a process that nobody waits for it any more
            part.process.join()
    if errors := [f"{part.device}: {part.error}" for part in parts if part.error]:
        raise StoreError(f"{len(errors)} of {len(parts)} processes failed: {'; '.join(errors)}")
    report = WarmReport.sum([part.report for part in parts if part.report], time.perf_counter() - started)
    return replace(report, stopped="too many failures") if parent.gave_up else report


def _start(job: Job, devices: Sequence[str], index: int) -> _Part:
    number = len(devices)
    share_of_cores = max(1, cores() // number)
    settings = replace(
        job.settings,
        share=(index, number),
        workers=job.settings.workers or share_of_cores,
        max_failures=None,  # the parent sees them all
    )
    threads = share_of_cores if devices[index] == "cpu" else None
    part_of_job = replace(job, device=devices[index], settings=settings, threads=threads)
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(
        target=_run_part, args=(part_of_job, theirs), name=f"featcache-warm-{index}", daemon=True
    )
    process.start()
    theirs.close()
    return _Part(devices[index], process, ours)


class _Parent:
    """Hears what the processes tell, and tells them to stop."""

    def __init__(self, parts: list[_Part], job: Job, listeners: Listeners, stop: threading.Event) -> None:
        self._parts = parts
        self._job = job
        self._listeners = listeners
        self._stop = stop
        self._failed = 0
        self._has_told = False
        self.gave_up = False

    def attend(self) -> None:
        """Returns when all processes have ended, or told that they are done."""
        while running := [part for part in self._parts if part.report is None and part.error is None]:
            by_connection = {part.connection: part for part in running}
            for connection in wait(list(by_connection), _TICK_S):
                assert isinstance(connection, Connection)
                self._hear(by_connection[connection])
            most = self._job.settings.max_failures
            self.gave_up = self.gave_up or (most is not None and self._failed > most)
            if (self._stop.is_set() or self.gave_up) and not self._has_told:
                self._has_told = True
                self._tell_to_stop(running)
            self._tell_progress()

    def _hear(self, part: _Part) -> None:
        try:
            message = part.connection.recv()
        except (EOFError, OSError):
            part.process.join()
            part.error = f"its process ended with status {part.process.exitcode}"
            return
        if isinstance(message, Progress):
            part.progress = message
        elif isinstance(message, WarmReport):
            part.report = message
        elif isinstance(message, Failure):
            self._failed += 1
            _call(self._listeners.failure, message)
        elif isinstance(message, PassedOver):
            _call(self._listeners.passed_over, message)
        else:
            part.error = str(message)

    def _tell_to_stop(self, running: list[_Part]) -> None:
        for part in running:
            try:
                part.connection.send("stop")
            except OSError:  # it has ended, which the next look at it will show
                continue

    def _tell_progress(self) -> None:
        known = [part.progress for part in self._parts if part.progress is not None]
        if not known or self._listeners.progress is None:
            return
        totals = [part.total for part in known if part.total is not None]
        self._listeners.progress(
            Progress(
                **{name: sum(getattr(part, name) for part in known) for name in _ADDED},
                seconds=max(part.seconds for part in known),
                total=sum(totals) if len(totals) == len(self._parts) else None,
            )
        )


def _call(listener: Callable[[Any], None] | None, message: Any) -> None:
    if listener is not None:
        listener(message)


def _run_part(job: Job, connection: Connection) -> None:
    """In the process of one device."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent answers for them
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def listen() -> None:
        with suppress(EOFError, OSError):  # the parent is gone
            connection.recv()
        stop.set()

    threading.Thread(target=listen, name="featcache-warm-parent", daemon=True).start()
    sending = threading.Lock()  # messages come from several threads

    def send(message: object) -> None:
        try:
            with sending:
                connection.send(message)
        except OSError:
            stop.set()

    try:
        send(run_job(job, Listeners(progress=send, failure=send, passed_over=send), stop))
    except FeatcacheError as exc:
        send(str(exc))
    except Exception as exc:  # nobody's fault but ours: with its trace on standard error
        send(repr(exc))
        raise
