"""Which entry leaves a memory tier first: S3-FIFO, or LRU to compare.

S3-FIFO is from Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): a small queue
filters what is asked for once, so that a scan doesn't flush the main queue. Sizes are bytes; nothing here
knows what an entry is, and nothing is thread-safe: the tier's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, Protocol

Key = bytes


class Policy(Protocol):
    """Order of eviction. A key is added once, touched at each hit, and removed once."""

    def add(self, key: Key, nbytes: int) -> None:
        """A new entry; KeyError if it is there."""

    def touch(self, key: Key) -> None:
        """A hit; KeyError if it isn't there."""

    def remove(self, key: Key) -> None:
        """An entry has left, as a victim or because it was deleted; KeyError if it isn't there."""

    def victims(self) -> Iterator[Key]:
        """Keys in the order in which they should leave, each at least once.

        Take a key out with `remove` before the next is asked for, or pass it over: it is then looked at
        again later. Nothing else may be called in between.
        """

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

    def victims(self) -> Iterator[Key]:
        for _ in range(len(self._entries)):
            key = next(iter(self._entries))
            yield key
            if key in self._entries:  # in use, so it isn't old
                self._entries.move_to_end(key)

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
        self._offered: Key | None = None  # the victim that `victims` has yielded last
        self._is_filling = True  # nothing had to leave yet

    def add(self, key: Key, nbytes: int) -> None:
        if key in self._frequency:
            raise KeyError(key)
        self._frequency[key] = 0
        if key in self._ghost:
            self._ghost_bytes -= self._ghost.pop(key)
            self._main[key] = nbytes
        elif self._is_filling and self._small_bytes + nbytes > SMALL_SHARE * self._max_bytes:
            self._main[key] = nbytes  # as libcachesim does: some of a loop over too much stays
        else:
            self._small[key] = nbytes
            self._small_bytes += nbytes

    def touch(self, key: Key) -> None:
        self._frequency[key] = min(self._frequency[key] + 1, MAX_FREQUENCY)

    def remove(self, key: Key) -> None:
        del self._frequency[key]
        if key in self._main:
            del self._main[key]
            return
        nbytes = self._small.pop(key)
        self._small_bytes -= nbytes
        if key == self._offered:
            self._remember(key, nbytes)

    def victims(self) -> Iterator[Key]:
        self._is_filling = False
        # Each round lowers a frequency or yields; so many go round the queue that is to shrink.
        for _ in range((MAX_FREQUENCY + 2) * len(self)):
            if not self._frequency:
                return
            is_small_full = self._small_bytes > SMALL_SHARE * self._max_bytes
            queue = self._small if self._small and (is_small_full or not self._main) else self._main
            key = next(iter(queue))
            limit = PROMOTE_AT if queue is self._small else 1
            if self._frequency[key] < limit:
                self._offered = key
                yield key
                self._offered = None
                if key not in self._frequency:
                    continue
            self._to_main(key)
        # All of that one is in use: then the other has to give.
        for key in [*self._small, *self._main]:
            if key in self._frequency:
                self._offered = key
                yield key
                self._offered = None

    def _to_main(self, key: Key) -> None:
        """Hit often enough, or in use: to the end of the main queue."""
        if key in self._small:
            self._main[key] = self._small.pop(key)
            self._small_bytes -= self._main[key]
            self._frequency[key] = 0
        else:
            self._main.move_to_end(key)
            self._frequency[key] = max(0, self._frequency[key] - 1)

    def _remember(self, key: Key, nbytes: int) -> None:
        self._ghost[key] = nbytes
        self._ghost_bytes += nbytes
        while self._ghost and (self._ghost_bytes > self._max_bytes or len(self._ghost) > MAX_GHOSTS):
            self._ghost_bytes -= self._ghost.popitem(last=False)[1]

    def __len__(self) -> int:
        return len(self._frequency)


def make_policy(name: Literal["s3fifo", "lru"], max_bytes: int) -> Policy:
    return LRU() if name == "lru" else S3FIFO(max_bytes)
