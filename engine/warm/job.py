"""A whole run from names: load the tower, open the store, warm."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from featcache.engine.encoder import VisionEncoder
from featcache.engine.loading import load_model
from featcache.engine.warm.items import PassedOver
from featcache.engine.warm.pipeline import WarmSettings
from featcache.engine.warm.report import Failure, Progress, WarmReport
from featcache.engine.warm.run import warm
from featcache.errors import ConfigError, StoreError
from featcache.store import FeatureStore

QUEUE_BYTES = 256 << 20
HOST_BYTES = 2 * QUEUE_BYTES  # memory is only passed through: what is warmed is meant for the disk


@dataclass(frozen=True, slots=True)
class Job:
    """What to warm, with what, into which store. Everything that a process needs to be told.

    device: as torch writes it; None is CUDA if there is one. threads: of torch on the CPU; None is its own
        choice.
    """

    model: str
    sources: tuple[str, ...]
    store: Path
    disk_bytes: int
    settings: WarmSettings = WarmSettings()  # noqa: RUF009 (frozen)
    device: str | None = None
    dtype: str = "auto"
    compile_tower: bool = False
    namespace: str = ""
    sync: bool = True
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told while a job runs; see `warm`."""

    progress: Callable[[Progress], None] | None = None
    failure: Callable[[Failure], None] | None = None
    passed_over: Callable[[PassedOver], None] | None = None


NOBODY = Listeners()


@contextmanager
def opened(job: Job, *, readonly: bool = False) -> Iterator[VisionEncoder]:
    """The encoder of a job over its store. readonly: nothing is written, and there need be no store yet.

    Raises ModelError, StoreError or ConfigError.
    """
    device = parse_device(job.device) if job.device else None
    if job.threads:
        torch.set_num_threads(job.threads)
    loaded = load_model(
        job.model, device=device, dtype=job.dtype, tower_only=True, compile_tower=job.compile_tower
    )
    path: Path | None = job.store
    if readonly and not (job.store / "data.mdb").is_file():
        path = None
    with FeatureStore.open(
        path,
        host_bytes=HOST_BYTES,
        disk_bytes=job.disk_bytes,
        device=str(loaded.device) if loaded.device.type == "cuda" else None,
        queue_bytes=QUEUE_BYTES,
        readonly=readonly,
        sync=job.sync,
    ) as store:
        if not readonly and store.path is None:
            raise StoreError(f"{job.store}: can't be written: {store.stats().disk_error}")
        encoder = VisionEncoder(loaded, store, namespace=job.namespace)
        try:
            yield encoder
        finally:
            encoder.close()


def run_job(job: Job, listeners: Listeners = NOBODY, stop: threading.Event | None = None) -> WarmReport:
    """Run a job in this process."""
    with opened(job) as encoder:
        return warm(
            encoder,
            job.sources,
            job.settings,
            progress=listeners.progress,
            on_failure=listeners.failure,
            on_passed_over=listeners.passed_over,
            stop=stop,
        )


def parse_device(name: str) -> str:
    """A device as people write it ("0", "cuda:1", "cpu") as torch does. Raises ConfigError."""
    text = name.strip().lower()
    text = f"cuda:{text}" if text.isdecimal() else text
    kind, _, number = text.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError(f"device {name!r}; write cpu, cuda, or the number of a GPU")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch finds no CUDA here; write cpu")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs here")
    return text


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
