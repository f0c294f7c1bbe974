"""Decoding steps on inputs that stay in their place, as CUDA graphs need them, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from featcache.engine.graphs import LEAST_WIDTH, width_for
from featcache.engine.kv import BLOCK

pytest.importorskip("triton", reason="Triton comes with torch on Linux")


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])  # three-axis positions; a sliding window
def test_a_filled_up_static_step_decodes_as_the_engine_does(family: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("graphs_child.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command: list[str | Path] = [sys.executable, script, family, tmp_path]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_sequences_that_grow_meet_few_widths() -> None:
    widths = [width_for(total) for total in range(1, 5000)]
    assert set(widths) == {64, 128, 256, 512}
    assert all(width * BLOCK >= total for total, width in enumerate(widths, start=1))
    assert widths[LEAST_WIDTH * BLOCK - 1] == 64 and widths[LEAST_WIDTH * BLOCK] == 128
