"""What every memory tier does, as a mixin; and the features that store tests put and expect."""

from __future__ import annotations

import random

import pytest
import torch

from featcache.features import Features, Layout
from featcache.tiers.memory import Entry, MemoryTier, State

ROW = 1024  # bytes a token in these tests: (n, 256) of float32


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def features_of(number: int, tokens: int = 4, width: int = 256) -> Features:
    """Features whose every value tells the number that they belong to."""
    rows = torch.arange(tokens * width, dtype=torch.float32).reshape(tokens, width) + 1_000_000 * number
    return Features({"rows": rows}, Layout(tokens, 30, 40), key_of(number + 7))


def is_intact(features: Features, number: int) -> bool:
    expected = features_of(number, *features.rows.shape)
    return torch.equal(features.rows, expected.rows) and features.fingerprint == expected.fingerprint


class MemoryTierContract:
    """A subclass says how its tier is made, and how the bytes of an entry get there."""

    def make(self, max_bytes: int, policy: str = "s3fifo") -> MemoryTier:
        raise NotImplementedError

    def admit(self, tier: MemoryTier, number: int, tokens: int = 4) -> Entry | None:
        """An entry with its bytes in place, held once; None if it was refused."""
        raise NotImplementedError

    def fill(self, tier: MemoryTier, numbers: range, tokens: int = 4) -> None:
        for number in numbers:
            entry = self.admit(tier, number, tokens)
            assert entry is not None
            tier.release(entry)

    def test_what_was_admitted_is_found(self) -> None:
        tier = self.make(64 * ROW)
        self.fill(tier, range(5))
        for number in range(5):
            entry = tier.acquire(key_of(number))
            assert entry is not None
            assert entry.state is State.READY
            assert is_intact(tier.features(entry), number)
            tier.release(entry)
        assert tier.acquire(key_of(5)) is None
        assert key_of(4) in tier and key_of(5) not in tier
        assert tier.check() == []

    @pytest.mark.parametrize("policy", ["s3fifo", "lru"])
    def test_budget_is_never_exceeded(self, policy: str) -> None:
        tier = self.make(64 * ROW, policy)
        chance = random.Random(3)
        for number in range(500):
            entry = self.admit(tier, number, chance.randint(1, 20))
            assert entry is not None
            assert tier.stats().used_bytes <= 64 * ROW
            tier.release(entry)
        stats = tier.stats()
        assert stats.admitted == 500
        assert stats.evicted == 500 - stats.num_entries > 400
        assert tier.check() == []

    def test_larger_than_the_tier_is_refused_and_evicts_nothing(self) -> None:
        tier = self.make(64 * ROW)
        self.fill(tier, range(8))
        assert self.admit(tier, 100, tokens=65) is None
        stats = tier.stats()
        assert (stats.refused, stats.evicted, stats.num_entries) == (1, 0, 8)
        assert tier.check() == []

    def test_exactly_as_large_as_the_tier_fits(self) -> None:
        tier = self.make(64 * ROW)
        self.fill(tier, range(8))
        entry = self.admit(tier, 100, tokens=64)
        assert entry is not None
        assert tier.keys() == [key_of(100)]
        tier.release(entry)

    def test_held_entry_outlives_a_thousand_evictions(self) -> None:
        tier = self.make(64 * ROW)
        self.fill(tier, range(1))
        held = tier.acquire(key_of(0))
        assert held is not None
        self.fill(tier, range(1, 1100))
        assert tier.stats().evicted > 1000
        assert is_intact(tier.features(held), 0)
        assert key_of(0) in tier
        tier.release(held)
        assert tier.check() == []

    def test_all_held_is_no_room_and_a_release_makes_some(self) -> None:
        tier = self.make(16 * ROW)
        held = [self.admit(tier, number) for number in range(4)]
        assert all(entry is not None for entry in held)
        assert self.admit(tier, 9) is None
        assert tier.stats().held_bytes == 16 * ROW
        tier.release(held[2])
        entry = self.admit(tier, 9)
        assert entry is not None
        assert sorted(tier.keys()) == [key_of(0), key_of(1), key_of(3), key_of(9)]
        for one in (held[0], held[1], held[3], entry):
            tier.release(one)
        assert tier.stats().held_bytes == 0
        assert tier.check() == []

    def test_deleted_while_held_stays_intact_and_frees_its_space_at_the_release(self) -> None:
        tier = self.make(16 * ROW)
        self.fill(tier, range(4))
        entry = tier.acquire(key_of(1))
        assert entry is not None
        assert tier.delete(key_of(1))
        assert not tier.delete(key_of(1))
        assert entry.state is State.RETIRING
        assert key_of(1) not in tier and tier.acquire(key_of(1)) is None
        self.fill(tier, range(10, 30))  # what is left turns over, and must not reuse its space
        assert is_intact(tier.features(entry), 1)
        assert tier.stats().used_bytes == 16 * ROW
        tier.release(entry)
        assert tier.stats().used_bytes == 12 * ROW
        assert tier.check() == []

    def test_deleted_may_come_again_while_the_old_is_held(self) -> None:
        tier = self.make(16 * ROW)
        self.fill(tier, range(2))
        old = tier.acquire(key_of(1))
        assert old is not None
        tier.delete(key_of(1))
        self.fill(tier, range(1, 2))
        assert len(tier) == 2
        tier.release(old)
        assert key_of(1) in tier
        assert tier.stats().used_bytes == 8 * ROW
        assert tier.check() == []

    def test_admitted_again_is_the_same_entry(self) -> None:
        tier = self.make(16 * ROW)
        entry = self.admit(tier, 3)
        assert entry is not None
        admission = tier.admit(entry.header, entry.features)
        assert admission is not None
        assert admission.entry is entry and not admission.is_new
        assert entry.holds == 2
        tier.release(entry)
        tier.release(entry)
        assert tier.stats().used_bytes == 4 * ROW
        assert tier.check() == []

    def test_abandoned_is_gone(self) -> None:
        tier = self.make(16 * ROW)
        entry = self.admit(tier, 3)
        assert entry is not None
        tier.abandon(entry)
        assert key_of(3) not in tier
        assert tier.stats().used_bytes == 0
        assert tier.check() == []

    def test_hot_entries_survive_a_scan(self) -> None:
        tier = self.make(100 * ROW)
        self.fill(tier, range(10))
        for _ in range(3):
            for number in range(10):
                entry = tier.acquire(key_of(number))
                assert entry is not None
                tier.release(entry)
        self.fill(tier, range(100, 600))
        assert all(key_of(number) in tier for number in range(10))

    def test_touch_counts_as_a_use(self) -> None:
        tier = self.make(100 * ROW)
        self.fill(tier, range(8))  # what the small queue takes
        for _ in range(3):
            for number in range(5):
                tier.touch(key_of(number))
        tier.touch(key_of(999))  # not there: nothing
        self.fill(tier, range(100, 600))
        assert [key_of(number) in tier for number in range(8)] == [True] * 5 + [False] * 3

    def test_empty_tier_refuses_all(self) -> None:
        tier = self.make(0)
        assert self.admit(tier, 1) is None
        assert tier.acquire(key_of(1)) is None
        assert tier.check() == []

    def test_clear_leaves_what_is_held(self) -> None:
        tier = self.make(16 * ROW)
        self.fill(tier, range(3))
        held = tier.acquire(key_of(2))
        assert held is not None
        tier.clear()
        assert len(tier) == 0
        assert tier.stats().used_bytes == 4 * ROW
        assert is_intact(tier.features(held), 2)
        tier.release(held)
        assert tier.stats().used_bytes == 0

    def test_release_too_many_is_a_bug_that_is_seen(self) -> None:
        tier = self.make(16 * ROW)
        entry = self.admit(tier, 0)
        assert entry is not None
        tier.release(entry)
        with pytest.raises(AssertionError, match="released more often"):
            tier.release(entry)
