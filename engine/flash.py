"""Attention on CUDA in half precision: flash kernels for prefills, a paged kernel for decoding.

Prefills gather the keys and values that their sequences hold and go through torch's variable-length attention
in one call (its own paged form wants pages of 256 tokens). Decoding sequences are read from the pool in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from featcache.engine.kv import BLOCK, KVPool
from featcache.engine.parcel import Integers, Parcel, Sent

if TYPE_CHECKING:
    from featcache.engine.attention import Span


def can_flash(pool: KVPool) -> bool:
    """Whether this pool's device, dtype and shape are for these kernels."""
    keys = pool.keys
    is_half = keys.dtype in (torch.bfloat16, torch.float16)
    fits = keys.shape[-1] % 8 == 0 and keys.shape[-1] <= 256
    return keys.is_cuda and is_half and fits and find_spec("triton") is not None


class Layer(NamedTuple):
    """One layer's attention: of whom, over what.

    query: (1, heads, tokens, head_dim). key, value: (1, kv_heads, tokens, head_dim), in the pool already.
    keys, values: the layer's pool, each (blocks, BLOCK, kv_heads, head_dim). window: tokens that are seen, the
    asking one included; None for all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float | None
    window: int | None


class DecodeTables(NamedTuple):
    """What the paged kernel reads. blocks: (sequences, width) int64; totals: (sequences,) int64, at most
    `longest` each.
    """

    blocks: torch.Tensor
    totals: torch.Tensor
    longest: int


class FlashStep:
    """The spans of a step that need no mask of their own: its first `num_tokens` tokens, decodes first."""

    def __init__(self, spans: Sequence[Span], parcel: Parcel) -> None:
        decodes = [span for span in spans if span.new == 1]
        prefills = [span for span in spans if span.new > 1]
        self.num_decodes = len(decodes)
        self.num_tokens = len(decodes) + sum(span.new for span in prefills)
        self._blocks = parcel.add(decode_blocks(decodes)) if decodes else None
        self._totals = parcel.add(np.array([span.total for span in decodes], dtype=np.int64))
        self._longest = max((span.total for span in decodes), default=0)
        self._has_prefills = bool(prefills)
        self._held: Sent | None = None
        if prefills:
            self._starts_new = parcel.add(_starts([span.new for span in prefills]))
            self._starts_all = parcel.add(_starts([span.total for span in prefills]))
            self._most_new = max(span.new for span in prefills)
            self._most_all = max(span.total for span in prefills)
            if any(span.past for span in prefills):
                self._held = parcel.add(np.concatenate([span.slots(0, span.total) for span in prefills]))
        self._bounds: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self, layer: Layer, output: torch.Tensor) -> None:
        """Fill output (1, tokens, heads, head_dim) for its tokens."""
        if self._blocks is not None:
            from featcache.engine.paged_decode import paged_decode

            rows = slice(self.num_decodes)
            paged_decode(layer, DecodeTables(self._blocks(), self._totals(), self._longest), output[0, rows])
        if self._has_prefills:
            rows = slice(self.num_decodes, self.num_tokens)
            output[0, rows] = self._prefill(layer, rows)

    def _prefill(self, layer: Layer, rows: slice) -> torch.Tensor:
        if self._held is None:
            key, value = layer.key[0, :, rows].transpose(0, 1), layer.value[0, :, rows].transpose(0, 1)
        else:
            held = self._held()
            key = layer.keys.flatten(0, 1).index_select(0, held)
            value = layer.values.flatten(0, 1).index_select(0, held)
        if self._bounds is None:
            self._bounds = self._starts_new().to(torch.int32), self._starts_all().to(torch.int32)
        query = layer.query[0, :, rows].transpose(0, 1)
        return _varlen(query, key, value, self._bounds, self._most_new, self._most_all, layer)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    most_new: int,
    most_all: int,
    layer: Layer,
) -> torch.Tensor:
    """Causal attention of packed sequences whose last tokens ask: (new tokens, heads, head_dim).

    It is the operator below `torch.nn.attention.varlen`, whose own arguments differ from torch 2.11 to 2.14.
    """
    window = -1 if layer.window is None or layer.window >= most_all else layer.window - 1
    answer: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *bounds,
        most_new,
        most_all,
        0.0,  # no dropout
        window == -1,  # causal; with a window, nothing to the right says the same
        False,
        scale=layer.scaling,
        window_size_left=window,
        window_size_right=0,
    )[0]
    return answer


def decode_blocks(spans: Sequence[Span], width: int | None = None) -> Integers:
    """(spans, width) block numbers, filled up with 0."""
    counts = [-(-span.total // BLOCK) for span in spans]
    blocks = np.zeros((len(spans), width or max(counts)), dtype=np.int64)
    for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
        blocks[row, :count] = span.table[:count]
    return blocks


def _starts(lengths: Sequence[int]) -> Integers:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
