"""Several processes, real signals and real kills; the command itself."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from models import build
from warm_forks import Forks, Run
from warm_helpers import encoded, photos

from featcache.cli import app
from featcache.engine.encoder import VisionEncoder
from featcache.engine.loading import load_model
from featcache.lease import Lease
from featcache.store import FeatureStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def forks(model: Path) -> Iterator[Forks]:
    with Forks(model) as forks:
        yield forks


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


def kill_until_done(forks: Forks, model: Path, folder: Path, kills: int, seed: int) -> None:
    images, store = photos(folder / "set", 150), folder / "store"
    (images / "twin.bmp").write_bytes(encoded(5, "BMP"))
    generator = random.Random(seed)
    for _ in range(kills):
        run = forks.start(images, store)
        time.sleep(generator.uniform(0.02, 0.7))
        run.kill()
    report = forks.start(images, store).wait()
    assert report is not None and report["failed"] == 0
    assert report["cached"] + report["encoded"] + report["duplicates"] == report["seen"] == 151
    assert_complete(model, images, store, 150)
    again = forks.start(images, store).wait()
    assert again is not None and again["cached"] == 151 and again["encoded"] == 0


def test_killed_runs_leave_a_whole_store_and_the_next_goes_on(
    forks: Forks, model: Path, tmp_path: Path
) -> None:
    kill_until_done(forks, model, tmp_path, kills=6, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_killed_twenty_times(forks: Forks, model: Path, tmp_path: Path, seed: int) -> None:
    kill_until_done(forks, model, tmp_path, kills=20, seed=seed)


def test_two_processes_share_the_work(forks: Forks, model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 160), tmp_path / "store"
    runs = [forks.start(images, store), forks.start(images, store)]
    reports = [report for run in runs if (report := run.wait()) is not None]
    assert len(reports) == 2
    assert sum(report["encoded"] for report in reports) == 160
    for report in reports:
        assert report["seen"] == report["cached"] + report["encoded"] + report["shared"] == 160
    assert_complete(model, images, store, 160)


def test_a_run_takes_over_from_one_that_is_killed(forks: Forks, model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 160), tmp_path / "store"
    killed = forks.start(images, store)
    other = forks.start(images, store)
    wait_for_entries(store, 20)
    killed.kill()
    report = other.wait()
    assert report is not None and report["failed"] == report["unfinished"] == 0
    assert report["cached"] + report["encoded"] + report["shared"] == 160
    assert_complete(model, images, store, 160)


def wait_for_entries(store: Path, number: int, timeout_s: float = 60) -> None:
    """Until the store on disk holds so many records. In a process of its own, so that it is opened once here."""
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


@pytest.mark.parametrize(("number", "devices"), [(signal.SIGINT, "cpu"), (signal.SIGTERM, "cpu,cpu")])
def test_a_signal_ends_a_run_cleanly(
    model: Path, tmp_path: Path, number: signal.Signals, devices: str
) -> None:
    images, store = photos(tmp_path / "set", 1500), tmp_path / "store"
    process = start(model, images, "--store", store, "--device", devices, "--batch-size", 4, "--json")
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
    with FeatureStore.open(store, disk_bytes="512MiB") as opened:
        disk = opened.stats().disk
        assert disk is not None and disk.entries == doc["encoded"] < 1500
        assert opened.verify().is_clean


def test_two_devices_do_it_together(model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 50), tmp_path / "store"
    (images / "bad.png").write_bytes(b"x")
    names = "\n".join(str(path) for path in sorted(images.iterdir()))
    process = start(model, "-", "--store", store, "--devices", "cpu,cpu", "--json", stdin=subprocess.PIPE)
    out, err = process.communicate(names, timeout=100)
    doc = json.loads(out)
    assert process.returncode == 3, err
    assert (doc["seen"], doc["encoded"], doc["failed"], doc["unfinished"]) == (51, 50, 1, 0)
    assert doc["tower_calls"] >= 2 and "bad.png" in err
    assert_complete(model, images, store, 50)


def test_a_device_whose_process_dies_fails_the_run(model: Path, tmp_path: Path) -> None:
    images, store = photos(tmp_path / "set", 1500), tmp_path / "store"
    process = start(model, images, "--store", store, "--devices", "cpu,cpu", "--batch-size", 4)
    try:
        wait_for_entries(store, 8)
        [victim, *_] = sorted(workers_of(process.pid))
        os.kill(victim, signal.SIGKILL)
        os.kill(process.pid, signal.SIGINT)  # the other one needn't do all the rest
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and "ended with status -9" in err
    assert_runs_are_over(victim)


def workers_of(pid: int) -> list[int]:
    """The processes that a run has started, but for Python's resource tracker."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def assert_runs_are_over(pid: int) -> None:
    Run(pid, Path("none")).wait()
