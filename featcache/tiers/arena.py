"""The host tier's memory: one buffer, taken once, and the book of which parts of it are free.

Pinning is slow (2 s for 4 GiB) and torch's own pinned allocator rounds to powers of two (pytorch #150517:
1.9 x what was asked), so the arena is one exact mapping, pinned at start, that is never given back in parts.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from featcache.errors import ConfigError
from featcache.sizes import format_size

if TYPE_CHECKING:
    import torch

ALIGNMENT = 512  # bytes; a DMA burst, and more than any element's size


class Block(NamedTuple):
    """A part of the arena, in bytes. `size` is what was asked for, rounded up to ALIGNMENT."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Allocator:
    """Best fit with immediate coalescing; O(log n) to find a hole. Not thread-safe: the tier locks.

    capacity: bytes, rounded down to ALIGNMENT.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % ALIGNMENT
        self.used_bytes = 0
        self._holes: list[tuple[int, int]] = []  # (size, offset), sorted: the best fit is the first that fits
        self._by_offset: dict[int, int] = {}  # offset -> size of each hole
        self._by_end: dict[int, int] = {}  # end -> offset of each hole
        if self.capacity:
            self._add(0, self.capacity)

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, or None if no hole is large enough. Zero bytes take ALIGNMENT."""
        size = rounded(nbytes)
        place = bisect_left(self._holes, (size, 0))
        if place == len(self._holes):
            return None
        hole_size, offset = self._holes[place]
        self._remove(offset, hole_size)
        if hole_size > size:
            self._add(offset + size, hole_size - size)
        self.used_bytes += size
        return Block(offset, size)

    def free(self, block: Block) -> None:
        """Give a block back; it joins the holes beside it."""
        begin, end = block.offset, block.end
        if (before := self._by_end.get(begin)) is not None:
            self._remove(before, begin - before)
            begin = before
        if (after := self._by_offset.get(end)) is not None:
            self._remove(end, after)
            end += after
        self._add(begin, end - begin)
        self.used_bytes -= block.size

    @property
    def largest_hole(self) -> int:
        return self._holes[-1][0] if self._holes else 0

    def holes(self) -> list[Block]:
        """All holes, by offset."""
        return [Block(offset, size) for offset, size in sorted(self._by_offset.items())]

    def check(self, live: list[Block]) -> list[str]:
        """Recount: `live` and the holes must cover the capacity without gap or overlap."""
        problems = []
        at = 0
        for block in sorted([*live, *self.holes()]):
            if block.offset != at:
                problems.append(f"arena: {'gap' if block.offset > at else 'overlap'} at {at}..{block.offset}")
            at = block.end
        if at != self.capacity:
            problems.append(f"arena: blocks and holes end at {at}, not at {self.capacity}")
        if (used := sum(block.size for block in live)) != self.used_bytes:
            problems.append(f"arena: {self.used_bytes} bytes accounted, {used} live")
        return problems

    def _add(self, offset: int, size: int) -> None:
        insort(self._holes, (size, offset))
        self._by_offset[offset] = size
        self._by_end[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, offset))]
        del self._by_offset[offset], self._by_end[offset + size]


def rounded(nbytes: int) -> int:
    """What a block of `nbytes` takes of the arena."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Arena:
    """`nbytes` of host memory as one buffer, with its allocator.

    pinned: page-locked for CUDA at once, so that copies run at the bus's full rate. Plain memory is not
    touched before it is used, so that an empty arena costs nothing.

    The mapping lives until the last tensor that views it is gone, also past `close()`.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        import torch

        self.allocator = Allocator(nbytes)
        self.pinned = pinned
        self.buffer: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        if self.allocator.capacity:
            self.buffer = torch.frombuffer(_mapping(self.allocator.capacity, pinned), dtype=torch.uint8)
        if pinned and self.allocator.capacity:
            _pin(self.buffer)
        self._array = self.buffer.numpy()

    def tensor(self, block: Block, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of a block, as (nbytes,) uint8; no copy."""
        return self.buffer[block.offset : block.offset + nbytes]

    def memory(self, block: Block, nbytes: int) -> memoryview:
        """The same as a writable memoryview."""
        return self._array[block.offset : block.offset + nbytes].data

    def close(self) -> None:
        """Unpin. No copy may be under way. Leased tensors stay readable."""
        if self.pinned and self.allocator.capacity:
            import torch

            cudart: Any = torch.cuda.cudart  # untyped in torch
            cudart().cudaHostUnregister(self.buffer.data_ptr())
            self.pinned = False


def _mapping(nbytes: int, pinned: bool) -> mmap.mmap:
    # Shared where the GPU writes: copy-on-write after a fork would leave it writing to the child's pages.
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if pinned else mmap.MAP_PRIVATE)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError) as exc:
        raise ConfigError(f"host_bytes: {format_size(nbytes)} of memory can't be had: {exc}") from exc
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower first touches, nothing else
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _pin(buffer: torch.Tensor) -> None:
    import torch

    cudart: Any = torch.cuda.cudart  # untyped in torch
    code = int(cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    if code != 0:
        size = format_size(buffer.numel())
        raise ConfigError(f"host_bytes: CUDA can't pin {size} of host memory (error {code}); ask for less")
