"""`Parcel`: all the small integers that a step's kernels read, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Sent: TypeAlias = Callable[[], torch.Tensor]


class Parcel:
    """Add arrays, send once, then ask what `add` returned for the tensors. Sending waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[Integers] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, array: Integers) -> Sent:
        """An int64 array of any shape; the tensor is there once the parcel is sent."""
        number = len(self._arrays)
        self._arrays.append(array)
        return lambda: self._tensors[number]

    def send(self) -> None:
        if self._device.type != "cuda":
            self._tensors = [torch.from_numpy(array) for array in self._arrays]
            return
        packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in self._arrays]))
        sent = packed.pin_memory().to(self._device, non_blocking=True)
        pieces = sent.split([array.size for array in self._arrays])
        self._tensors = [p.view(a.shape) for p, a in zip(pieces, self._arrays, strict=True)]
