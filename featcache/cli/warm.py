"""`featcache warm`: encode whole image sets ahead of their use."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import EXIT_FAILED, EXIT_SOME_FAILED
from featcache.cli.options import json_option, store_option
from featcache.cli.output import complain, print_facts, print_json
from featcache.sizes import format_size

if TYPE_CHECKING:
    from featcache.engine.warm.items import PassedOver
    from featcache.engine.warm.job import Job, Listeners
    from featcache.engine.warm.report import Failure, WarmReport
    from featcache.engine.warm.survey import Survey

EXIT_INTERRUPTED = 130
SHOWN_FAILURES = 20

_POSITIVE = click.IntRange(min=1)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("model")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--min-pixels", type=_POSITIVE, help="Scale smaller images up to this area.")
@click.option("--max-pixels", type=_POSITIVE, help="Scale larger images down to this area.")
@click.option("--max-tiles", type=_POSITIVE, help="Tiles that an image is cut into at most.")
@click.option("--dtype", default="auto", help="Of the tower: auto, bfloat16, float16, float32.  [auto]")
@click.option("--compile-tower", is_flag=True, help="As in `serve`: its features have keys of their own.")
@click.option("--device", "--devices", "devices", help="cpu, cuda, or GPUs by number: 0,1 (a process each).")
@click.option("--batch-size", type=_POSITIVE, help="Images in one call of the tower at most.")
@click.option("--workers", type=_POSITIVE, help="Threads that decode and preprocess.  [one a core]")
@store_option
@click.option("--disk-bytes", help="The store's budget on disk.  [20GiB]")
@click.option("--namespace", default="", help="Whose images these are.")
@click.option("--limit", type=click.IntRange(min=0), help="Stop after so many images.")
@click.option("--shuffle-seed", type=int, help="Take the images in a random order.")
@click.option("--failures", type=_FILE, help="Write failures here, as lines of JSON.")
@click.option("--max-failures", type=click.IntRange(min=0), help="Give up when more images fail.")
@click.option("--dry-run", is_flag=True, help="Only tell what is missing, and what it would take.")
@click.option("-v", "--verbose", is_flag=True, help="Name what is passed over.")
@json_option
def warm(
    model: str,
    sources: tuple[str, ...],
    devices: str | None,
    failures: Path | None,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Encode the images of SOURCE... with MODEL, as far as they aren't stored yet.

    MODEL is "tiny", a folder or a hub name. A SOURCE is an image, a folder, a glob, a URL, a list of these
    (@list.txt, or - for standard input), a .tar, .zip, .parquet or .arrow, or a .jsonl of chat requests or
    rows with images.

    Ctrl-C ends it cleanly, and it may be started again at any time: what is stored isn't encoded again.

    Exit status 0 well, 1 failed, 2 wrong usage, 3 some images failed, 130 interrupted.
    """
    with ExitStack() as stack:
        interrupts = stack.enter_context(_interrupts())
        names = _device_names(devices)
        if "-" in sources and len(names) > 1:
            sources = stack.enter_context(_stored_list(sources))
        job = _job(model, sources, names[0], given)
        listeners = stack.enter_context(_listeners(failures, verbose))
        if dry_run:
            _dry_run(job, listeners, as_json)
            return
        report = _run(job, names, listeners, interrupts)
    if as_json:
        print_json({"model": model, "store": str(job.store), **report.to_json()})
    else:
        print_facts(_facts(report))
    if status := _exit_status(report):
        raise click.exceptions.Exit(status)


def _device_names(devices: str | None) -> list[str | None]:
    if devices is None:
        return [None]
    from featcache.engine.warm.job import parse_device

    return [parse_device(name) for name in devices.split(",")]


