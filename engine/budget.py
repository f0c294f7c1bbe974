"""How many vision patches may go through the tower in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

CPU_COST = 16_384  # one photo of 3.2 megapixels at a patch of 14; more at once isn't faster
FIRST_COST = 32_768  # on CUDA, until the first batches were measured
MAX_COST = 1 << 20
SHARE_OF_FREE = 0.5  # the rest is for the prompts that run beside it


class BatchBudget:
    """The bound of a micro-batch, in patches: on CUDA it follows the memory that is free.

    Not for several threads at once: its owner encodes one batch after another.
    """

    def __init__(self, device: torch.device, max_cost: int | None = None) -> None:
        self._device = device
        self._limit = max_cost or (MAX_COST if device.type == "cuda" else CPU_COST)
        self._bytes_per_cost = 0.0

    def max_cost(self) -> int:
        if self._device.type != "cuda":
            return self._limit
        if not self._bytes_per_cost:
            return min(self._limit, FIRST_COST)
        free, _ = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        free += stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
        return max(1, min(self._limit, int(SHARE_OF_FREE * free / self._bytes_per_cost)))

    @contextmanager
    def measure(self, cost: int) -> Iterator[None]:
        """Around one call of the tower. What others allocate meanwhile counts too, which errs low."""
        if self._device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        used = torch.cuda.max_memory_allocated(self._device) - before
        self._bytes_per_cost = max(self._bytes_per_cost * 0.9, used / cost, 1.0)

    def ran_out(self, cost: int) -> None:
        """A batch of `cost` didn't fit: never try as much again."""
        self._limit = max(1, min(self._limit, cost // 2))
