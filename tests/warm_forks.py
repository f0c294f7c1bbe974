"""A process that forks runs of warming, one a line of JSON on its standard input.

Torch and transformers are imported once, so that a test can kill many runs in little time. Before a fork it
starts no thread and opens no store.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Forks:
    """The test's side."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, __file__, str(model)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None and self._server.stdout.readline() == "ready\n"

    def start(self, images: Path, store: Path, **settings: Any) -> Run:
        assert self._server.stdin is not None and self._server.stdout is not None
        report = store.with_name(f"report-{random.randrange(1 << 40)}.json")
        line = {"images": str(images), "store": str(store), "report": str(report), "settings": settings}
        self._server.stdin.write(json.dumps(line) + "\n")
        self._server.stdin.flush()
        return Run(int(self._server.stdout.readline()), report)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate()


class Run:
    """One forked run. Its pidfd tells when it has ended, though it is no child of the test."""

    def __init__(self, pid: int, report: Path) -> None:
        self.pid = pid
        self._report = report

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 120) -> dict[str, Any] | None:
        """Its report; None if it was killed."""
        deadline = time.monotonic() + timeout_s
        while _is_running(self.pid):
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.005)
        return json.loads(self._report.read_text()) if self._report.exists() else None


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def serve(model: str) -> None:
    import torch

    from featcache.engine.encoder import VisionEncoder
    from featcache.engine.loading import load_model
    from featcache.engine.warm import WarmSettings, warm
    from featcache.store import FeatureStore

    torch.set_num_threads(1)
    loaded = load_model(model, device="cpu", tower_only=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the runs
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        try:
            with FeatureStore.open(order["store"], host_bytes="64MiB", disk_bytes="512MiB") as store:
                encoder = VisionEncoder(loaded, store, max_batch_cost=100)
                report = warm(encoder, order["images"], WarmSettings(**order["settings"]))
            unnamed = Path(order["report"] + ".part")
            unnamed.write_text(json.dumps(report.to_json()))
            unnamed.rename(order["report"])
        finally:
            os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
