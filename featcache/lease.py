"""`Lease`: a hold on features in use. What is leased is never evicted or overwritten."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self, TypeAlias

from featcache.errors import LeaseError
from featcache.features import Features, Layout
from featcache.keys import FeatureKey
from featcache.tiers.memory import Entry, MemoryTier

TierName: TypeAlias = Literal["device", "host", "disk"]
Origin: TypeAlias = Literal["device", "host", "disk", "encoded"]


class Lease:
    """Features that stay as they are until `release()`; also a context manager.

    key: of the features. tier: where they were found, or "encoded" if they were made for this call.
    """

    __slots__ = ("_features", "_held", "key", "layout", "tier")

    def __init__(
        self, key: bytes, features: Features, tier: Origin, held: tuple[MemoryTier, Entry] | None = None
    ) -> None:
        self.key = FeatureKey(key)
        self.layout: Layout = features.layout
        self.tier: Origin = tier
        self._features: Features | None = features
        self._held = [held]  # popped by the release that comes first: list.pop is atomic

    @property
    def features(self) -> Features:
        """Raises LeaseError after the release: their memory may hold other features by then."""
        if self._features is None:
            raise LeaseError(f"features {self.key.hex()[:12]} were used after their release")
        return self._features

    @property
    def is_released(self) -> bool:
        return self._features is None

    def release(self) -> None:
        """Give up the hold. Does not block. Raises LeaseError the second time."""
        try:
            held = self._held.pop()
        except IndexError:
            raise LeaseError(f"the lease on {self.key.hex()[:12]} was released twice") from None
        self._features = None
        if held is not None:
            tier, entry = held
            tier.release(entry)

    def again(self) -> Lease:
        """Another lease on the same features, to be released on its own. LeaseError after the release."""
        features = self.features
        held = self._held[0]
        if held is not None:
            tier, entry = held
            tier.hold(entry)
        return Lease(self.key, features, self.tier, held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_released:
            self.release()

    def __repr__(self) -> str:
        return f"Lease({self.key.hex()[:12]}, {self.tier}{', released' if self.is_released else ''})"
