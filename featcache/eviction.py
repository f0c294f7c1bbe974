"""Which entry leaves a memory tier first: S3-FIFO, or LRU to compare.

S3-FIFO is from Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): a small queue
filters what is asked for once, so that a scan doesn't flush the main queue. Sizes are bytes; nothing here
knows what an entry is, and nothing is thread-safe: the tier's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, Protocol

Key = bytes
IsFree = Callable[[Key], bool]


class Policy(Protocol):
    """Order of eviction. A key is added once, touched at each hit, and removed or evicted once."""

    def add(self, key: Key, nbytes: int) -> None:
        """A new entry; KeyError if it is there."""

    def touch(self, key: Key) -> None:
        """A hit; KeyError if it isn't there."""

    def remove(self, key: Key) -> None:
        """Leave without being a victim (deleted); KeyError if it isn't there."""

    def evict(self, is_free: IsFree) -> Key | None:
        """Take out and return the next victim for which `is_free`; None if there is none."""

    def __len__(self) -> int: ...


class LRU:
    """Least recently used."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, int] = OrderedDict()

    def add(self, key: Key, nbytes: int) -> None:
        if key in self._entries:
            raise KeyError(key)
        self._entries[key] = nbytes

    def touch(self, key: Key) -> None:
        self._entries.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._entries[key]

    def evict(self, is_free: IsFree) -> Key | None:
        victim = next((key for key in self._entries if is_free(key)), None)
        if victim is not None:
            del self._entries[victim]
        return victim

    def __len__(self) -> int:
        return len(self._entries)


SMALL_SHARE = 0.1  # of the bytes
MAX_FREQUENCY = 3
PROMOTE_AT = 2  # hits in the small queue that lead to the main one
MAX_GHOSTS = 1 << 20


class S3FIFO:
    """Two queues and the keys of what left the first one lately."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._small: OrderedDict[Key, int] = OrderedDict()  # key -> bytes
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghost: OrderedDict[Key, int] = OrderedDict()
        self._frequency: dict[Key, int] = {}
        self._small_bytes = 0
        self._ghost_bytes = 0

    def add(self, key: Key, nbytes: int) -> None:
        if key in self._frequency:
            raise KeyError(key)
        self._frequency[key] = 0
        if key in self._ghost:
            self._ghost_bytes -= self._ghost.pop(key)
            self._main[key] = nbytes
        else:
            self._small[key] = nbytes
            self._small_bytes += nbytes

    def touch(self, key: Key) -> None:
        self._frequency[key] = min(self._frequency[key] + 1, MAX_FREQUENCY)

    def remove(self, key: Key) -> None:
        del self._frequency[key]
        if key in self._small:
            self._small_bytes -= self._small.pop(key)
        else:
            del self._main[key]

    def evict(self, is_free: IsFree) -> Key | None:
        # Every pass lowers a frequency or takes a victim, unless all are held: then this many are enough.
        for _ in range((MAX_FREQUENCY + 2) * len(self) + 1):
            if not self._frequency:
                return None
            if self._small and (self._small_bytes > SMALL_SHARE * self._max_bytes or not self._main):
                victim = self._from_small(is_free)
            else:
                victim = self._from_main(is_free)
            if victim is not None:
                del self._frequency[victim]
                return victim
        return None

    def _from_small(self, is_free: IsFree) -> Key | None:
        key, nbytes = self._small.popitem(last=False)
        self._small_bytes -= nbytes
        if self._frequency[key] >= PROMOTE_AT or not is_free(key):
            self._frequency[key] = 0
            self._main[key] = nbytes
            return None
        self._remember(key, nbytes)
        return key

    def _from_main(self, is_free: IsFree) -> Key | None:
        key, nbytes = self._main.popitem(last=False)
        if self._frequency[key] > 0 or not is_free(key):
            self._frequency[key] = max(0, self._frequency[key] - 1)
            self._main[key] = nbytes
            return None
        return key

    def _remember(self, key: Key, nbytes: int) -> None:
        self._ghost[key] = nbytes
        self._ghost_bytes += nbytes
        while self._ghost and (self._ghost_bytes > self._max_bytes or len(self._ghost) > MAX_GHOSTS):
            self._ghost_bytes -= self._ghost.popitem(last=False)[1]

    def __len__(self) -> int:
        return len(self._frequency)


def make_policy(name: Literal["s3fifo", "lru"], max_bytes: int) -> Policy:
    return LRU() if name == "lru" else S3FIFO(max_bytes)
