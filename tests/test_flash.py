"""How spans are packed for the flash kernels, with plain attention in the kernels' place; and the fallback."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from featcache.engine import flash_check
from featcache.engine.flash import DecodeTables, Layer, can_flash
from featcache.engine.kv import KVPool

HEADS = SimpleNamespace(num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
CPU = torch.device("cpu")


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    most_new: int,
    most_all: int,
    layer: Layer,
) -> torch.Tensor:
    """What the kernel is documented to do, one sequence and one head after the other."""
    asking, asked = (b.tolist() for b in bounds)
    assert most_new == max(b - a for a, b in itertools.pairwise(asking))
    assert most_all == max(b - a for a, b in itertools.pairwise(asked))
    answer = torch.empty_like(query)
    for number in range(len(asking) - 1):
        mine, held = slice(*asking[number : number + 2]), slice(*asked[number : number + 2])
        new, total = mine.stop - mine.start, held.stop - held.start
        distance = torch.arange(total - new, total)[:, None] - torch.arange(total)[None]
        seen = (distance >= 0) & (distance < (layer.window or total))
        for head in range(query.shape[1]):
            scores = query[mine, head] @ key[held, head // 3].T * query.shape[2] ** -0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            answer[mine, head] = weights @ value[held, head // 3]
    return answer


def decode(layer: Layer, tables: DecodeTables, output: torch.Tensor) -> None:
    for row, total in enumerate(tables.totals.tolist()):
        assert total <= tables.longest
        first = max(0, total - layer.window) if layer.window else 0
        key, value = (p[tables.blocks[row]].flatten(0, 1)[first:total] for p in (layer.keys, layer.values))
        for head in range(output.shape[1]):
            weights = (key[:, head // 3] @ layer.query[0, head, row] * output.shape[2] ** -0.5).softmax(0)
            output[row, head] = weights @ value[:, head // 3]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("featcache.engine.flash._varlen", varlen)
    monkeypatch.setattr("featcache.engine.paged_decode.paged_decode", decode)
    return monkeypatch


def test_packed_spans_are_attended_as_plain_ones(kernels: pytest.MonkeyPatch) -> None:
    assert flash_check.flash_agrees(HEADS, torch.float32, CPU)
    for window in (None, flash_check._WINDOW):
        assert flash_check._error(HEADS, torch.float32, CPU, window) < 1e-5


@pytest.mark.parametrize("kernel", ["varlen", "decode"])
def test_a_kernel_that_is_off_is_not_used(
    kernels: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: str
) -> None:
    """One that looks a token too far back, as an off-by-one in the window would."""

    def further(layer: Layer) -> Layer:
        return layer._replace(window=layer.window and layer.window + 1)

    def wrong_varlen(*args: Any) -> torch.Tensor:
        return varlen(args[0], args[1], args[2], args[3], args[4], args[5], further(args[6]))

    def wrong_decode(layer: Layer, *args: Any) -> None:
        decode(further(layer), *args)

    if kernel == "varlen":
        kernels.setattr("featcache.engine.flash._varlen", wrong_varlen)
    else:
        kernels.setattr("featcache.engine.paged_decode.paged_decode", wrong_decode)
    with caplog.at_level(logging.WARNING, "featcache"):
        assert not flash_check.flash_agrees(HEADS, torch.float32, CPU)
    assert "off by" in caplog.text


def test_kernels_that_are_missing_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU torch has none of them, and says so in its own way."""
    with caplog.at_level(logging.WARNING, "featcache"):
        assert not flash_check.flash_agrees(HEADS, torch.float32, CPU)
    assert "plain attention is" in caplog.text
    assert not can_flash(KVPool(HEADS, 2, torch.bfloat16, CPU))
