"""What goes wrong beneath a store, for real: requests go on, nothing flushed is lost, all served is right."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tier_contract import features_of, is_intact, key_of

from featcache import FeatureStore
from featcache.errors import SchemaError, StoreError
from featcache.features import Features, bytes_of
from featcache.keys import FeatureKey

MIB = 1 << 20
HERE = str(Path(__file__).parent)


def open_store(path: Path, **settings: object) -> FeatureStore:
    given = {"host_bytes": "8MiB", "disk_bytes": "96MiB", **settings}
    return FeatureStore.open(path, **given)  # type: ignore[arg-type]


def ask(store: FeatureStore, numbers: range, tokens: int = 512) -> list[int]:
    """What a request does; returns the numbers that had to be computed."""
    computed: list[int] = []

    def compute(keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        asked = [int.from_bytes(key, "big") for key in keys]
        computed.extend(asked)
        return {key: features_of(number, tokens) for key, number in zip(keys, asked, strict=True)}

    for number in numbers:
        (lease,) = store.get_or_compute([key_of(number)], compute)
        assert is_intact(lease.features, number)
        lease.release()
    return computed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    path = tmp_path / "mount"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs: " + mounted.stderr.decode().strip())
    yield path
    subprocess.run(["umount", "-l", path], capture_output=True)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a failed disk again with the next batch, not after seconds."""
    monkeypatch.setattr("featcache.tiers.health.RETRY_S", (0.0,))


@pytest.mark.usefixtures("no_wait")
def test_full_disk_harms_no_request_and_writing_resumes(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="featcache"), open_store(small_disk / "store") as store:
        ask(store, range(4))
        store.flush()
        (small_disk / "other").write_bytes(bytes(20 * MIB))
        assert ask(store, range(100, 140)) == list(range(100, 140))
        with pytest.raises(StoreError, match="could not be written"):
            store.flush()
        stats = store.stats()
        assert stats.disk is not None and stats.disk.dropped > 0
        assert stats.counts["failed_writes"] == stats.disk.dropped
        warnings = caplog.text.count("can't write")  # one for each time that it stopped, not for each record
        assert 1 <= warnings <= 1 + caplog.text.count("writing again")
        (small_disk / "other").unlink()
        ask(store, range(200, 203))
        store.flush()
        stats = store.stats()
        assert stats.disk is not None and not stats.disk.is_degraded
        assert store._stack.disk is not None and store._stack.disk.contains(key_of(202))
        assert store.verify().is_clean and store.check() == []


def test_readonly_path_is_read_and_not_written(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(small_disk / "store") as store:
        ask(store, range(4))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with caplog.at_level(logging.WARNING, logger="featcache"), open_store(small_disk / "store") as store:
        assert ask(store, range(6)) == [4, 5]
        assert ask(store, range(6)) == []
        store.flush()
        stats = store.stats()
        assert stats.disk_error is not None and stats.writer is None
        assert caplog.text.count("reading only") == 1
        store.put_encoder(b"e" * 32, {"family": "tiny"})  # type: ignore[arg-type]
        store.put_alias(b"a" * 32, b"b" * 32)
        assert store.alias(b"a" * 32) == b"b" * 32
        assert store.delete(key_of(5))


def test_readonly_store_is_asked_for_and_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store here"):
        open_store(tmp_path / "none", readonly=True)
    with open_store(tmp_path / "store") as store:
        ask(store, range(2))
    with open_store(tmp_path / "store", readonly=True) as store:
        assert ask(store, range(3)) == [2]
        store.flush()
    with open_store(tmp_path / "store", readonly=True) as store:
        assert store.tier_of(key_of(2)) is None


@pytest.mark.usefixtures("no_wait")
def test_path_on_a_vanished_mount_harms_no_request(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="featcache"), open_store(small_disk / "store") as store:
        ask(store, range(20))
        store.flush()
        subprocess.run(["umount", "-l", small_disk], check=True)
        assert not (small_disk / "store").exists()
        ask(store, range(30))
        assert caplog.text.count("going on without it") <= 1
        store.stats()


def test_path_that_can_not_be_opened_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Path("/proc/featcache-can-not-be-made-here")
    with caplog.at_level(logging.WARNING, logger="featcache"), open_store(gone) as store:
        assert ask(store, range(5)) == [0, 1, 2, 3, 4]
        assert ask(store, range(5)) == []
        assert store.stats().disk is None and str(gone) in str(store.stats().disk_error)
    assert caplog.text.count("going on without it") == 1


def test_overwritten_pages_are_computed_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ask(store, range(10))
        store.flush()
        content = (tmp_path / "data.mdb").read_bytes()
        with (tmp_path / "data.mdb").open("r+b") as file:
            for number in (2, 5, 7):
                needle = bytes(bytes_of(features_of(number, 512).rows)[64_000:64_064])
                place = content.index(needle)
                file.seek(place)
                file.write(random.Random(number).randbytes(64))
        store._stack.host.clear()
        assert ask(store, range(10)) == [2, 5, 7]
        store.flush()
        stats = store.stats()
        assert stats.disk is not None and stats.disk.damaged == 3
    with open_store(tmp_path) as store:
        assert ask(store, range(10)) == []
        assert store.verify().is_clean


def test_disk_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Another process holds LMDB's write lock: puts, hits and misses go on, and are written later."""
    with open_store(tmp_path, host_bytes="64MiB") as store:
        ask(store, range(3))
        store.flush()
        holder = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from featcache.tiers.disk import DiskTier\n"
                "tier = DiskTier.open(sys.argv[1], max_bytes=96 << 20)\n"
                "with tier._env.write(): print('held', flush=True); sys.stdin.read()",
                str(tmp_path),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert ask(store, range(30)) == list(range(3, 30))
        assert ask(store, range(30)) == []
        with pytest.raises(StoreError, match="not yet written"):
            store.flush(timeout_s=0.1)
        holder.communicate("", timeout=60)
        store.flush()
        stats = store.stats()
        assert stats.disk is not None and stats.disk.entries == 30


def test_store_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    before_it = set(threading.enumerate())
    with open_store(tmp_path) as store:
        ask(store, range(2))
        store.flush()
        disk = store._stack.disk
        assert disk is not None
        with disk._env.write() as txn:
            txn.put(b"schema", b"999", db=disk._env.tables["info"])
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(SchemaError, match=str(tmp_path)):
        open_store(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before
    assert set(threading.enumerate()) <= before_it


CHILD = """
import sys
sys.path[:0] = [sys.argv[2]]
from tier_contract import features_of, key_of
from featcache import FeatureStore
store = FeatureStore.open(sys.argv[1], host_bytes="8MiB", disk_bytes="256MiB")
number = int(sys.argv[3])
while True:
    for _ in range(3):
        store.put(key_of(number), features_of(number, 64), wait=True)
        number += 1
    store.flush()
    print(number, flush=True)
"""


def test_killed_process_loses_nothing_that_flush_has_confirmed(tmp_path: Path) -> None:
    chance, first = random.Random(5), 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), HERE, str(first)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        confirmed = first
        for _ in range(chance.randint(1, 5)):
            confirmed = int(child.stdout.readline())
        threading.Event().wait(0.02 * chance.random())
        child.send_signal(signal.SIGKILL)
        lines = child.communicate()[0].split()
        confirmed = int(lines[-1]) if lines else confirmed
        with open_store(tmp_path, disk_bytes="256MiB") as store:
            assert store.verify().is_clean
            assert ask(store, range(confirmed), tokens=64) == []
            assert store.check() == []
        first = confirmed
