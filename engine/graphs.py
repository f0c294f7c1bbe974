"""`DecodeGraphs`: steps that only decode, replayed as CUDA graphs.

A step of a few tokens is over sooner on the GPU than the CPU can launch its kernels. A graph is captured for a
number of sequences and a number of blocks of each, both rounded up; a replay costs one copy and one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from featcache.engine.attention import PagedStep
from featcache.engine.parcel import Parcel, Sent
from featcache.engine.scheduler import Part

log = logging.getLogger("featcache")

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_WIDTHS = (64, 256, 1024, 4096, 16384)  # blocks of a sequence


class Packed(NamedTuple):
    """A step as tensors, there once the parcel is sent. See Family.language_model_forward."""

    parcel: Parcel
    step: PagedStep
    ids: Sent
    positions: Sent
    image_index: Sent
    logits_at: Sent


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor  # all integers that the graph reads
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs by size and width, each captured when it is first wanted. One thread uses it.

    pack: parts, rows and blocks of each to fill up to -> Packed. forward: Packed -> logits.
    """

    def __init__(
        self,
        pack: Callable[[Sequence[Part], int, int], Packed],
        forward: Callable[[Packed], torch.Tensor],
    ) -> None:
        self._pack = pack
        self._forward = forward
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._memory: tuple[int, int] | None = None
        self.failed = False
        self.replays = 0

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, parts: Sequence[Part]) -> torch.Tensor | None:
        """Logits (parts, vocabulary), overwritten by the next run; None if these parts fit no graph."""
        blocks = max(len(part.sequence.table) for part in parts)
        size = next((size for size in SIZES if size >= len(parts)), None)
        width = next((width for width in _WIDTHS if width >= blocks), None)
        if self.failed or size is None or width is None:
            return None
        packed = self._pack(parts, size, width)
        captured = self._captured.get((size, width))
        if captured is None:
            try:
                captured = self._captured[size, width] = self._capture(packed)
            except RuntimeError:  # CUDA's own errors are ones: this model does what no graph can hold
                log.warning("engine: decoding goes on without CUDA graphs", exc_info=True)
                self.failed = True
                return None
        packed.parcel.send(into=captured.numbers)
        captured.graph.replay()
        self.replays += 1
        return captured.logits[: len(parts)]

    def _capture(self, packed: Packed) -> _Captured:
        numbers = packed.parcel.send()
        assert numbers is not None
        device = numbers.device
        # the first runs compile kernels and make workspaces; to run it again writes the same keys and values
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(packed)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # the threads beside this one go on using the device
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            logits = self._forward(packed)
        self._memory = self._memory or graph.pool()
        return _Captured(graph, numbers, logits)
