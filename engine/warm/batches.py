"""Prepared images that wait for the tower, handed out so that it is always full."""

from __future__ import annotations

import bisect
import threading
import time
from typing import NamedTuple

from featcache.engine.imageref import ImageRef
from featcache.engine.warm.items import SourceItem


class Prepared(NamedTuple):
    """An image whose pixels are ready. cost: vision patches. nbytes: of the pixels."""

    item: SourceItem
    ref: ImageRef
    cost: int
    nbytes: int


class Ready:
    """A bounded pool. Workers put into it; one thread takes batches out.

    A batch begins with the largest image and is filled up with those that come next in size and fit, so that
    images of like sizes go together and small ones fill what is left.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[Prepared] = []  # smallest first
        self._bytes = 0
        self._cost = 0
        self._blocked = 0
        self._hastened = False
        self._ended = False
        self._discarded = False
        self._since = 0.0  # when the oldest batch-to-be began to wait

    def put(self, image: Prepared) -> bool:
        """Add an image, as soon as there is room. Returns False if nobody takes any more."""
        with self._changed:
            while self._waiting and self._bytes + image.nbytes > self._max_bytes:
                self._blocked += 1
                self._changed.notify_all()
                self._changed.wait()
                self._blocked -= 1
            if self._discarded:
                return False
            if not self._waiting:
                self._since = time.monotonic()
            bisect.insort(self._waiting, image, key=lambda other: other.cost)
            self._bytes += image.nbytes
            self._cost += image.cost
            self._changed.notify_all()
        return True

    def hasten(self) -> None:
        """Few more will come: what waits is not to wait for company any longer."""
        with self._changed:
            self._hastened = True
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will be put."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Nothing more will be taken."""
        with self._changed:
            self._discarded = True
            self._waiting.clear()
            self._bytes = self._cost = 0
            self._changed.notify_all()

    def take(
        self, max_cost: int, max_images: int, *, patience_s: float, timeout_s: float
    ) -> list[Prepared] | None:
        """The next batch; None if there will be no more.

        max_cost: of a batch, but one image alone may have more. patience_s: how long a batch may stay short
            of it while images still come. timeout_s: return an empty batch after that.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                late = self._ended or self._hastened or now >= self._since + patience_s
                if self._waiting and (late or self._is_enough(max_cost, max_images)):
                    return self._batch(max_cost, max_images)
                if self._discarded or (self._ended and not self._waiting):
                    return None
                if now >= deadline:
                    return []
                until = min(deadline, self._since + patience_s) if self._waiting else deadline
                self._changed.wait(until - now)

    def _is_enough(self, max_cost: int, max_images: int) -> bool:
        return self._cost >= max_cost or len(self._waiting) >= max_images or self._blocked > 0

    def _batch(self, max_cost: int, max_images: int) -> list[Prepared]:
        batch: list[Prepared] = []
        left = max_cost
        at = len(self._waiting) - 1
        while at >= 0 and len(batch) < max_images:
            image = self._waiting[at]
            if not batch or image.cost <= left:
                batch.append(self._waiting.pop(at))
                left -= image.cost
                self._bytes -= image.nbytes
                self._cost -= image.cost
            at -= 1
        self._since = time.monotonic()
        self._changed.notify_all()
        return batch
