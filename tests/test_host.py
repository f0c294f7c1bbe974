"""The host tier: records in one arena."""

from __future__ import annotations

import torch
from tier_contract import ROW, MemoryTierContract, features_of, is_intact, key_of

from featcache.features import Features, bytes_of
from featcache.tiers.host import HostTier
from featcache.tiers.memory import Entry, MemoryTier, State


def bring(tier: HostTier, entry: Entry, features: Features) -> None:
    """What the copies' thread does."""
    memory = tier.memory(entry)
    for name, _, begin, end in entry.header.offsets():
        memory[begin:end] = bytes_of(features.tensors[name])
    tier.settle(entry)


class TestHostTier(MemoryTierContract):
    def make(self, max_bytes: int, policy: str = "s3fifo") -> MemoryTier:
        return HostTier(max_bytes, policy=policy)

    def admit(self, tier: MemoryTier, number: int, tokens: int = 4) -> Entry | None:
        assert isinstance(tier, HostTier)
        features = features_of(number, tokens)
        admission = tier.admit(features.header(key_of(number)), features)
        if admission is None:
            return None
        bring(tier, admission.entry, features)
        return admission.entry


def test_pending_entry_shows_what_it_is_made_of_and_then_the_arena() -> None:
    tier = HostTier(16 * ROW)
    made = features_of(1)
    admission = tier.admit(made.header(key_of(1)), made)
    assert admission is not None and admission.entry.state is State.PENDING
    shown = tier.acquire(key_of(1))
    assert shown is not None and shown.features is made
    bring(tier, admission.entry, made)
    assert tier.features(shown).rows.data_ptr() == tier.data(shown).data_ptr()
    assert is_intact(tier.features(shown), 1)
    tier.release(shown)
    tier.release(shown)


def test_entry_whose_bytes_are_still_read_is_not_found() -> None:
    tier = HostTier(16 * ROW)
    admission = tier.admit(features_of(1).header(key_of(1)))
    assert admission is not None
    assert tier.acquire(key_of(1)) is None
    assert tier.header(key_of(1)) is None
    bring(tier, admission.entry, features_of(1))
    assert tier.header(key_of(1)) == admission.entry.header
    tier.release(admission.entry)


def test_pending_entry_is_not_evicted() -> None:
    tier = HostTier(8 * ROW)
    made = features_of(1)
    admission = tier.admit(made.header(key_of(1)), made)
    assert admission is not None
    for number in range(2, 40):
        other = tier.admit(features_of(number).header(key_of(number)), features_of(number))
        assert other is not None
        bring(tier, other.entry, features_of(number))
        tier.release(other.entry)
    bring(tier, admission.entry, made)
    assert is_intact(tier.features(admission.entry), 1)
    tier.release(admission.entry)
    assert tier.check() == []


def test_deleted_while_its_bytes_come_is_never_found_and_frees_its_space() -> None:
    tier = HostTier(8 * ROW)
    made = features_of(1)
    admission = tier.admit(made.header(key_of(1)), made)
    assert admission is not None
    assert tier.delete(key_of(1))
    bring(tier, admission.entry, made)
    assert admission.entry.state is State.RETIRING
    assert key_of(1) not in tier
    tier.release(admission.entry)
    assert tier.stats().used_bytes == 0
    assert tier.check() == []


def test_lent_record_is_shown_without_space() -> None:
    tier = HostTier(0)
    made = features_of(1)
    entry = tier.lend(made.header(key_of(1)), made, None)
    assert entry is not None
    assert tier.lend(made.header(key_of(1)), made, None) is None
    shown = tier.acquire(key_of(1))
    assert shown is entry and shown.features is made
    assert tier.stats().used_bytes == 0
    tier.abandon(entry)
    assert key_of(1) not in tier
    assert shown.features is made  # the lease goes on
    tier.release(shown)
    assert tier.check() == []


def test_every_tensor_of_a_record_is_placed_and_aligned() -> None:
    tier = HostTier(64 * ROW)
    made = features_of(1)
    mixed = Features(
        {
            "rows": torch.arange(4 * 7, dtype=torch.bfloat16).reshape(4, 7),
            "deepstack.0": torch.arange(4 * 5, dtype=torch.float32).reshape(4, 5),
            "deepstack.1": torch.arange(4 * 3, dtype=torch.int8).reshape(4, 3),
        },
        made.layout,
        made.fingerprint,
    )
    admission = tier.admit(mixed.header(key_of(1)), mixed)
    assert admission is not None
    bring(tier, admission.entry, mixed)
    shown = tier.features(admission.entry)
    for name, tensor in mixed.tensors.items():
        assert torch.equal(shown.tensors[name], tensor)
        assert shown.tensors[name].data_ptr() % tensor.element_size() == 0
    tier.release(admission.entry)
    assert tier.stats().used_bytes == 512  # 148 bytes, in the arena's grain


def test_leased_tensors_are_readable_after_close() -> None:
    tier = HostTier(16 * ROW)
    made = features_of(1)
    admission = tier.admit(made.header(key_of(1)), made)
    assert admission is not None
    bring(tier, admission.entry, made)
    shown = tier.features(admission.entry)
    tier.close()
    del tier
    assert is_intact(shown, 1)
