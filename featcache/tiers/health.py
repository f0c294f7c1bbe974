"""Whether the disk can be written just now: when to try again, and what to say once."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger("featcache")

RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0)  # waits before the next attempt, after one failure, two, …


class Health:
    """Failures in a row of one tier. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._failures = 0
        self._retry_at = 0.0
        self.errors = 0

    @property
    def is_degraded(self) -> bool:
        return self._failures > 0

    def may_try(self) -> bool:
        return time.monotonic() >= self._retry_at

    def failed(self, exc: Exception) -> None:
        """Count a failure, wait longer each time, and warn of the first."""
        with self._lock:
            self.errors += 1
            self._retry_at = time.monotonic() + RETRY_S[min(self._failures, len(RETRY_S) - 1)]
            self._failures += 1
            is_first = self._failures == 1
        if is_first:
            log.warning("disk tier: can't write (%s); going on without it, and trying again", exc)

    def succeeded(self) -> None:
        with self._lock:
            has_recovered, self._failures = self._failures > 0, 0
        if has_recovered:
            log.warning("disk tier: writing again")
