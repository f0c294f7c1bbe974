"""Everything of LMDeploy that featcache touches, by name, and whether the installed version has it.

Only what stands here is used; `tests/test_lmdeploy_contract.py` says which name moved in another version.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from featcache.errors import ModelError

SUPPORTED = ("0.18",)
INSTALL = "pip install 'featcache[lmdeploy]'"
MODULE_MAP = Path(__file__).parent / "map" / "module_map.py"

# (module, attributes): a dotted attribute is one of a class
TOUCHED = (
    ("lmdeploy.messages", ("GenerationConfig", "PytorchEngineConfig", "ResponseType")),
    ("lmdeploy.pytorch.config", ("ModelConfig.from_pretrained",)),
    ("lmdeploy.pytorch.engine", ("Engine.from_pretrained", "Engine.create_instance", "Engine.close")),
    ("lmdeploy.pytorch.engine", ("Engine.get_schedule_metrics",)),
    ("lmdeploy.pytorch.engine.engine_instance", ("EngineInstance.async_stream_infer",)),
    ("lmdeploy.pytorch.engine.engine_instance", ("EngineInstance.async_cancel",)),
    ("lmdeploy.pytorch.engine.input_process", ("PreprocessInputResult",)),
    ("lmdeploy.pytorch.multimodal.data_type", ("MultiModalData",)),
    ("lmdeploy.utils", ("get_logger",)),
    (
        "lmdeploy.pytorch.models.internvl3_hf",
        (
            "InternVLForConditionalGeneration.get_image_features",
            "InternVLForConditionalGeneration.prepare_inputs_for_generation",
            "InternVLProcessor.preprocess_input",
        ),
    ),
    (
        "lmdeploy.pytorch.models.qwen2_vl",
        (
            "Qwen2VLForConditionalGeneration.prepare_inputs_for_generation",
            "Qwen2VLInputProcessor.preprocess_input",
            "Qwen2VisionTransformerPretrainedModel.rot_pos_emb",
        ),
    ),
    (
        "lmdeploy.pytorch.models.qwen2_5_vl",
        (
            "Qwen2_5_VLForConditionalGeneration.prepare_inputs_for_generation",
            "Qwen2_5_VLInputProcessor.preprocess_input",
            "Qwen2_5_VisionTransformerPretrainedModel.rot_pos_emb",
            "Qwen2_5_VisionTransformerPretrainedModel.get_window_index",
        ),
    ),
    (
        "lmdeploy.pytorch.models.qwen3_vl",
        (
            "Qwen3VLForConditionalGeneration.prepare_inputs_for_generation",
            "Qwen3VLForConditionalGeneration.forward",
            "Qwen3VLInputProcessor.preprocess_input",
            "Qwen3VLVisionModel.rot_pos_emb",
            "Qwen3VLVisionModel.fast_pos_embed_interpolate",
        ),
    ),
)


def installed_version() -> str:
    """Raises ModelError if LMDeploy isn't installed, or isn't a version that featcache supports."""
    try:
        version = importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        version = _unpacked_version()
    if not version.startswith(tuple(f"{supported}." for supported in SUPPORTED)):
        raise ModelError(
            f"backend lmdeploy: LMDeploy {version} is installed; featcache works with {', '.join(SUPPORTED)}: "
            f"{INSTALL}"
        )
    return version


def _unpacked_version() -> str:
    """Of a package that lies on the path without its metadata."""
    try:
        return str(importlib.import_module("lmdeploy.version").__version__)
    except ImportError as exc:
        raise ModelError(f"backend lmdeploy: LMDeploy can't be imported ({exc}): {INSTALL}") from exc


def missing_names() -> list[str]:
    """Those of TOUCHED that the installed LMDeploy doesn't have."""
    missing = []
    for module, attributes in TOUCHED:
        try:
            found: Any = importlib.import_module(module)
        except ImportError as exc:
            missing.append(f"{module} ({exc})")
            continue
        for attribute in attributes:
            at = found
            for part in attribute.split("."):
                at = getattr(at, part, None)
            if at is None:
                missing.append(f"{module}.{attribute}")
    return missing


def check() -> str:
    """The version. Raises ModelError that says what to install, or which names have moved."""
    version = installed_version()
    if missing := missing_names():
        raise ModelError(f"backend lmdeploy: LMDeploy {version} lacks {', '.join(missing)}")
    return version


@contextmanager
def our_module_map() -> Iterator[None]:
    """Engines made inside use our model classes, in worker processes too.

    PytorchEngineConfig.custom_module_map is the documented way, but 0.18 drops it: nothing copies it into the
    ModelConfig, from which every worker reads it.
    """
    from lmdeploy.pytorch.config import ModelConfig

    original = ModelConfig.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = original.__func__(cls, *args, **kwargs)
        config.custom_module_map = str(MODULE_MAP)
        return config

    ModelConfig.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        ModelConfig.from_pretrained = original
