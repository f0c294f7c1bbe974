"""Paged attention for transformers' language models, registered through `AttentionInterface`.

Several sequences are packed in one row. Each layer writes its new keys and values into the pool, then every
sequence attends to its own blocks: prefills one by one, all decoding sequences in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from featcache.engine.kv import BLOCK, KVPool

NAME = "featcache_paged"


@dataclass(frozen=True, slots=True)
class Span:
    """What one sequence adds to a step: `new` tokens at `start` of the packed row, after `past` held ones.

    images: its runs of image tokens, as (start, stop) in the sequence, if they see each other both ways.
    """

    start: int
    new: int
    past: int
    table: Sequence[int]
    images: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        return self.past + self.new


class PagedStep(Cache):  # type: ignore[misc]
    """One forward's view of the pool. Takes the place of transformers' cache, which it only resembles."""

    def __init__(self, pool: KVPool, spans: Sequence[Span], device: torch.device) -> None:
        super().__init__(layers=[])
        self.pool = pool
        self.prefills = [span for span in spans if span.new > 1 or span.past == 0]
        self.decodes = [span for span in spans if span.new == 1 and span.past > 0]
        self._device = device
        slots = [
            span.table[at // BLOCK] * BLOCK + at % BLOCK
            for span in spans
            for at in range(span.past, span.total)
        ]
        self.slots = self._send(torch.tensor(slots))
        self.prefill_slots = [self._send(_slots_of(span)) if span.past else None for span in self.prefills]
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        if self.decodes:
            self._prepare_decodes()

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the device without waiting for it."""
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _prepare_decodes(self) -> None:
        longest = max(span.total for span in self.decodes)
        width = -(-longest // BLOCK)
        tables = [[*span.table[:width], *[0] * (width - len(span.table))] for span in self.decodes]
        self.decode_tables = self._send(torch.tensor(tables))
        self.decode_rows = self._send(torch.tensor([span.start for span in self.decodes]))
        totals = torch.tensor([span.total for span in self.decodes])
        self.decode_totals = self._send(totals)
        self.decode_width = width * BLOCK
        self.needs_decode_mask = bool((totals != self.decode_width).any())

    def decode_mask(self, window: int | None) -> torch.Tensor | None:
        """(decodes, 1, 1, width) bool: which tokens each decoding sequence sees."""
        if not self.needs_decode_mask and (window is None or window >= self.decode_width):
            return None
        key = (-1, window)
        if key not in self._masks:
            at = torch.arange(self.decode_width, device=self._device)
            seen = at < self.decode_totals[:, None]
            if window is not None:
                seen &= at >= self.decode_totals[:, None] - window
            self._masks[key] = seen[:, None, None]
        return self._masks[key]

    def prefill_mask(self, number: int, window: int | None) -> torch.Tensor | None:
        """(new, total) bool for a prefill; None if plain causal attention says the same."""
        span = self.prefills[number]
        if window is not None and window >= span.total:
            window = None
        if window is None and not span.images and (span.past == 0 or span.new == 1):
            return None
        key = (number, window)
        if key not in self._masks:
            self._masks[key] = self._send(_mask(span, window))
        return self._masks[key]

    # What transformers asks of a cache

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, kv_heads, tokens, head_dim) of one layer into the pool."""
        pool_keys, pool_values = self.pool.layer(layer_idx)
        pool_keys.flatten(0, 1).index_copy_(0, self.slots, keys[0].transpose(0, 1))
        pool_values.flatten(0, 1).index_copy_(0, self.slots, values[0].transpose(0, 1))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        return query_length, 0


def _slots_of(span: Span) -> torch.Tensor:
    table = torch.tensor(span.table[: -(-span.total // BLOCK)])
    return (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: span.total]


def _mask(span: Span, window: int | None) -> torch.Tensor:
    asking = torch.arange(span.past, span.total)[:, None]
    asked = torch.arange(span.total)[None]
    seen = asked <= asking
    if window is not None:
        seen &= asked > asking - window
    for start, stop in span.images:
        seen |= (asking >= start) & (asking < stop) & (asked >= start) & (asked < stop)
    return seen


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, in the form that transformers calls.

    query: (1, heads, tokens, head_dim); key, value: (1, kv_heads, tokens, head_dim), already in the pool.
    Returns (1, tokens, heads, head_dim).
    """
    keys, values = paged.pool.layer(int(module.layer_idx))  # type: ignore[arg-type]
    output = torch.empty_like(query)
    grouped = query.shape[1] != key.shape[1]
    for number, span in enumerate(paged.prefills):
        rows = slice(span.start, span.start + span.new)
        slots = paged.prefill_slots[number]
        if slots is None:
            own_keys, own_values = key[:, :, rows], value[:, :, rows]
        else:
            own_keys = keys.flatten(0, 1).index_select(0, slots).transpose(0, 1)[None]
            own_values = values.flatten(0, 1).index_select(0, slots).transpose(0, 1)[None]
        mask = paged.prefill_mask(number, sliding_window)
        if mask is not None and query.is_cuda and not span.images and not sliding_window:
            mask = causal_lower_right(span.new, span.total)  # the same, in a form that flash kernels take
        output[:, :, rows] = scaled_dot_product_attention(
            query[:, :, rows],
            own_keys,
            own_values,
            attn_mask=mask,
            is_causal=mask is None and span.new > 1,
            scale=scaling,
            enable_gqa=grouped,
        )
    if paged.decodes:
        asked = query[0].index_select(1, paged.decode_rows).transpose(0, 1)[:, :, None]
        held_keys = keys[paged.decode_tables].flatten(1, 2).transpose(1, 2)
        held_values = values[paged.decode_tables].flatten(1, 2).transpose(1, 2)
        answer = scaled_dot_product_attention(
            asked,
            held_keys,
            held_values,
            attn_mask=paged.decode_mask(sliding_window),
            scale=scaling,
            enable_gqa=grouped,
        )
        output[0].index_copy_(1, paged.decode_rows, answer[:, :, 0].transpose(0, 1))
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, paged_attention)
