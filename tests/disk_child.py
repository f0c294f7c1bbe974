"""Programs that the disk tests run as processes of their own, to be killed or run side by side."""

from __future__ import annotations

import random
import sys
import time

from featcache.tiers.disk import DiskTier
from featcache.tiers.writer import DiskWriter
from tests.records import MIB, is_right, key_of, read, record_of

BUDGET = 96 * MIB


def write_and_confirm(path: str, first: str) -> None:
    """Write records through the writer for ever; print the number up to which `flush` has confirmed them."""
    tier = DiskTier.open(path, max_bytes=BUDGET)
    writer = DiskWriter(tier, max_bytes=8 * MIB)
    rng = random.Random(int(first))
    number = int(first)
    while True:
        for _ in range(rng.randint(1, 6)):
            header, pieces = record_of(number, rng.randint(2_000, 600_000))
            writer.submit(header, pieces, lambda stored: None, wait=True)
            number += 1
        writer.flush()
        print(number, flush=True)


def write_for(path: str, seconds: str, seed: str) -> None:
    """Write and delete the same hundred keys as others do."""
    tier = DiskTier.open(path, max_bytes=BUDGET)
    rng = random.Random(int(seed))
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        numbers = [rng.randrange(100) for _ in range(4)]
        tier.write([record_of(number, 100_000 + 5_000 * number) for number in numbers])
        tier.delete([key_of(rng.randrange(100))])
    print("wrong 0")


def read_for(path: str, seconds: str, seed: str) -> None:
    """Read what others write; print how many values were read, and how many were wrong."""
    tier = DiskTier.open(path, max_bytes=BUDGET, readonly=int(seed) % 2 == 0)
    rng = random.Random(int(seed))
    end = time.monotonic() + float(seconds)
    good = wrong = 0
    while time.monotonic() < end:
        number = rng.randrange(100)
        data = read(tier, number)
        if data is not None:
            good, wrong = good + is_right(number, data), wrong + (not is_right(number, data))
    print("wrong", wrong + tier.stats().damaged, "good", good)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
