"""Decoding attention that reads keys and values from the pool in place, as a Triton kernel.

Sequences are cut into splits of a fixed length, so that few long ones fill the GPU as well, and a second kernel
puts the splits together. As the cuts depend on nothing else, a sequence's result is the same to the bit in every
batch. What is read lies in tensors alone, so that a captured graph can be replayed for other sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from featcache.engine.flash import DecodeTables, Layer
from featcache.engine.kv import BLOCK

SPLIT = 128  # tokens of one program
_TILE = 64  # tokens read at a time
_JOINED = 16  # splits put together at a time
_LOG2_E = 1.4426950408889634  # the kernels take exponents to the base of 2


def paged_decode(layer: Layer, tables: DecodeTables, output: torch.Tensor) -> None:
    """Attention of one token of each sequence over all that it holds, its own included.

    layer.query: its first len(output) tokens are meant. output: (sequences, heads, head_dim), filled.
    """
    sequences, heads, head_dim = output.shape
    kv_heads = layer.keys.shape[2]
    splits = -(-tables.longest // SPLIT)
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
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        query.stride(2),
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
        split_size=SPLIT,
        num_warps=4,
        num_stages=2,
    )
    _join_kernel[(sequences, heads)](
        partial,
        weight,
        output,
        tables.totals,
        splits,
        output.stride(0),
        output.stride(1),
        window=layer.window or 0,
        heads=heads,
        head_dim=head_dim,
        width=width,
        split_size=SPLIT,
        rows=_JOINED,
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
    query_column,
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
    split_size: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """One split of one sequence for the query heads that share one head of keys.

    Every tile that it reads holds a token that is seen, so that no maximum is ever minus infinity.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    total = tl.load(totals + sequence).to(tl.int32)
    first = 0
    if window > 0:
        first = tl.maximum(total - window, 0)
    begin = tl.maximum(split * split_size, first // tile * tile)
    stop = tl.minimum((split + 1) * split_size, total)
    if begin < stop:
        row = tl.arange(0, rows)
        column = tl.arange(0, width)
        head = kv_head * group + row
        is_asked = (row < group)[:, None] & (column < head_dim)[None, :]
        at_query = sequence * query_sequence + head[:, None] * query_head + column[None, :] * query_column
        asked = tl.load(query + at_query, mask=is_asked, other=0.0)
        best = tl.full([rows], -float("inf"), tl.float32)
        mass = tl.zeros([rows], tl.float32)
        answer = tl.zeros([rows, width], tl.float32)
        for position in range(begin, stop, tile):
            token = position + tl.arange(0, tile)
            number = tl.load(blocks + sequence * blocks_sequence + token // block, mask=token < stop, other=0)
            at = (number * block + token % block) * token_stride + kv_head * head_stride
            is_there = (token < stop)[:, None] & (column < head_dim)[None, :]
            key = tl.load(keys + at[:, None] + column[None, :], mask=is_there, other=0.0)
            score = tl.dot(asked, tl.trans(key)) * scale
            is_seen = (token < stop) & (token >= first)
            score = tl.where(is_seen[None, :], score, -float("inf"))
            higher = tl.maximum(best, tl.max(score, 1))
            part = tl.exp2(score - higher[:, None])
            fade = tl.exp2(best - higher)
            value = tl.load(values + at[:, None] + column[None, :], mask=is_there, other=0.0)
            answer = answer * fade[:, None] + tl.dot(part.to(value.dtype), value)
            mass = mass * fade + tl.sum(part, 1)
            best = higher
        splits = tl.num_programs(2)
        whole = (sequence * tl.num_programs(1) * group + head) * splits + split
        at_answer = whole[:, None] * head_dim + column[None, :]
        tl.store(partial + at_answer, answer / mass[:, None], mask=is_asked)
        tl.store(weight + whole, best + tl.log2(mass), mask=row < group)


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(
    partial,
    weight,
    output,
    totals,
    splits,
    output_sequence,
    output_head,
    window: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    split_size: tl.constexpr,
    rows: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """The answer of one head of one sequence, from those of its splits."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    total = tl.load(totals + sequence).to(tl.int32)
    first = 0
    if window > 0:
        first = tl.maximum(total - window, 0)
    column = tl.arange(0, width)
    base = (sequence * heads + head) * splits
    stop = tl.cdiv(total, split_size)
    best = -float("inf")
    mass = 0.0
    answer = tl.zeros([width], tl.float32)
    for begin in range(first // split_size, stop, rows):
        split = begin + tl.arange(0, rows)
        weights = tl.load(weight + base + split, mask=split < stop, other=-float("inf"))
        higher = tl.maximum(best, tl.max(weights, 0))
        part = tl.exp2(weights - higher)
        fade = tl.exp2(best - higher)
        is_there = (split < stop)[:, None] & (column < head_dim)[None, :]
        at = (base + split)[:, None] * head_dim + column[None, :]
        answers = tl.load(partial + at, mask=is_there, other=0.0)
        answer = answer * fade + tl.sum(answers * part[:, None], 0)
        mass = mass * fade + tl.sum(part, 0)
        best = higher
    at_output = sequence * output_sequence + head * output_head + column
    tl.store(output + at_output, (answer / mass).to(output.dtype.element_ty), mask=column < head_dim)
