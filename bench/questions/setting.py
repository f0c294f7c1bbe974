"""What a question is measured with, and what it answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """Where a figure stands in a plot: lines over numbers, stacked bars over names."""

    plot: str
    series: str
    x: float | str


@dataclass(frozen=True, slots=True)
class Setting:
    """device: "cpu" or "cuda". quick: fewer rounds. folder: an empty one, for models and stores.

    shape: the size of Qwen2-VL; one of `SHAPES`.
    """

    device: str
    quick: bool
    folder: Path
    shape: str = "small"

    def rounds(self, quick: int, full: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. is_right: of a row that checks something; None for a mere figure. note: what stands beside.

    point: for a figure that is drawn.
    """

    figure: str
    value: float
    unit: str
    is_right: bool | None = None
    note: str = ""
    point: Point | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def checked(figure: str, value: float, expected: float) -> Row:
    """A count that has to come out exactly."""
    return Row(figure, value, "", value == expected, "" if value == expected else f"expected {expected:g}")


def ms(figure: str, seconds: Sequence[float], note: str = "", point: Point | None = None) -> Row:
    """Median, with the tenth and ninetieth percentile beside it."""
    if len(seconds) > 2:
        low, high = percentile(seconds, 10) * 1e3, percentile(seconds, 90) * 1e3
        note = f"p10 {low:.2f}, p90 {high:.2f}" + (f"; {note}" if note else "")
    return Row(figure, statistics.median(seconds) * 1e3, "ms", note=note, point=point)


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def seconds_of(call: Callable[[], object], device: str = "cpu") -> float:
    """Wall time of a call; on CUDA until the device is done."""
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
