"""The disk tier: what it keeps, finds, evicts and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.errors import ConfigError, SchemaError, StoreClosedError, StoreError
from featcache.features import Header, checksum, unpack
from featcache.tiers import schema
from featcache.tiers.batch import cut
from featcache.tiers.disk import DiskTier
from tests.records import MIB, data_of, header_of, key_of, read, record_of

BUDGET = 64 * MIB


def open_tier(path: Path, **options: object) -> DiskTier:
    return DiskTier.open(path, **{"max_bytes": BUDGET, **options})  # type: ignore[arg-type]


def test_records_come_back_as_they_were_put(tmp_path: Path) -> None:
    sizes = [2048, 4096, schema.CHUNK // 2048 * 2048, schema.CHUNK, 3 * schema.CHUNK + 2048, 5 * MIB]
    tier = open_tier(tmp_path)
    assert tier.write([record_of(n, size) for n, size in enumerate(sizes)]).stored == len(sizes)
    for n, size in enumerate(sizes):
        header = header_of(n, size)
        assert read(tier, n) == data_of(n, header.data_bytes)
        assert tier.header(key_of(n)) == header
        assert tier.contains(key_of(n))
    assert read(tier, 99) is None and tier.header(key_of(99)) is None and not tier.contains(key_of(99))
    stats = tier.stats()
    assert (stats.entries, stats.hits, stats.misses) == (len(sizes), len(sizes), 1)
    assert stats.data_bytes == sum(header_of(n, size).data_bytes for n, size in enumerate(sizes))
    assert tier.check() == []
    tier.close()


def test_reopened_it_still_has_everything(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(n) for n in range(5)], {b"alias": b"value"})
    tier.put_encoder(b"\x07" * 32, {"family": "test"})
    tier.close()
    tier = open_tier(tmp_path)
    assert [read(tier, n) for n in range(5)] == [bytes(record_of(n)[1][0]) for n in range(5)]
    assert tier.alias(b"alias") == b"value" and tier.alias(b"other") is None
    encoder = tier.encoders()[b"\x07" * 32]
    assert encoder["description"] == {"family": "test"} and encoder["entries"] == 5
    tier.close()


def test_a_stored_head_and_its_data_are_a_safetensors_record(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(3)])
    with tier._env.read() as txn:
        row = txn.get(key_of(3), db=tier._env.tables["meta"])
        assert row is not None
        header = schema.Entry.unpack(key_of(3), row).header(key_of(3))
    data = read(tier, 3) or b""
    key, features = unpack(header.to_bytes(checksum(header, [memoryview(data)])) + data)
    assert key == key_of(3) and features.layout == header_of(3, 64 << 10).layout
    tier.close()


@given(sizes=st.lists(st.integers(0, 3 * schema.CHUNK + 7), max_size=6))
def test_pieces_are_cut_into_chunks_without_loss(sizes: list[int]) -> None:
    pieces = [os.urandom(size) for size in sizes]
    chunks = [bytes(chunk) for chunk in cut([memoryview(piece) for piece in pieces])]
    assert b"".join(chunks) == b"".join(pieces)
    assert all(len(chunk) == schema.CHUNK for chunk in chunks[:-1])


def test_the_budget_holds_in_the_file_itself(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for n in range(400):
        assert tier.write([record_of(n, (n % 13 + 1) * 100_000)]).stored == 1
    assert (tmp_path / "data.mdb").stat().st_size <= 1.15 * BUDGET
    stats = tier.stats()
    assert stats.evicted > 300 and stats.entries + stats.evicted == 400
    assert tier.check() == []
    held = [n for n in range(400) if tier.contains(key_of(n))]
    assert len(held) == stats.entries
    assert all(read(tier, n) == data_of(n, header_of(n, (n % 13 + 1) * 100_000).data_bytes) for n in held)
    tier.close()


def test_a_loop_over_more_than_fits_still_hits(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, max_bytes=32 * MIB)
    hits = [0, 0, 0]
    for turn in range(3):
        for n in range(60):
            if tier.contains(key_of(n)):
                hits[turn] += 1
            else:
                tier.write([record_of(n, MIB)])
    assert hits[0] == 0 and min(hits[1:]) > 12, hits
    tier.close()


def test_what_is_hit_outlives_a_scan(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(n, MIB) for n in range(10)])
    for _ in range(3):
        assert all(read(tier, n) for n in range(10))
    for n in range(100, 300):
        tier.write([record_of(n, MIB)])
    assert all(tier.contains(key_of(n)) for n in range(10))
    tier.close()


def test_a_record_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(1)])
    result = tier.write([record_of(2, BUDGET), record_of(3)])
    assert (result.stored, result.dropped) == (1, 1)
    assert tier.contains(key_of(1)) and not tier.contains(key_of(2)) and tier.contains(key_of(3))
    assert tier.stats().dropped == 1
    tier.close()


def test_the_same_key_is_stored_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(1), record_of(1)])
    tier.write([record_of(1)])
    assert tier.stats().entries == 1
    tier.close()


def test_deleting_gives_everything_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(n) for n in range(10)])
    assert tier.delete(key_of(n) for n in range(5, 20)) == 5
    assert [tier.contains(key_of(n)) for n in range(10)] == [True] * 5 + [False] * 5
    assert tier.stats().entries == 5 and tier.check() == []
    tier.delete([key_of(n) for n in range(5)])
    assert tier.stats().data_bytes == 0 and tier.check() == []
    tier.close()


def test_entries_are_listed_in_order_in_portions(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for start in range(0, 1200, 100):
        tier.write([record_of(n, 2048) for n in range(start, start + 100)])
    tier.delete([key_of(n) for n in range(100, 1100, 2)])
    left = [n for n in range(1200) if n < 100 or n >= 1100 or n % 2]
    assert [info.key for info in tier.entries(newest_first=False)] == [key_of(n) for n in left]
    newest = [info.key for info in tier.entries(limit=20)]
    assert newest == [key_of(n) for n in reversed(left)][:20]
    assert tier.keys_with_prefix(key_of(7)[:31] + b"\x07") == [key_of(7)]
    tier.close()


def test_aliases_replace_each_other_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcache.tiers.disk.MAX_ALIASES", 100)
    tier = open_tier(tmp_path)
    for n in range(250):
        tier.write([], {b"%d" % n: b"v%d" % n, b"same": b"s%d" % n})
    assert tier.stats().aliases == 100
    assert tier.alias(b"same") == b"s249" and tier.alias(b"249") == b"v249" and tier.alias(b"10") is None
    assert tier.check() == []
    tier.close()


def test_one_environment_a_path_and_process(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path), open_tier(tmp_path / "." / "x" / "..")
    first.write([record_of(1)])
    assert first._env is second._env
    first.close()
    assert read(second, 1) is not None
    second.close()
    with pytest.raises(StoreClosedError):
        second.contains(key_of(1))
    second.close()


def test_readonly_never_writes_and_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        open_tier(tmp_path / "none", readonly=True)
    assert not (tmp_path / "none").exists()
    tier = open_tier(tmp_path / "store")
    tier.write([record_of(1)])
    tier.close()
    tier = open_tier(tmp_path / "store", readonly=True)
    assert read(tier, 1) == data_of(1, header_of(1, 64 << 10).data_bytes)
    assert tier.write([record_of(2)]).dropped == 1
    assert not tier.contains(key_of(2))
    tier.close()


@pytest.mark.parametrize("version", ["0", "2"])
def test_another_schema_is_refused_with_the_way_out_and_left_alone(tmp_path: Path, version: str) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(1)])
    tier.close()
    with lmdb.open(str(tmp_path), max_dbs=20) as env, env.begin(write=True) as txn:
        txn.put(b"schema", version.encode(), db=env.open_db(b"info", txn=txn))
    before = (tmp_path / "data.mdb").read_bytes()
    for readonly in (False, True):
        with pytest.raises(SchemaError, match="featcache export"):
            open_tier(tmp_path, readonly=readonly)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_path_that_cannot_be_a_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file"):
        open_tier(tmp_path / "file")
    with pytest.raises(ConfigError, match="disk_bytes"):
        open_tier(tmp_path / "small", max_bytes=1000)


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    program = """
import json, os, sys
from featcache.errors import StoreClosedError
from featcache.tiers.disk import DiskTier
from tests.records import key_of, read, record_of
tier = DiskTier.open(sys.argv[1], max_bytes=64 << 20)
tier.write([record_of(1)])
r, w = os.pipe()
if os.fork() == 0:
    try:
        tier.contains(key_of(1))
        said = "used"
    except StoreClosedError as exc:
        said = str(exc)
    try:
        tier.close()
        own = DiskTier.open(sys.argv[1], max_bytes=64 << 20)
        os.write(w, json.dumps([said, read(own, 1) is not None]).encode())
    finally:
        os._exit(0)
os.wait()
os.close(w)
tier.write([record_of(2)])
print(json.dumps([json.loads(os.read(r, 10000)), read(tier, 1) is not None, read(tier, 2) is not None]))
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    (said, child_reads), first, second = json.loads(run.stdout)
    assert "forked" in said and child_reads and first and second


def test_room_that_is_not_given_is_not_a_damaged_record(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([record_of(1)])

    def none(header: Header) -> None:
        return None

    assert tier.read(key_of(1), none) is None
    assert tier.stats().damaged == 0 and read(tier, 1) is not None
    tier.close()
