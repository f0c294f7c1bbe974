"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size as a grid of patches, three-axis positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL import Image

from featcache.engine.families.base import Family, ImageOptions, Pixels
from featcache.features import Layout


class Qwen2VL(Family):
    name = "qwen2_vl"
    options = frozenset({"min_pixels", "max_pixels"})
    num_axes: ClassVar[int] = 3

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        self.merge = int(self.config.vision_config.spatial_merge_size)

    def processor_options(self, options: ImageOptions) -> dict[str, Any]:
        if options.min_pixels is None and options.max_pixels is None:
            return {}
        size = dict(self.image_processor.size)
        low = options.min_pixels or min(size["shortest_edge"], options.max_pixels or size["longest_edge"])
        high = options.max_pixels or max(size["longest_edge"], low)
        return {"size": {"shortest_edge": low, "longest_edge": high}}

    def pixels(self, inputs: Any, image: Image.Image, options: ImageOptions) -> Pixels:
        frames, rows, columns = (int(n) for n in inputs["image_grid_thw"][0])
        patches = frames * rows * columns
        layout = Layout(
            num_tokens=patches // self.merge**2,
            width=image.width,
            height=image.height,
            grid=(frames, rows, columns),
        )
        return Pixels({"pixel_values": self.tower_dtype(inputs["pixel_values"])}, layout, patches)

    def collate(self, batch: Sequence[Pixels]) -> dict[str, Any]:
        patches = torch.cat([pixels.tensors["pixel_values"] for pixels in batch])
        grids = torch.tensor([pixels.layout.grid for pixels in batch])
        return {"pixel_values": self.to_device(patches), "image_grid_thw": self.to_device(grids)}

    def split(self, output: Any, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        return [{"rows": rows} for rows in output.pooler_output]

    def positions(self, ids: torch.Tensor, layouts: Sequence[Layout]) -> tuple[torch.Tensor, int]:
        """M-RoPE: text counts on; an image's tokens share a time, and have its rows and columns."""
        total = ids.shape[0]
        positions = torch.empty((3, total), dtype=torch.int64)
        image_tokens = (ids == self.image_token_id).nonzero()[:, 0].tolist()
        done = here = taken = 0  # tokens placed, the next position, image tokens used up
        for layout in layouts:
            assert layout.grid is not None
            start = image_tokens[taken]
            positions[:, done:start] = torch.arange(here, here + start - done)
            here += start - done
            _, rows, columns = layout.grid
            rows, columns = rows // self.merge, columns // self.merge
            done, taken = start + layout.num_tokens, taken + layout.num_tokens
            positions[0, start:done] = here
            positions[1, start:done] = here + torch.arange(rows).repeat_interleave(columns)
            positions[2, start:done] = here + torch.arange(columns).repeat(rows)
            here += max(rows, columns)
        positions[:, done:] = torch.arange(here, here + total - done)
        return positions, here - done

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        return positions[:, None]


class Qwen25VL(Qwen2VL):
    name = "qwen2_5_vl"


class Qwen3VL(Qwen2VL):
    """With DeepStack: three more levels of features enter above the first layers."""

    name = "qwen3_vl"

    def split(self, output: Any, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        images = super().split(output, batch)
        for level, per_image in enumerate(output.deepstack_features):
            for tensors, rows in zip(images, per_image, strict=True):
                tensors[f"deepstack.{level}"] = rows
        return images

    def level_inputs(
        self, embeds: torch.Tensor, image_index: torch.Tensor, rows: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        # The model adds each level to hidden[visual_pos_masks]. A boolean mask would make the host wait for
        # the device; the index of the one packed row doesn't, with levels spread out over that row.
        levels = []
        for level in range(len(rows) - 1):
            spread = torch.zeros_like(embeds[0])
            levels.append(spread.index_copy_(0, image_index, rows[f"deepstack.{level}"].to(embeds.dtype)))
        only_row = torch.zeros(1, dtype=torch.int64, device=embeds.device)
        return {"visual_pos_masks": only_row, "deepstack_visual_embeds": levels}
