"""`featcache export | import`: entries as safetensors files, to move them between stores and machines."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click

from featcache.cli import EXIT_SOME_FAILED
from featcache.cli.opened import encoders_named, key_of, opened
from featcache.cli.options import json_option, store_option
from featcache.cli.output import complain, print_facts, print_json, progress
from featcache.errors import ConfigError, RecordError, StoreError
from featcache.features import MAX_HEADER_BYTES, Header, checksum
from featcache.sizes import format_size
from featcache.tiers.disk import DiskTier, Record

SUFFIX = ".safetensors"
ENCODERS = "encoders.json"  # beside the records: what their fingerprints stand for
BATCH_BYTES = 32 << 20  # of files taken in with one commit
BATCH_FILES = 64


@dataclass(slots=True)
class Tally:
    """What a transfer did, and what it could not do, by the names of its inputs."""

    done: int = 0
    done_bytes: int = 0
    known: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)

    def fail(self, name: str, reason: str) -> None:
        reason = reason.removeprefix(f"{name}: ")
        self.failures.append((name, reason))
        complain(f"{name}: {reason}")

    def end(self, as_json: bool, verb: str, **more: Any) -> None:
        """Report, and leave with the status that says whether all went well."""
        if as_json:
            failed = [{"name": name, "reason": reason} for name, reason in self.failures]
            print_json({verb: self.done, f"{verb}_bytes": self.done_bytes, **more, "failed": failed})
        else:
            facts = [(verb, f"{self.done:,} entries, {format_size(self.done_bytes)}")]
            facts += [(name.replace("_", " "), str(value)) for name, value in more.items() if value]
            facts += [("failed", f"{len(self.failures):,}")] if self.failures else []
            print_facts(facts)
        if self.failures:
            raise click.exceptions.Exit(EXIT_SOME_FAILED)


@click.command()
@click.argument("keys", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every entry of the store.")
@click.option("--encoder", metavar="MODEL|DIGITS", help="Every entry of this model, or this fingerprint.")
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="A folder, made if it isn't there; or a .safetensors file for one key.",
)
@store_option
@json_option
def export(
    keys: tuple[str, ...],
    everything: bool,
    encoder: str | None,
    target: Path,
    store: Path | None,
    as_json: bool,
) -> None:
    """Write entries as safetensors files, one each, named by their keys.

    KEYS are whole keys, or as many of their first hex digits (six at least) as are unique. Any safetensors
    reader opens the files; `featcache import` takes them into another store.
    """
    if bool(keys) + everything + (encoder is not None) != 1:
        raise click.UsageError("say what to export: KEYS, or --all, or --encoder")
    is_file = target.suffix == SUFFIX
    if is_file and len(keys) != 1:
        raise click.UsageError(f"{target} is one file, for one key; give a folder for more")
    tally, fingerprints = Tally(), set[bytes]()
    with opened(store, readonly=True) as tier:
        names, total = _chosen(tier, keys, encoder)
        _make_folder(target.parent if is_file else target)
        with progress("exporting", total) as advance:
            for name in names:
                try:
                    header = _export(tier, key_of(tier, name), target if is_file else None, target)
                except (RecordError, ConfigError) as exc:
                    tally.fail(name, str(exc))
                else:
                    fingerprints.add(header.fingerprint)
                    tally.done, tally.done_bytes = tally.done + 1, tally.done_bytes + header.data_bytes
                advance(1)
        if not is_file:
            _export_encoders(tier, fingerprints, target / ENCODERS)
    tally.end(as_json, "exported", to=str(target))


def _chosen(tier: DiskTier, keys: tuple[str, ...], encoder: str | None) -> tuple[Iterable[str], int]:
    """The keys to export as hex digits, and how many there are."""
    if keys:
        return keys, len(keys)
    if encoder is None:
        return (entry.key.hex() for entry in tier.entries()), tier.stats().entries
    wanted, known = encoders_named(tier, encoder), tier.encoders()
    of_these = (entry.key.hex() for entry in tier.entries() if entry.header.fingerprint in wanted)
    return of_these, sum(known[fingerprint]["entries"] for fingerprint in wanted)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--to {folder}: {exc.strerror}") from exc


def _export(tier: DiskTier, key: bytes, file: Path | None, folder: Path) -> Header:
    data = bytearray()

    def room(header: Header) -> memoryview:
        data.extend(bytes(header.data_bytes))
        return memoryview(data)

    header = tier.read(key, room)
    if header is None:
        raise RecordError("is damaged, or was removed meanwhile; `featcache verify` tells")
    head = header.to_bytes(checksum(header, [memoryview(data)]))
    _write_file(file or folder / f"{key.hex()}{SUFFIX}", [head, data])
    return header


def _write_file(path: Path, pieces: Iterable[bytes | bytearray]) -> None:
    """Whole or not at all: nobody finds half a file under its name. Raises StoreError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as out:
                out.writelines(pieces)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as exc:
        raise StoreError(f"{path}: {exc.strerror}") from exc


