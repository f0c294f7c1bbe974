"""A tower that runs through torch.compile: right to a tolerance, and kept apart from the eager one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from models import build
from pictures import noise

from featcache.engine.encoder import VisionEncoder
from featcache.engine.loading import load_model
from featcache.features import Features
from featcache.store import FeatureStore

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)


@pytest.mark.parametrize(
    "family", ["internvl", "qwen2_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.soak)]
)
def test_a_compiled_tower_makes_its_own_features(family: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path)
    images = [noise(80, 60, seed) for seed in range(3)] + [noise(120, 90, 9)]
    made: dict[bool, Sequence[Features]] = {}
    with FeatureStore.open(tmp_path / "store", host_bytes="32MiB", disk_bytes="64MiB") as store:
        for is_compiled in (False, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            loaded = load_model(folder, dtype="float32", device="cpu", compile_tower=is_compiled)
            encoder = VisionEncoder(loaded, store)
            made[is_compiled] = encoder.encode(images)
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert (graphs > 0) == is_compiled
            assert encoder.stats()["tower_images"] == 4 and encoder.stats()["tier_encoded"] == 4
            encoder.close()
    assert made[True][0].fingerprint != made[False][0].fingerprint
    for eager, compiled in zip(made[False], made[True], strict=True):
        assert compiled.rows.shape == eager.rows.shape and compiled.layout == eager.layout
        assert (compiled.rows - eager.rows).abs().max() <= 1e-4 * eager.rows.abs().max()
