"""LMDeploy's model classes, with the rows of images given instead of made.

LMDeploy builds them by `map/module_map.py`, in each of its processes. A request's images come as spans (see
`spans.py`) whose data are rows of features; the class puts them in the places of their tokens. Images that
come the way of LMDeploy's own processors, as pixels, go through the tower here, so that they mix in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from lmdeploy.pytorch.engine.input_process import PreprocessInputResult
from lmdeploy.pytorch.models.internvl3_hf import InternVLForConditionalGeneration, InternVLProcessor
from lmdeploy.pytorch.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLInputProcessor
from lmdeploy.pytorch.models.qwen2_vl import Qwen2VLForConditionalGeneration, Qwen2VLInputProcessor
from lmdeploy.pytorch.models.qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLInputProcessor
from lmdeploy.pytorch.multimodal.data_type import MultiModalData

from featcache.engine.lmdeploy.spans import Span

Rows = list[torch.Tensor]  # of one span: the rows, and one tensor for each further level


def item_of(span: Span, rows: Rows, image_token_id: int, ready: torch.cuda.Event | None) -> MultiModalData:
    """A span as LMDeploy carries it.

    rows: each (stop - start, hidden). ready: after which they may be read; None across processes.
    """
    return MultiModalData(
        data=rows,
        start=span.start,
        end=span.stop,
        mrope_pos_ids=span.positions,
        content_hash=span.content_hash,
        meta={"featcache": True, "image_token_id": image_token_id, "ready": ready},
    )


class _Processor:
    """An input processor that takes finished spans as they are, and all else the stock way."""

    def preprocess_input(
        self, input_ids: list[int], input_multimodals: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> Any:
        given = [item for item in input_multimodals or () if "featcache" in item]
        if not given:
            return super().preprocess_input(input_ids, input_multimodals, **kwargs)  # type: ignore[misc]
        spans = [span for item in given for span in item["featcache"]]
        return PreprocessInputResult(input_ids=input_ids, input_multimodals={MODALITY: spans})


MODALITY = "image"


class _GivenRows:
    """`prepare_inputs_for_generation` over a stock class: it runs on the engine's stream, before the forward.

    keeps_ids: whether the forward takes token ids beside embeddings.
    """

    keeps_ids: ClassVar[bool] = True
    modality: ClassVar[str] = MODALITY

    def prepare_inputs_for_generation(
        self, past_key_values: Any, inputs_embeds: torch.Tensor | None = None, context: Any = None
    ) -> dict[str, Any]:
        per_sequence = context.input_multimodals
        items = [item for given in per_sequence or () for kind in given.values() for item in kind]
        if not any(is_given(item) for item in items):
            stock: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
                past_key_values, inputs_embeds, context
            )
            return stock
        context.input_multimodals = None
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            past_key_values, inputs_embeds, context
        )
        context.input_multimodals = per_sequence
        rows = self._rows(items)
        if rows:
            ids = context.input_ids
            embeds = inputs["inputs_embeds"]
            if embeds is None:
                embeds = self.get_input_embeddings()(ids)  # type: ignore[attr-defined]
            self.scatter(inputs, embeds, ids == items[-1].meta["image_token_id"], rows)
            if not self.keeps_ids:
                inputs["input_ids"] = None
        return inputs

    def scatter(self, inputs: dict[str, Any], embeds: torch.Tensor, mask: torch.Tensor, rows: Rows) -> None:
        inputs["inputs_embeds"] = embeds.masked_scatter(mask[..., None], rows[0].to(embeds.dtype))

    def _rows(self, items: Sequence[MultiModalData]) -> Rows:
        """The rows of all spans, one tensor a level."""
        waited = set()
        found: list[Rows] = []
        for item in items:
            if not is_given(item):
                found.append(self.encode([item]))
                continue
            ready = item.meta["ready"]
            if ready is not None and id(ready) not in waited:
                torch.cuda.current_stream().wait_event(ready)
                waited.add(id(ready))
            if item.data:
                found.append(item.data)
        return [torch.cat(level) for level in zip(*found, strict=True)]

    def encode(self, items: Sequence[MultiModalData]) -> Rows:
        """The rows of stock items."""
        raise NotImplementedError

    def get_tower_output(self, **inputs: Any) -> SimpleNamespace:
        """As transformers' `get_image_features(..., return_dict=True)`: the tower on a batch of misses."""
        raise NotImplementedError


def is_given(item: MultiModalData) -> bool:
    return bool(item.meta) and "featcache" in item.meta


class _InternVLProcessor(_Processor, InternVLProcessor):  # type: ignore[misc]
    pass


class GivenInternVL(_GivenRows, InternVLForConditionalGeneration):  # type: ignore[misc]
    keeps_ids = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_processor = _InternVLProcessor(self.config, self.input_processor.dtype)

    def encode(self, items: Sequence[MultiModalData]) -> Rows:
        output = self.get_tower_output(pixel_values=torch.cat([item.data for item in items]))
        return [output.pooler_output.flatten(0, 1)]

    def get_tower_output(self, *, pixel_values: torch.Tensor) -> SimpleNamespace:
        rows = self.get_image_features(
            pixel_values, self.vision_feature_layer, self.vision_feature_select_strategy
        )
        return SimpleNamespace(pooler_output=rows)


