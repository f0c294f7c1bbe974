"""What test_paged_decode runs with TRITON_INTERPRET=1: exits with an error where a result is off.

The interpreter multiplies matrices of bfloat16 as if they were integers, so float16 stands for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from featcache.engine.flash import DecodeTables, Layer
from featcache.engine.kv import BLOCK
from featcache.engine.paged_decode import SPLIT, paged_decode

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 5, 17 * SPLIT + 3)
GROUPS = range(1, 9)


def main() -> None:
    torch.set_num_threads(1)
    cases = [
        *((group, 64, torch.float16, None, (3, SPLIT + 7)) for group in GROUPS),
        *((2, head_dim, torch.float16, None, (40, 200)) for head_dim in (16, 64, 80, 128)),
        *((4, head_dim, torch.float32, None, (7, 129, 64)) for head_dim in (16, 64, 80, 128)),
        *((2, 32, torch.float32, None, (length, 5)) for length in LENGTHS),
        *((2, 32, torch.float32, window, (1, 31, 32, 33, 300)) for window in (1, 16, 32, 64, 65, 200, 4000)),
        (3, 24, torch.float32, 2 * SPLIT + 1, (5 * SPLIT,)),
    ]
    heads = sum(check(*case, seed=seed) for seed, case in enumerate(cases))
    alone_as_in_a_batch()
    print(len(cases), heads)


def check(
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    totals: Sequence[int],
    seed: int,
    device: str = "cpu",
) -> int:
    """Compare one call; returns how many heads it had."""
    layer, tables = made(group, head_dim, dtype, window, totals, seed)
    output = torch.full((len(totals), 2 * group, head_dim), float("nan"), dtype=dtype, device=device)
    query, keys, values = (t.to(device) for t in (layer.query, layer.keys, layer.values))
    there = Layer(query, query, query, keys, values, layer.scaling, layer.window)
    paged_decode(
        there, DecodeTables(tables.blocks.to(device), tables.totals.to(device), tables.longest), output
    )
    expected = plain(layer, tables)
    error = (output.float().cpu() - expected).abs().max()
    of = f"group {group}, head_dim {head_dim}, {dtype}, window {window}, totals {totals}"
    assert error <= TOLERANCE[dtype], f"{of}: off by {error}"
    assert expected.abs().max() > 0.1, of
    return output.shape[0] * output.shape[1]


def made(
    group: int, head_dim: int, dtype: torch.dtype, window: int | None, totals: Sequence[int], seed: int
) -> tuple[Layer, DecodeTables]:
    """Random sequences in a pool whose blocks are dealt out in no order; what nobody holds is not a number."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-total // BLOCK) for total in totals]
    numbers = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
    shape = (sum(counts) + 3, BLOCK, 2, head_dim)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    blocks = torch.zeros((len(totals), max(counts) + 1), dtype=torch.int64)
    for row, (count, total) in enumerate(zip(counts, totals, strict=True)):
        table = [numbers.pop() for _ in range(count)]
        blocks[row, :count] = torch.tensor(table)
        for pool in (keys, values):
            held = torch.full((count * BLOCK, 2, head_dim), float("nan"), dtype=dtype)
            held[:total] = torch.randn((total, 2, head_dim), generator=generator).to(dtype)
            pool[table] = held.view(count, BLOCK, 2, head_dim)
    # a row of the packed step is longer than its decodes, and heads come before tokens
    query = (
        torch.randn((1, len(totals) + 2, 2 * group, head_dim), generator=generator).to(dtype).transpose(1, 2)
    )
    scaling = None if seed % 2 else 0.3
    layer = Layer(query, query, query, keys, values, scaling, window)
    return layer, DecodeTables(blocks, torch.tensor(totals), max(totals))


def plain(layer: Layer, tables: DecodeTables) -> torch.Tensor:
    """(sequences, heads, head_dim) in fp32, one head after the other."""
    sequences, head_dim = len(tables.totals), layer.query.shape[-1]
    group = layer.query.shape[1] // layer.keys.shape[2]
    scale = layer.scaling or head_dim**-0.5
    answers = torch.empty((sequences, layer.query.shape[1], head_dim))
    for row in range(sequences):
        total = int(tables.totals[row])
        table = tables.blocks[row, : -(-total // BLOCK)]
        first = max(0, total - layer.window) if layer.window else 0
        keys, values = (p[table].flatten(0, 1)[first:total].float() for p in (layer.keys, layer.values))
        for head in range(layer.query.shape[1]):
            key, value = keys[:, head // group], values[:, head // group]
            weights = torch.softmax(key @ layer.query[0, head, row].float() * scale, 0)
            answers[row, head] = weights @ value
    return answers


def alone_as_in_a_batch() -> None:
    """A sequence's result has the same bits, whoever is decoded beside it."""
    layer, tables = made(2, 64, torch.float16, None, (70, 3 * SPLIT + 9, 20), seed=100)
    together = torch.empty((3, 4, 64), dtype=torch.float16)
    paged_decode(layer, tables, together)
    for row in range(3):
        alone = torch.empty((1, 4, 64), dtype=torch.float16)
        total = int(tables.totals[row])
        mine = layer._replace(query=layer.query[:, :, row : row + 1])
        paged_decode(
            mine, DecodeTables(tables.blocks[row : row + 1], tables.totals[row : row + 1], total), alone
        )
        assert torch.equal(alone[0], together[row])


if __name__ == "__main__":
    main()
