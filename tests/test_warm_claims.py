"""Claims between runs: real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from featcache.errors import StoreClosedError, StoreError
from featcache.tiers.claims import Claim, Claims

KEYS = [bytes([n]) * 32 for n in range(10)]

HOLDER = """
import sys
from pathlib import Path
from featcache.tiers.claims import Claims
claims = Claims.open(Path(sys.argv[1]), ttl_s=float(sys.argv[2]))
for n in range(5):
    claims.take(bytes([n]) * 32)
print("taken", flush=True)
sys.stdin.read()
"""


def holder(store: Path, ttl_s: float = 30.0) -> subprocess.Popen[bytes]:
    """Another process, with claims on KEYS[:5]."""
    command = [sys.executable, "-c", HOLDER, str(store), str(ttl_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"taken\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_a_key_has_one_owner(tmp_path: Path) -> None:
    with Claims.open(tmp_path) as one, Claims.open(tmp_path) as two:
        assert one.take(KEYS[0]) is Claim.NEW
        assert one.take(KEYS[0]) is Claim.OWN
        assert two.take(KEYS[0]) is Claim.TAKEN
        assert two.is_taken(KEYS[0]) and not one.is_taken(KEYS[0]) and not two.is_taken(KEYS[1])
        assert one.is_own(KEYS[0]) and not two.is_own(KEYS[0]) and not two.is_own(KEYS[1])
        one.give_back([KEYS[0], KEYS[1]])
        assert two.take(KEYS[0]) is Claim.NEW
        one.give_back([KEYS[0]])  # it isn't one's any more
        assert one.take(KEYS[0]) is Claim.TAKEN


def test_closing_gives_all_up_and_leaves_nothing(tmp_path: Path) -> None:
    one = Claims.open(tmp_path)
    with Claims.open(tmp_path) as two:
        assert one.take(KEYS[0]) is Claim.NEW
        one.close()
        one.close()
        assert two.take(KEYS[0]) is Claim.NEW
        with pytest.raises(StoreClosedError):
            one.take(KEYS[1])
    with Claims.open(tmp_path) as three, three._shared.env.begin() as txn:
        assert txn.stat(three._shared.claims)["entries"] == 0
        assert txn.stat(three._shared.owners)["entries"] == 1


def test_threads_of_many_runs_share_each_key_out_once(tmp_path: Path) -> None:
    taken: Counter[bytes] = Counter()
    lock = threading.Lock()
    keys = [os.urandom(32) for _ in range(200)]

    def work(claims: Claims) -> None:
        for key in keys:
            if claims.take(key) is Claim.NEW:
                with lock:
                    taken[key] += 1

    runs = [Claims.open(tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(run,)) for run in runs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs:
        run.close()
    assert len(taken) == 200 and set(taken.values()) == {1}


def test_a_killed_owner_loses_its_claims_at_once(tmp_path: Path) -> None:
    other = holder(tmp_path)
    try:
        with Claims.open(tmp_path) as claims:
            assert claims.take(KEYS[0]) is Claim.TAKEN
            other.kill()  # a zombie until waited for: dead all the same
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
            assert claims.take(KEYS[0]) is Claim.NEW
            other.wait()
            assert claims.take(KEYS[1]) is Claim.NEW
    finally:
        end(other)


def test_an_owner_that_stands_still_loses_its_claims_after_the_limit(tmp_path: Path) -> None:
    other = holder(tmp_path, ttl_s=0.5)
    try:
        os.kill(other.pid, signal.SIGSTOP)
        with Claims.open(tmp_path) as claims:
            waited = threading.Event()
            for _ in range(100):
                if claims.take(KEYS[0]) is Claim.NEW:
                    break
                waited.wait(0.05)
            assert claims.take(KEYS[0]) is Claim.OWN
    finally:
        end(other)


def test_an_owner_that_works_on_keeps_its_claims_beyond_the_limit(tmp_path: Path) -> None:
    other = holder(tmp_path, ttl_s=0.3)
    try:
        with Claims.open(tmp_path) as claims:
            for _ in range(8):
                assert claims.take(KEYS[0]) is Claim.TAKEN
                threading.Event().wait(0.1)
    finally:
        end(other)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Claims.open(tmp_path / "file")
