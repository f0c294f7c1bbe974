"""Zipf traffic over working sets from a tenth of the host budget to ten times as much.

The store's part of a request is measured; a miss is charged the time of one image in the tower, measured once.
"""

from __future__ import annotations

import bisect
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from featcache.bench.models import page, qwen2_vl
from featcache.bench.setting import Point, Row, Setting, checked, seconds_of
from featcache.engine.families.base import ImageOptions
from featcache.features import Features, Layout
from featcache.images import open_image
from featcache.keys import FeatureKey
from featcache.store import FeatureStore

TOKENS, HIDDEN = 64, 1024  # 128 KiB an image in bfloat16
HOST, DISK = 8 << 20, 32 << 20
PLOT = "Where features were found, by the working set's share of the host budget, %"


def measure(setting: Setting) -> Iterator[Row]:
    loaded = qwen2_vl(setting)
    pixels = loaded.family.preprocess(open_image(page(1, setting)), ImageOptions())
    loaded.family.encode([pixels])
    tower_s = seconds_of(lambda: loaded.family.encode([pixels]), setting.device)
    yield Row("encoding one image", tower_s * 1e3, "ms", note="what a miss is charged below")
    for share in (0.1, 0.5, 1.0, 2.0, 10.0):
        images = max(2, int(share * HOST / (TOKENS * HIDDEN * 2)))
        path = setting.folder / f"store-{share}"
        with FeatureStore.open(path, host_bytes=HOST, disk_bytes=DISK) as store:
            tiers, seconds, wrong = _traffic(store, images, setting.rounds(1500, 20_000))
        requests = sum(tiers.values())
        for tier in ("host", "disk", "encoded"):
            yield Row(
                f"working set {share:g} x the host budget: from {tier}",
                100 * tiers[tier] / requests,
                "%",
                point=Point(PLOT, tier, f"{share:g} x"),
            )
        mean = seconds / requests + tower_s * tiers["encoded"] / requests
        yield Row(
            f"working set {share:g} x the host budget ({images} images)",
            mean * 1e3,
            "ms to features",
        )
        yield checked(f"working set {share:g} x: features that are not their key's", wrong, 0)


def _traffic(store: FeatureStore, images: int, requests: int) -> tuple[Counter[str], float, int]:
    """Tiers of a Zipf (0.9) sequence of images, the seconds that the store took, and wrong features."""
    generator = random.Random(0)
    weights = list(itertools.accumulate(1 / (rank + 1) ** 0.9 for rank in range(images)))
    tiers: Counter[str] = Counter()
    wrong, spent = 0, 0.0

    def compute(keys: Sequence[FeatureKey]) -> Mapping[FeatureKey, Features]:
        return {key: _features(key) for key in keys}

    for turn in range(-2 * images, requests):  # the first fill the tiers
        number = bisect.bisect(weights, generator.random() * weights[-1])
        key = FeatureKey(min(number, images - 1).to_bytes(32, "big"))
        began = time.perf_counter()
        [lease] = store.get_or_compute([key], compute)
        if turn >= 0:
            spent += time.perf_counter() - began
            tiers[lease.tier] += 1
        wrong += not torch.equal(lease.features.rows, _features(key).rows)
        lease.release()
    return tiers, spent, wrong


def _features(key: bytes) -> Features:
    """Rows that tell their key."""
    rows = torch.zeros((TOKENS, HIDDEN), dtype=torch.bfloat16)
    rows[:, : len(key)] = torch.tensor(list(key), dtype=torch.bfloat16)
    return Features({"rows": rows}, Layout(TOKENS, 640, 480))
