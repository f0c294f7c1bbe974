"""`ModelRunner`: one forward of the language model over the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence as Parts

import torch

from featcache.engine.attention import NAME, PagedStep, Span
from featcache.engine.kv import KVPool
from featcache.engine.loading import Loaded
from featcache.engine.scheduler import Part
from featcache.engine.sequence import Sequence

Rows = dict[str, torch.Tensor]


class ModelRunner:
    """Packs parts of sequences in one row and runs the model on it. Sets the model's attention to ours."""

    def __init__(self, loaded: Loaded, num_blocks: int) -> None:
        self._family = loaded.family
        self._device = loaded.device
        self.pool = KVPool(loaded.family.text_config, num_blocks, loaded.dtype, loaded.device)
        # the vision tower keeps its own
        loaded.model.set_attn_implementation({"text_config": NAME})

    def run(self, parts: Parts[Part]) -> torch.Tensor:
        """Compute the parts; returns logits (parts that are complete, vocabulary), in order."""
        spans, last = [], []
        start = 0
        for part in parts:
            spans.append(self._span(part, start))
            start += part.new
            if part.start + part.new == len(part.sequence.ids):
                last.append(start - 1)
        index, rows = self._images(parts)
        step = PagedStep(self.pool, spans, self._device)
        ids = [i for part in parts for i in part.sequence.ids[part.start : part.start + part.new]]
        return self._family.language_model_forward(
            self._send(torch.tensor([ids])),
            self._send(torch.cat([_positions(part) for part in parts], dim=1)),
            self._send(torch.tensor(index, dtype=torch.int64)),
            rows,
            step,
            self._send(torch.tensor(last, dtype=torch.int64)),
            paged=step,
        )

    def _span(self, part: Part, start: int) -> Span:
        images: tuple[tuple[int, int], ...] = ()
        if self._family.bidirectional_images and part.new > 1:
            stop = part.start + part.new
            runs = part.sequence.prompt.runs
            images = tuple(
                (run.start, run.stop) for run in runs if run.start < stop and run.stop > part.start
            )
        return Span(start, part.new, part.start, tuple(part.sequence.table), images)

    def _images(self, parts: Parts[Part]) -> tuple[list[int], Rows | None]:
        """Where image tokens stand in the packed row, and their features."""
        index: list[int] = []
        found: dict[str, list[torch.Tensor]] = {}
        begin = 0
        for sequence, start, new in parts:
            stop = start + new
            if sequence.leases and sequence.features_ready is not None:
                self._wait_for_features(sequence)
            for run in sequence.prompt.runs:
                first, last = max(run.start, start), min(run.stop, stop)
                if first >= last:
                    continue
                index += range(begin + first - start, begin + last - start)
                row = run.row + first - run.start
                for name, tensor in sequence.leases[run.image].features.tensors.items():
                    found.setdefault(name, []).append(tensor[row : row + last - first])
            begin += new
        if not index:
            return index, None
        return index, {name: torch.cat(tensors) for name, tensors in found.items()}

    def _wait_for_features(self, sequence: Sequence) -> None:
        """The encoder has its own stream: this one waits for it, on the device."""
        stream = torch.cuda.current_stream(self._device)
        assert sequence.features_ready is not None
        stream.wait_event(sequence.features_ready)
        for lease in sequence.leases.values():
            for tensor in lease.features.tensors.values():
                tensor.record_stream(stream)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor


def _positions(part: Part) -> torch.Tensor:
    """(axes, new) of a part: the prompt's own, and counted on behind it."""
    prompt, stop = part.sequence.prompt, part.start + part.new
    end = len(prompt.ids)
    inside = prompt.positions[:, part.start : min(stop, end)]
    behind = torch.arange(max(part.start, end), max(stop, end)) + prompt.delta
    return torch.cat([inside, behind.expand(inside.shape[0], -1)], dim=1)
