"""How far a long run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from featcache.sizes import format_size

if TYPE_CHECKING:
    from featcache.engine.warm.report import Progress

LINE_EVERY_S = 10.0


@contextmanager
def shown(what: str) -> Iterator[Callable[[Progress], None]]:
    """Yields what to call with each Progress. All of it goes to standard error."""
    if sys.stderr.isatty():
        with _bar(what) as tell:
            yield tell
    else:
        yield _Lines(what)


class _Lines:
    """A line at the beginning, at the end, and every ten seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = time.monotonic() + LINE_EVERY_S

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LINE_EVERY_S
        total = "" if progress.total is None else f" of {progress.total:,}"
        left = seconds_left(progress)
        eta = "" if left is None else f", {duration(left)} left"
        click.echo(f"{self._what}: {progress.done:,}{total} images, {account(progress)}{eta}", err=True)


def account(progress: Progress) -> str:
    """What became of the images so far, in one line."""
    rate = progress.done / progress.seconds if progress.seconds else 0.0
    hits = progress.cached / progress.done if progress.done else 0.0
    parts = [f"{rate:,.1f}/s", f"{hits:.0%} stored before", f"{format_size(progress.feature_bytes)} made"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    return ", ".join(parts)


def seconds_left(progress: Progress) -> float | None:
    """At the rate so far; None if it isn't known how much is left, or nothing is done yet."""
    if progress.total is None or not progress.done:
        return None
    return max(0.0, progress.total - progress.done) * progress.seconds / progress.done


def duration(seconds: float) -> str:
    """ "45 s", "3:07 min" or "2:05 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


@contextmanager
def _bar(what: str) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[account]}"), TimeRemainingColumn()]
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, account="")
        yield lambda p: bar.update(task, completed=p.done, total=p.total, account=account(p))
