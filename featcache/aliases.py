"""`Aliases`: the most recent aliases in memory, over those on disk."""

from __future__ import annotations

import threading
from collections import OrderedDict

MAX_ALIASES = 65_536  # about 16 MB


class Aliases:
    """A bounded LRU map of short values. Thread-safe."""

    def __init__(self, max_entries: int = MAX_ALIASES) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()  # guards _values
        self._values: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, alias_key: bytes) -> bytes | None:
        with self._lock:
            value = self._values.get(alias_key)
            if value is not None:
                self._values.move_to_end(alias_key)
            return value

    def put(self, alias_key: bytes, value: bytes) -> bool:
        """Keep it; whether it is new or has changed."""
        with self._lock:
            is_new = self._values.get(alias_key) != value
            self._values[alias_key] = value
            self._values.move_to_end(alias_key)
            if len(self._values) > self._max_entries:
                self._values.popitem(last=False)
            return is_new

    def __len__(self) -> int:
        return len(self._values)
