"""The tower without its language model: the same encoder, in a fraction of the memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from models import BUILDERS, build
from warm_helpers import picture

from featcache.engine.encoder import VisionEncoder
from featcache.engine.loading import load_model
from featcache.store import FeatureStore


@pytest.mark.parametrize("family", BUILDERS)
def test_the_tower_alone_is_the_same_encoder(
    family: str, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(family, tmp_path_factory.getbasetemp() / "models")
    whole = load_model(folder, device="cpu")
    caplog.clear()
    tower = load_model(folder, device="cpu", tower_only=True)
    assert "UNEXPECTED" not in caplog.text  # nothing is said of what is left out on purpose
    images = [picture(1, (200, 150)), picture(2), picture(3, (30, 90))]
    with FeatureStore.open() as one, FeatureStore.open() as two:
        encoders = VisionEncoder(whole, one), VisionEncoder(tower, two)
        features = [encoder.encode(images) for encoder in encoders]
        assert encoders[0].fingerprint == encoders[1].fingerprint
        for encoder in encoders:
            encoder.close()
    for a, b in zip(*features, strict=True):
        assert a.layout == b.layout and a.tensors.keys() == b.tensors.keys()
        assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    language = tower.family.text_model
    assert not list(language.parameters()) and not list(tower.model.lm_head.parameters())
    assert tower.device == whole.device and tower.dtype == whole.dtype


RSS = """
import sys
from featcache.engine.loading import load_model
import featcache.engine.families.registry, transformers.models.qwen2_vl.modeling_qwen2_vl
def resident():
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10
taken = []
for tower_only in (True, False):
    before = resident()
    loaded = load_model(sys.argv[1], device="cpu", dtype="bfloat16", tower_only=tower_only)
    taken.append(resident() - before)
print(*taken)
"""


def test_the_language_model_takes_no_memory(tmp_path: Path) -> None:
    folder = build("qwen2_vl", tmp_path)
    config = tf.AutoConfig.from_pretrained(folder)
    config.text_config.hidden_size, config.vision_config.hidden_size = 512, 512
    config.text_config.intermediate_size = 8192
    config.text_config.rope_parameters["mrope_section"] = [16, 24, 24]
    with torch.device("meta"):
        model = tf.Qwen2VLForConditionalGeneration(config)
    model.to_empty(device="cpu")  # what the weights are doesn't matter here
    weights = sum(p.nbytes for p in model.model.language_model.parameters())
    assert weights > 100 << 20
    model.save_pretrained(folder)
    run = subprocess.run([sys.executable, "-c", RSS, str(folder)], capture_output=True, text=True, check=True)
    tower, whole = (int(number) for number in run.stdout.split())
    assert whole - tower > 0.9 * weights / 2  # in half the file's width: not mapped from it, but made