def _job(model: str, sources: tuple[str, ...], device: str | None, given: dict[str, Any]) -> Job:
    from featcache.engine.families.base import ImageOptions
    from featcache.engine.warm import WarmSettings
    from featcache.engine.warm.job import Job
    from featcache.settings import StoreSettings

    def those(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    store = StoreSettings.resolve(path=given["store"], disk_bytes=given["disk_bytes"])
    images = ImageOptions(**those("min_pixels", "max_pixels", "max_tiles"))
    wanted = those("workers", "batch_size", "limit", "shuffle_seed", "max_failures")
    return Job(
        model=model,
        sources=sources,
        store=store.path,
        disk_bytes=store.disk_bytes,
        settings=WarmSettings(images=images, **wanted),
        device=device,
        sync=store.sync,
        **those("dtype", "namespace", "compile_tower"),
    )


def _run(job: Job, devices: list[str | None], listeners: Listeners, interrupts: Interrupts) -> WarmReport:
    from dataclasses import replace

    from featcache.cli.progress import shown
    from featcache.engine.warm.devices import run_on_devices
    from featcache.engine.warm.job import run_job

    with shown("warming") as progress:
        listeners = replace(listeners, progress=progress)
        interrupts.are_answered = True
        if len(devices) == 1:
            return run_job(job, listeners, interrupts.stop)
        return run_on_devices(job, [name for name in devices if name], listeners, interrupts.stop)


def _dry_run(job: Job, listeners: Listeners, as_json: bool) -> None:
    from featcache.engine.warm.job import opened
    from featcache.engine.warm.survey import survey

    with opened(job, readonly=True) as encoder:
        found = survey(
            encoder,
            job.sources,
            job.settings,
            on_failure=listeners.failure,
            on_passed_over=listeners.passed_over,
        )
    if as_json:
        print_json({"model": job.model, "store": str(job.store), **found.to_json()})
    else:
        print_facts(_survey_facts(found))
    if found.failed:
        raise click.exceptions.Exit(EXIT_SOME_FAILED)


def _exit_status(report: WarmReport) -> int:
    if report.stopped == "interrupted":
        return EXIT_INTERRUPTED
    if report.stopped or report.not_kept:
        return EXIT_FAILED
    return EXIT_SOME_FAILED if report.failed else 0


# What is said


def _facts(report: WarmReport) -> Iterator[tuple[str, str]]:
    """The report for people; what is zero and may be is left out."""
    yield "images", f"{report.seen:,}"
    yield "already stored", f"{report.cached:,}"
    yield "encoded", f"{report.encoded:,} ({format_size(report.feature_bytes)})"
    for name in ("duplicates", "shared", "failed", "unfinished", "passed_over", "not_kept", "evicted"):
        if number := getattr(report, name):
            yield _FOR_PEOPLE.get(name, name), f"{number:,}"
    rate = f"{report.images_per_second:,.1f} images/s"
    yield "time", f"{report.seconds:,.1f} s, {rate}, tower busy {report.tower_busy:.0%}"
    if report.stopped:
        yield "stopped", report.stopped


_FOR_PEOPLE = {
    "shared": "encoded by another run",
    "passed_over": "passed over",
    "not_kept": "not stored: no room",
    "evicted": "evicted: the disk budget is too small",
}


def _survey_facts(found: Survey) -> Iterator[tuple[str, str]]:
    yield "images", f"{found.seen:,} ({format_size(found.bytes_read)})"
    yield "already stored", f"{found.cached:,}"
    yield "missing", f"{found.missing:,}"
    for name in ("duplicates", "failed", "passed_over"):
        if number := getattr(found, name):
            yield _FOR_PEOPLE.get(name, name), f"{number:,}"
    if found.feature_bytes is not None and found.seconds is not None:
        yield "would take", f"{format_size(found.feature_bytes)}, about {found.seconds:,.0f} s"
        yield "estimated from", f"{found.sampled} images"


@contextmanager
def _listeners(failures: Path | None, verbose: bool) -> Iterator[Listeners]:
    """Failures go to their file as they come, and the first of them to standard error."""
    from featcache.engine.warm.job import Listeners
    from featcache.errors import ConfigError

    shown = 0
    with ExitStack() as stack:
        file = None
        if failures is not None:
            try:
                file = stack.enter_context(failures.open("w", encoding="utf-8", buffering=1))
            except OSError as exc:
                raise ConfigError(f"--failures: {failures} can't be written: {exc.strerror}") from exc

        def failed(failure: Failure) -> None:
            nonlocal shown
            if file is not None:
                file.write(json.dumps(failure.to_json()) + "\n")
            shown += 1
            if shown <= SHOWN_FAILURES:
                complain(failure.error)
            elif shown == SHOWN_FAILURES + 1:
                where = failures or "a file that you name with --failures"
                complain(f"more images failed; all are in {where}")

        def passed_over(item: PassedOver) -> None:
            complain(f"{item.name}: {item.reason}, passed over")

        yield Listeners(failure=failed, passed_over=passed_over if verbose else None)


@contextmanager
def _stored_list(sources: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The list on standard input as a file, since several processes are to read it."""
    with tempfile.NamedTemporaryFile(prefix="featcache-list-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield tuple(f"@{file.name}" if source == "-" else source for source in sources)


class Interrupts:
    """The first SIGINT or SIGTERM asks for a clean end; the second, or one before the run, ends at once."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.are_answered = False

    def __call__(self, number: int, frame: object) -> None:
        if self.stop.is_set() or not self.are_answered:
            raise KeyboardInterrupt
        self.stop.set()
        complain("finishing the running batch; once more to end at once")


@contextmanager
def _interrupts() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, interrupts)
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
