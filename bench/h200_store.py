"""The store on a CUDA device: first that it is right, then its figures, each beside its baseline.

PYTHONPATH=. python bench/h200_store.py [--device cuda|cpu] [--only NAME ...] [--json FILE]

It needs torch, numpy, xxhash, lmdb and blake3, and nothing else that featcache depends on. Where the last two
are missing and can't be installed, bring their wheels:

python -m pip install -q --no-index --no-deps --target site .whl/lmdb-*.whl .whl/blake3-*.whl
PYTHONPATH=site:. python bench/h200_store.py --json store.json

With --device cpu the parts that need no streams run on the host, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from featcache.copies import CudaCopies
from featcache.features import Features, Layout
from featcache.store import FeatureStore

MIB = 1 << 20
GIB = 1 << 30
HIDDEN = 2048
DEVICE: torch.device = torch.device("cpu")
Row = dict[str, Any]


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", metavar="NAME", help=", ".join([*CHECKS, *FIGURES]))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    DEVICE = torch.device(options.device)
    if DEVICE.type == "cuda":
        DEVICE = torch.device("cuda", DEVICE.index or 0)
        torch.cuda.set_device(DEVICE)
    else:
        torch.set_num_threads(1)
    results = {"machine": machine(), "checks": {}, "figures": []}
    print(json.dumps(results["machine"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            if wanted(name, options.only):
                results["checks"][name] = attempt(name, check, Path(folder) / name)
        for name, figure in FIGURES.items():
            if wanted(name, options.only) and DEVICE.type == "cuda":
                rows: list[Row] = []
                attempt(name, lambda place: rows.extend(figure(place)), Path(folder) / name)  # noqa: B023
                results["figures"] += rows
                for row in rows:
                    print_row(row)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    is_right = all(verdict == "ok" for verdict in results["checks"].values())
    missed = [row["figure"] for row in results["figures"] if not row["ok"]]
    print(f"checks {'ok' if is_right else 'FAILED'}; figures missed: {', '.join(missed) or 'none'}")
    sys.exit(not is_right or bool(missed))


def wanted(name: str, only: Sequence[str] | None) -> bool:
    return not only or name in only


def attempt(name: str, work: Callable[[Path], object], place: Path) -> str:
    place.mkdir()
    begin = time.perf_counter()
    try:
        work(place)
        synchronize()
        verdict = "ok"
    except Skipped as exc:
        verdict = "ok"
        print(f"skip {name}: {exc}", flush=True)
        return verdict
    except BaseException:
        traceback.print_exc()
        verdict = "failed"
    print(f"{verdict:<6} {name} ({time.perf_counter() - begin:.2f} s)", flush=True)
    return verdict


class Skipped(Exception):  # noqa: N818
    """It needs a CUDA device."""


def need_cuda() -> None:
    if DEVICE.type != "cuda":
        raise Skipped("it needs a CUDA device")


def machine() -> dict[str, Any]:
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%F"),
    }


def print_row(row: Row) -> None:
    detail = ", ".join(f"{name} {value}" for name, value in row["detail"].items())
    verdict = "ok  " if row["ok"] else "MISS"
    print(f"  {verdict} {row['figure']}: {row['value']} (target {row['target']}); {detail}", flush=True)


def row_of(figure: str, value: float, target: str, is_ok: bool, **detail: object) -> Row:
    return {"figure": figure, "value": round(value, 4), "target": target, "ok": bool(is_ok), "detail": detail}


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def opened(path: Path | None, **settings: Any) -> Iterator[FeatureStore]:
    given: dict[str, Any] = {"host_bytes": 256 * MIB, "disk_bytes": 2 * GIB, "device_bytes": 64 * MIB}
    device = str(DEVICE) if DEVICE.type == "cuda" else None
    with FeatureStore.open(path, device=device, **{**given, **settings}) as store:
        yield store
        synchronize()
        store.flush()
        settle_down(store)
        assert store.check() == [], store.check()


def settle_down(store: FeatureStore) -> None:
    """Wait until the copies to the device have given up their holds too."""
    deadline = time.monotonic() + 30
    while store._stack.host.stats().held_bytes and time.monotonic() < deadline:
        time.sleep(0.001)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def features_of(number: int, tokens: int = 64, dtype: torch.dtype = torch.bfloat16) -> Features:
    """Features on DEVICE whose every value tells the number; made on the current stream."""
    rows = torch.full((tokens, HIDDEN), number % 251, dtype=torch.float32, device=DEVICE)
    rows += torch.arange(tokens, dtype=torch.float32, device=DEVICE)[:, None] % 5
    return Features({"rows": rows.to(dtype)}, Layout(tokens, 640, 480), key_of(number + 7))


def differs(features: Features, number: int) -> torch.Tensor:
    """() bool on DEVICE, computed on the current stream: nothing waits for it."""
    expected = features_of(number, features.layout.num_tokens, features.rows.dtype)
    return (features.rows != expected.rows).any()


def assert_right(store: FeatureStore, number: int, tier: str) -> None:
    lease = store.get(key_of(number))
    assert lease is not None, f"{number} is lost"
    assert lease.tier == tier, f"{number} came from {lease.tier}, not {tier}"
    assert lease.features.rows.device == DEVICE
    assert not differs(lease.features, number).item(), f"{number} from {tier} is wrong"
    assert lease.features.fingerprint == key_of(number + 7)
    lease.release()


def memory_tier() -> str:
    return "device" if DEVICE.type == "cuda" else "host"


def empty_device(store: FeatureStore) -> None:
    if store._stack.device is not None:
        store._stack.device.clear()


# Whether it is right


def every_tier(place: Path) -> None:
    with opened(place / "store") as store:
        for number in range(20):
            store.put(key_of(number), features_of(number))
            assert_right(store, number, memory_tier())
        store.flush()
        if DEVICE.type == "cuda":
            assert store._stack.host._arena.buffer.is_pinned()
            empty_device(store)
            for number in range(20):
                assert_right(store, number, "host")
                assert_right(store, number, "device")
        empty_device(store)
        settle_down(store)
        store._stack.host.clear()
        for number in range(20):
            assert_right(store, number, "disk")
            assert_right(store, number, memory_tier())
    with opened(place / "store") as store:
        for number in range(20):
            assert_right(store, number, "disk")
        assert store.verify().is_clean


def every_dtype(place: Path) -> None:
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    with opened(place / "store") as store:
        tensors = {
            f"t{n}": torch.randn(37, 3 + n, device=DEVICE).mul(4).to(dtype) for n, dtype in enumerate(dtypes)
        }
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        store.put(key_of(1), Features(tensors, Layout(37, 6, 7)))
        store.flush()
        for tier in (memory_tier(), "host", "disk"):
            settle_down(store)
            if tier != "device":
                empty_device(store)
            if tier == "disk":
                store._stack.host.clear()
            lease = store.get(key_of(1))
            assert lease is not None and lease.tier == tier, lease
            for name, tensor in expected.items():
                got = lease.features.tensors[name]
                assert got.dtype == tensor.dtype and got.device == DEVICE
                assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), (name, lease.tier)
            lease.release()


def view_of_a_batch(place: Path) -> None:
    with opened(None) as store:
        batch = torch.cat([features_of(number).rows for number in range(8)])
        for number in range(8):
            rows = batch[64 * number : 64 * (number + 1)]
            store.put(key_of(number), Features({"rows": rows}, Layout(64, 640, 480), key_of(number + 7)))
        synchronize()
        store.flush()
        batch.zero_()
        for number in range(8):
            assert_right(store, number, memory_tier())
        assert store.check() == []  # and no entry pins the batch


def made_on_a_side_stream(place: Path) -> None:
    """Put on the stream that makes them, found on another while they are still being made."""
    need_cuda()
    with opened(place / "store") as store:
        side, bad = torch.cuda.Stream(), torch.zeros((), dtype=torch.bool, device=DEVICE)
        for number in range(50):
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                store.put(key_of(number), features_of(number))
            lease = store.get(key_of(number))
            assert lease is not None
            bad |= differs(lease.features, number)
            lease.release()
        assert not bad.item()
        store.flush()
        empty_device(store)
        for number in range(50):
            assert_right(store, number, "host")


def read_after_its_eviction(place: Path) -> None:
    """Released, evicted and its memory asked for again while a stream still has to read it."""
    need_cuda()
    with opened(None, device_bytes=2 * MIB) as store:
        side, bad = torch.cuda.Stream(), torch.zeros((), dtype=torch.bool, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        for number in range(0, 1000, 10):
            store.put(key_of(number), features_of(number))
            with torch.cuda.stream(side):
                lease = store.get(key_of(number))
                assert lease is not None
                torch.cuda._sleep(1_000_000)
                bad |= differs(lease.features, number)
                lease.release()
                del lease
            for other in range(number + 1, number + 10):
                store.put(key_of(other), features_of(other))
        synchronize()
        assert not bad.item()
        stats = store.stats().device
        assert stats is not None and stats.evicted > 900


def lease_under_pressure(place: Path) -> None:
    with opened(place / "store", device_bytes=4 * MIB, host_bytes=8 * MIB) as store:
        store.put(key_of(0), features_of(0))
        store.flush()
        lease = store.get(key_of(0))
        assert lease is not None
        for number in range(1, 1200):
            store.put(key_of(number), features_of(number))
            if number % 100 == 0:
                store.flush()
        assert not differs(lease.features, 0).item()
        lease.release()
        stats = store.stats()
        for tier in (stats.device, stats.host):
            assert tier is None or tier.used_bytes <= tier.max_bytes


def device_memory_is_bounded(place: Path) -> None:
    need_cuda()
    with opened(None, device_bytes=64 * MIB) as store:
        synchronize()
        before = torch.cuda.memory_allocated()
        for number in range(2000):
            store.put(key_of(number), features_of(number))
            lease = store.get(key_of(number // 2))
            if lease is not None:
                lease.release()
                del lease
        store.flush()
        settle_down(store)
        synchronize()
        grown = torch.cuda.memory_allocated() - before
        assert grown <= 66 * MIB, f"{grown / MIB:.0f} MiB allocated for 64 MiB of features"


def small_arena_in_a_hurry(place: Path) -> None:
    """Blocks are used again at once: none may be while a copy still reads or writes it."""
    with opened(place / "store", device_bytes=2 * MIB, host_bytes=6 * MIB) as store:
        chance, bad = random.Random(1), torch.zeros((), dtype=torch.bool, device=DEVICE)

        def compute(keys: Sequence[bytes]) -> Mapping[Any, Any]:
            numbers = [int.from_bytes(key, "big") for key in keys]
            return {key: features_of(n, 16 + n % 100) for key, n in zip(keys, numbers, strict=True)}

        for _ in range(3000):
            numbers = [chance.randrange(80) for _ in range(chance.randint(1, 4))]
            for n, lease in zip(
                numbers, store.get_or_compute([key_of(n) for n in numbers], compute), strict=True
            ):
                bad |= differs(lease.features, n)
                lease.release()
        assert not bad.item()
        counts = store.stats().counts
        assert counts["hits_host"] + counts["hits_disk"] > 100, counts


def threads_with_streams(place: Path) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)

        def compute(keys: Sequence[bytes]) -> Mapping[Any, Any]:
            return {key: features_of(int.from_bytes(key, "big")) for key in keys}

        bad = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for _ in range(200):
            number = chance.randrange(100)
            (lease,) = store.get_or_compute([key_of(number)], compute)
            bad |= differs(lease.features, number)
            lease.release()
        if bad.item():
            wrong.append(seed)

    def on_a_stream(seed: int) -> None:
        if DEVICE.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                work(seed)
        else:
            work(seed)

    with opened(place / "store", device_bytes=8 * MIB, host_bytes=16 * MIB) as store:
        threads = [threading.Thread(target=on_a_stream, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def nothing_waits(place: Path) -> None:
    """While the compute stream is busy: put and get return, and copies in both directions are done."""
    need_cuda()
    with opened(None, device_bytes=0) as store:
        store.put(key_of(1), features_of(1, 2048))
        made = features_of(2, 2048)
        store.flush()
        lease = store.get(key_of(1))  # makes the copy's memory and kernels known
        assert lease is not None
        lease.release()
        synchronize()
        made_before = torch.cuda.current_stream().record_event()
        torch.cuda._sleep(2_000_000_000)  # about a second
        busy = torch.cuda.current_stream().record_event()
        begin = time.perf_counter()
        late = features_of(3, 2048)
        store.put(key_of(3), late)
        lease = store.get(key_of(1))
        assert lease is not None
        took = time.perf_counter() - begin
        assert not busy.query(), "the sleep is too short for this check"
        copies = store._stack._copies
        assert isinstance(copies, CudaCopies)
        with torch.cuda.stream(copies._in_stream):
            arrived = copies._in_stream.record_event()
        deadline = time.monotonic() + 0.5
        while not arrived.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert arrived.query() and not busy.query(), "the copy to the device waits for the compute stream"
        assert took < 0.1, f"put and get took {1e3 * took:.1f} ms beside a busy stream"
        assert made_before.query()
        assert not differs(lease.features, 1).item()
        lease.release()
        store.put(key_of(2), made)
        store.flush()
        assert_right(store, 3, "host")


# Figures


def rates(place: Path, total: int = 2 * GIB) -> list[Row]:
    """Copies through the store, beside the same bytes between the same kinds of memory by copy_ alone."""
    rows = []
    for nbytes in (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        count = total // nbytes
        tokens = nbytes // (2 * HIDDEN)
        with opened(None, host_bytes=total + GIB // 4, device_bytes=GIB) as store:
            made = [features_of(n, tokens) for n in range(min(count, GIB // nbytes))]
            pinned = store._stack.host._arena.buffer
            raw_out, raw_in, out, into = [], [], [], []
            for turn in range(3):
                raw_out.append(raw(pinned, made, count, nbytes, to_host=True))
                raw_in.append(raw(pinned, made, count, nbytes, to_host=False))
                out.append(store_out(store, made, count, turn))
                into.append(store_in(store, count, turn))
                forget(store)
            del made
        for name, ours, baseline in (("D2H", out, raw_out), ("H2D", into, raw_in)):
            ratio = min(baseline) / min(ours)
            rows.append(
                row_of(
                    f"{name} through the store, {nbytes // MIB} MiB a record: of the raw pinned rate",
                    ratio,
                    ">= 0.95" if nbytes >= 4 * MIB else "-",
                    ratio >= 0.95 or nbytes < 4 * MIB,
                    gb_s=round(total / min(ours) / 1e9, 1),
                    raw_gb_s=round(total / min(baseline) / 1e9, 1),
                    us_a_record=round(1e6 * min(ours) / count, 1),
                )
            )
    return rows


def raw(pinned: torch.Tensor, made: Sequence[Features], count: int, nbytes: int, *, to_host: bool) -> float:
    """Seconds for as many copies by torch alone, on one stream, as fast as they can be given."""
    slots = [pinned[i * nbytes : (i + 1) * nbytes] for i in range(count)]
    flat = [features.rows.reshape(-1).view(torch.uint8) for features in made]
    pairs = [(slots[i], flat[i % len(flat)]) for i in range(count)]
    stream = torch.cuda.Stream()
    synchronize()
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        for slot, tensor in pairs:
            if to_host:
                slot.copy_(tensor, non_blocking=True)
            else:
                tensor.copy_(slot, non_blocking=True)
        stream.synchronize()
    return time.perf_counter() - begin


def store_out(store: FeatureStore, made: Sequence[Features], count: int, turn: int) -> float:
    """Seconds from the first put until every record is in the host tier."""
    keys = [key_of(turn * count + i) for i in range(count)]
    synchronize()
    begin = time.perf_counter()
    for i, key in enumerate(keys):
        store.put(key, made[i % len(made)])
    store.flush()
    took = time.perf_counter() - begin
    stats = store.stats().host
    assert stats is not None and stats.num_entries == count, stats
    return took


def store_in(store: FeatureStore, count: int, turn: int) -> float:
    """Seconds from the first get until every record is on the device, all of them host hits."""
    empty_device(store)
    keys = [key_of(turn * count + i) for i in range(count)]
    before = store.stats().counts["hits_host"]
    synchronize()
    begin = time.perf_counter()
    for key in keys:
        lease = store.get(key)
        assert lease is not None
        lease.release()
    torch.cuda.current_stream().synchronize()
    took = time.perf_counter() - begin
    assert store.stats().counts["hits_host"] - before == count
    settle_down(store)
    return took


def forget(store: FeatureStore) -> None:
    synchronize()
    settle_down(store)
    empty_device(store)
    store._stack.host.clear()


def beside_matmul(place: Path) -> list[Row]:
    """A loop of matrix products alone, and while the store copies out and in as fast as it can."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    b = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    product = torch.empty_like(a)
    with opened(None, host_bytes=2 * GIB, device_bytes=0) as store:
        made = [features_of(n, 16 * MIB // (2 * HIDDEN)) for n in range(16)]
        resident = [key_of(1_000_000 + n) for n in range(16)]
        for key, features in zip(resident, made, strict=True):
            store.put(key, features)
        store.flush()
        alone, beside, moved = [], [], []
        for turn in range(8):
            alone.append(matmuls(a, b, product))
            stop = threading.Event()
            copied = [0, 0]
            mover = threading.Thread(target=copy_both_ways, args=(store, made, resident, stop, copied, turn))
            mover.start()
            while copied[0] < 128 * MIB:  # until copying is in full swing
                time.sleep(0.0005)
            at_start = list(copied)
            beside.append(matmuls(a, b, product))
            moved.append([now - then for now, then in zip(copied, at_start, strict=True)])
            stop.set()
            mover.join()
        forget(store)
    slower = statistics.median(beside) / statistics.median(alone) - 1
    out, into = (statistics.median(pair[way] for pair in moved) for way in (0, 1))
    return [
        row_of(
            "matrix products beside the store's copies: slower than alone by",
            slower,
            "<= 0.02",
            slower <= 0.02 and min(out, into) >= GIB,
            alone_ms=round(statistics.median(alone), 2),
            beside_ms=round(statistics.median(beside), 2),
            out_gib=round(out / GIB, 2),
            in_gib=round(into / GIB, 2),
        )
    ]


def matmuls(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, count: int = 600) -> float:
    """Milliseconds on the device of products that are queued ahead."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(10):
        torch.mm(a, b, out=product)
    begin.record()
    for _ in range(count):
        torch.mm(a, b, out=product)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_both_ways(
    store: FeatureStore,
    made: Sequence[Features],
    resident: Sequence[bytes],
    stop: threading.Event,
    copied: list[int],
    turn: int,
) -> None:
    """Put and get 16 MiB in turns, never more than a few ahead of the copies."""
    number = turn * 1_000_000_000
    with torch.cuda.stream(torch.cuda.Stream()):
        while not stop.is_set():
            for features, key in zip(made, resident, strict=True):
                store.put(key_of(2_000_000 + number), features)
                number += 1
                lease = store.get(key)
                if lease is not None:
                    lease.release()
                    copied[1] += features.nbytes
                copied[0] += features.nbytes
            store.flush()
            torch.cuda.current_stream().synchronize()


def handing_over(place: Path) -> list[Row]:
    """54 MB of features, as 52 tiles of InternVL have: what the caller waits for."""
    with opened(place / "store", host_bytes=4 * GIB, disk_bytes=8 * GIB, queue_bytes=GIB) as store:
        made = [features_of(n, 13_312) for n in range(4)]
        plain, puts, landed = [], [], []
        for turn in range(24):
            features = made[turn % 4]
            synchronize()
            begin = time.perf_counter()
            host = features.rows.cpu()
            plain.append(time.perf_counter() - begin)
            del host
            begin = time.perf_counter()
            store.put(key_of(turn), features)
            puts.append(time.perf_counter() - begin)
            store._stack._copies.drain()
            landed.append(time.perf_counter() - begin)
        store.flush()
    cpu_ms, put_ms = 1e3 * statistics.median(plain[4:]), 1e3 * statistics.median(puts[4:])
    return [
        row_of(
            "handing over 54 MB by put(): ms of the caller's time",
            put_ms,
            "< 1",
            put_ms < 1,
            cpu_ms=round(cpu_ms, 2),
            times_faster=round(cpu_ms / put_ms, 1),
            put_worst_ms=round(1e3 * max(puts[4:]), 3),
            in_host_tier_after_ms=round(1e3 * statistics.median(landed[4:]), 2),
        )
    ]


def hits(place: Path) -> list[Row]:
    """What a hit costs, 13.6 MB (13 tiles): of the caller's time, and until the device can use it."""
    rows = []
    with opened(place / "store", host_bytes=2 * GIB, device_bytes=GIB) as store:
        for n in range(32):
            store.put(key_of(n), features_of(n, 3328), wait=True)
        store.flush()
        for tier in ("device", "host", "disk"):
            calls, ready = [], []
            for _ in range(3):
                for n in range(32):
                    if tier != "device":
                        empty_device(store)
                    if tier == "disk":
                        settle_down(store)
                        store._stack.host.clear()
                    synchronize()
                    begin = time.perf_counter()
                    lease = store.get(key_of(n))
                    calls.append(time.perf_counter() - begin)
                    torch.cuda.current_stream().synchronize()
                    ready.append(time.perf_counter() - begin)
                    assert lease is not None and lease.tier == tier, lease
                    lease.release()
            rows.append(
                row_of(
                    f"{tier} hit of 13.6 MB: ms until the device can use it",
                    1e3 * statistics.median(ready[32:]),
                    "-",
                    True,
                    call_us=round(1e6 * statistics.median(calls[32:]), 1),
                )
            )
    return rows


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        every_tier,
        every_dtype,
        view_of_a_batch,
        made_on_a_side_stream,
        read_after_its_eviction,
        lease_under_pressure,
        device_memory_is_bounded,
        small_arena_in_a_hurry,
        threads_with_streams,
        nothing_waits,
    )
}
FIGURES: dict[str, Callable[[Path], list[Row]]] = {
    figure.__name__: figure for figure in (rates, beside_matmul, handing_over, hits)
}

if __name__ == "__main__":
    main()
