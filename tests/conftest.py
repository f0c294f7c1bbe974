"""Fixtures that several test files share; torch is imported only where one is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny random model, made once a session: `model_folder("qwen2_vl")`."""
    from models import build

    root = tmp_path_factory.mktemp("models")
    return lambda family: build(family, root)
