"""The engine: from images and tokens to text. `CachedVLM` is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featcache.engine.vlm import CachedVLM

__all__ = ["CachedVLM"]


def __getattr__(name: str) -> object:
    if name != "CachedVLM":
        raise AttributeError(f"module 'featcache.engine' has no attribute {name!r}")
    from featcache.engine.vlm import CachedVLM

    return CachedVLM
