"""The decode kernel against plain attention, in Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with torch on Linux")


def test_paged_decode_in_the_interpreter() -> None:
    """In a process of its own, as the interpreter has to be chosen before Triton is imported."""
    script = Path(__file__).with_name("paged_decode_child.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    checked, heads = run.stdout.split()
    assert int(checked) >= 30 and int(heads) >= 500
