"""The device tier: features in GPU memory, in tensors of their own, ready for the next prefill."""

from __future__ import annotations

from featcache.eviction import make_policy
from featcache.features import Features
from featcache.settings import PolicyName
from featcache.tiers.memory import MemoryTier


class DeviceTier(MemoryTier):
    """Entries whose space is a share of the budget; torch's allocator gives and takes the memory itself.

    An entry is admitted with its features, whose storages hold nothing else (see `storage_bytes`), and with
    the event after which they may be read.
    """

    name = "device tier"

    def __init__(self, max_bytes: int, *, policy: PolicyName = "s3fifo") -> None:
        super().__init__(max_bytes, make_policy(policy, max_bytes))

    def _take(self, nbytes: int) -> int | None:
        return nbytes if self._used_bytes + nbytes <= self.max_bytes else None

    def _give(self, space: int) -> None:
        pass  # the entry's last reference to its tensors is gone; torch reuses their memory in stream order

    def _problems(self) -> list[str]:
        problems = super()._problems()
        for entry in [*self._entries.values(), *self._retiring]:
            held = 0 if entry.features is None else storage_bytes(entry.features)
            if held != entry.nbytes:
                problems.append(f"{entry.key.hex()[:12]} holds {held} bytes, {entry.nbytes} are accounted")
        return problems


def storage_bytes(features: Features) -> int:
    """Memory that the tensors keep alive: of views, all that they are views of."""
    storages = [tensor.untyped_storage() for tensor in features.tensors.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
