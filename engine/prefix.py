"""Which blocks of KV a prompt has in common with what was computed before.

A block's hash stands for everything that its keys and values depend on: the hash of the block before it, its
16 token ids, and for each image token in it the image's feature key and the row it stands for. The first
block's parent is the salt. Hashes are blake3 at full width; the content is compared as well.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from featcache.engine.kv import BLOCK, Blocks
from featcache.engine.prompt import ImageRun, Prompt

_IDS = struct.Struct(f"<{BLOCK}q")
_RUN = struct.Struct("<III32s")  # where in the block, how many, from which row, feature key


class BlockHash(NamedTuple):
    """hash: of the block and all before it. content: what was hashed, its parent's hash included."""

    hash: bytes
    content: bytes


class PrefixChain:
    """The hashes of one sequence's full blocks; grows with it."""

    def __init__(self, prompt: Prompt) -> None:
        self._runs = [
            (run.start, run.stop, run.row, bytes(prompt.images[run.image].key)) for run in prompt.runs
        ]
        self._next_run = 0
        self._parent = blake3(b"featcache/kv/1" + prompt.salt.encode("utf-8", "surrogatepass")).digest()
        self.blocks: list[BlockHash] = []

    def extend(self, ids: Sequence[int]) -> None:
        """Hash the blocks of `ids` that are full and not hashed yet."""
        for start in range(len(self.blocks) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
            content = self._parent + _IDS.pack(*ids[start : start + BLOCK]) + self._images(start)
            self._parent = blake3(content).digest()
            self.blocks.append(BlockHash(self._parent, content))

    def _images(self, start: int) -> bytes:
        """The image tokens of the block at `start`: blocks are asked for in order."""
        stop, found = start + BLOCK, b""
        while self._next_run < len(self._runs) and self._runs[self._next_run][1] <= start:
            self._next_run += 1
        for begin, end, row, key in self._runs[self._next_run :]:
            if begin >= stop:
                break
            first = max(begin, start)
            found += _RUN.pack(first - start, min(end, stop) - first, row + first - begin, key)
        return found


def longest_held(chain: PrefixChain, blocks: Blocks, num_tokens: int) -> list[int]:
    """The blocks that hold the longest known prefix of a sequence of `num_tokens`, each shared once more.

    At least one token is left to be computed, since its logits are wanted.
    """
    held: list[int] = []
    for block_hash, content in chain.blocks[: (num_tokens - 1) // BLOCK]:
        block = blocks.find(block_hash, content)
        if block is None:
            break
        blocks.share(block)
        held.append(block)
    return held


def is_inside(runs: Sequence[ImageRun], position: int) -> bool:
    """Whether a cut before `position` would fall inside a run of image tokens."""
    return any(run.start < position < run.stop for run in runs)
