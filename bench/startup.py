"""How long commands take to start, beside a bare interpreter, alternating in one run.

python bench/startup.py [--runs 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from featcache.features import Header, Layout, TensorSpec
from featcache.tiers.disk import DiskTier

ENTRIES = 200
LIMIT_S = 0.3
MAIN = "from featcache.cli import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        fill(store)
        rows = [
            row(name, command, on_terminal, options.runs)
            for name, command, on_terminal in [
                ("featcache --help", ["--help"], False),
                ("featcache version", ["version"], False),
                ("featcache stats", ["stats", "--store", str(store)], False),
                ("featcache stats, on a terminal", ["stats", "--store", str(store)], True),
                ("featcache ls --json", ["ls", "--json", "--store", str(store)], False),
                ("featcache ls, on a terminal", ["ls", "--limit", "20", "--store", str(store)], True),
                ("featcache verify", ["verify", "--store", str(store)], False),
            ]
        ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for result in rows:
        print(
            f"{result['figure']:<32} {result['value']:.3f} s over a bare {result['baseline']:.3f} s "
            f"({result['ratio']:.1f} x in all; target {LIMIT_S} s: {'yes' if result['ok'] else 'NO'})"
        )


def fill(path: Path) -> None:
    tier = DiskTier.open(path, max_bytes=64 << 20)
    numbers = random.Random(0)
    for _ in range(ENTRIES):
        specs = {"rows": TensorSpec("BF16", (64, 64))}
        header = Header.of(numbers.randbytes(32), bytes(32), Layout(64, 640, 480), specs)
        tier.write([(header, [memoryview(numbers.randbytes(header.data_bytes))])])
    tier.close()


def row(name: str, command: list[str], on_terminal: bool, runs: int) -> dict[str, object]:
    timed = terminal_seconds if on_terminal else seconds
    bare, whole = [], []
    for _ in range(runs):
        bare.append(timed(["-c", "pass"]))
        whole.append(timed(["-c", MAIN, *command]))
    baseline, median = statistics.median(bare), statistics.median(whole)
    over = median - baseline
    return {
        "figure": name,
        "value": round(over, 4),
        "baseline": round(baseline, 4),
        "ratio": round(median / baseline, 2),
        "target": f"<= {LIMIT_S} s",
        "ok": over <= LIMIT_S,
    }


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def terminal_seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, *arguments])
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the command has ended
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    if status:
        raise SystemExit(f"{arguments} failed")
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
