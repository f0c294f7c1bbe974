"""Paged attention for transformers' language models, registered through `AttentionInterface`.

Several sequences are packed in one row: first those that decode, one token each, then the prefills. Each layer
writes its new keys and values into the pool; then every sequence attends to its own blocks. The model is given
no cache: this is all that one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from featcache.engine.flash import FlashStep, Layer
from featcache.engine.kv import BLOCK, KVPool
from featcache.engine.parcel import Parcel
from featcache.errors import ModelError

NAME = "featcache_paged"

# What some language models want of attention and this one can't do; to leave it out would be a wrong answer.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass(frozen=True, slots=True)
class Span:
    """What one sequence adds to a step: `new` tokens at `start` of the packed row, after `past` held ones.

    table: its blocks, those of the new tokens included.
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

    def at(self, start: int) -> Span:
        return replace(self, start=start)

    def slots(self, first: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where in the pool its tokens [first, stop) are."""
        begin = first // BLOCK
        blocks = np.array(self.table[begin : -(-stop // BLOCK)], dtype=np.int64)
        every = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        return every[first - begin * BLOCK : stop - begin * BLOCK]


class PagedStep:
    """One forward's view of the pool.

    spans: in order of `start`, those of one token first.
    parcel: takes along what the device has to know; to be sent before the forward.
    flash: use the kernels of `flash`, where no mask is needed.
    """

    def __init__(self, pool: KVPool, spans: Sequence[Span], parcel: Parcel, *, flash: bool) -> None:
        self.pool = pool
        device = pool.keys.device
        self._slots = parcel.add(np.concatenate([span.slots(span.past, span.total) for span in spans]))
        self.flash: FlashStep | None = None
        self.plain = [(number, span) for number, span in enumerate(spans)]
        if flash:
            self.flash = FlashStep([span for span in spans if not span.images], parcel)
            self.plain = [(number, span) for number, span in self.plain if span.images]
        self._tables: dict[int, slice | Any] = {}
        for number, span in self.plain:
            table = list(span.table[: -(-span.total // BLOCK)])
            if table == list(range(table[0], table[0] + len(table))):
                self._tables[number] = slice(table[0], table[0] + len(table))
            elif span.past:
                self._tables[number] = parcel.add(np.array(table, dtype=np.int64))
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self._device = device

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """New keys and values of one layer, (1, kv_heads, tokens, head_dim), into the pool."""
        keys, values = self.pool.layer(layer)
        slots = self._slots()
        keys.flatten(0, 1).index_copy_(0, slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, slots, value[0].transpose(0, 1))

    def held(self, pool: torch.Tensor, number: int, span: Span, first: int) -> torch.Tensor:
        """(1, kv_heads, total - first, head_dim) of a span: a view where its blocks lie in one row."""
        table = self._tables[number]
        blocks = pool[table] if isinstance(table, slice) else pool.index_select(0, table())
        return blocks.flatten(0, 1)[first : span.total].transpose(0, 1)[None]

    def mask(self, number: int, span: Span, window: int | None) -> torch.Tensor | None:
        """(new, total) bool for a prefill; None if plain causal attention says the same."""
        if window is not None and window >= span.total:
            window = None
        if window is None and not span.images and not span.past:
            return None
        key = (number, window)
        if key not in self._masks:
            mask = _mask(span, window)
            if self._device.type == "cuda":
                mask = mask.pin_memory().to(self._device, non_blocking=True)
            self._masks[key] = mask
        return self._masks[key]


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

    query: (1, heads, tokens, head_dim); key, value: (1, kv_heads, tokens, head_dim).
    Returns (1, tokens, heads, head_dim). Raises ModelError if the model wants what this can't do.
    """
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise ModelError(f"the language model's attention has {name}, which the native engine can't do")
    number = int(module.layer_idx)  # type: ignore[arg-type]
    paged.write(number, key, value)
    layer = Layer(query, key, value, *paged.pool.layer(number), scaling, sliding_window)
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    if paged.flash is not None:
        paged.flash.attend(layer, output)
    for at, span in paged.plain:
        attend = _decode if span.new == 1 else _prefill
        output[:, span.start : span.start + span.new] = attend(paged, at, span, layer)
    return output, None


def _decode(paged: PagedStep, at: int, span: Span, layer: Layer) -> torch.Tensor:
    """One token: (1, 1, heads, head_dim). The heads that share keys are the rows of one product."""
    first = 0 if layer.window is None else max(0, span.total - layer.window)
    query = layer.query[:, :, span.start]
    answer = scaled_dot_product_attention(
        query.reshape(1, layer.key.shape[1], -1, query.shape[2]),
        paged.held(layer.keys, at, span, first),
        paged.held(layer.values, at, span, first),
        scale=layer.scaling,
    )
    return answer.reshape(1, 1, query.shape[1], query.shape[2])


def _prefill(paged: PagedStep, at: int, span: Span, layer: Layer) -> torch.Tensor:
    """Several tokens: (1, new, heads, head_dim)."""
    rows = slice(span.start, span.start + span.new)
    query, key, value = layer.query[:, :, rows], layer.key[:, :, rows], layer.value[:, :, rows]
    if span.past:
        key, value = paged.held(layer.keys, at, span, 0), paged.held(layer.values, at, span, 0)
    mask = paged.mask(at, span, layer.window)
    answer = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return answer.transpose(1, 2)


AttentionInterface.register(NAME, paged_attention)
