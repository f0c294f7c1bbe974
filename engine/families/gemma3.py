"""Gemma 3: one square an image, crops on request; the tokens of a square see each other both ways."""

from __future__ import annotations

from typing import Any

import torch

from featcache.engine.families.base import ImageOptions
from featcache.engine.families.tiles import TiledFamily
from featcache.features import Layout


class Gemma3(TiledFamily):
    name = "gemma3"
    options = frozenset({"max_tiles"})
    image_kwargs = {  # noqa: RUF012 - a constant
        "do_convert_rgb": True,
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    bidirectional_images = True

    def processor_options(self, options: ImageOptions) -> dict[str, Any]:
        if options.max_tiles is None or options.max_tiles == 1:
            return {}
        return {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": options.max_tiles}

    def tile_tokens(self, tiles: torch.Tensor) -> int:
        return int(self.processor.image_seq_length)

    @property
    def placeholder(self) -> str:
        token: str = self.processor.boi_token
        return token

    def replacement(self, layout: Layout) -> str:
        square: str = self.processor.full_image_sequence
        crops = layout.num_tokens // int(self.processor.image_seq_length) - 1
        if not crops:
            return square
        return (
            f"Here is the original image {square} and here are some crops to help you see better "
            + " ".join([square] * crops)
        )
