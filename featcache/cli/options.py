"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

store_option = click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="The store's folder; else FEATCACHE_STORE, else ~/.cache/featcache.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
