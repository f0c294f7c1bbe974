"""The disk tier's figures, each beside its baseline in the same run. Used by bench/store.py.

python bench/store_disk.py [reads writes turnover hits metadata] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy

from featcache.eviction import make_policy
from featcache.features import Header, Layout, TensorSpec
from featcache.tiers.disk import DiskTier, Record
from featcache.tiers.writer import DiskWriter

MIB = 1 << 20
HIDDEN = 2048  # of bf16: rows of 4 KiB
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--folder", help="where the stores are made: the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.figures) - FIGURES.keys():
        parser.error(f"no such figure: {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    rows = disk_figures(options.folder, options.figures or list(FIGURES))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{'ok  ' if row['ok'] else 'MISS'} {row['figure']}: {row['value']} (target {row['target']})")
        print("      " + ", ".join(f"{name} {value}" for name, value in row["detail"].items()))


def disk_figures(folder: str | None = None, names: Sequence[str] | None = None) -> list[Row]:
    """Rows of {figure, value, target, ok, detail}; the stores are made in `folder`, and deleted."""
    rows: list[Row] = []
    for name in names or FIGURES:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            rows += FIGURES[name](Path(place))
    return rows


def row_of(figure: str, value: float, target: str, is_ok: bool, **detail: object) -> Row:
    return {"figure": figure, "value": round(value, 3), "target": target, "ok": bool(is_ok), "detail": detail}


def header_of(number: int, nbytes: int) -> Header:
    rows = max(1, nbytes // (2 * HIDDEN))
    specs = {"rows": TensorSpec("BF16", (rows, HIDDEN))}
    return Header.of(number.to_bytes(32, "big"), b"\x01" * 32, Layout(rows, 640, 480), specs)


def record_of(number: int, nbytes: int) -> Record:
    header = header_of(number, nbytes)
    data = numpy.random.default_rng(number).integers(0, 256, header.data_bytes, numpy.uint8)
    return header, [data.data]


# Reads: out of a warm map into a host buffer, checksum included, against memcpy


def reads(place: Path, total: int = 256 * MIB, rounds: int = 7) -> list[Row]:
    return [read_row(place / str(size), size, total, rounds) for size in (MIB, 4 * MIB, 13 * MIB)]


def read_row(path: Path, size: int, total: int, rounds: int) -> Row:
    tier = DiskTier.open(path, max_bytes=2 * total)
    headers = [header_of(n, size) for n in range(total // size)]
    sources = [record_of(n, size)[1][0] for n in range(len(headers))]
    for header, source in zip(headers, sources, strict=True):
        tier.write([(header, [source])])
    buffers = [numpy.ones(size, numpy.uint8) for _ in headers]  # touched, so that no page is missing
    order = list(range(len(headers)))
    copying, reading = [], []
    for _ in range(rounds):
        random.shuffle(order)
        copying.append(seconds(lambda: [numpy.copyto(buffers[n], sources[n]) for n in order]))
        reading.append(seconds(lambda: [read_into(tier, headers[n].key, buffers[n]) for n in order]))
    assert tier.stats().hits == rounds * len(headers) and tier.stats().damaged == 0
    tier.close()
    copied, read = total / min(copying) / 1e9, total / min(reading) / 1e9
    return row_of(
        f"read from a warm map, {size // MIB} MiB a record, checksum included / memcpy",
        read / copied,
        ">= 0.5",
        read >= 0.5 * copied,
        read_gb_s=round(read, 2),
        memcpy_gb_s=round(copied, 2),
        in_place_xxh3_gb_s=round(hash_rate(sources), 2),
    )


def read_into(tier: DiskTier, key: bytes, buffer: Any) -> None:
    tier.read(key, lambda header: buffer.data)


def hash_rate(sources: Sequence[Any]) -> float:
    import xxhash

    took = min(seconds(lambda: [xxhash.xxh3_128(source).digest() for source in sources]) for _ in range(3))
    return float(sum(len(source) for source in sources) / took / 1e9)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Writes: through the writer's queue, against a bare loop of LMDB puts of the same values, batches and sync


def writes(place: Path, total: int = 512 * MIB, rounds: int = 4) -> list[Row]:
    return [
        write_row(place, name, sizes, total, rounds, sync)
        for sync in (True, False)
        for name, sizes in [("1 MiB", [MIB]), ("4 MiB", [4 * MIB]), ("0.25-14 MiB", mixed_sizes(64))]
    ]


def mixed_sizes(count: int) -> list[int]:
    rng = random.Random(5)
    return [rng.randint(MIB // 4, 14 * MIB) for _ in range(count)]


def write_row(place: Path, name: str, sizes: Sequence[int], total: int, rounds: int, sync: bool) -> Row:
    pool = [record_of(n, size) for n, size in enumerate(sizes * (1 if len(sizes) > 1 else 16))]
    numbers: list[int] = []
    while sum(pool[n][0].data_bytes for n in numbers) < total:
        numbers.append(len(numbers) % len(pool))
    ours: list[float] = []
    bare: list[float] = []
    for turn in range(rounds):
        both = [(bare, bare_puts), (ours, written_behind)]
        for took, write in both if turn % 2 else both[::-1]:  # disks are slower after a burst
            os.sync()
            took.append(write(place / f"{write.__name__}-{turn}", pool, numbers, sync))
            empty(place)
    nbytes = sum(pool[n][0].data_bytes for n in numbers)
    rate, bare_rate = nbytes / statistics.median(ours) / 1e9, nbytes / statistics.median(bare) / 1e9
    return row_of(
        f"write-behind, {name} a record, {'synced commits' if sync else 'sync off'} / bare LMDB puts",
        rate / bare_rate,
        ">= 0.8",
        rate >= 0.8 * bare_rate,
        write_behind_gb_s=round(rate, 3),
        bare_gb_s=round(bare_rate, 3),
    )


def written_behind(path: Path, pool: Sequence[Record], numbers: Sequence[int], sync: bool) -> float:
    tier = DiskTier.open(path, max_bytes=4 << 30, sync=sync)
    writer = DiskWriter(tier, max_bytes=256 * MIB)
    headers = [renamed(pool[n][0], number) for number, n in enumerate(numbers)]

    def work() -> None:
        for header, n in zip(headers, numbers, strict=True):
            writer.submit(header, pool[n][1], lambda stored: None, wait=True)
        writer.flush()

    took = seconds(work)
    assert tier.stats().entries == len(numbers)
    writer.close()
    tier.close()
    return took


def bare_puts(path: Path, pool: Sequence[Record], numbers: Sequence[int], sync: bool) -> float:
    """Whole values, no checksum, no metadata, no budget; one transaction for each 64 MiB, as ours."""
    path.mkdir(parents=True)
    env = lmdb.open(str(path), map_size=8 << 30, sync=sync, metasync=False, readahead=False, meminit=False)

    def work() -> None:
        batch: list[int] = []
        for number in range(len(numbers)):
            batch.append(number)
            size = sum(pool[numbers[b]][0].data_bytes for b in batch)
            if size >= 64 * MIB or number == len(numbers) - 1:
                with env.begin(write=True) as txn:
                    for b in batch:
                        txn.put(b.to_bytes(32, "big"), pool[numbers[b]][1][0])
                batch = []
        env.sync(True)

    took = seconds(work)
    env.close()
    return took


def renamed(header: Header, number: int) -> Header:
    return Header.of(number.to_bytes(32, "big"), header.fingerprint, header.layout, header.specs)


def empty(place: Path) -> None:
    for file in sorted(place.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


# Turnover: the budget written over twenty times with records of all sizes


def turnover(place: Path, budget: int = 512 * MIB, times: int = 20) -> list[Row]:
    tier = DiskTier.open(place / "store", max_bytes=budget)
    pool = [record_of(n, size) for n, size in enumerate(mixed_sizes(64))]
    took, written, number, largest = [], 0, 1 << 32, 0
    rng = random.Random(2)
    while written < times * budget:
        header, pieces = pool[rng.randrange(len(pool))]
        record = [(renamed(header, number), pieces)]
        took.append(seconds(lambda record=record: tier.write(record)) / header.data_bytes * MIB)  # type: ignore[misc]
        number, written = number + 1, written + header.data_bytes
        largest = max(largest, (place / "store" / "data.mdb").stat().st_size)
    held = tier.stats().data_bytes
    assert tier.check() == [] and tier.stats().dropped == 0
    tier.close()
    fresh = len(took) // times  # the first time that the budget is filled
    p99 = [float(numpy.percentile(part, 99)) * 1e3 for part in (took[:fresh], took[fresh:])]
    p50 = [float(numpy.percentile(part, 50)) * 1e3 for part in (took[:fresh], took[fresh:])]
    return [
        row_of(
            f"data file after {times} x the budget, 0.25-14 MiB a record / budget",
            largest / budget,
            "<= 1.15",
            largest <= 1.15 * budget,
            budget_mib=budget // MIB,
            file_mib=largest // MIB,
            features_held_mib=held // MIB,
        ),
        row_of(
            "p99 of a put (synced) per MiB, full store / fresh store",
            p99[1] / p99[0],
            "<= 3",
            p99[1] <= 3 * p99[0],
            p99_ms_per_mib=[round(x, 2) for x in p99],
            p50_ms_per_mib=[round(x, 2) for x in p50],
        ),
    ]


# Hit ratios, against the authors' simulator


def hits(place: Path) -> list[Row]:
    return [
        hit_row(name, trace, int(objects * share), share)
        for name, trace, objects in traces()
        for share in (0.01, 0.1, 0.3)
    ]


def traces(length: int = 300_000, objects: int = 20_000) -> Iterator[tuple[str, list[int], int]]:
    rng = numpy.random.default_rng(0)
    weights = 1 / numpy.arange(1, objects + 1) ** 0.9
    zipf = rng.choice(objects, length, p=weights / weights.sum())
    yield "Zipf 0.9", zipf.tolist(), objects
    scanned: list[int] = []
    for n, part in enumerate(numpy.array_split(zipf, 30)):
        scanned += part.tolist()
        scanned += range(objects + n * 3_000, objects + (n + 1) * 3_000)
    yield "Zipf 0.9 + scans", scanned, objects
    yield "loop", list(range(objects)) * (length // objects), objects


def hit_row(name: str, trace: Sequence[int], capacity: int, share: float) -> Row:
    ours = {policy: hit_ratio(policy, trace, capacity) for policy in ("s3fifo", "lru")}
    theirs = simulated("S3FIFO", trace, capacity), simulated("LRU", trace, capacity)
    value = 100 * (ours["s3fifo"] - theirs[0])
    ok = abs(value) <= 1 and ours["s3fifo"] >= ours["lru"] - 0.02 and abs(ours["lru"] - theirs[1]) <= 0.001
    return row_of(
        f"S3-FIFO's hit ratio less the simulator's, in points: {name}, room for {share:.0%}",
        value,
        "within 1; >= LRU - 2",
        ok,
        s3fifo=round(100 * ours["s3fifo"], 2),
        simulator=round(100 * theirs[0], 2),
        lru=round(100 * ours["lru"], 2),
        simulator_lru=round(100 * theirs[1], 2),
    )


def hit_ratio(name: str, trace: Sequence[int], capacity: int) -> float:
    policy = make_policy(name, capacity)  # type: ignore[arg-type]
    held: set[bytes] = set()
    hit = 0
    for number in trace:
        key = number.to_bytes(8, "big")
        if key in held:
            policy.touch(key)
            hit += 1
            continue
        while len(held) >= capacity:
            victim = next(policy.victims())
            policy.remove(victim)
            held.remove(victim)
        policy.add(key, 1)
        held.add(key)
    return hit / len(trace)


def simulated(name: str, trace: Sequence[int], capacity: int) -> float:
    import libcachesim

    cache = getattr(libcachesim, name)(capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    hit = 0
    for number in trace:
        request.obj_id = number
        hit += bool(cache.get(request))
    return hit / len(trace)


# A million records of metadata: what the commands ask for, each in a process of its own

QUESTIONS = {
    "stats": "tier.stats()",
    "ls --limit 20": "list(tier.entries(limit=20))",
    "show": "tier.info((777_777).to_bytes(32, 'big'))",
}
ASK = """
import json, sys, time
from featcache.tiers.disk import DiskTier
start = time.perf_counter()
tier = DiskTier.open(sys.argv[1], max_bytes=0, readonly=True)
answer = {question}
took = time.perf_counter() - start
tier.close()
assert answer
# of this program: getrusage counts the parent that it was forked from as well
kib = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([took, kib / 1024]))
"""


def metadata(place: Path, count: int = 1_000_000) -> list[Row]:
    tier = DiskTier.open(place, max_bytes=64 << 30, sync=False)
    data = memoryview(bytes(64))
    specs = {"rows": TensorSpec("BF16", (1, 32))}
    took = 0.0
    for start in range(0, count, 5_000):
        records = [
            (Header.of(n.to_bytes(32, "big"), b"\x01" * 32, Layout(1, 640, 480), specs), [data])
            for n in range(start, start + 5_000)
        ]
        took += seconds(lambda records=records: tier.write(records))  # type: ignore[misc]
    assert tier.stats().entries == count
    per_entry = tier.stats().file_bytes / count
    tier.close()
    rows = []
    for name, question in QUESTIONS.items():
        run = [sys.executable, "-c", ASK.format(question=question), str(place)]
        answers = [json.loads(subprocess.run(run, check=True, capture_output=True).stdout) for _ in range(3)]
        slowest, rss = max(a[0] for a in answers), max(a[1] for a in answers)
        rows.append(
            row_of(
                f"{name} of {count:,} entries, seconds",
                slowest,
                "< 1 s, < 200 MiB RSS",
                slowest < 1 and rss < 200,
                rss_mib=round(rss, 1),
                file_bytes_per_entry=round(per_entry),
                writes_per_s=round(count / took),
            )
        )
    return rows


FIGURES: dict[str, Callable[[Path], list[Row]]] = {
    "reads": reads,
    "writes": writes,
    "turnover": turnover,
    "hits": hits,
    "metadata": metadata,
}

if __name__ == "__main__":
    main()
