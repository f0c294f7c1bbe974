"""What commands print: tables on a terminal, tab-separated lines elsewhere, JSON where it is asked for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click


def print_json(document: Any) -> None:
    """One JSON document on standard output; digests in it are hex text already."""
    click.echo(json.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for people. A column whose title ends in ">" is set to the right."""
    titles = [column.removesuffix(">") for column in columns]
    if not sys.stdout.isatty():
        click.echo("\t".join(titles))
        for row in rows:
            click.echo("\t".join(row))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column, title in zip(columns, titles, strict=True):
        right = column.endswith(">")
        table.add_column(title, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: a value is never read as markup
    Console().print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    known = list(facts)
    if not sys.stdout.isatty():
        for name, value in known:
            click.echo(f"{name}\t{value}")
        return
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        click.echo(f"{click.style(name.ljust(width), dim=True)}  {value}")


def complain(message: str) -> None:
    """One line on standard error, about an input that failed while others go on."""
    click.echo(f"featcache: {' '.join(message.split())}", err=True)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields what to call with the number done since the last call; shown on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def ago(then_s: float) -> str:
    """How long ago a time is: "12 s", "5 min", "3 h", "40 d"."""
    seconds = max(0.0, time.time() - then_s)
    for unit, length in (("s", 1), ("min", 60), ("h", 3600), ("d", 86_400)):
        if seconds < {"s": 120, "min": 7200, "h": 172_800, "d": float("inf")}[unit]:
            return f"{seconds / length:.0f} {unit}"
    raise AssertionError(seconds)
