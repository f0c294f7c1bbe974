"""The store's figures, each beside its baseline in the same run, as a table or JSON.

python bench/store.py [put arena hit reads writes turnover hits metadata] [--folder DIR] [--json]

`reads` to `metadata` are the disk tier's, in bench/store_disk.py; what needs a GPU is in bench/h200_store.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import torch
from rich.console import Console
from rich.table import Table
from store_disk import FIGURES, disk_figures, row_of

from featcache import FeatureStore
from featcache.eviction import make_policy
from featcache.features import Features, Layout, pack
from featcache.settings import PolicyName
from featcache.tiers.arena import Allocator, Block

MIB = 1 << 20
HIDDEN = 2048  # of bf16: rows of 4 KiB
Row = dict[str, Any]


def main() -> None:
    known = [*OWN, *FIGURES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(known))
    parser.add_argument("--folder", help="where the stores are made: the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.figures) - set(known):
        parser.error(f"no such figure: {', '.join(unknown)}; there are {', '.join(known)}")
    names = options.figures or known
    rows: list[Row] = []
    for name in names:
        if name in OWN:
            with tempfile.TemporaryDirectory(dir=options.folder) as place:
                rows += OWN[name](Path(place))
        else:
            rows += disk_figures(options.folder, [name])
    if options.json:
        print(json.dumps({"machine": machine(), "figures": rows}, indent=2))
    else:
        print_table(rows)
    sys.exit(not all(row["ok"] for row in rows))


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lmdb": lmdb.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def print_table(rows: Sequence[Row]) -> None:
    table = Table(title="featcache: the store", caption=", ".join(f"{k} {v}" for k, v in machine().items()))
    table.add_column("figure", ratio=3)
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    table.add_column("")
    table.add_column("beside", ratio=4)
    for row in rows:
        detail = ", ".join(f"{name} {value}" for name, value in row["detail"].items())
        verdict = "[green]ok[/]" if row["ok"] else "[red]missed[/]"
        table.add_row(row["figure"], str(row["value"]), row["target"], verdict, detail)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def features_of(number: int, nbytes: int) -> Features:
    rows = torch.randint(-(1 << 15), 1 << 15, (nbytes // (2 * HIDDEN), HIDDEN), dtype=torch.int16)
    return Features(
        {"rows": rows.view(torch.bfloat16)}, Layout(len(rows), 640, 480), number.to_bytes(32, "big")
    )


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def median_us(seconds: Sequence[float]) -> float:
    return 1e6 * statistics.median(seconds)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# put() returns before a byte has moved


def put(place: Path, nbytes: int = 4 * MIB, rounds: int = 60) -> list[Row]:
    """A put, and the same record as one synchronous LMDB transaction, in turns."""
    made = [features_of(number, nbytes) for number in range(rounds)]
    env = lmdb.open(str(place / "bare"), map_size=4 << 30, subdir=True)
    puts, bare = [], []

    def put_bare(number: int) -> None:
        with env.begin(write=True) as txn:
            txn.put(key_of(number), pack(key_of(number), made[number]))

    with FeatureStore.open(place / "store", host_bytes="1GiB", disk_bytes="2GiB") as store:
        for number in range(rounds):
            puts.append(timed(lambda: store.put(key_of(number), made[number])))  # noqa: B023
            store.flush()
            bare.append(timed(lambda: put_bare(number)))  # noqa: B023
        busy = [timed(lambda: store.put(key_of(rounds + n), made[n])) for n in range(rounds)]  # noqa: B023
        store.flush()
        stats = store.stats()
        assert stats.disk is not None and stats.disk.entries + stats.counts["unwritten"] == 2 * rounds
    env.close()
    ratio = median_us(bare) / median_us(puts)
    return [
        row_of(
            "put() of 4 MiB returns: times faster than a synchronous LMDB put",
            ratio,
            ">= 20",
            ratio >= 20,
            put_us=round(median_us(puts)),
            put_worst_us=round(1e6 * max(puts)),
            one_after_another_us=round(median_us(busy)),
            lmdb_put_us=round(median_us(bare)),
        )
    ]


# The arena


def arena(place: Path, capacity: int = 1 << 30, allocations: int = 100_000) -> list[Row]:
    """Records of 0.25 to 14 MiB and more hits than misses; how full it is when one finds no room."""
    rows = []
    for name in ("s3fifo", "lru"):
        fullness, each_us = fill_arena(name, capacity, allocations)
        late = fullness[len(fullness) // 2 :]
        usable = statistics.mean(late)
        rows.append(
            row_of(
                f"host arena of 1 GiB after 100,000 allocations, {name}: usable",
                usable,
                ">= 0.9",
                usable >= 0.9,
                worst_percent=round(statistics.quantiles(late, n=100)[0], 3),
                allocate_and_evict_us=round(each_us, 1),
            )
        )
    return rows


def fill_arena(name: PolicyName, capacity: int, allocations: int) -> tuple[list[float], float]:
    """(fullness at each allocation that found no room, microseconds an allocation with its evictions)"""
    chance = random.Random(1)
    allocator, policy = Allocator(capacity), make_policy(name, capacity)
    live: dict[int, Block] = {}
    numbers: list[int] = []
    fullness, took = [], 0.0
    for number in range(allocations):
        for _ in range(2):  # hits, more often on what came lately
            if (
                numbers
                and (hit := numbers[-1 - min(int(chance.expovariate(0.02)), len(numbers) - 1)]) in live
            ):
                policy.touch(key_of(hit))
        size = int((MIB // 4) * 56 ** chance.random())
        begin = time.perf_counter()
        block = allocator.allocate(size)
        if block is None:
            fullness.append(allocator.used_bytes / capacity)
            for victim in policy.victims():
                policy.remove(victim)
                allocator.free(live.pop(int.from_bytes(victim, "big")))
                if (block := allocator.allocate(size)) is not None:
                    break
        assert block is not None
        policy.add(key_of(number), block.size)
        took += time.perf_counter() - begin
        live[number] = block
        numbers.append(number)
    return fullness, 1e6 * took / allocations


# A hit


def hit(place: Path, total: int = 256 * MIB) -> list[Row]:
    """A disk hit as a user has it, beside memcpy of the same bytes; and what a hit in memory costs.

    The disk tier's own read, with its target, is the figure `reads`.
    """
    rows = []
    for nbytes in (1 * MIB, 4 * MIB, 14 * MIB):
        count = total // nbytes
        with FeatureStore.open(place / str(nbytes), host_bytes=2 * total, disk_bytes="1GiB") as store:
            for number in range(count):
                store.put(key_of(number), features_of(number, nbytes), wait=True)
            store.flush()
            disk, host, copy = [], [], []
            target = torch.zeros(
                count * nbytes, dtype=torch.uint8
            )  # as the arena: places that aren't in a cache
            sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(count)]
            for _ in range(5):
                store._stack.host.clear()
                disk.append(timed(lambda: read_all(store, count)))  # noqa: B023
                host.append(timed(lambda: read_all(store, count)))  # noqa: B023
                copy.append(timed(lambda: copy_all(target, sources)))  # noqa: B023
            counts = store.stats().counts
            assert (counts["hits_disk"], counts["hits_host"]) == (5 * count, 5 * count)
        ratio = min(copy) / min(disk)
        rows.append(
            row_of(
                f"disk hit through the store, {nbytes // MIB} MiB, checked: of memcpy's rate",
                ratio,
                "-",
                True,
                gb_s=round(count * nbytes / min(disk) / 1e9, 2),
                memcpy_gb_s=round(count * nbytes / min(copy) / 1e9, 2),
                memory_hit_us=round(1e6 * min(host) / count, 1),
            )
        )
    return rows


def read_all(store: FeatureStore, count: int) -> None:
    for number in range(count):
        lease = store.get(key_of(number))
        assert lease is not None
        lease.release()


def copy_all(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    view = target.numpy().reshape(len(sources), -1)
    for place, source in zip(view, sources, strict=True):
        place[:] = source.numpy()


OWN: dict[str, Callable[[Path], list[Row]]] = {"put": put, "arena": arena, "hit": hit}

if __name__ == "__main__":
    main()