class _Qwen2VLProcessor(_Processor, Qwen2VLInputProcessor):  # type: ignore[misc]
    pass


class _Qwen25VLProcessor(_Processor, Qwen2_5_VLInputProcessor):  # type: ignore[misc]
    pass


class _Grids(_GivenRows):
    """Towers that take patches of images of any size, and the images' grids."""

    visual: Any

    def encode(self, items: Sequence[MultiModalData]) -> Rows:
        grids = torch.cat([item.meta["grid_thw"].reshape(-1, 3) for item in items])
        output = self.get_tower_output(
            pixel_values=torch.cat([item.data for item in items]), image_grid_thw=grids
        )
        levels = getattr(output, "deepstack_features", [])
        return [torch.cat(list(rows)) for rows in (output.pooler_output, *levels)]

    def get_tower_output(
        self, *, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor
    ) -> SimpleNamespace:
        grids = image_grid_thw.cpu()
        lengths = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
        ends = lengths.to(pixel_values.device).cumsum(dim=0, dtype=torch.int32)
        merged = (grids.prod(-1) // self.visual.spatial_merge_size**2).tolist()
        rows, levels = self.run_tower(pixel_values, grids, ends)
        return SimpleNamespace(
            pooler_output=torch.split(rows, merged),
            deepstack_features=[torch.split(level, merged) for level in levels],
        )

    def run_tower(
        self, pixels: torch.Tensor, grids: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As the stock class calls its tower.

        pixels: (patches, values). grids: (images, 3), on the CPU. ends: (frames,) int32, running patch counts.
        Returns rows (tokens, hidden), and one such tensor for each further level.
        """
        raise NotImplementedError


class GivenQwen2VL(_Grids, Qwen2VLForConditionalGeneration):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_processor = _Qwen2VLProcessor(self.config)

    def run_tower(
        self, pixels: torch.Tensor, grids: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        angles = self.visual.rot_pos_emb(grids).repeat(1, 2)
        rotary = (angles.cos().to(pixels.dtype), angles.sin().to(pixels.dtype))
        return self.visual(pixels, cu_seqlens=ends, rotary_pos_emb=rotary), []


class GivenQwen25VL(_Grids, Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_processor = _Qwen25VLProcessor(self.config)

    def run_tower(
        self, pixels: torch.Tensor, grids: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        window_index, window_ends = self.visual.get_window_index(grids)
        windows = torch.tensor(window_ends, device=pixels.device, dtype=torch.int32)
        rows = self.visual(
            pixels,
            cu_seqlens=ends,
            rotary_pos_emb=self.visual.rot_pos_emb(grids).to(pixels.dtype),
            window_index=window_index,
            cu_window_seqlens=torch.unique_consecutive(windows),
        )
        return rows, []


class _Qwen3VLProcessor(_Processor, Qwen3VLInputProcessor):  # type: ignore[misc]
    pass


class GivenQwen3VL(_Grids, Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """With DeepStack: further levels enter above the first layers."""

    def __init__(self, *args: Any, dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, dtype=dtype, **kwargs)
        self.input_processor = _Qwen3VLProcessor(self.config, dtype)

    def run_tower(
        self, pixels: torch.Tensor, grids: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        angles = self.visual.rot_pos_emb(grids).repeat(1, 2)
        rows, levels = self.visual(
            pixels,
            cu_seqlens=ends,
            rotary_pos_emb=(angles.cos().to(pixels.dtype), angles.sin().to(pixels.dtype)),
            pos_embeds=self.visual.fast_pos_embed_interpolate(grids),
        )
        return rows, list(levels)

    def scatter(self, inputs: dict[str, Any], embeds: torch.Tensor, mask: torch.Tensor, rows: Rows) -> None:
        super().scatter(inputs, embeds, mask, rows)
        inputs["visual_pos_masks"] = mask[..., None].expand_as(embeds)
        inputs["deepstack_visual_embeds"] = rows[1:]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        attn_metadata: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        mrope_position_ids: torch.Tensor | None = None,
        visual_pos_masks: torch.Tensor | None = None,
        deepstack_visual_embeds: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The stock forward makes the levels itself, and has no argument for them."""
        if deepstack_visual_embeds is None:
            return super().forward(
                input_ids,
                position_ids,
                past_key_values,
                attn_metadata,
                inputs_embeds,
                mrope_position_ids,
                **kwargs,
            )
        return self.language_model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            attn_metadata=attn_metadata,
            inputs_embeds=inputs_embeds,
            mrope_position_ids=mrope_position_ids,
            visual_pos_masks=visual_pos_masks,
            deepstack_visual_embeds=deepstack_visual_embeds,
        )
