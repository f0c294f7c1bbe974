"""Blocks and prefixes: the index against plain dictionaries, and no block lost or shared by mistake."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featcache.engine.kv import BLOCK, Blocks
from featcache.engine.prefix import PrefixChain, longest_held
from featcache.engine.prompt import ImageRun, Prompt

IMAGE_TOKEN = 9


class Ref:
    """What a chain asks of an image: its key."""

    def __init__(self, key: bytes) -> None:
        self.key = key


def prompt(pieces: list[Any], salt: str = "") -> Prompt:
    """Of pieces that are token lists, or (key number, rows) for an image."""
    ids: list[int] = []
    refs: list[Ref] = []
    runs: list[ImageRun] = []
    for piece in pieces:
        if isinstance(piece, tuple):
            key, rows = piece
            runs.append(ImageRun(len(refs), len(ids), len(ids) + rows, 0))
            refs.append(Ref(key.to_bytes(32, "big")))
            ids += [IMAGE_TOKEN] * rows
        else:
            ids += piece
    return Prompt(ids, tuple(refs), (), tuple(runs), torch.zeros(1, len(ids)), 0, salt)  # type: ignore[arg-type]


def identity(of: Prompt) -> list[Any]:
    """What each token stands for."""
    tokens: list[Any] = list(of.ids)
    for run in of.runs:
        for at in range(run.start, run.stop):
            tokens[at] = (of.images[run.image].key, run.row + at - run.start)
    return tokens


def num_common(one: Prompt, other: Prompt) -> int:
    """Tokens at the beginning that stand for the same."""
    pairs = zip(identity(one), identity(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def hashes(of: Prompt) -> list[bytes]:
    chain = PrefixChain(of)
    chain.extend(of.ids)
    return [block.hash for block in chain.blocks]


PIECES = st.lists(
    st.one_of(
        st.lists(st.sampled_from([1, 2]), min_size=1, max_size=30),
        st.tuples(st.integers(1, 2), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=5,
)


@given(PIECES, PIECES, st.sampled_from(["", "a"]), st.sampled_from(["", "a"]))
def test_two_prompts_share_the_blocks_that_mean_the_same_and_no_other(
    one: list[Any], other: list[Any], salt: str, other_salt: str
) -> None:
    a, b = prompt(one, salt), prompt(other, other_salt)
    expected = num_common(a, b) // BLOCK if salt == other_salt else 0
    same = [p == q for p, q in zip(hashes(a), hashes(b), strict=False)]
    assert same == [number < expected for number in range(len(same))]


def test_a_thousand_pairs_of_images_behind_equal_text_share_nothing() -> None:
    rng = random.Random(0)
    seen: set[bytes] = set()
    for _ in range(1000):
        of = prompt([[1] * 5, (rng.getrandbits(200), 60)])
        blocks = hashes(of)
        assert not seen & set(blocks)
        seen |= set(blocks)


def test_a_chain_that_grows_is_the_chain_of_the_whole() -> None:
    whole = prompt([[1] * 20, (1, 50), [2] * 40])
    chain = PrefixChain(whole)
    for length in range(0, len(whole.ids) + 1, 7):
        chain.extend(whole.ids[:length])
    chain.extend(whole.ids)
    assert [block.hash for block in chain.blocks] == hashes(whole)


class Model:
    """The prefix cache as a plain dictionary from everything up to a block's end to the block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = Blocks(num_blocks)
        self.tables: list[list[int]] = []
        self.known: dict[tuple[Any, ...], int] = {}

    def add(self, of: Prompt) -> bool:
        chain = PrefixChain(of)
        chain.extend(of.ids)
        held = longest_held(chain, self.blocks, len(of.ids))
        meaning = identity(of)
        expected = []
        while (len(expected) + 1) * BLOCK < len(meaning):
            block = self.known.get(tuple(meaning[: (len(expected) + 1) * BLOCK]))
            if block is None or self.blocks.find(*chain.blocks[len(expected)]) is None:
                break
            expected.append(block)
        assert held == expected
        fresh = self.blocks.allocate(-(-len(of.ids) // BLOCK) - len(held))
        if fresh is None:
            self.blocks.release(held)
            return False
        gone = set(fresh)
        self.known = {prefix: block for prefix, block in self.known.items() if block not in gone}
        table = held + fresh
        for number in range(len(of.ids) // BLOCK):
            self.blocks.publish(table[number], *chain.blocks[number])
            self.known.setdefault(tuple(meaning[: (number + 1) * BLOCK]), table[number])
        self.tables.append(table)
        return True

    def end(self, number: int) -> None:
        self.blocks.release(self.tables.pop(number % len(self.tables)))


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "end", "clear"]), PIECES, st.integers(0, 10)), max_size=40
    )
)
def test_the_index_is_a_dictionary_and_no_block_leaks(steps: list[tuple[str, list[Any], int]]) -> None:
    model = Model(24)
    for what, pieces, number in steps:
        if what == "add":
            model.add(prompt(pieces))
        elif what == "end" and model.tables:
            model.end(number)
        elif what == "clear":
            model.blocks.clear()
            model.known.clear()
        assert model.blocks.check(model.tables) == []
    while model.tables:
        model.end(0)
    assert model.blocks.num_available == 24 and model.blocks.check() == []


def test_at_least_one_token_is_left_to_compute() -> None:
    blocks = Blocks(8)
    of = prompt([[1] * (3 * BLOCK)])
    chain = PrefixChain(of)
    chain.extend(of.ids)
    table = blocks.allocate(3)
    assert table is not None
    for number, block in enumerate(table):
        blocks.publish(block, *chain.blocks[number])
    assert longest_held(chain, blocks, 3 * BLOCK) == table[:2]
    assert longest_held(chain, blocks, 3 * BLOCK + 1) == table


def test_equal_hashes_of_other_content_are_not_a_hit() -> None:
    blocks = Blocks(2)
    table = blocks.allocate(1)
    assert table is not None
    blocks.publish(table[0], b"hash", b"content")
    assert blocks.find(b"hash", b"other") is None and blocks.find(b"hash", b"content") == table[0]


def test_the_end_of_a_chain_leaves_before_its_beginning() -> None:
    blocks = Blocks(4)
    of = prompt([[1] * (4 * BLOCK)])
    chain = PrefixChain(of)
    chain.extend(of.ids)
    table = blocks.allocate(4)
    assert table is not None
    for number, block in enumerate(table):
        blocks.publish(block, *chain.blocks[number])
    blocks.release(table)
    taken = blocks.allocate(2)
    assert taken is not None
    assert longest_held(chain, blocks, 4 * BLOCK) == table[:2]
    blocks.release(taken + table[:2])
    assert blocks.check() == []


def test_more_than_there_is_takes_nothing() -> None:
    blocks = Blocks(3)
    assert blocks.allocate(4) is None and blocks.num_available == 3


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_runs_may_begin_and_end_anywhere(rows: int) -> None:
    a = prompt([[1] * 3, (1, rows), [2] * 30])
    b = prompt([[1] * 3, (1, rows), [2] * 30])
    c = prompt([[1] * 3, (2, rows), [2] * 30])
    assert hashes(a) == hashes(b)
    assert not set(hashes(a)) & set(hashes(c))
    assert np.asarray(a.ids).tolist() == np.asarray(c.ids).tolist()
