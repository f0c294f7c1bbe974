"""Loading a model into LMDeploy, with the vision tower where featcache can call it."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from featcache.engine.families.registry import family_of
from featcache.engine.lmdeploy.engine import LMDeploySettings
from featcache.engine.lmdeploy.names import check, our_module_map
from featcache.engine.lmdeploy.tower import TowerModel
from featcache.engine.loading import Loaded, bind, load_model, locate, read_config
from featcache.errors import ModelError

ADAPTERS = ("internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def open_lmdeploy(
    model: str | os.PathLike[str],
    settings: LMDeploySettings,
    *,
    dtype: str = "auto",
) -> tuple[Loaded, Any]:
    """Load a model. Returns it as the encoder sees it, and LMDeploy's engine.

    With one GPU, LMDeploy's own tower makes the features. With several it is in other processes: transformers'
    tower makes them here, and they are those of the native backend and `featcache warm`.

    Raises ModelError if LMDeploy is missing or another version, or if it or featcache can't serve the model.
    """
    version = check()
    name, path = os.fspath(model), locate(model)
    config = read_config(name, path)
    if family_of(config).name not in ADAPTERS:
        raise ModelError(
            f"{name}: backend lmdeploy serves {', '.join(ADAPTERS)}; for {family_of(config).name} there is "
            "the native backend"
        )
    if not torch.cuda.is_available():
        raise ModelError("backend lmdeploy needs a CUDA device; the native backend runs on the CPU too")
    precision = _dtype(name, config, dtype)
    loaded = None
    if settings.tp > 1:
        loaded = load_model(model, device="cuda", dtype=precision, tower_only=True)
    pipeline = _pipeline(name, path, precision, settings)
    if loaded is None:
        from transformers import AutoProcessor, GenerationConfig

        try:
            generation = GenerationConfig.from_pretrained(path)
        except OSError:  # the model has none
            generation = GenerationConfig.from_model_config(config)
        patched = pipeline.executor.model_agent.patched_model.get_model()
        facade = TowerModel(patched, config, generation, version)
        loaded = bind(facade, AutoProcessor.from_pretrained(path), name, path)
    return loaded, pipeline


def _pipeline(name: str, path: str, precision: str, settings: LMDeploySettings) -> Any:
    # LMDeploy checks its surroundings in a child process, which needs the caller's main module to be guarded
    os.environ.setdefault("LMDEPLOY_ENABLE_CHECK_ENV", "0")
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine
    from lmdeploy.utils import get_logger

    get_logger("lmdeploy").setLevel(logging.WARNING)  # it would write lines for every request
    engine_config = PytorchEngineConfig(
        dtype=precision,
        tp=settings.tp,
        session_len=settings.max_model_len,
        max_batch_size=settings.max_running,
        cache_max_entry_count=settings.kv_share,
        block_size=settings.block,
        max_prefill_token_num=settings.max_batch_tokens,
        enable_prefix_caching=settings.prefix_cache,
        eager_mode=not settings.cuda_graphs,
        enable_metrics=False,
        logprobs_mode="raw_logprobs",
    )
    with our_module_map():
        try:
            return Engine.from_pretrained(path, engine_config=engine_config)
        except Exception as exc:  # LMDeploy raises nearly anything
            raise ModelError(f"{name}: LMDeploy can't load it: {type(exc).__name__}: {exc}") from exc


def _dtype(name: str, config: Any, dtype: str) -> str:
    """LMDeploy's own "auto" may choose float16 for a bfloat16 checkpoint."""
    if dtype == "auto":
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        return "float16" if own == torch.float16 else "bfloat16"
    if dtype not in ("bfloat16", "float16"):
        raise ModelError(f"{name}: backend lmdeploy runs in bfloat16 or float16, not in {dtype}")
    return dtype
