"""Decoding attention that reads keys and values from the pool in place, as a Triton kernel.

Each sequence's tokens are cut into splits, so that few long sequences fill the GPU as well; a second kernel puts
the splits together. What is read lies in tensors alone, so that a captured graph can be replayed for others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from featcache.engine.flash import DecodeTables, Layer
from featcache.engine.kv import BLOCK

_TILE = 64  # tokens read at a time
_WAVES = 2  # programs for each multiprocessor, about
_MAX_SPLITS = 64


def num_splits(device: torch.device, groups: int, longest: int) -> int:
    """Parts to cut sequences of up to `longest` tokens into, when there are `groups` of heads in all."""
    wanted = _WAVES * torch.cuda.get_device_properties(device).multi_processor_count // max(1, groups)
    return max(1, min(wanted, _MAX_SPLITS, -(-longest // (2 * _TILE))))


def paged_decode(layer: Layer, tables: DecodeTables, output: torch.Tensor) -> None:
    """Attention of one token of each sequence over all that it holds, its own included.

    layer.query: its first len(output) tokens are meant. output: (sequences, heads, head_dim), filled.
    """
    sequences, heads, head_dim = output.shape
    kv_heads = layer.keys.shape[2]
    splits = num_splits(output.device, sequences * kv_heads, tables.longest)
    partial = torch.empty((sequences, heads, splits, head_dim), dtype=torch.float32, device=output.device)
    weight = torch.empty((sequences, heads, splits), dtype=torch.float32, device=output.device)
    query = layer.query[0].transpose(0, 1)
    scale = layer.scaling if layer.scaling is not None else head_dim**-0.5
    width = triton.next_power_of_2(head_dim)
    _split_kernel[(sequences, kv_heads, splits)](
        query,
        layer.keys,
        layer.values,
        tables.blocks,
        tables.totals,
        partial,
        weight,
        scale * 1.4426950408889634,  # exponents to the base of 2
        query.stride(0),
        query.stride(1),
        tables.blocks.stride(0),
        layer.keys.stride(1),
        layer.keys.stride(2),
        window=layer.window or 0,
        group=heads // kv_heads,
        rows=max(16, triton.next_power_of_2(heads // kv_heads)),
        head_dim=head_dim,
        width=width,
        block=BLOCK,
        tile=_TILE,
        splits=splits,
        num_warps=4,
        num_stages=3,
    )
    _join_kernel[(sequences, heads)](
        partial,
        weight,
        output,
        output.stride(0),
        output.stride(1),
        heads=heads,
        head_dim=head_dim,
        width=width,
        splits=splits,
        rows=triton.next_power_of_2(splits),
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _split_kernel(
    query,
    keys,
    values,
    blocks,
    totals,
    partial,
    weight,
    scale,
    query_sequence,
    query_head,
    blocks_sequence,
    token_stride,
    head_stride,
    window: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    splits: tl.constexpr,
):  # type: ignore[no-untyped-def]
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    total = tl.load(totals + sequence).to(tl.int32)
    first = 0
    if window > 0:
        first = tl.maximum(0, total - window)
    begin = first // tile * tile
    share = tl.cdiv(tl.cdiv(total - begin, splits), tile) * tile
    start = begin + split * share
    stop = tl.minimum(start + share, total)
    row = tl.arange(0, rows)
    column = tl.arange(0, width)
    head = kv_head * group + row
    is_head = row < group
    is_column = column < head_dim
    at_query = sequence * query_sequence + head[:, None] * query_head + column[None, :]
    asked = tl.load(query + at_query, mask=is_head[:, None] & is_column[None, :], other=0.0)
    best = tl.full([rows], -float("inf"), tl.float32)
    mass = tl.zeros([rows], tl.float32)
    answer = tl.zeros([rows, width], tl.float32)
    for position in range(start, stop, tile):
        token = position + tl.arange(0, tile)
        is_seen = (token < stop) & (token >= first)
        number = tl.load(blocks + sequence * blocks_sequence + token // block, mask=token < stop, other=0)
        at = (number * block + token % block) * token_stride + kv_head * head_stride
        is_there = (token < stop)[:, None] & is_column[None, :]
        key = tl.load(keys + at[:, None] + column[None, :], mask=is_there, other=0.0)
        score = tl.dot(asked, tl.trans(key)) * scale
        score = tl.where(is_seen[None, :], score, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        # a tile of which the window shows nothing leaves `higher` at -inf
        base = tl.where(higher == -float("inf"), 0.0, higher)
        part = tl.exp2(score - base[:, None])
        fade = tl.exp2(best - base)
        value = tl.load(values + at[:, None] + column[None, :], mask=is_there, other=0.0)
        answer = answer * fade[:, None] + tl.dot(part.to(value.dtype), value)
        mass = mass * fade + tl.sum(part, 1)
        best = higher
    is_empty = mass == 0.0
    answer = answer / tl.where(is_empty, 1.0, mass)[:, None]
    whole = (sequence * tl.num_programs(1) * group + head) * splits + split
    tl.store(
        partial + whole[:, None] * head_dim + column[None, :],
        answer,
        mask=is_head[:, None] & is_column[None, :],
    )
    logarithm = tl.where(is_empty, -float("inf"), best + tl.log2(tl.where(is_empty, 1.0, mass)))
    tl.store(weight + whole, logarithm, mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(
    partial,
    weight,
    output,
    output_sequence,
    output_head,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
    rows: tl.constexpr,
):  # type: ignore[no-untyped-def]
    sequence, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, rows)
    column = tl.arange(0, width)
    whole = (sequence * heads + head) * splits + split
    weights = tl.load(weight + whole, mask=split < splits, other=-float("inf"))
    weights = tl.exp2(weights - tl.max(weights, 0))
    is_there = (split < splits)[:, None] & (column < head_dim)[None, :]
    parts = tl.load(partial + whole[:, None] * head_dim + column[None, :], mask=is_there, other=0.0)
    answer = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    at = sequence * output_sequence + head * output_head + column
    tl.store(output + at, answer.to(output.dtype.element_ty), mask=column < head_dim)
