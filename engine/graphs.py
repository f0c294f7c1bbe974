"""Decoding steps as CUDA graphs: one launch in place of several hundred.

A graph is made when a batch of its size, and of sequences about as long, decodes for the first time. Batches are
filled up to the next size with rows that read and write a block which nobody owns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from featcache.engine.attention import Span
from featcache.engine.families.base import Family
from featcache.engine.flash import DecodeTables, Layer, decode_blocks
from featcache.engine.kv import BLOCK, KVPool
from featcache.engine.parcel import Integers

_LOG = logging.getLogger("featcache")
SIZES = (1, 2, 4, 8, 16, 32, 64)  # sequences
LEAST_WIDTH = 64  # blocks in a row of the tables; for longer sequences, the next power of two


class StaticStep:
    """A decoding step whose inputs lie in one tensor that stays in its place.

    Attention is given it as if it were a `PagedStep`, of which the paged kernel decodes all tokens.
    size: sequences. width: blocks that each may have. spare: the block of rows that only fill up.
    """

    def __init__(self, pool: KVPool, num_axes: int, size: int, width: int, spare: int) -> None:
        self.pool = pool
        self.flash = self
        self.plain: tuple[()] = ()
        self._size, self._width, self._spare = size, width, spare
        self._shapes = ((1, size), (num_axes, size), (size,), (size, width), (size,))
        device = pool.keys.device
        self._sent = torch.empty(size * (num_axes + width + 3), dtype=torch.int64, device=device)
        pieces = torch.split(self._sent, [int(np.prod(shape)) for shape in self._shapes])
        views = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        self._ids, self._positions, self._slots, blocks, totals = views
        self._tables = DecodeTables(blocks, totals, width * BLOCK)
        self._all = torch.arange(size, device=device)
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def fill(self, ids: Sequence[int], positions: Integers, spans: Sequence[Span]) -> None:
        """Send the inputs. ids: of each span's one token. positions: (num_axes, spans)."""
        used = len(spans)
        inputs = [np.zeros(shape, dtype=np.int64) for shape in self._shapes]
        all_ids, all_positions, slots, blocks, totals = inputs
        slots[:], blocks[:], totals[:] = self._spare * BLOCK, self._spare, 1
        all_ids[0, :used], all_positions[:, :used] = ids, positions
        slots[:used] = [span.table[span.past // BLOCK] * BLOCK + span.past % BLOCK for span in spans]
        blocks[:used] = decode_blocks(spans, self._width)
        totals[:used] = [span.total for span in spans]
        packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in inputs]))
        if self._sent.is_cuda:
            packed = packed.pin_memory()
        self._sent.copy_(packed, non_blocking=True)

    def forward(self, family: Family) -> torch.Tensor:
        """Logits (size, vocabulary)."""
        return family.language_model_forward(
            self._ids, self._positions, self._none, None, None, self._all, paged=self
        )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for pool, new in zip(self.pool.layer(layer), (key, value), strict=True):
            pool.flatten(0, 1).index_copy_(0, self._slots, new[0].transpose(0, 1))

    def attend(self, layer: Layer, output: torch.Tensor) -> None:
        from featcache.engine.paged_decode import paged_decode

        paged_decode(layer, self._tables, output[0])


class _Captured(NamedTuple):
    step: StaticStep
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """The graphs of one model. One thread uses it.

    spare: a block of the pool that no sequence gets.
    """

    def __init__(self, family: Family, pool: KVPool, spare: int) -> None:
        self._family = family
        self._pool = pool
        self._spare = spare
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._stream = torch.cuda.Stream(pool.keys.device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._has_failed = False
        self.replays = 0

    def run(self, ids: Sequence[int], positions: Integers, spans: Sequence[Span]) -> torch.Tensor | None:
        """Logits (spans, vocabulary), which hold until the next call; None if there is no graph for it."""
        if self._has_failed or len(spans) > SIZES[-1]:
            return None
        size = next(size for size in SIZES if size >= len(spans))
        captured = self._get(size, width_for(max(span.total for span in spans)))
        if captured is None:
            return None
        captured.step.fill(ids, positions, spans)
        captured.graph.replay()
        self.replays += 1
        return captured.logits[: len(spans)]

    def _get(self, size: int, width: int) -> _Captured | None:
        if (size, width) not in self._captured:
            try:
                self._captured[size, width] = self._capture(size, width)
            except Exception as exc:  # a model's forward that can't be captured raises nearly anything
                self._has_failed = True
                _LOG.warning("decoding runs without CUDA graphs: %s: %s", type(exc).__name__, exc)
                return None
        return self._captured[size, width]

    def _capture(self, size: int, width: int) -> _Captured:
        step = StaticStep(self._pool, self._family.num_axes, size, width, self._spare)
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._pool.keys.device)
        step.fill((), np.zeros((self._family.num_axes, 0), dtype=np.int64), ())
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step.forward(self._family)  # compiles kernels and makes workspaces, which a capture can't
            self._stream.synchronize()
            # other threads go on encoding and copying meanwhile, which concerns their own streams
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                logits = step.forward(self._family)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _Captured(step, graph, logits)


def width_for(longest: int) -> int:
    """Blocks in a row of the tables, for sequences of up to so many tokens."""
    blocks = -(-longest // BLOCK)
    return max(LEAST_WIDTH, 1 << (blocks - 1).bit_length())
