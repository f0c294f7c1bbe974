"""What featcache relies on in LMDeploy, checked against the installed package. Nothing here needs a GPU."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("LMDEPLOY_ENABLE_CHECK_ENV", "0")

import pytest

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed: see tests/lmdeploy.txt")

import torch
from pictures import encoded, patches

from featcache import FeatureStore, ModelError
from featcache.engine import CachedVLM
from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.lmdeploy import names
from featcache.engine.lmdeploy.map.module_map import CUSTOM_MODULE_MAP
from featcache.engine.lmdeploy.opening import ADAPTERS
from featcache.engine.loading import load_model
from featcache.engine.prompt import build_prompt


def test_no_name_that_featcache_touches_has_moved() -> None:
    assert names.missing_names() == []
    assert names.check().startswith("0.18.")


def test_a_name_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = ("lmdeploy.pytorch.engine", ("Engine.from_somewhere", "Engine.close"))
    monkeypatch.setattr(names, "TOUCHED", (moved, ("lmdeploy.gone", ("Anything",))))
    with pytest.raises(
        ModelError, match=r"lacks lmdeploy\.pytorch\.engine\.Engine\.from_somewhere, lmdeploy\.gone"
    ):
        names.check()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "SUPPORTED", ("0.17",))
    with pytest.raises(ModelError, match=r"LMDeploy 0\.18\.\d+ is installed; featcache works with 0\.17"):
        names.check()


def test_without_lmdeploy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise names.importlib.metadata.PackageNotFoundError(name)

    def not_there(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(names.importlib.metadata, "version", absent)
    monkeypatch.setattr(names.importlib, "import_module", not_there)
    with pytest.raises(ModelError, match=r"pip install 'featcache\[lmdeploy\]'"):
        names.installed_version()


def test_another_precision_is_refused_before_anything_is_loaded(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="bfloat16 or float16, not in float32"):
        CachedVLM.from_pretrained(model_folder("internvl"), backend="lmdeploy", dtype="float32", store=None)


def test_a_family_without_an_adapter_is_refused_by_name(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="llava_onevision there is the native backend"):
        CachedVLM.from_pretrained(model_folder("llava_onevision"), backend="lmdeploy", store=None)


def test_a_machine_without_a_gpu_is_told_of_the_native_backend(model_folder: Callable[[str], Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ModelError, match="needs a CUDA device; the native backend runs on the CPU"):
        CachedVLM.from_pretrained(model_folder("internvl"), backend="lmdeploy", store=None)


# The map of model classes


def _class_names_in_a_worker(pickled_config: bytes) -> list[str]:
    """As LMDeploy's worker does with the configuration it was sent."""
    from lmdeploy.pytorch.models import patch

    config = pickle.loads(pickled_config)
    patch.update_custom_module_map(config.custom_module_map)
    found = [
        patch._get_model_class(SimpleNamespace(architectures=[name]), patch._get_module_map())
        for name in CUSTOM_MODULE_MAP
    ]
    return [f"{cls.__module__}.{cls.__name__}" for cls in found]


def test_worker_processes_find_our_classes(model_folder: Callable[[str], Path]) -> None:
    from lmdeploy.pytorch.config import ModelConfig

    folder = str(model_folder("qwen2_vl"))
    original = ModelConfig.__dict__["from_pretrained"]
    with names.our_module_map():
        config = ModelConfig.from_pretrained(folder, dtype="bfloat16")
    assert ModelConfig.__dict__["from_pretrained"] is original
    assert ModelConfig.from_pretrained(folder, dtype="bfloat16").custom_module_map is None
    sent = pickle.dumps(SimpleNamespace(custom_module_map=config.custom_module_map))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(_class_names_in_a_worker, (sent,))
    assert found == list(CUSTOM_MODULE_MAP.values())


def test_the_map_names_the_families_that_are_served(model_folder: Callable[[str], Path]) -> None:
    configs = [json.loads((model_folder(name) / "config.json").read_text()) for name in ADAPTERS]
    assert {config["architectures"][0] for config in configs} == set(CUSTOM_MODULE_MAP)


# The prompt


@pytest.mark.parametrize("family", ADAPTERS)
def test_the_prompt_and_the_pixels_are_lmdeploys_own(
    family: str, model_folder: Callable[[str], Path]
) -> None:
    """As its own preparation of the same messages makes them, which is what it gets without featcache."""
    folder, image = model_folder(family), patches(100, 60, 5)
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "text", "text": "what is in the picture"},
    ]
    messages = [{"role": "user", "content": parts}]
    theirs = prepared_by_lmdeploy(folder, messages)
    loaded = load_model(folder, dtype="float16", device="cpu")
    with FeatureStore.open(None) as store:
        prompt = build_prompt(loaded, VisionEncoder(loaded, store), messages)
    pixels = loaded.family.preprocess(image, loaded.family.options_for(ImageOptions(), 1)).tensors
    assert prompt.ids == list(theirs["input_ids"])
    assert torch.equal(pixels["pixel_values"].half(), theirs["multimodal"][0]["pixel_values"].half())


def prepared_by_lmdeploy(folder: Path, messages: list[dict[str, Any]]) -> dict[str, Any]:
    from lmdeploy import PytorchEngineConfig
    from lmdeploy.model import get_chat_template
    from lmdeploy.serve.processors import MultimodalProcessor
    from lmdeploy.tokenizer import Tokenizer
    from lmdeploy.vl.engine import ImageEncoder

    path = str(folder)
    encoder = ImageEncoder(path, "pytorch", backend_config=PytorchEngineConfig(dtype="float16"))
    processor = MultimodalProcessor(Tokenizer(path), get_chat_template(path, None), encoder, "pytorch")
    return asyncio.run(processor.get_prompt_input(messages, True))  # type: ignore[no-any-return]


def data_url(image: Any) -> str:
    return "data:image/png;base64," + b64encode(encoded(image)).decode()
