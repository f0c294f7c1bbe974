"""The device tier's book, which is the same on the CPU. bench/h200_store.py has the tests on CUDA."""

from __future__ import annotations

import torch
from tier_contract import ROW, MemoryTierContract, features_of, key_of

from featcache.copies import _alone
from featcache.features import Features
from featcache.tiers.device import DeviceTier, storage_bytes
from featcache.tiers.memory import Entry, MemoryTier


class TestDeviceTier(MemoryTierContract):
    def make(self, max_bytes: int, policy: str = "s3fifo") -> MemoryTier:
        return DeviceTier(max_bytes, policy=policy)

    def admit(self, tier: MemoryTier, number: int, tokens: int = 4) -> Entry | None:
        features = _alone(features_of(number, tokens))
        admission = tier.admit(features.header(key_of(number)), features)
        if admission is None:
            return None
        tier.settle(admission.entry)
        return admission.entry


def test_view_of_a_batch_is_counted_as_what_it_pins() -> None:
    batch = torch.zeros(64, 256)
    view = Features({"rows": batch[8:12]}, features_of(0).layout)
    assert storage_bytes(view) == 64 * ROW
    alone = _alone(view)
    assert storage_bytes(alone) == alone.nbytes == 4 * ROW
    assert alone.rows.untyped_storage().data_ptr() != batch.untyped_storage().data_ptr()


def test_what_is_alone_already_is_not_copied() -> None:
    made = Features({"rows": torch.zeros(4, 256), "deepstack.0": torch.zeros(4, 8)}, features_of(0).layout)
    assert _alone(made) is made


def test_tensors_that_share_one_storage_count_once() -> None:
    flat = torch.zeros(8, 256)
    shared = Features({"rows": flat[:4], "deepstack.0": flat[4:]}, features_of(0).layout)
    assert storage_bytes(shared) == 8 * ROW == shared.nbytes


def test_check_finds_a_view_that_pins_more_than_is_accounted() -> None:
    tier = DeviceTier(64 * ROW)
    view = Features({"rows": torch.zeros(64, 256)[:4]}, features_of(0).layout)
    admission = tier.admit(view.header(key_of(1)), view)
    assert admission is not None
    tier.settle(admission.entry)
    assert [problem for problem in tier.check() if f"holds {64 * ROW} bytes" in problem]
