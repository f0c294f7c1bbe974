"""What was found and waits for a worker: bounded by number and by the bytes that the items hold."""

from __future__ import annotations

import threading
from collections import deque

from featcache.engine.warm.items import SourceItem


class Inbox:
    """From one reader to several workers."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._changed = threading.Condition()  # guards all below
        self._items: deque[SourceItem] = deque()
        self._bytes = 0
        self._ended = False
        self._closed = False

    def put(self, item: SourceItem) -> bool:
        """Add an item, as soon as there is room. Returns False if it isn't wanted any more."""
        with self._changed:
            while not self._closed and self._is_full(item):
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(item)
            self._bytes += item.held_bytes
            self._changed.notify_all()
        return True

    def _is_full(self, item: SourceItem) -> bool:
        if not self._items:  # one alone may be larger than the bound
            return False
        return len(self._items) >= self._max_items or self._bytes + item.held_bytes > self._max_bytes

    def get(self) -> SourceItem | None:
        """The next item, as soon as there is one; None at the end."""
        with self._changed:
            while not self._items and not self._ended and not self._closed:
                self._changed.wait()
            if not self._items:
                return None
            item = self._items.popleft()
            self._bytes -= item.held_bytes
            self._changed.notify_all()
            return item

    def end(self) -> None:
        """Nothing more will be put."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will be taken."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
