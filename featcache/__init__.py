"""featcache: never encode the same image twice.

    from featcache import CachedVLM, FeatureStore

All but the errors is imported when it is first used, so that `import featcache` stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from featcache.errors import (
    CancelledError,
    ConfigError,
    ContextLengthError,
    FeatcacheError,
    ImageError,
    LeaseError,
    ModelError,
    QueueFullError,
    RecordError,
    RequestError,
    SchemaError,
    StoreClosedError,
    StoreError,
)

if TYPE_CHECKING:
    from featcache.bundled import bundled_model
    from featcache.engine import CachedVLM
    from featcache.features import Features, Layout
    from featcache.images import ImageLimits, open_image, pixel_digest
    from featcache.keys import source_digest
    from featcache.store import FeatureStore

__version__ = "0.1.0"

__all__ = [
    "CachedVLM",
    "CancelledError",
    "ConfigError",
    "ContextLengthError",
    "FeatcacheError",
    "FeatureStore",
    "Features",
    "ImageError",
    "ImageLimits",
    "Layout",
    "LeaseError",
    "ModelError",
    "QueueFullError",
    "RecordError",
    "RequestError",
    "SchemaError",
    "StoreClosedError",
    "StoreError",
    "__version__",
    "bundled_model",
    "open_image",
    "pixel_digest",
    "source_digest",
]

_LAZY = {
    "CachedVLM": "featcache.engine",
    "FeatureStore": "featcache.store",
    "Features": "featcache.features",
    "ImageLimits": "featcache.images",
    "Layout": "featcache.features",
    "bundled_model": "featcache.bundled",
    "open_image": "featcache.images",
    "pixel_digest": "featcache.images",
    "source_digest": "featcache.keys",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'featcache' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
