"""Warming on the CPU: end to end beside the tower alone, a second run beside the first, memory by set size.

python bench/warm.py [--images 500] [--many 5000] [--json FILE]

The tower has Qwen2-VL's architecture with random weights: 12 layers of width 192 (5.5 million parameters), on
images of about 450 x 450 pixels. Real towers have 50 to 120 times as many parameters, so that reading, decoding
and preprocessing weigh far less beside them than here. The photographs are those that scikit-image and
scikit-learn ship, where these are installed, and others made here: octaves of noise over gradients, as JPEG.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from models import build, scale_weights
from PIL import Image

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.loading import Loaded, load_model
from featcache.engine.warm import WarmReport, WarmSettings, warm
from featcache.images import open_image
from featcache.store import FeatureStore

MAX_PIXELS = 28 * 28 * 256
SIZES = ((640, 480), (480, 640), (800, 600), (1024, 768))
READY = 64  # images whose pixels are made beforehand, for the tower alone
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--many", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", nargs=3, metavar=("MODEL", "FOLDER", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(measured_memory(*map(Path, options.memory_of))))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [*speed(Path(folder), options.images), *memory(Path(folder), options.images, options.many)]
    machine = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    for row in rows:
        print(
            f"{row['figure']:<64} {row['value']:>9} (target {row['target']}: {'yes' if row['ok'] else 'NO'})"
        )
        print(f"    {row['of']}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))
    sys.exit(not all(row["ok"] for row in rows))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


# Speed


def speed(folder: Path, number: int) -> Iterator[Row]:
    images = photographs(folder / "photos", number)
    loaded = load_model(model(folder / "model", width=192, depth=12), device="cpu", tower_only=True)
    with FeatureStore.open(folder / "store", disk_bytes="4GiB") as store:
        encoder = VisionEncoder(loaded, store)
        ready = sorted(images.iterdir())[:READY]
        before = tower_alone(encoder, ready)
        settings = WarmSettings(images=ImageOptions(max_pixels=MAX_PIXELS))
        first = warm(encoder, images, settings)
        after = tower_alone(encoder, ready)
        second = warm(encoder, images, settings)
        encoder.close()
    alone = (before + after) / 2
    assert first.encoded == number and second.cached == number
    yield row(
        "end to end / tower alone on ready tensors",
        first.images_per_second / alone,
        0.85,
        f"{first.images_per_second:.2f} images/s; the tower alone {before:.2f} before and {after:.2f} after; "
        f"{stages(first)}; tower busy {first.tower_busy:.0%}",
    )
    yield row(
        "first run / second run, seconds",
        first.seconds / second.seconds,
        30,
        f"{first.seconds:.1f} s and {second.seconds:.3f} s ({second.images_per_second:.0f} images/s)",
    )


def tower_alone(encoder: VisionEncoder, paths: list[Path]) -> float:
    """Images a second of the tower on pixels that are ready, in batches as large as those of a run."""
    options = ImageOptions(max_pixels=MAX_PIXELS)
    pixels = [encoder.family.preprocess(open_image(path), options) for path in paths]
    batches: list[list[Any]] = [[]]
    for one in pixels:
        if sum(p.cost for p in batches[-1]) + one.cost > encoder.max_batch_cost:
            batches.append([])
        batches[-1].append(one)
    encoder.family.encode(batches[-1])
    started = time.perf_counter()
    for batch in batches:
        encoder.family.encode(batch)
    return len(pixels) / (time.perf_counter() - started)


def stages(report: WarmReport) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds_by_stage.items())


# Memory


def memory(folder: Path, few: int, many: int) -> Iterator[Row]:
    path = model(folder / "small", width=64, depth=2)
    peaks = {}
    for number in (few, many):
        images = photographs(folder / f"set-{number}", number, scale=0.4)
        command = [
            sys.executable,
            __file__,
            "--memory-of",
            str(path),
            str(images),
            str(folder / f"s{number}"),
        ]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[number] = json.loads(run.stdout.splitlines()[-1])
        assert peaks[number]["encoded"] == number
    growth = peaks[many]["peak_mib"] / peaks[few]["peak_mib"]
    result = row(
        f"peak memory of {many:,} images / of {few:,}",
        growth,
        1.1,
        "; ".join(f"{n:,} images: {p['peak_mib']:.0f} MiB" for n, p in peaks.items()),
    )
    yield {**result, "ok": growth <= 1.1}


def measured_memory(model_path: Path, images: Path, store_path: Path) -> dict[str, float]:
    """The most that this process had in memory of its own, which files mapped from disk are not part of."""
    torch.set_num_threads(2)
    loaded = load_model(model_path, device="cpu", tower_only=True)
    peak = 0

    def look(_: object) -> None:
        nonlocal peak
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
        peak = max(peak, int(line.split()[1]))

    with FeatureStore.open(store_path, host_bytes="64MiB", disk_bytes="4GiB", queue_bytes="32MiB") as store:
        encoder = VisionEncoder(loaded, store)
        report = warm(encoder, images, progress=look)
        encoder.close()
    return {"peak_mib": peak / 1024, "encoded": report.encoded}


# What they need


def model(folder: Path, *, width: int, depth: int) -> Path:
    """A Qwen2-VL with a tower of this width and depth and random weights."""
    small: Loaded = load_model(build("qwen2_vl", folder), device="cpu")
    config = small.model.config
    config.vision_config.embed_dim, config.vision_config.depth = width, depth
    config.vision_config.num_heads = max(2, width // 64)
    config.vision_config.mlp_ratio = 4
    scale_weights(type(small.model)(config), seed=0).save_pretrained(folder / "sized")
    small.processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}
    small.processor.save_pretrained(folder / "sized")
    return folder / "sized"


def photographs(folder: Path, number: int, scale: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    shipped = list(shipped_photographs()) if scale == 1.0 else []
    for path in shipped[:number]:
        Image.open(path).convert("RGB").save(folder / f"shipped-{path.stem}.jpg", quality=92)
    have = len(list(folder.iterdir()))
    for seed in range(number - have):
        width, height = (round(side * scale) for side in SIZES[seed % len(SIZES)])
        made_photograph(seed, width, height).save(folder / f"made-{seed:05}.jpg", quality=90)
    return folder


def shipped_photographs() -> Iterator[Path]:
    for package, below in (("skimage", "data"), ("sklearn", "datasets/images")):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            for path in sorted((Path(spec.origin).parent / below).iterdir()):
                if path.suffix in (".jpg", ".png", ".jpeg"):
                    yield path


def made_photograph(seed: int, width: int, height: int) -> Image.Image:
    """Octaves of noise over a gradient: as hard to decode and to scale as a photograph."""
    generator = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(2, 7):
        noise = generator.integers(0, 256, (height >> (8 - octave), width >> (8 - octave), 3), dtype=np.uint8)
        if 0 in noise.shape:
            continue
        total += np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)) / octave
    total += np.linspace(0, random.Random(seed).uniform(50, 150), width, dtype=np.float32)[None, :, None]
    return Image.fromarray(np.uint8(total * (255 / total.max())))


def row(figure: str, value: float, target: float, of: str) -> Row:
    return {"figure": figure, "value": round(value, 3), "target": target, "ok": value >= target, "of": of}


if __name__ == "__main__":
    main()
