"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

StorePath = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="PATH",
        help="The store's folder; else FEATCACHE_STORE, else ~/.cache/featcache.",
    ),
]
