"""The host tier: records in one arena, which is pinned where a CUDA device copies to and from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featcache.eviction import make_policy
from featcache.features import Features, Header, tensors_of
from featcache.settings import PolicyName
from featcache.tiers.arena import Arena, Block, rounded
from featcache.tiers.memory import Entry, MemoryTier

if TYPE_CHECKING:
    import torch


class HostTier(MemoryTier):
    """Entries whose space is a block of the arena."""

    name = "host tier"

    def __init__(self, max_bytes: int, *, policy: PolicyName = "s3fifo", pinned: bool = False) -> None:
        self._arena = Arena(max_bytes, pinned=pinned)
        capacity = self._arena.allocator.capacity
        super().__init__(capacity, make_policy(policy, capacity))

    def _size(self, nbytes: int) -> int:
        return rounded(nbytes)

    def _take(self, nbytes: int) -> Block | None:
        return self._arena.allocator.allocate(nbytes)

    def _give(self, space: Block) -> None:
        self._arena.allocator.free(space)

    def data(self, entry: Entry) -> torch.Tensor:
        """The place of an entry's tensor data, (data_bytes,) uint8. Valid while the caller holds it."""
        return self._arena.tensor(entry.space, entry.header.data_bytes)

    def memory(self, entry: Entry) -> memoryview:
        """The same as a writable memoryview."""
        return self._arena.memory(entry.space, entry.header.data_bytes)

    def _arrive(self, entry: Entry) -> None:
        entry.features = entry.event = None  # from now on leases show what is in the arena

    def features(self, entry: Entry) -> Features:
        """What a held entry shows: views of the arena, or until its bytes are there what it is made of."""
        features = entry.features
        if features is None:
            header = entry.header
            features = Features(tensors_of(header, self.data(entry)), header.layout, header.fingerprint)
            entry.features = features
        return features

    def lend(self, header: Header, features: Features, event: torch.cuda.Event | None) -> Entry | None:
        """Show a record that has no space here while somebody else still writes it to disk.

        The entry is PENDING and takes nothing of the budget; `abandon` ends it. None if the key is there.
        """
        with self._lock:
            if header.key in self._entries:
                return None
            entry = Entry(header, None, 0, features)
            entry.event = event
            self._entries[header.key] = entry
            return entry

    def close(self) -> None:
        """Unpin the arena. No copy may be under way; leased tensors stay readable."""
        self._arena.close()

    def _problems(self) -> list[str]:
        everything = [*self._entries.values(), *self._retiring]
        live = [entry.space for entry in everything if entry.space is not None]
        return super()._problems() + self._arena.allocator.check(live)
