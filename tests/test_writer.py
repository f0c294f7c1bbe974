"""Write-behind: batches, back-pressure, flush, and a thread that nothing ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from featcache.errors import StoreClosedError, StoreError
from featcache.tiers import writer as writer_module
from featcache.tiers.disk import DiskTier, WriteResult
from featcache.tiers.writer import DiskWriter
from tests.records import MIB, header_of, is_right, key_of, read, record_of

HOLDER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], max_dbs=16, map_size=1 << 30)
with env.begin(write=True):
    print("held", flush=True)
    sys.stdin.read()
"""


class SlowTier(DiskTier):
    """The real tier, whose writes wait until they are let through."""

    gate: threading.Event
    batches: list[int]

    def write(self, records: Any, aliases: Any = None) -> WriteResult:
        assert self.gate.wait(30)
        self.batches.append(len(records))
        return super().write(records, aliases)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SlowTier]:
    tier = SlowTier.open(tmp_path, max_bytes=64 * MIB)
    assert isinstance(tier, SlowTier)
    tier.gate, tier.batches = threading.Event(), []
    yield tier
    tier.close()


def test_flush_means_stored_and_done_is_told_once_each(tier: SlowTier) -> None:
    tier.gate.set()
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    done: list[tuple[int, bool]] = []
    for n in range(50):
        header, pieces = record_of(n)
        assert writer.submit(header, pieces, lambda stored, n=n: done.append((n, stored)), wait=True)
    writer.submit_alias(b"a", b"b")
    writer.flush()
    assert done == [(n, True) for n in range(50)]
    assert all(is_right(n, read(tier, n) or b"") for n in range(50)) and tier.alias(b"a") == b"b"
    stats = writer.stats()
    assert (stats.written, stats.waiting, stats.waiting_bytes, stats.dropped) == (50, 0, 0, 0)
    writer.close()


def test_a_full_queue_drops_and_counts_or_waits(tier: SlowTier) -> None:
    writer = DiskWriter(tier, max_bytes=4 * MIB)
    taken = []
    for n in range(10):
        header, pieces = record_of(n, MIB)
        taken.append(writer.submit(header, pieces, lambda stored: None))
    assert taken == [True] * 4 + [False] * 6
    assert writer.stats().dropped == 6 and writer.stats().waiting_bytes <= 4 * MIB
    header, pieces = record_of(20, MIB)
    late = (header, pieces, lambda stored: None)
    waiter = threading.Thread(target=writer.submit, args=late, kwargs={"wait": True})
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive(), "it waits for room"
    tier.gate.set()
    waiter.join(30)
    writer.flush()
    assert [n for n in range(21) if tier.contains(key_of(n))] == [0, 1, 2, 3, 20]
    writer.close()


def test_a_record_larger_than_the_queue_goes_through_alone(tier: SlowTier) -> None:
    tier.gate.set()
    writer = DiskWriter(tier, max_bytes=MIB)
    header, pieces = record_of(1, 3 * MIB)
    assert writer.submit(header, pieces, lambda stored: None)
    writer.flush()
    assert tier.contains(key_of(1))
    writer.close()


def test_what_waits_is_written_in_one_batch(tier: SlowTier) -> None:
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    for n in range(40):
        header, pieces = record_of(n)
        writer.submit(header, pieces, lambda stored: None)
    tier.gate.set()
    writer.flush()
    assert sum(tier.batches) == 40 and len(tier.batches) <= 3
    writer.close()


def test_flush_gives_up_in_time_and_says_so(tier: SlowTier) -> None:
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    header, pieces = record_of(1)
    writer.submit(header, pieces, lambda stored: None)
    with pytest.raises(StoreError, match="1 records were not yet written"):
        writer.flush(timeout_s=0.05)
    tier.gate.set()
    writer.flush(timeout_s=30)
    writer.close()


def test_close_writes_what_is_queued_and_refuses_more(tier: SlowTier) -> None:
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    for n in range(5):
        header, pieces = record_of(n)
        writer.submit(header, pieces, lambda stored: None)
    tier.gate.set()
    writer.close()
    assert all(tier.contains(key_of(n)) for n in range(5))
    with pytest.raises(StoreClosedError):
        writer.submit(header, pieces, lambda stored: None)


def test_close_gives_up_while_another_process_keeps_the_write_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier.open(tmp_path / "store", max_bytes=64 * MIB)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tier.path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    header, pieces = record_of(1)
    writer.submit(header, pieces, lambda stored: None)
    assert not writer.close(timeout_s=0.2)
    assert "1 records not written" in caplog.text and "write lock" in caplog.text
    holder.communicate("")  # it ends, and with it its lock
    assert writer.close(timeout_s=30) and tier.contains(key_of(1))
    tier.close()


def test_close_waits_for_a_slow_disk_that_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BATCH_RECORDS", 1)
    tier = DiskTier.open(tmp_path / "store", max_bytes=64 * MIB)
    write = tier.write

    def slowly(*batch: Any) -> WriteResult:
        threading.Event().wait(0.5)
        return write(*batch)

    monkeypatch.setattr(tier, "write", slowly)
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    for n in range(6):
        header, pieces = record_of(n)
        writer.submit(header, pieces, lambda stored: None)
    assert writer.close(timeout_s=2)  # less than all of them take, and far more than one does
    assert all(tier.contains(key_of(n)) for n in range(6))
    tier.close()


def test_an_error_in_a_batch_is_counted_and_the_thread_goes_on(tier: SlowTier) -> None:
    tier.gate.set()
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    done: list[bool] = []
    header, _ = record_of(1)
    writer.submit(header, [memoryview(b"not as long as its header says")], done.append)
    writer.flush()
    header, pieces = record_of(2)
    writer.submit(header, pieces, done.append)
    writer.flush()
    assert done == [False, True] and not tier.contains(key_of(1)) and tier.contains(key_of(2))
    writer.close()


def test_hits_are_written_without_waiting_for_a_record(
    tier: SlowTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcache.tiers.writer.IDLE_S", 0.01)
    tier.gate.set()
    tier.write([record_of(1)])
    before = next(tier.entries()).accessed
    writer = DiskWriter(tier, max_bytes=MIB)
    tier.touch(key_of(1))
    for _ in range(500):
        if next(tier.entries()).accessed > before:
            break
        threading.Event().wait(0.01)
    assert next(tier.entries()).accessed > before
    writer.close()


def test_headers_tell_how_much_waits(tier: SlowTier) -> None:
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    header, pieces = record_of(1)
    writer.submit(header, pieces, lambda stored: None)
    assert writer.stats().waiting_bytes == header_of(1, 64 << 10).data_bytes
    tier.gate.set()
    writer.close()
