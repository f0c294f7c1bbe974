"""What goes wrong on disks and with processes, done for real: nothing wrong served, nothing flushed lost."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from featcache.errors import StoreError
from featcache.tiers.disk import DiskTier
from featcache.tiers.schema import CHUNK
from tests.disk_child import BUDGET
from tests.records import MIB, data_of, header_of, is_right, key_of, places_of, read, record_of


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.disk_child", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_a_writer(path: Path, first: int, rng: random.Random) -> int:
    """Kill a writing process at a random instant; returns the number that flush had confirmed last."""
    with start("write_and_confirm", path, first) as child:
        assert child.stdout is not None
        confirmed = first
        for _ in range(rng.randint(1, 4)):
            confirmed = int(child.stdout.readline())
        threading.Event().wait(rng.random() * 0.03)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().split()
    return int(lines[-1]) if lines else confirmed


def check_after_kill(path: Path, first: int, confirmed: int) -> None:
    tier = DiskTier.open(path, max_bytes=BUDGET)
    report = tier.verify()
    assert report.is_clean, report
    recent = [n for n in range(first, confirmed) if tier.contains(key_of(n))]
    evicted = tier.stats().evicted
    assert len(recent) == confirmed - first or evicted, "flushed, and not there"
    assert all(is_right(n, read(tier, n) or b"") for n in recent)
    tier.close()


@pytest.mark.timeout(300)
def test_killed_at_a_hundred_random_instants_nothing_flushed_is_lost(tmp_path: Path) -> None:
    rng = random.Random(7)
    number = 0
    for turn in range(100):
        if turn % 10 == 0:  # a fresh store now and then, so that nothing is evicted yet
            path = tmp_path / f"store{turn}"
        confirmed = kill_a_writer(path, number, rng)
        check_after_kill(path, number, confirmed)
        number = confirmed + 100


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier.open(tmp_path / "store", max_bytes=BUDGET)
    tier.write([record_of(n, 700_000) for n in range(20)])
    yield tier
    tier.close()


def overwrite(tier: DiskTier, number: int, offset: int, data: bytes) -> None:
    """Change bytes of a record's tensor data where they stand in the database file."""
    file = tier.path / "data.mdb"
    original = data_of(number, header_of(number, 700_000).data_bytes)
    places = places_of(file, original, slice(offset, offset + 32))
    assert len(places) == 1
    with file.open("r+b") as raw:
        raw.seek(places[0])
        raw.write(data)


def test_overwritten_payload_is_never_served_and_made_again(
    filled: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(3)
    for number in range(10):
        overwrite(filled, number, rng.randrange(0, 600_000), rng.randbytes(rng.randint(1, 40)))
    with caplog.at_level(logging.WARNING, logger="featcache"):
        served = [read(filled, number) for number in range(20)]
    assert served[:10] == [None] * 10 and all(is_right(n, served[n] or b"") for n in range(10, 20))
    assert filled.stats().damaged == 10 and "damaged" in caplog.text
    assert [read(filled, number) for number in range(10)] == [None] * 10
    assert not filled.contains(key_of(0))
    filled.write([record_of(number, 700_000) for number in range(10)])
    assert all(is_right(n, read(filled, n) or b"") for n in range(20))
    assert filled.stats().quarantined == 10 and filled.verify().is_clean


def test_verify_finds_damage_and_repair_removes_it(filled: DiskTier) -> None:
    overwrite(filled, 4, 300_000, b"damaged")
    report = filled.verify()
    assert list(report.damaged) == [key_of(4)] and report.checked == 20
    assert filled.contains(key_of(4)), "verify alone changes nothing"
    assert filled.verify(repair=True).removed == 1
    assert not filled.contains(key_of(4)) and filled.verify().is_clean


def test_a_damaged_page_header_never_frees_other_records(filled: DiskTier) -> None:
    """LMDB trusts the page count before a value when it deletes it: 16 bytes before a chunk of ours."""
    file = filled.path / "data.mdb"
    original = data_of(5, header_of(5, 700_000).data_bytes)
    (place,) = places_of(file, original, slice(CHUNK, CHUNK + 32))
    assert place % 4096 == 16
    with file.open("r+b") as raw:
        raw.seek(place - 4)
        raw.write((5000).to_bytes(4, "little"))
    assert filled.delete([key_of(5)]) == 1
    assert filled.stats().lost_bytes > 0
    for number in range(100, 140):  # reuse whatever was freed
        filled.write([record_of(number, 700_000)])
    assert all(is_right(n, read(filled, n) or b"") for n in range(20) if n != 5)
    assert filled.verify().is_clean


def test_damaged_metadata_is_a_miss(filled: DiskTier) -> None:
    with filled._env.write() as txn:
        table = filled._env.tables["meta"]
        row = bytes(txn.get(key_of(1), db=table) or b"")
        txn.put(key_of(1), row[:60] + b"\xff" * 30 + row[90:], db=table)
        txn.put(key_of(2), b"short", db=table)
    assert filled.header(key_of(1)) is None and read(filled, 2) is None
    assert set(filled.verify().damaged) == {key_of(1), key_of(2)}
    filled.write([record_of(1, 700_000), record_of(2, 700_000)])
    assert all(is_right(n, read(filled, n) or b"") for n in range(20))
    filled.verify(repair=True)
    assert filled.verify().is_clean and filled.check() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mount"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs: " + mounted.stderr.decode().strip())
    yield path
    subprocess.run(["umount", "-l", path], capture_output=True)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcache.tiers.health.RETRY_S", (0.0,))


