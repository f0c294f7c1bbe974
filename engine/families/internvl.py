"""InternVL in the layout of Hugging Face: up to twelve tiles chosen by the image's shape, and an overview."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from featcache.engine.families.base import ImageOptions, Pixels
from featcache.engine.families.tiles import TiledFamily
from featcache.features import Layout


class InternVL(TiledFamily):
    name = "internvl"
    options = frozenset({"max_tiles"})
    image_kwargs = {"crop_to_patches": True}  # noqa: RUF012 - a constant

    def processor_options(self, options: ImageOptions) -> dict[str, Any]:
        if options.max_tiles is None:
            return {}
        low = min(int(self.image_processor.min_patches), options.max_tiles)
        return {"min_patches": low, "max_patches": options.max_tiles}

    def tile_tokens(self, tiles: torch.Tensor) -> int:
        return int(self.processor.image_seq_length)

    def pixels(self, inputs: Any, image: Image.Image, options: ImageOptions) -> Pixels:
        tiles = inputs["pixel_values"]
        return self.tiled(tiles, image, self._grid(len(tiles), image, options))

    def _grid(self, tiles: int, image: Image.Image, options: ImageOptions) -> tuple[int, int]:
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        if tiles == 1:
            return (1, 1)
        limits = {
            "min_patches": int(self.image_processor.min_patches),
            "max_patches": int(self.image_processor.max_patches),
            **self.processor_options(options),
        }
        size = self.image_processor.size
        columns, rows = get_optimal_tiled_canvas(
            (image.height, image.width),
            (size["height"], size["width"]),
            limits["min_patches"],
            limits["max_patches"],
        )
        return (int(rows), int(columns))

    def replacement(self, layout: Layout) -> str:
        processor = self.processor
        return f"{processor.start_image_token}{super().replacement(layout)}{processor.end_image_token}"
