"""What the two memory tiers share: entries, their states and holds, admission and accounting.

A tier is a book of entries. It moves no bytes and starts no threads: whoever admits an entry brings its bytes
and says so with `settle`.

    admit ──▶ PENDING ──settle──▶ READY ──evict, delete──▶ RETIRING ──last release──▶ gone
                 └──────────────abandon, delete──────────────┘
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from featcache.eviction import Policy
from featcache.features import Features, Header

if TYPE_CHECKING:
    import torch


class State(Enum):
    PENDING = "pending"  # its bytes are under way; served from what it was made of, if that is known
    READY = "ready"  # its bytes are in place
    RETIRING = "retiring"  # found by nobody any more; its space is given back with the last hold


_NEXT: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.PENDING: frozenset({State.READY, State.RETIRING}),
        State.READY: frozenset({State.RETIRING}),
        State.RETIRING: frozenset(),
    }
)


class Entry:
    """One record in one memory tier. Only its tier writes to it, under the tier's lock.

    space: what the tier took for it; None if it is only lent (see HostTier.lend).
    features: what a lease shows; None if the tier makes it when it is asked for, or has nothing to show yet.
    event: CUDA event after which `features` may be read; None if that is now.
    holds: leases, copies and writes that need it; nothing held is evicted.
    """

    __slots__ = ("event", "features", "header", "holds", "nbytes", "space", "state")

    def __init__(self, header: Header, space: Any, nbytes: int, features: Features | None) -> None:
        self.header = header
        self.space = space
        self.nbytes = nbytes
        self.features = features
        self.event: torch.cuda.Event | None = None
        self.state = State.PENDING
        self.holds = 1

    @property
    def key(self) -> bytes:
        return self.header.key

    def to(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state


class Admission(NamedTuple):
    """An entry, held once for whoever asked; `is_new` says whether that one is to bring its bytes."""

    entry: Entry
    is_new: bool


@dataclass(frozen=True, slots=True)
class TierStats:
    """max_bytes, used_bytes: the budget and what entries take of it. held_bytes: of these, what can't leave.

    refused: records that found no room, because they are larger than the tier or everything in it is held.
    """

    max_bytes: int
    used_bytes: int
    held_bytes: int
    num_entries: int
    admitted: int
    evicted: int
    refused: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class MemoryTier:
    """Entries in memory within a budget of bytes. Thread-safe; no method blocks or moves bytes.

    Subclasses say what space is: `_take` and `_give`, called under the lock.
    """

    name = "memory"

    def __init__(self, max_bytes: int, policy: Policy) -> None:
        self.max_bytes = max_bytes
        self._policy = policy
        self._lock = threading.Lock()  # guards all below and the policy; nothing is waited for under it
        self._entries: dict[bytes, Entry] = {}
        self._retiring: set[Entry] = set()
        self._used_bytes = 0
        self._held_bytes = 0
        self._admitted = self._evicted = self._refused = 0

    def _take(self, nbytes: int) -> Any | None:
        """Space for `nbytes`, or None if there is none free."""
        raise NotImplementedError

    def _give(self, space: Any) -> None:
        raise NotImplementedError

    def _size(self, nbytes: int) -> int:
        """What a record of `nbytes` takes of the budget."""
        return nbytes

    # Finding

    def acquire(self, key: bytes) -> Entry | None:
        """The entry of `key`, held once more, if it has features to show. Counts as a use."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not self._can_show(entry):
                return None
            if entry.space is not None:
                self._policy.touch(key)
            self._hold(entry)
            return entry

    def features(self, entry: Entry) -> Features:
        """What a held entry shows."""
        assert entry.features is not None, f"{self.name}: nothing to show"
        return entry.features

    def touch(self, key: bytes) -> None:
        """A use of `key` that a tier above has served."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.space is not None:
                self._policy.touch(key)

    def header(self, key: bytes) -> Header | None:
        """The header of `key`, if it can be leased. Not a use."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.header if entry is not None and self._can_show(entry) else None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.header(key) is not None

    def __len__(self) -> int:
        return len(self._entries)

    def _can_show(self, entry: Entry) -> bool:
        return entry.features is not None or entry.state is State.READY

    # Coming and going

    def admit(
        self,
        header: Header,
        features: Features | None = None,
        event: torch.cuda.Event | None = None,
        *,
        is_settled: bool = False,
    ) -> Admission | None:
        """Space for a record: a PENDING entry, held for the caller; or the one that is there already, held.

        Evicts what the policy says until the record fits. features: shown from now on, once `event` has
        passed; without, nothing is shown before `settle`. is_settled: nothing else is to come.

        Returns None if the record is larger than the budget less what is held; nothing is evicted then.
        """
        with self._lock:
            if (present := self._entries.get(header.key)) is not None:
                self._hold(present)
                return Admission(present, False)
            nbytes = self._size(header.data_bytes)
            space = self._make_room(nbytes)
            if space is None:
                self._refused += 1
                return None
            entry = Entry(header, space, nbytes, features)
            entry.event = event
            self._entries[header.key] = entry
            self._policy.add(header.key, nbytes)
            self._used_bytes += nbytes
            self._held_bytes += nbytes
            self._admitted += 1
            if is_settled:
                entry.to(State.READY)
            return Admission(entry, True)

    def settle(self, entry: Entry) -> None:
        """The bytes of a PENDING entry are in place. One that was deleted meanwhile stays RETIRING."""
        with self._lock:
            self._arrive(entry)
            if entry.state is State.PENDING:
                entry.to(State.READY)

    def _arrive(self, entry: Entry) -> None:
        """What else changes with the arrival of an entry's bytes; under the lock."""

    def release(self, entry: Entry) -> None:
        """Give up one hold."""
        with self._lock:
            assert entry.holds > 0, f"{self.name}: released more often than held"
            entry.holds -= 1
            if entry.holds == 0:
                self._held_bytes -= entry.nbytes
                if entry.state is State.RETIRING:
                    self._reclaim(entry)

    def hold(self, entry: Entry) -> None:
        """One more hold on an entry that the caller holds already."""
        with self._lock:
            assert entry.holds > 0, f"{self.name}: held again after its last release"
            self._hold(entry)

    def abandon(self, entry: Entry) -> None:
        """The bytes of an entry won't come: nobody finds it any more, and the caller's hold is given up."""
        with self._lock:
            self._retire(entry)
        self.release(entry)

    def delete(self, key: bytes) -> bool:
        """Forget `key`. What is held of it stays intact until its last release."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            self._retire(entry)
            return True

    def clear(self) -> None:
        """Delete everything."""
        for key in self.keys():
            self.delete(key)

    # The book; all under the lock

    def _make_room(self, nbytes: int) -> Any | None:
        if nbytes > self.max_bytes - self._held_bytes:
            return None
        if (space := self._take(nbytes)) is not None:
            return space
        for key in self._policy.victims():
            entry = self._entries[key]
            if entry.holds:
                continue
            self._retire(entry)
            self._evicted += 1
            if (space := self._take(nbytes)) is not None:
                return space
        return None

    def _hold(self, entry: Entry) -> None:
        if entry.holds == 0:
            self._held_bytes += entry.nbytes
        entry.holds += 1

    def _retire(self, entry: Entry) -> None:
        if entry.state is State.RETIRING:
            return
        entry.to(State.RETIRING)
        del self._entries[entry.key]
        self._retiring.add(entry)
        if entry.space is not None:
            self._policy.remove(entry.key)
        if entry.holds == 0:
            self._reclaim(entry)

    def _reclaim(self, entry: Entry) -> None:
        self._retiring.discard(entry)
        self._used_bytes -= entry.nbytes
        entry.features = entry.event = None
        if entry.space is not None:
            self._give(entry.space)

    # What it holds

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._entries)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                self.max_bytes,
                self._used_bytes,
                self._held_bytes,
                len(self._entries),
                self._admitted,
                self._evicted,
                self._refused,
            )

    def check(self) -> list[str]:
        """Recount everything; a list of what doesn't agree."""
        with self._lock:
            return [f"{self.name}: {problem}" for problem in self._problems()]

    def _problems(self) -> list[str]:
        everything = [*self._entries.values(), *self._retiring]
        problems = []
        if (used := sum(entry.nbytes for entry in everything)) != self._used_bytes:
            problems.append(f"{self._used_bytes} bytes accounted, {used} in entries")
        if (held := sum(entry.nbytes for entry in everything if entry.holds)) != self._held_bytes:
            problems.append(f"{self._held_bytes} bytes accounted as held, {held} are")
        if self._used_bytes > self.max_bytes:
            problems.append(f"{self._used_bytes} bytes used of {self.max_bytes}")
        if any(entry.state is State.RETIRING for entry in self._entries.values()):
            problems.append("a retiring entry can still be found")
        if any(entry.holds == 0 for entry in self._retiring):
            problems.append("a retired entry that nobody holds keeps its space")
        if any(entry.state is State.PENDING and not entry.holds for entry in everything):
            problems.append("a pending entry that nobody holds")
        owned = sum(entry.space is not None for entry in self._entries.values())
        if len(self._policy) != owned:
            problems.append(f"the policy knows {len(self._policy)} entries of {owned}")
        return problems
