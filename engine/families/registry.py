"""Which adapter serves which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featcache.engine.families.base import Family
from featcache.engine.families.gemma3 import Gemma3
from featcache.engine.families.idefics import Idefics3, SmolVLM
from featcache.engine.families.internvl import InternVL
from featcache.engine.families.llava import Llava, LlavaOnevision
from featcache.engine.families.qwen import Qwen2VL, Qwen3VL, Qwen25VL
from featcache.errors import ModelError

FAMILIES: Mapping[str, type[Family]] = {
    family.name: family
    for family in (
        *(Qwen2VL, Qwen25VL, Qwen3VL),
        *(InternVL, Llava, LlavaOnevision, Idefics3, SmolVLM, Gemma3),
    )
}


def family_of(config: Any) -> type[Family]:
    """The adapter class for a model's config. Raises ModelError, listing what there is, if there is none."""
    name = str(getattr(config, "model_type", None))
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"architecture {name!r} isn't known to featcache, which serves {known}")
    return FAMILIES[name]


def load_family(model: Any, processor: Any) -> Family:
    """The adapter for a loaded model. Raises ModelError if its images can't be cached exactly."""
    return family_of(model.config)(model, processor)
