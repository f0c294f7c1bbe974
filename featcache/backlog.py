"""`Backlog`: how many bytes are on their way to the disk, and the bound on them."""

from __future__ import annotations

import threading

from featcache.errors import StoreClosedError


class Backlog:
    """Bytes between `put` and their commit, at most `max_bytes` or one record. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._changed = threading.Condition()  # guards all below
        self._used_bytes = 0
        self._closed = False

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def enter(self, nbytes: int, *, wait: bool) -> bool:
        """Take room for a record. Without any, False, or with `wait` as soon as there is some.

        Raises StoreClosedError if the store is closed meanwhile.
        """
        with self._changed:
            while self._used_bytes and self._used_bytes + nbytes > self.max_bytes:
                if not wait:
                    return False
                self._changed.wait()
                if self._closed:
                    raise StoreClosedError("the store is closed")
            self._used_bytes += nbytes
            return True

    def leave(self, nbytes: int) -> None:
        with self._changed:
            self._used_bytes -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Wake who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
