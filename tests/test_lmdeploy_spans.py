"""Spans against what LMDeploy does with them: its positions, its prefix cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_prefix import PIECES, identity, num_common, prompt

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed: see tests/lmdeploy.txt")

from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.messages import SamplingParam, SequenceMeta
from lmdeploy.pytorch.paging import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from featcache.engine.lmdeploy.models import item_of
from featcache.engine.lmdeploy.spans import cut
from featcache.engine.prompt import Prompt

BLOCKS = st.sampled_from([8, 16, 64])


def scheduler(block: int, use_mrope: bool = False) -> Scheduler:
    cache = CacheConfig(
        max_batches=8, block_size=block, num_cpu_blocks=0, num_gpu_blocks=200, enable_prefix_caching=True
    )
    meta = SequenceMeta(block, strategy=ARSequenceStrategy(), use_mrope=use_mrope)
    return Scheduler(SchedulerConfig(max_batches=8, max_session_len=4096), cache, seq_meta=meta)


def scheduled(lmdeploy: Scheduler, number: int, given: Prompt, block: int) -> Any:
    """A sequence of LMDeploy's that has gone through the scheduling of a prefill."""
    items = [item_of(span, [], 9, None) for span in cut(given, block)]
    session = lmdeploy.add_session(number)
    session.add_sequence(
        list(given.ids),
        sampling_param=SamplingParam(max_new_tokens=1),
        multimodals={"image": items} if items else None,
    )
    [sequence] = session.sequences.values()
    lmdeploy.schedule(is_prefill=True)
    lmdeploy.activate_seqs([sequence])
    return sequence


@given(PIECES, BLOCKS, st.sampled_from(["", "a"]))
def test_spans_cover_every_row_once_and_cross_no_block(pieces: list[Any], block: int, salt: str) -> None:
    given = prompt(pieces, salt)
    spans = cut(given, block)
    assert all(span.start < span.stop <= (span.start // block + 1) * block for span in spans)
    assert all(a.stop <= b.start for a, b in pairwise(spans))
    rows = [
        (given.images[span.image].key, span.row + k)
        for span in spans
        if span.image is not None
        for k in range(span.stop - span.start)
    ]
    assert rows == [token for token in identity(given) if isinstance(token, tuple)]


@given(PIECES, PIECES, BLOCKS, st.sampled_from(["", "a"]), st.sampled_from(["", "a"]))
def test_lmdeploy_reuses_the_blocks_that_mean_the_same_and_no_other(
    one: list[Any], other: list[Any], block: int, salt: str, other_salt: str
) -> None:
    """All but the block of the last token, which it computes anyway."""
    a, b = prompt(one, salt), prompt(other, other_salt)
    lmdeploy = scheduler(block)
    assert scheduled(lmdeploy, 1, a, block).cached_tokens == 0
    lmdeploy.end_session(1)
    expected = min(num_common(a, b), len(b.ids) - 1) // block * block if salt == other_salt else 0
    assert scheduled(lmdeploy, 2, b, block).cached_tokens == expected


GRIDS = st.lists(
    st.one_of(
        st.lists(st.sampled_from([1, 2]), min_size=1, max_size=30),
        st.tuples(st.integers(1, 9), st.integers(1, 9)),  # rows and columns of an image
    ),
    min_size=1,
    max_size=6,
)


@given(GRIDS, BLOCKS)
def test_lmdeploy_counts_the_positions_that_m_rope_has(pieces: list[Any], block: int) -> None:
    """Its own account of a sequence whose spans carry relative positions, through to generated tokens."""
    assume(any(isinstance(piece, tuple) for piece in pieces))
    with_rows = [(1, piece[0] * piece[1]) if isinstance(piece, tuple) else piece for piece in pieces]
    plain = prompt(with_rows)
    places, here = [], 0
    for piece in pieces:
        if isinstance(piece, tuple):
            rows, columns = piece
            row, column = np.divmod(np.arange(rows * columns), columns)
            places.append(here + np.stack([np.zeros_like(row), row, column]))
            here += max(rows, columns)
        else:
            places.append(np.repeat(np.arange(here, here + len(piece))[None], 3, axis=0))
            here += len(piece)
    expected = np.concatenate(places, axis=1)
    given = Prompt(
        plain.ids, plain.images, (), plain.runs, torch.from_numpy(expected), here - len(plain.ids), ""
    )
    sequence = scheduled(scheduler(block, use_mrope=True), 1, given, block)
    counted = np.asarray(sequence.history_mrope_pos_ids._data[: len(given.ids)])
    assert counted.T.tolist() == expected.tolist()
    sequence.update_token_ids(np.array([1]))
    assert sequence.history_mrope_pos_ids._data[len(given.ids)].tolist() == [here] * 3
