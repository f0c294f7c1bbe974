"""What starts without torch. Seconds are measured in bench/; here, what is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "torchvision", "numpy", "safetensors", "PIL", "rich")


def loaded_by(statement: str) -> set[str]:
    script = (
        f"import sys\n{statement}\nimport json\nsys.__stdout__.write('\\n' + json.dumps(sorted(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(result.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import featcache", set()),
        ("from featcache import FeatcacheError, source_digest", set()),
        ("import featcache.keys, featcache.images, featcache.sizes, featcache.settings", set()),
        ("from featcache import Features, Layout", set()),
        ("import featcache.cli", set()),
        ("from featcache import open_image, pixel_digest; pixel_digest(b'P6 1 1 255\\nabc')", {"PIL"}),
    ],
)
def test_light_names_load_nothing_heavy(statement: str, allowed: set[str]) -> None:
    assert loaded_by(statement) & set(HEAVY) <= allowed


def test_help_loads_nothing_heavy() -> None:
    run = "import featcache.cli\ntry: featcache.cli.app(['--help'])\nexcept SystemExit: pass"
    assert loaded_by(run) & set(HEAVY) == set()


def test_every_public_name_is_there_and_documented() -> None:
    script = """
import featcache
for name in featcache.__all__:
    value = getattr(featcache, name)
    assert name == "__version__" or value.__doc__, name
    assert name in dir(featcache)
try:
    featcache.nothing
except AttributeError as exc:
    print(exc)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out == "module 'featcache' has no attribute 'nothing'\n"
