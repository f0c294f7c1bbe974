"""Several processes, real signals and real kills; the command itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from models import build
from warm_helpers import encoded, photos
from warm_runs import Run

from featcache.cli import app
from featcache.engine.encoder import VisionEncoder
from featcache.engine.loading import load_model
from featcache.engine.warm import Failure, Progress, WarmSettings
from featcache.engine.warm.devices import run_on_devices
from featcache.engine.warm.job import Job, Listeners
from featcache.errors import StoreError
from featcache.lease import Lease
from featcache.store import FeatureStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_vl", tmp_path_factory.mktemp("model"))


def assert_complete(model: Path, images: Path, store_path: Path, number: int) -> None:
    """The store holds `number` records, whole, and all images of the folder are found on disk."""
    with FeatureStore.open(store_path, host_bytes=0, disk_bytes="512MiB") as store:
        assert store.check() == []
        report = store.verify()
        assert report.is_clean and report.checked == number
        encoder = VisionEncoder(
            load_model(model, device="cpu"), store
        )  # with its language model, as in a server
        for path in sorted(images.glob("*.png"))[::7]:
            [lease] = encoder.features([encoder.identify(path)])
            assert isinstance(lease, Lease) and lease.tier == "disk"
            lease.release()
        assert encoder.stats()["decoded"] == encoder.stats()["tower_calls"] == 0
        encoder.close()


def kill_until_done(model: Path, folder: Path, kills: int, seed: int) -> None:
    images, store = photos(folder / "set", 150), folder / "store"
    (images / "twin.bmp").write_bytes(encoded(5, "BMP"))
    generator = random.Random(seed)
    for _ in range(kills):
        run = Run(model, images, store)
        run.wait_until_loaded()
        time.sleep(generator.uniform(0, 0.6))
        run.kill()
    report = Run(model, images, store).report()
    assert report is not None and report["failed"] == 0
    assert report["cached"] + report["encoded"] + report["duplicates"] == report["seen"] == 151
    assert_complete(model, images, store, 150)
    again = Run(model, images, store).report()
    assert again is not None and again["cached"] == 151 and again["encoded"] == 0


def test_killed_runs_leave_a_whole_store_and_the_next_goes_on(model: Path, tmp_path: Path) -> None:
    kill_until_done(model, tmp_path, kills=6, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_killed_twenty_times(model: Path, tmp_path: Path, seed: int) -> None:
    kill_until_done(model, tmp_path, kills=20, seed=seed)


def test_two_processes_share_the_work(model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 160), tmp_path / "store"
    runs = [Run(model, images, store), Run(model, images, store)]
    reports = [report for run in runs if (report := run.report())]
    assert len(reports) == 2
    assert sum(report["encoded"] for report in reports) == 160
    for report in reports:
        assert report["seen"] == report["cached"] + report["encoded"] + report["shared"] == 160
    assert_complete(model, images, store, 160)


def test_a_run_takes_over_from_one_that_is_killed(model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 160), tmp_path / "store"
    killed = Run(model, images, store)
    other = Run(model, images, store)
    wait_for_entries(store, 20)
    killed.kill()
    report = other.report()
    assert report is not None and report["failed"] == report["unfinished"] == 0
    assert report["cached"] + report["encoded"] + report["shared"] == 160
    assert_complete(model, images, store, 160)


def wait_for_entries(store: Path, number: int, timeout_s: float = 60) -> None:
    """Until the store holds so many records. Seen from another process, so that it isn't open in this one."""
    code = (
        "import sys, time\nfrom featcache.tiers.disk import DiskTier\n"
        "while True:\n"
        "    try:\n"
        "        tier = DiskTier.open(sys.argv[1], max_bytes=1 << 29, readonly=True)\n"
        "        if tier.stats().entries >= int(sys.argv[2]): break\n"
        "        tier.close()\n"
        "    except Exception: pass\n"
        "    time.sleep(0.01)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(store), str(number)], check=True, timeout=timeout_s)


# The command


def command(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["warm", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_reports_for_programs_and_for_people(model: Path, tmp_path: Path) -> None:
    photos(tmp_path / "set", 12)
    (tmp_path / "set" / "bad.jpg").write_bytes(b"no image")
    (tmp_path / "set" / "notes.txt").write_text("x")
    store, failures = tmp_path / "store", tmp_path / "failures.jsonl"
    common = [model, tmp_path / "set", "--store", store, "--device", "cpu"]

    code, out, err = command(*common, "--dry-run", "--json", "--limit", 5)
    assert code == 0 and json.loads(out)["missing"] == 5 and not store.exists()

    code, out, err = command(*common, "--json", "--failures", failures, "-v")
    doc = json.loads(out)
    assert code == 3 and doc["store"] == str(store) and doc["model"] == str(model)
    assert {n: doc[n] for n in ("seen", "encoded", "failed", "passed_over", "stopped")} == {
        "seen": 13,
        "encoded": 12,
        "failed": 1,
        "passed_over": 1,
        "stopped": None,
    }
    [line] = failures.read_text().splitlines()
    failure = json.loads(line)
    assert failure["source"].endswith("bad.jpg") and failure["member"] == ""
    assert "is no image that can be read" in failure["error"] and failure["error"] in err
    assert "notes.txt: is text/plain, passed over" in err

    (tmp_path / "set" / "bad.jpg").unlink()
    code, out, err = command(*common)
    assert code == 0 and "already stored\t12" in out and "encoded\t0 (0 B)" in out and err == ""

    code, out, err = command(*common, "--namespace", "other", "--min-pixels", 28 * 28 * 9, "--json")
    assert code == 0 and json.loads(out)["encoded"] == 12


def test_exit_statuses_of_what_cannot_be(model: Path, tmp_path: Path) -> None:
    photos(tmp_path / "set", 3)
    store = ["--store", tmp_path / "store"]
    assert command(model)[0] == 2
    assert command(model, tmp_path, "--workers", 0)[0] == 2
    code, _, err = command(tmp_path / "none", tmp_path / "set", *store)
    assert code == 1 and "no such folder" in err
    code, _, err = command(model, tmp_path / "set", *store, "--device", "tpu")
    assert code == 1 and "device 'tpu'" in err
    code, _, err = command(model, tmp_path / "set", *store, "--device", "cpu", "--max-tiles", 3)
    assert code == 1 and "max_tiles" in err
    code, _, err = command(model, tmp_path / "no-folder", *store, "--device", "cpu")
    assert code == 3 and "no such file" in err
    for n in range(9):
        (tmp_path / "set" / f"x{n}.png").write_bytes(b"x")
    code, out, _ = command(model, tmp_path / "set", *store, "--device", "cpu", "--max-failures", 2, "--json")
    assert code == 1 and json.loads(out)["stopped"] == "too many failures"
    (tmp_path / "file").write_text("")
    code, _, err = command(model, tmp_path / "set", "--store", tmp_path / "file", "--device", "cpu")
    assert code == 1 and "file" in err


def start(*arguments: object, **rest: Any) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", "from featcache.cli import main; main()", "warm", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **rest}
    return subprocess.Popen(program, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("number", "devices"),
    [(signal.SIGINT, "cpu"), pytest.param(signal.SIGTERM, "cpu,cpu", marks=pytest.mark.soak)],
)
def test_a_signal_ends_the_command_cleanly(
    model: Path, tmp_path: Path, number: signal.Signals, devices: str
) -> None:
    images, store = photos(tmp_path / "set", 1500), tmp_path / "store"
    program = [
        sys.executable,
        "-c",
        "from featcache.cli import main; main()",
        "warm",
        str(model),
        str(images),
    ]
    program += ["--store", str(store), "--device", devices, "--batch-size", "4", "--json"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_entries(store, 8)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    doc = json.loads(out)
    assert doc["stopped"] == "interrupted" and doc["encoded"] >= 8
    assert doc["seen"] == doc["encoded"] + doc["cached"] + doc["shared"] + doc["unfinished"]
    assert_stored(store, doc["encoded"])


def assert_stored(path: Path, number: int) -> None:
    with FeatureStore.open(path, disk_bytes="512MiB") as store:
        disk = store.stats().disk
        assert disk is not None and disk.entries == number < 1500
        assert store.verify().is_clean


# A process a device


def job(model: Path, images: Path, store: Path, **settings: Any) -> Job:
    return Job(str(model), (str(images),), store, 512 << 20, WarmSettings(**settings))


def test_two_devices_do_it_together(model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 50), tmp_path / "store"
    (images / "bad.png").write_bytes(b"x")
    names = "\n".join(str(path) for path in sorted(images.iterdir()))
    arguments = [str(model), "-", "--store", str(store), "--devices", "cpu,cpu", "--json"]
    result = CliRunner().invoke(app, ["warm", *arguments], input=names)
    assert result.exit_code == 3, result.output
    doc = json.loads(result.stdout)
    assert (doc["seen"], doc["encoded"], doc["failed"], doc["unfinished"]) == (51, 50, 1, 0)
    assert doc["tower_calls"] >= 2 and "bad.png" in result.stderr
    assert_complete(model, images, store, 50)


def test_all_devices_stop_when_they_are_told_to(model: Path, tmp_path: Path) -> None:
    images, store, stop = photos(tmp_path / "set", 1500), tmp_path / "store", threading.Event()
    told: list[Progress] = []

    def listen(progress: Progress) -> None:
        told.append(progress)
        if progress.encoded >= 8:
            stop.set()

    report = run_on_devices(
        job(model, images, store, batch_size=4), ["cpu", "cpu"], Listeners(progress=listen), stop
    )
    assert report.stopped == "interrupted" and report.encoded >= told[-1].encoded >= 8
    assert report.seen == report.encoded + report.cached + report.shared + report.unfinished
    assert_stored(store, report.encoded)


def test_failures_of_all_devices_count_together(model: Path, tmp_path: Path) -> None:
    for n in range(300):
        (tmp_path / f"{n:03}.png").write_bytes(b"x")
    failures: list[Failure] = []
    report = run_on_devices(
        job(model, tmp_path, tmp_path / "store", max_failures=3),
        ["cpu", "cpu"],
        Listeners(failure=failures.append),
    )
    assert report.stopped == "too many failures" and 3 < len(failures) <= report.failed


def test_a_device_whose_process_dies_fails_the_run_after_the_others(model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 200), tmp_path / "store"
    victims: list[Any] = []

    def listen(progress: Progress) -> None:
        if progress.encoded >= 8 and not victims:
            victims.extend(multiprocessing.active_children())
            victims[0].kill()

    with pytest.raises(StoreError, match=r"1 of 2 processes failed: cpu: .*status -9"):
        run_on_devices(job(model, images, store, batch_size=4), ["cpu", "cpu"], Listeners(progress=listen))
    assert not multiprocessing.active_children()
    report = Run(model, images, store).report()
    assert report is not None and report["cached"] >= 100 and report["encoded"] + report["cached"] == 200
    assert_complete(model, images, store, 200)


def test_a_device_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"2 of 2 processes failed: cpu: .*no such folder"):
        run_on_devices(job(tmp_path / "none", tmp_path, tmp_path / "store"), ["cpu", "cpu"])
