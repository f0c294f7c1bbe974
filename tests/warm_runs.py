"""Runs of warming in processes of their own, forked from a clean one that has imported torch already."""

from __future__ import annotations

import json
import multiprocessing
import time
import uuid
from pathlib import Path
from typing import Any

import featcache.engine.warm.devices  # sets what the clean process imports  # noqa: F401

_CONTEXT = multiprocessing.get_context("forkserver")


class Run:
    """One run, started."""

    def __init__(self, model: Path, images: Path, store: Path, **settings: Any) -> None:
        self._report = store.with_name(f"report-{uuid.uuid4()}.json")
        self._process = _CONTEXT.Process(target=_run, args=(model, images, store, self._report, settings))
        self._process.start()

    def wait_until_loaded(self) -> None:
        while self._process.is_alive() and not self._report.with_suffix(".loaded").exists():
            time.sleep(0.002)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def report(self) -> dict[str, Any] | None:
        """Wait for its report; None if it was killed."""
        self._process.join(100)
        assert self._process.exitcode is not None, "the run hangs"
        if not self._report.exists():
            return None
        doc: dict[str, Any] = json.loads(self._report.read_text())
        return doc


def _run(model: Path, images: Path, store_path: Path, report_path: Path, settings: dict[str, Any]) -> None:
    import torch

    from featcache.engine.encoder import VisionEncoder
    from featcache.engine.loading import load_model
    from featcache.engine.warm import WarmSettings, warm
    from featcache.store import FeatureStore

    torch.set_num_threads(1)
    with FeatureStore.open(store_path, host_bytes="64MiB", disk_bytes="512MiB") as store:
        encoder = VisionEncoder(load_model(model, device="cpu", tower_only=True), store, max_batch_cost=100)
        report_path.with_suffix(".loaded").touch()
        report = warm(encoder, images, WarmSettings(**settings))
        encoder.close()
    report_path.write_text(json.dumps(report.to_json()))