@pytest.mark.usefixtures("no_wait")
def test_a_full_disk_drops_and_counts_and_recovers(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier.open(small_disk, max_bytes=BUDGET)
    (small_disk / "other").write_bytes(bytes(2 * MIB))
    with caplog.at_level(logging.WARNING, logger="featcache"):
        results = [tier.write([record_of(n, 500_000)]) for n in range(60)]
    dropped = sum(result.dropped for result in results)
    assert dropped and sum(result.stored for result in results) + dropped == 60
    stats = tier.stats()
    assert stats.dropped == dropped and stats.write_errors > 0
    assert caplog.text.count("can't write") < stats.write_errors or stats.write_errors == 1
    held = [n for n in range(60) if tier.contains(key_of(n))]
    assert held and all(is_right(n, read(tier, n) or b"") for n in held)
    assert len(held) + stats.evicted == 60 - dropped
    (small_disk / "other").unlink()
    for n in range(100, 104):
        tier.write([record_of(n, 500_000)])
    assert is_right(103, read(tier, 103) or b"") and not tier.stats().is_degraded
    assert tier.verify().is_clean
    tier.close()


@pytest.mark.usefixtures("no_wait")
def test_a_full_disk_makes_room_inside_its_own_file(small_disk: Path) -> None:
    tier = DiskTier.open(small_disk, max_bytes=BUDGET)
    stored = [tier.write([record_of(n, 500_000)]).stored for n in range(80)]
    assert sum(stored[40:]) >= 20, "a full disk of its own making must not end all writing"
    assert tier.verify().is_clean
    tier.close()


def test_a_readonly_disk_serves_reads(small_disk: Path) -> None:
    tier = DiskTier.open(small_disk / "store", max_bytes=BUDGET)
    tier.write([record_of(1)])
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreError, match="store"):
        DiskTier.open(small_disk / "store", max_bytes=BUDGET)
    tier = DiskTier.open(small_disk / "store", max_bytes=BUDGET, readonly=True)
    assert is_right(1, read(tier, 1) or b"")
    tier.close()


def test_a_thousand_threads_do_not_exhaust_the_readers(filled: DiskTier) -> None:
    wrong: list[int] = []

    def look(number: int) -> None:
        if not is_right(number % 20, read(filled, number % 20) or b""):
            wrong.append(number)

    for _ in range(5):
        threads = [threading.Thread(target=look, args=(n,)) for n in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_readers_of_killed_processes_are_cleared(tmp_path: Path) -> None:
    path = tmp_path / "store"
    tier = DiskTier.open(path, max_bytes=BUDGET)
    tier.write([record_of(n) for n in range(100)])
    children = [start("read_for", path, 60, seed) for seed in range(4)]
    threading.Event().wait(1.0)
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    tier.close()
    tier = DiskTier.open(path, max_bytes=BUDGET)
    pids = {line.split()[0] for line in tier._env._env.readers().splitlines()[1:] if line.split()}
    assert not pids & {str(child.pid) for child in children}
    tier.close()


def run_side_by_side(path: Path, seconds: float) -> None:
    DiskTier.open(path, max_bytes=BUDGET).close()
    children = [start("write_for", path, seconds, seed) for seed in range(2)]
    children += [start("read_for", path, seconds, seed) for seed in range(4)]
    said = [child.communicate(timeout=seconds + 60)[0].split() for child in children]
    assert all(child.returncode == 0 for child in children)
    assert [words[:2] for words in said] == [["wrong", "0"]] * 6
    assert all(int(words[3]) > 0 for words in said[2:])
    tier = DiskTier.open(path, max_bytes=BUDGET)
    assert tier.verify().is_clean
    tier.close()


def test_four_processes_read_what_two_write(tmp_path: Path) -> None:
    run_side_by_side(tmp_path / "store", 4)


@pytest.mark.soak
def test_four_processes_read_what_two_write_for_longer(tmp_path: Path) -> None:
    run_side_by_side(tmp_path / "store", 20)


def test_the_file_stays_sparse(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, max_bytes=BUDGET)
    tier.write([record_of(1)])
    status = (tmp_path / "data.mdb").stat()
    assert status.st_size < 2 * MIB and status.st_blocks * 512 < 2 * MIB
    tier.close()