def _export_encoders(tier: DiskTier, fingerprints: set[bytes], path: Path) -> None:
    known = {fp.hex(): doc["description"] for fp, doc in tier.encoders().items() if fp in fingerprints}
    try:
        before = json.loads(path.read_bytes())
    except (OSError, ValueError):  # none yet, or not one of ours
        before = {}
    _write_file(path, [json.dumps({**before, **known}, indent=2).encode()])


@click.command("import")
@click.argument(
    "sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILES|FOLDERS..."
)
@store_option
@json_option
def import_(sources: tuple[Path, ...], store: Path | None, as_json: bool) -> None:
    """Take in entries that `featcache export` wrote; of folders, every .safetensors file.

    Each is checked whole. A damaged or foreign file is named and left out, and the others go on (status 3).
    The store is made if it isn't there.
    """
    tally = Tally()
    files = [file for source in sources for file in _files(source, tally)]
    with opened(store, readonly=False, create=True) as tier:
        evicted = tier.stats().evicted
        with progress("importing", len(files)) as advance:
            for batch in _batches(tier, files, tally, advance):
                _import(tier, batch, tally)
        for folder in sorted({file.parent for file in files}):
            _import_encoders(tier, folder / ENCODERS, tally)
        tier.sync()
        evicted = tier.stats().evicted - evicted
    tally.end(as_json, "imported", already_there=tally.known, evicted=evicted)


def _files(source: Path, tally: Tally) -> list[Path]:
    if not source.is_dir():
        return [source]
    found = sorted(source.rglob(f"*{SUFFIX}"))
    if not found:
        tally.fail(str(source), f"holds no {SUFFIX} files")
    return found


Named = tuple[Path, Record]


def _batches(tier: DiskTier, files: list[Path], tally: Tally, advance: Any) -> Iterator[list[Named]]:
    """Sound records that the store hasn't got, a commit's worth at a time."""
    batch: list[Named] = []
    nbytes, most = 0, min(BATCH_BYTES, tier.max_bytes // 16)  # a batch's evictions free pages for later ones
    for file in files:
        advance(1)
        try:
            record = _read(file, tier.max_bytes)
        except RecordError as exc:
            tally.fail(str(file), str(exc))
            continue
        if tier.contains(record[0].key):
            tally.known += 1
            continue
        batch.append((file, record))
        nbytes += record[0].data_bytes
        if nbytes >= most or len(batch) >= BATCH_FILES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _read(file: Path, max_bytes: int) -> Record:
    """Header and data of a record file, checked. Raises RecordError."""
    try:
        if file.exists() and not file.is_file():
            raise RecordError("is not a regular file")
        with file.open("rb") as opened_file:
            header, expected, start = _read_head(opened_file)
            size = os.fstat(opened_file.fileno()).st_size
            if size != start + header.data_bytes:
                raise RecordError(f"has {size} bytes; by its header it is {start + header.data_bytes}")
            if header.data_bytes > max_bytes:
                raise RecordError(f"has {size} bytes; the store may take {max_bytes} (FEATCACHE_DISK_BYTES)")
            data = opened_file.read(header.data_bytes)
    except OSError as exc:
        raise RecordError(exc.strerror or str(exc)) from exc
    if checksum(header, [memoryview(data)]) != expected:
        raise RecordError("checksum does not match: the record is damaged")
    return header, [memoryview(data)]


def _read_head(file: BinaryIO) -> tuple[Header, bytes, int]:
    head = file.read(8)
    size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    return Header.from_bytes(head + file.read(min(size, MAX_HEADER_BYTES)))


def _import(tier: DiskTier, batch: list[Named], tally: Tally) -> None:
    result = tier.write([record for _, record in batch])
    for file, (header, _) in batch:
        if result.dropped and not tier.contains(header.key):
            tally.fail(str(file), "could not be stored: the store's disk is full, or can't be written")
        else:
            tally.done, tally.done_bytes = tally.done + 1, tally.done_bytes + header.data_bytes


def _import_encoders(tier: DiskTier, path: Path, tally: Tally) -> None:
    if not path.is_file():
        return
    known = tier.encoders()
    try:
        for digits, description in json.loads(path.read_bytes()).items():
            fingerprint = bytes.fromhex(digits)
            if fingerprint in known and not known[fingerprint]["description"]:
                tier.put_encoder(fingerprint, description)
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        tally.fail(str(path), f"does not tell of encoders: {exc}")
