"""The paged KV pool: blocks of 16 tokens, who uses them, and which of them hold a known prefix.

`Blocks` keeps the books and knows no tensors; `KVPool` is the memory.

A block is free, in use (references > 0), or kept: nobody uses it, but it holds a prefix that may be asked for
again. Kept blocks leave, least recently used first, when free ones run out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from featcache.errors import ConfigError
from featcache.sizes import format_size

BLOCK = 16


@dataclass(slots=True)
class _Published:
    hash: bytes
    content: bytes


class Blocks:
    """Reference counts and the index of published blocks. One thread uses it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._published: list[_Published | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.epoch = 0  # raised by clear: what was computed before it is not for those who come after
        self.evicted = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones, and those that are merely kept."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def allocate(self, number: int) -> list[int] | None:
        """`number` blocks with one reference each, or None, and nothing taken, if there are fewer."""
        if number > self.num_available:
            return None
        blocks = []
        for _ in range(number):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        self._forget(block)
        self.evicted += 1
        return block

    def _forget(self, block: int) -> None:
        published = self._published[block]
        if published is not None:
            del self._by_hash[published.hash]
            self._published[block] = None

    def find(self, block_hash: bytes, content: bytes) -> int | None:
        """The block published under this hash, if its content is the same to the byte."""
        block = self._by_hash.get(block_hash)
        if block is None:
            return None
        published = self._published[block]
        return block if published is not None and published.content == content else None

    def share(self, block: int) -> None:
        """One more reference to a published block."""
        if self._references[block] == 0:
            del self._kept[block]
        self._references[block] += 1

    def publish(self, block: int, block_hash: bytes, content: bytes) -> None:
        """Let a block that is in use, and full, be found. The first of several equal ones is."""
        assert self._references[block] > 0, block
        if block_hash not in self._by_hash and self._published[block] is None:
            self._by_hash[block_hash] = block
            self._published[block] = _Published(block_hash, content)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference each. The last blocks of a chain become the first to leave."""
        for block in reversed(blocks):
            assert self._references[block] > 0, block
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._published[block] is None:
                    self._free.append(block)
                else:
                    self._kept[block] = None

    def clear(self) -> int:
        """Let no published block be found any more. Returns how many there were."""
        self.epoch += 1
        number = len(self._by_hash)
        for block in list(self._by_hash.values()):
            self._forget(block)
        self._free.extend(self._kept)
        self._kept.clear()
        return number

    def check(self, in_use: Iterable[Sequence[int]] = ()) -> list[str]:
        """Recount; what doesn't add up. in_use: the block tables of all that hold references."""
        counted = [0] * self.num_blocks
        for table in in_use:
            for block in table:
                counted[block] += 1
        problems = [
            f"block {block}: {self._references[block]} references, {number} counted"
            for block, number in enumerate(counted)
            if self._references[block] != number
        ]
        idle = sorted([*self._free, *self._kept])
        if idle != [block for block in range(self.num_blocks) if self._references[block] == 0]:
            problems.append("free and kept blocks aren't those without references")
        for block_hash, block in self._by_hash.items():
            published = self._published[block]
            if published is None or published.hash != block_hash:
                problems.append(f"block {block} is not what the index says")
        if any(self._published[block] is not None for block in self._free):
            problems.append("a free block is published")
        return problems


class KVPool:
    """Keys and values of all layers: each (layers, blocks, BLOCK, kv_heads, head_dim)."""

    def __init__(self, text_config: Any, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        layers, heads, head_dim = kv_shape(text_config)
        shape = (layers, num_blocks, BLOCK, heads, head_dim)
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as exc:
            size = num_blocks * block_bytes(text_config, dtype)
            raise ConfigError(f"kv_bytes: {format_size(size)} can't be had on {device}; give less") from exc

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each (blocks, BLOCK, kv_heads, head_dim)."""
        return self.keys[index], self.values[index]


def kv_shape(text_config: Any) -> tuple[int, int, int]:
    """(layers, kv_heads, head_dim) of a language model."""
    heads = int(text_config.num_attention_heads)
    kv_heads = int(getattr(text_config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text_config, "head_dim", None) or text_config.hidden_size // heads)
    return int(text_config.num_hidden_layers), kv_heads, head_dim


def block_bytes(text_config: Any, dtype: torch.dtype) -> int:
    """What one block takes, over all layers."""
    layers, heads, head_dim = kv_shape(text_config)
    return 2 * layers * BLOCK * heads * head_dim * dtype.itemsize
