"""The engine: from images and tokens to text."""

from featcache.engine.vlm import CachedVLM

__all__ = ["CachedVLM"]
