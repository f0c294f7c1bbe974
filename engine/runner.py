"""`ModelRunner`: one forward of the language model over the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence as Parts

import numpy as np
import torch

from featcache.engine.attention import NAME, PagedStep, Span
from featcache.engine.flash import can_flash
from featcache.engine.flash_check import flash_agrees
from featcache.engine.graphs import DecodeGraphs
from featcache.engine.kv import KVPool
from featcache.engine.loading import Loaded
from featcache.engine.parcel import Integers, Parcel
from featcache.engine.scheduler import Part
from featcache.engine.sequence import Sequence

Rows = dict[str, torch.Tensor]


class ModelRunner:
    """Packs parts of sequences in one row and runs the model on it. Sets the model's attention to ours.

    cuda_graphs: decode by CUDA graphs, where the flash kernels are.
    """

    def __init__(self, loaded: Loaded, num_blocks: int, *, cuda_graphs: bool = True) -> None:
        self._family = loaded.family
        self._device = loaded.device
        # one block more, which no sequence gets: rows that only fill up a graph's batch use it
        self.pool = KVPool(loaded.family.text_config, num_blocks + 1, loaded.dtype, loaded.device)
        self.has_flash = can_flash(self.pool) and flash_agrees(
            loaded.family.text_config, loaded.dtype, loaded.device
        )
        self.graphs: DecodeGraphs | None = None
        if self.has_flash and cuda_graphs:
            self.graphs = DecodeGraphs(loaded.family, self.pool, num_blocks)
        # the vision tower keeps its own
        loaded.model.set_attn_implementation({"text_config": NAME})

    def run(self, parts: Parts[Part]) -> tuple[list[Sequence], torch.Tensor]:
        """Compute the parts.

        Returns the sequences whose next token can be chosen, and their logits (sequences, vocabulary).
        """
        spans = [self._span(part) for part in parts]
        # decodes first, then plain prefills, then those with masks of their own
        order = sorted(range(len(parts)), key=lambda i: (parts[i].new > 1, bool(spans[i].images)))
        parts = [parts[i] for i in order]
        starts = np.concatenate([[0], np.cumsum([part.new for part in parts])]).tolist()
        spans = [spans[i].at(start) for i, start in zip(order, starts, strict=False)]
        complete = [
            (part.sequence, start + part.new - 1)
            for part, start in zip(parts, starts, strict=False)
            if part.start + part.new == len(part.sequence.ids)
        ]
        if self.graphs is not None and len(complete) == len(parts) and all(map(_decodes, parts)):
            ids = [part.sequence.ids[part.start] for part in parts]
            places = np.concatenate([_positions(part) for part in parts], axis=1)
            decoded = self.graphs.run(ids, places, spans)
            if decoded is not None:
                return [sequence for sequence, _ in complete], decoded
        index, rows = self._images(parts)
        parcel = Parcel(self._device)
        step = PagedStep(self.pool, spans, parcel, flash=self.has_flash)
        ids = [i for part in parts for i in part.sequence.ids[part.start : part.start + part.new]]
        sent = [
            parcel.add(np.array([ids], dtype=np.int64)),
            parcel.add(np.concatenate([_positions(part) for part in parts], axis=1)),
            parcel.add(index),
            parcel.add(np.array([last for _, last in complete], dtype=np.int64)),
        ]
        parcel.send()
        ids_sent, positions, index_sent, last = (tensor() for tensor in sent)
        logits = self._family.language_model_forward(
            ids_sent, positions, index_sent, rows, None, last, paged=step
        )
        return [sequence for sequence, _ in complete], logits

    def _span(self, part: Part) -> Span:
        images: tuple[tuple[int, int], ...] = ()
        if self._family.bidirectional_images and part.new > 1:
            stop = part.start + part.new
            runs = part.sequence.prompt.runs
            images = tuple(
                (run.start, run.stop) for run in runs if run.start < stop and run.stop > part.start
            )
        return Span(0, part.new, part.start, part.sequence.table, images)

    def _images(self, parts: Parts[Part]) -> tuple[Integers, Rows | None]:
        """Where image tokens stand in the packed row, and their features."""
        index: list[Integers] = []
        found: dict[str, list[torch.Tensor]] = {}
        begin = 0
        for sequence, start, new in parts:
            stop = start + new
            if sequence.leases and sequence.features_ready is not None:
                self._wait_for_features(sequence)
            runs = sequence.prompt.runs if start < sequence.num_prompt else ()
            for run in runs:
                first, last = max(run.start, start), min(run.stop, stop)
                if first >= last:
                    continue
                index.append(np.arange(begin + first - start, begin + last - start))
                row = run.row + first - run.start
                for name, tensor in sequence.leases[run.image].features.tensors.items():
                    found.setdefault(name, []).append(tensor[row : row + last - first])
            begin += new
        if not index:
            return np.zeros(0, dtype=np.int64), None
        return np.concatenate(index), {
            name: torch.cat(tensors).to(self._device) for name, tensors in found.items()
        }

    def _wait_for_features(self, sequence: Sequence) -> None:
        """The encoder has its own stream: this one waits for it, on the device."""
        stream = torch.cuda.current_stream(self._device)
        assert sequence.features_ready is not None
        stream.wait_event(sequence.features_ready)
        for lease in sequence.leases.values():
            for tensor in lease.features.tensors.values():
                if tensor.is_cuda:  # a store without a device lends what it has on the host
                    tensor.record_stream(stream)


def _decodes(part: Part) -> bool:
    """Whether it is one token of an answer: no image's, and with nothing behind it."""
    return part.new == 1 and part.start >= part.sequence.num_prompt


def _positions(part: Part) -> Integers:
    """(axes, new) of a part: the prompt's own, and counted on behind it."""
    prompt, stop = part.sequence.prompt, part.start + part.new
    end = len(prompt.ids)
    inside = prompt.positions[:, part.start : min(stop, end)].numpy()
    if stop <= end:
        return inside
    behind = np.arange(max(part.start, end), stop) + prompt.delta
    return np.concatenate([inside, np.broadcast_to(behind, (inside.shape[0], behind.size))], axis=1)
