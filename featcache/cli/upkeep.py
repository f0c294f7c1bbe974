"""`featcache verify | prune`: keeping a store sound and small."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import click

from featcache.cli import EXIT_FAILED
from featcache.cli.opened import encoders_named, opened
from featcache.cli.options import json_option, store_option
from featcache.cli.output import complain, print_facts, print_json, progress
from featcache.sizes import format_size, parse_duration, parse_size
from featcache.tiers.disk import DiskTier

DELETED_AT_ONCE = 256  # entries a transaction: writers of other processes wait for one


@click.command()
@click.option(
    "--repair", is_flag=True, help="Remove what is damaged; it is encoded anew when it is next asked for."
)
@store_option
@json_option
def verify(repair: bool, store: Path | None, as_json: bool) -> None:
    """Check every entry against its checksum, and the tables against each other.

    Exit status 1 if damage was found and not repaired. Others may use the store meanwhile.
    """
    with opened(store, readonly=not repair) as tier:
        with progress("verifying", tier.stats().entries) as advance:
            report = tier.verify(repair=repair, progress=lambda done, total: advance(1))
        left = () if report.is_clean else (*report.damaged, *report.problems)
        if repair and left:
            left = tuple(tier.check())
    for key, reason in report.damaged.items():
        complain(f"entry {key.hex()} is damaged: {reason}")
    for problem in report.problems:
        complain(problem)
    if as_json:
        print_json(report.to_json())
    else:
        facts = [("checked", _amount(report.checked, report.checked_bytes))]
        facts += [("damaged", f"{len(report.damaged):,}"), ("problems", f"{len(report.problems):,}")]
        facts += [("removed", f"{report.removed:,}")] if repair else []
        print_facts(facts)
    if left:
        raise click.exceptions.Exit(EXIT_FAILED)


class Candidate(NamedTuple):
    """An entry that may be removed; the least recently used compares first."""

    accessed: float
    key: bytes
    file_bytes: int


@click.command()
@click.option(
    "--max-bytes", metavar="SIZE", help="Remove the least recently used until no more than this is left."
)
@click.option("--older-than", metavar="AGE", help="Remove what was not used for this long: 12h, 30d, 2w.")
@click.option("--encoder", metavar="MODEL|DIGITS", help="Remove of this model or fingerprint only.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@store_option
@json_option
def prune(
    max_bytes: str | None,
    older_than: str | None,
    encoder: str | None,
    dry_run: bool,
    store: Path | None,
    as_json: bool,
) -> None:
    """Remove entries by size, age or encoder.

    With --encoder alone, all that it made. With --older-than and --max-bytes, first by age, then by size.
    The space is used again by later entries; the data file itself doesn't shrink.
    """
    if max_bytes is None and older_than is None and encoder is None:
        raise click.UsageError("say what to remove: --max-bytes, --older-than or --encoder")
    limit = None if max_bytes is None else parse_size(max_bytes, "--max-bytes")
    age_s = None if older_than is None else parse_duration(older_than, "--older-than")
    with opened(store, readonly=dry_run) as tier:
        wanted = None if encoder is None else encoders_named(tier, encoder)
        kept, victims = _divided(tier, wanted, limit, age_s)
        removed = len(victims) if dry_run else _delete(tier, [victim.key for victim in victims])
    report = {
        "removed": removed,
        "removed_bytes": sum(victim.file_bytes for victim in victims),
        "kept": kept.entries,
        "kept_bytes": kept.file_bytes,
        "dry_run": dry_run,
    }
    if as_json:
        print_json(report)
        return
    print_facts(
        [
            ("would remove" if dry_run else "removed", _amount(report["removed"], report["removed_bytes"])),
            ("left", _amount(report["kept"], report["kept_bytes"])),
        ]
    )


class Amount(NamedTuple):
    entries: int
    file_bytes: int


def _divided(
    tier: DiskTier, wanted: set[bytes] | None, limit: int | None, age_s: float | None
) -> tuple[Amount, list[Candidate]]:
    """What stays, and the victims, least recently used first."""
    all_entries, all_bytes = 0, 0
    candidates: list[Candidate] = []
    with progress("reading", tier.stats().entries) as advance:
        for entry in tier.entries(newest_first=False):
            all_entries, all_bytes = all_entries + 1, all_bytes + entry.file_bytes
            if wanted is None or entry.header.fingerprint in wanted:
                candidates.append(Candidate(entry.accessed, entry.key, entry.file_bytes))
            advance(1)
    candidates.sort()
    victims, kept_bytes = [], all_bytes
    oldest_kept = -1.0 if age_s is None else time.time() - age_s
    for candidate in candidates:
        too_old = candidate.accessed < oldest_kept
        too_much = limit is not None and kept_bytes > limit
        if not (too_old or too_much or (limit is None and age_s is None)):
            break
        victims.append(candidate)
        kept_bytes -= candidate.file_bytes
    return Amount(all_entries - len(victims), kept_bytes), victims


def _delete(tier: DiskTier, keys: list[bytes]) -> int:
    removed = 0
    with progress("removing", len(keys)) as advance:
        for start in range(0, len(keys), DELETED_AT_ONCE):
            portion = keys[start : start + DELETED_AT_ONCE]
            removed += tier.delete(portion)
            advance(len(portion))
    return removed


def _amount(entries: int, nbytes: int) -> str:
    return f"{entries:,} entries, {format_size(nbytes)}"
