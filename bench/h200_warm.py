"""Warming on a CUDA device: end to end beside the tower alone, with towers of real shapes.

PYTHONPATH=. python bench/h200_warm.py [--device cuda|cpu] [--tiny] [--seconds 100] [--json FILE]

As h200_engine.py, of which see the notes. Each figure is of fresh images, read from files and stored on disk.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from h200_models import SHAPES, figure, machine, photographs, run_sections, say, seconds_of, write_report

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.loading import Loaded
from featcache.engine.warm import WarmSettings, warm
from featcache.images import open_image
from featcache.store import FeatureStore

READY_COST = 300_000  # vision patches whose pixels are made beforehand, for the tower alone
SMALL, LARGE = "448 x 448", "1792 x 1344"
SIZES = {SMALL: (448, 448), LARGE: (1792, 1344)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    say(str(machine(device)))
    torch.set_num_threads(1)  # the workers of a run are as many as the cores
    with tempfile.TemporaryDirectory() as place:
        make = functools.partial(rates, device=device, tiny=options.tiny, place=Path(place))
        sections: dict[str, Callable[[], None]] = {
            f"{name}, {size}": functools.partial(make, name, size) for size in SIZES for name in SHAPES
        }
        report = functools.partial(write_report, options.json, device)
        is_right = run_sections(sections, options.only, options.seconds, report)
    sys.exit(not is_right)


@functools.cache
def model(name: str, device: torch.device, tiny: bool) -> Loaded:
    return SHAPES[name](device, tiny)


def rates(name: str, size: str, *, device: torch.device, tiny: bool, place: Path) -> None:
    loaded = model(name, device, tiny)
    number = {SMALL: 2000, LARGE: 200}[size] // (3 if name.startswith("Qwen") else 1) if not tiny else 8
    side = SIZES[size] if not tiny else (448, 448)
    folder = place / f"{name}-{size}".replace(" ", "")
    folder.mkdir()
    for index, data in enumerate(photographs(number, *side)):
        (folder / f"{index:05}.jpg").write_bytes(data)
    where = f"{name}, {size}"
    cuda = {"device": str(device), "device_bytes": "256MiB"} if device.type == "cuda" else {}
    with FeatureStore.open(
        place / f"{folder.name}-store", host_bytes="1GiB", disk_bytes="12GiB", **cuda
    ) as store:
        encoder = VisionEncoder(loaded, store)
        alone, calls = tower_alone(encoder, sorted(folder.iterdir()))
        report = warm(encoder, folder, WarmSettings())
        again = warm(encoder, folder, WarmSettings())
        encoder.close()
    gc.collect()
    assert report.encoded == number and again.cached == number, report
    figure(f"{where}: the tower alone, {calls} calls", alone, "images/s")
    figure(
        f"{where}: warm, {number} images, {report.tower_calls} calls", report.images_per_second, "images/s"
    )
    figure(f"{where}: warm / the tower alone", report.images_per_second / alone, least=0.85)
    figure(f"{where}: warm, of features", report.feature_bytes / report.seconds / 1e9, "GB/s")
    figure(f"{where}: the tower is busy", report.tower_busy)
    figure(f"{where}: a second run", again.images_per_second, "images/s")
    say(f"    {', '.join(f'{stage} {spent:.2f} s' for stage, spent in report.seconds_by_stage.items())}")


def tower_alone(encoder: VisionEncoder, paths: list[Path]) -> tuple[float, int]:
    """Images a second on pixels that are ready, in batches as large as those of a run; and its calls."""
    options = encoder.family.options_for(ImageOptions(), 1)
    cost = encoder.family.preprocess(open_image(paths[0]), options).cost
    with ThreadPoolExecutor(16) as pool:
        some = paths[: max(4, READY_COST // cost)]
        pixels = list(pool.map(lambda path: encoder.family.preprocess(open_image(path), options), some))
    fits = max(1, min(encoder.max_batch_cost, 65_536) // cost)
    batches = [pixels[i : i + fits] for i in range(0, len(pixels), fits)]
    encoder.family.encode(batches[0])
    spent = seconds_of(lambda: [encoder.family.encode(batch) for batch in batches])
    return len(pixels) / spent, len(batches)


if __name__ == "__main__":
    main()
