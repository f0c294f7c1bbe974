"""`featcache stats | ls | show`: what is in a store."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from featcache.cli.opened import SHOWN_DIGITS, encoders_named, key_of, opened
from featcache.cli.options import json_option, store_option
from featcache.cli.output import ago, print_facts, print_json, print_table
from featcache.errors import RecordError
from featcache.features import Layout
from featcache.sizes import format_size
from featcache.tiers.disk import DiskTier, EntryInfo


@click.command()
@store_option
@json_option
def stats(store: Path | None, as_json: bool) -> None:
    """Show what a store holds and how it is used, by encoder.

    Counted over all processes and restarts; what one running server does is at its /cache/stats.
    """
    with opened(store, readonly=True) as tier:
        document = _stats(tier)
    if as_json:
        print_json(document)
        return
    disk = document["disk"]
    print_facts(
        [
            ("store", document["path"]),
            ("entries", f"{disk['entries']:,}"),
            ("features", format_size(disk["data_bytes"])),
            ("data file", format_size(disk["file_bytes"])),
            ("known images", f"{disk['aliases']:,}"),
            ("evicted", f"{disk['evicted']:,} entries, {format_size(disk['evicted_bytes'])}"),
            ("quarantined", f"{disk['quarantined']:,}"),
        ]
    )
    if document["encoders"]:
        print_table(
            ["encoder", "model", "family", "dtype", "entries>", "features>"],
            [
                [
                    encoder["fingerprint"][:SHOWN_DIGITS],
                    *(str(encoder["description"].get(name, "")) for name in ("model", "family", "dtype")),
                    f"{encoder['entries']:,}",
                    format_size(encoder["data_bytes"]),
                ]
                for encoder in document["encoders"]
            ],
        )


def _stats(tier: DiskTier) -> dict[str, Any]:
    of_process = ("max_bytes", "hits", "misses", "damaged", "dropped", "write_errors", "is_degraded")
    disk = {name: value for name, value in tier.stats().to_json().items() if name not in of_process}
    encoders = [{"fingerprint": fp.hex(), **doc} for fp, doc in tier.encoders().items()]
    encoders.sort(key=lambda encoder: encoder["data_bytes"], reverse=True)
    return {"path": str(tier.path), "disk": disk, "encoders": encoders}


@click.command()
@click.option("--limit", "-n", type=click.IntRange(min=0), default=50, help="Entries at most; 0 is all. [50]")
@click.option("--oldest", is_flag=True, help="Oldest first; otherwise the newest.")
@click.option("--encoder", metavar="MODEL|DIGITS", help="Only of this model, or this fingerprint.")
@click.option("--quiet", "-q", is_flag=True, help="Whole keys only, one a line.")
@store_option
@json_option
def ls(limit: int, oldest: bool, encoder: str | None, quiet: bool, store: Path | None, as_json: bool) -> None:
    """List the entries of a store in the order in which they were stored."""
    with opened(store, readonly=True) as tier:
        found: Iterator[EntryInfo] = tier.entries(newest_first=not oldest)
        if encoder is not None:
            wanted = encoders_named(tier, encoder)
            found = (entry for entry in found if entry.header.fingerprint in wanted)
        shown = itertools.islice(found, limit or None)
        if quiet:
            for entry in shown:
                click.echo(entry.key.hex())
        elif as_json:
            print_json([_entry(entry) for entry in shown])
        else:
            print_table(
                ["key", "image", "tokens>", "features>", "encoder", "stored>", "used>"], map(_row, shown)
            )
            if next(found, None) is not None:
                click.echo(f"{limit} of {tier.stats().entries:,} entries; --limit 0 shows all", err=True)


def _row(entry: EntryInfo) -> list[str]:
    layout = entry.header.layout
    return [
        entry.key.hex()[:SHOWN_DIGITS],
        f"{layout.width}x{layout.height}",
        str(layout.num_tokens),
        format_size(entry.data_bytes),
        entry.header.fingerprint.hex()[:SHOWN_DIGITS],
        ago(entry.created),
        ago(entry.accessed),
    ]


def _entry(entry: EntryInfo) -> dict[str, Any]:
    return {
        "key": entry.key.hex(),
        "fingerprint": entry.header.fingerprint.hex(),
        "layout": entry.header.layout.to_json(),
        "data_bytes": entry.data_bytes,
        "file_bytes": entry.file_bytes,
        "created": entry.created,
        "accessed": entry.accessed,
    }


@click.command()
@click.argument("key")
@store_option
@json_option
def show(key: str, store: Path | None, as_json: bool) -> None:
    """Show one entry: its layout, tensors and encoder.

    KEY is a whole key, or as many of its first hex digits (six at least) as no other entry begins with.
    """
    with opened(store, readonly=True) as tier:
        entry = tier.info(key_of(tier, key))
        if entry is None:
            raise RecordError(f"entry {key} is damaged; `featcache verify --repair` removes it")
        encoder = tier.encoders().get(entry.header.fingerprint, {"description": {}})["description"]
    tensors = {
        name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in entry.header.specs.items()
    }
    if as_json:
        print_json({**_entry(entry), "tensors": tensors, "encoder": encoder})
        return
    named = [str(encoder[name]) for name in ("model", "family", "dtype") if encoder.get(name)]
    print_facts(
        [
            ("key", entry.key.hex()),
            ("encoder", f"{entry.header.fingerprint.hex()[:SHOWN_DIGITS]}  {', '.join(named)}".rstrip()),
            *_layout_facts(entry.header.layout),
            *((name, f"{spec['dtype']} {spec['shape']}") for name, spec in tensors.items()),
            ("features", format_size(entry.data_bytes)),
            ("stored", f"{_date(entry.created)} ({ago(entry.created)} ago)"),
            ("used", f"{_date(entry.accessed)} ({ago(entry.accessed)} ago)"),
        ]
    )


def _layout_facts(layout: Layout) -> Iterable[tuple[str, str]]:
    yield "image", f"{layout.width}x{layout.height}"
    yield "tokens", str(layout.num_tokens)
    if layout.grid is not None:
        yield "grid", "x".join(map(str, layout.grid))
    if layout.tiles is not None:
        yield "tiles", "x".join(map(str, layout.tiles))


def _date(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
