"""LLaVA: one square of fixed size an image. LLaVA-OneVision: an overview, and tiles chosen by its shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from featcache.engine.families.base import Family, ImageOptions, Pixels
from featcache.engine.families.tiles import TiledFamily
from featcache.errors import ModelError
from featcache.features import Layout

_COMPANION = Image.new("RGB", (1, 1))  # what the other picture is doesn't matter
_SQUARE_TOWERS = ("clip_vision_model", "siglip_vision_model")


class Llava(TiledFamily):
    name = "llava"

    def __init__(self, model: Any, processor: Any) -> None:
        tower = model.config.vision_config.model_type
        if tower not in _SQUARE_TOWERS:  # Pixtral is a "llava" too, with another processor and other rows
            raise ModelError(f"llava with a {tower} tower isn't known; there are {', '.join(_SQUARE_TOWERS)}")
        super().__init__(model, processor)

    def tile_tokens(self, tiles: torch.Tensor) -> int:
        height, width = tiles.shape[-2:]
        patches = (height // self.processor.patch_size) * (width // self.processor.patch_size)
        class_token = int(self.processor.vision_feature_select_strategy == "default")
        return int(patches + self.processor.num_additional_image_tokens - class_token)


class LlavaOnevision(Family):
    """An image alone is cut up (anyres); one among several is padded to a square and left whole.

    So a picture has two kinds of features, and which are needed depends on the prompt.
    """

    name = "llava_onevision"

    def options_for(self, options: ImageOptions, num_images: int) -> ImageOptions:
        options = super().options_for(options, num_images)
        return replace(options, companions="several") if num_images > 1 else options

    def structure(self, image: Image.Image, options: ImageOptions) -> Any:
        return [[image, _COMPANION]] if options.companions else [[image]]

    def pixels(self, inputs: Any, image: Image.Image, options: ImageOptions) -> Pixels:
        tiles = inputs["pixel_values"][0]
        tokens = int(self.processor.num_image_tokens) + 1  # the newline
        if not options.companions:
            tokens = int(self.processor._get_number_of_features(image.height, image.width, *tiles.shape[-2:]))
        if self.processor.vision_feature_select_strategy == "default":
            tokens -= 1
        patches = (tiles.shape[-1] // self.config.vision_config.patch_size) ** 2
        layout = Layout(tokens, image.width, image.height, tiles=self._grid(tiles, image))
        return Pixels({"pixel_values": self.tower_dtype(tiles)}, layout, len(tiles) * patches)

    def _grid(self, tiles: torch.Tensor, image: Image.Image) -> tuple[int, int]:
        from transformers.image_processing_utils import select_best_resolution

        if len(tiles) == 1:
            return (1, 1)
        points = self.image_processor.image_grid_pinpoints
        height, width = select_best_resolution((image.height, image.width), points)
        return (int(height // tiles.shape[-2]), int(width // tiles.shape[-1]))

    def encode(self, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        order = sorted(range(len(batch)), key=lambda i: _is_whole(batch[i]))
        encoded = super().encode([batch[i] for i in order])
        by_index = dict(zip(order, encoded, strict=True))
        return [by_index[i] for i in range(len(batch))]

    def collate(self, batch: Sequence[Pixels]) -> dict[str, Any]:
        """Cut images come first, each a sample of its own; whole ones are one last sample of at least two."""
        whole = sum(_is_whole(pixels) for pixels in batch)
        samples = [1] * (len(batch) - whole) + ([max(2, whole)] if whole else [])
        return {
            "pixel_values": self.to_device(torch.cat([pixels.tensors["pixel_values"] for pixels in batch])),
            "image_sizes": torch.tensor([[pixels.layout.height, pixels.layout.width] for pixels in batch]),
            "batch_num_images": samples,
        }

    def split(self, output: Any, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        return [{"rows": rows} for rows in output.pooler_output]


def _is_whole(pixels: Pixels) -> bool:
    return len(pixels.tensors["pixel_values"]) == 1  # a cut one has its overview too
