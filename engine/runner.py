"""`ModelRunner`: one forward of the language model over the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence as Parts

import numpy as np
import torch

from featcache.engine.attention import NAME, PagedStep, Span
from featcache.engine.flash import HAS_TRITON, can_flash
from featcache.engine.graphs import DecodeGraphs, Packed
from featcache.engine.kv import KVPool
from featcache.engine.loading import Loaded
from featcache.engine.parcel import Integers, Parcel
from featcache.engine.scheduler import Part
from featcache.engine.sequence import Sequence

Rows = dict[str, torch.Tensor]


class ModelRunner:
    """Packs parts of sequences in one row and runs the model on it. Sets the model's attention to ours."""

    def __init__(self, loaded: Loaded, num_blocks: int, *, graphs: bool = True) -> None:
        self._family = loaded.family
        self._device = loaded.device
        self.pool = KVPool(loaded.family.text_config, num_blocks, loaded.dtype, loaded.device)
        # the vision tower keeps its own
        loaded.model.set_attn_implementation({"text_config": NAME})
        self.graphs: DecodeGraphs | None = None
        if graphs and HAS_TRITON and can_flash(self.pool):
            self.graphs = DecodeGraphs(self._pack, self._forward)

    def run(self, parts: Parts[Part]) -> tuple[list[Sequence], torch.Tensor]:
        """Compute the parts.

        Returns the sequences whose next token can be chosen, and their logits (sequences, vocabulary), which
        hold until the next run.
        """
        # decodes first, then plain prefills, then those that need masks of their own
        parts = sorted(parts, key=lambda part: (part.new > 1, bool(self._seen_both_ways(part))))
        complete = [part.sequence for part in parts if _is_complete(part)]
        index, rows = self._images(parts)
        if self.graphs is not None and rows is None and parts[-1].new == 1:
            logits = self.graphs.run(parts)
            if logits is not None:
                return complete, logits
        packed = self._pack(parts, image_index=index)
        packed.parcel.send()
        return complete, self._forward(packed, rows)

    def _pack(
        self,
        parts: Parts[Part],
        size: int = 0,
        width: int | None = None,
        image_index: Integers = np.zeros(0, dtype=np.int64),
    ) -> Packed:
        """One row of all parts' tokens, filled up to `size` of them."""
        spans, ids, positions, last = [], [], [], []
        start = 0
        for part in parts:
            sequence, stop = part.sequence, part.start + part.new
            spans.append(Span(start, part.new, part.start, sequence.table, self._seen_both_ways(part)))
            ids += sequence.ids[part.start : stop]
            positions.append(_positions(part))
            start += part.new
            if _is_complete(part):
                last.append(start - 1)
        for at in range(start, size):
            spans.append(Span(at, 1, 0, (self.pool.spare_block,)))
            ids.append(0)
            positions.append(np.zeros((positions[0].shape[0], 1), dtype=np.int64))
            last.append(at)
        parcel = Parcel(self._device)
        return Packed(
            parcel,
            PagedStep(self.pool, spans, parcel, width),
            ids=parcel.add(np.array([ids], dtype=np.int64)),
            positions=parcel.add(np.concatenate(positions, axis=1)),
            image_index=parcel.add(image_index),
            logits_at=parcel.add(np.array(last, dtype=np.int64)),
        )

    def _forward(self, packed: Packed, rows: Rows | None = None) -> torch.Tensor:
        return self._family.language_model_forward(
            packed.ids(),
            packed.positions(),
            packed.image_index(),
            rows,
            None,
            packed.logits_at(),
            paged=packed.step,
        )

    def _seen_both_ways(self, part: Part) -> tuple[tuple[int, int], ...]:
        """The runs of image tokens that a prefill touches, where they see each other both ways."""
        if not self._family.bidirectional_images or part.new == 1:
            return ()
        start, stop = part.start, part.start + part.new
        runs = part.sequence.prompt.runs
        return tuple((run.start, run.stop) for run in runs if run.start < stop and run.stop > start)

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
        return np.concatenate(index), {name: torch.cat(tensors) for name, tensors in found.items()}

    def _wait_for_features(self, sequence: Sequence) -> None:
        """The encoder has its own stream: this one waits for it, on the device."""
        stream = torch.cuda.current_stream(self._device)
        assert sequence.features_ready is not None
        stream.wait_event(sequence.features_ready)
        for lease in sequence.leases.values():
            for tensor in lease.features.tensors.values():
                tensor.record_stream(stream)


def _is_complete(part: Part) -> bool:
    """Whether the next token can be chosen after it."""
    return part.start + part.new == len(part.sequence.ids)


def _positions(part: Part) -> Integers:
    """(axes, new) of a part: the prompt's own, and counted on behind it."""
    prompt, stop = part.sequence.prompt, part.start + part.new
    end = len(prompt.ids)
    inside = prompt.positions[:, part.start : min(stop, end)].numpy()
    if stop <= end:
        return inside
    behind = np.arange(max(part.start, end), stop) + prompt.delta
    return np.concatenate([inside, np.broadcast_to(behind, (inside.shape[0], behind.size))], axis=1)
