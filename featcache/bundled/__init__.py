"""What comes with featcache: the model `tiny`, and the scenes that it was trained on."""

from __future__ import annotations

from pathlib import Path

from featcache.errors import ConfigError

MODELS = ("tiny",)


def bundled_model(name: str) -> Path:
    """The folder of the bundled model `name`, for `from_pretrained`. ConfigError for any other name."""
    if name not in MODELS:
        raise ConfigError(f"no bundled model is called {name!r}; there is: {', '.join(MODELS)}")
    return Path(__file__).parent / name
