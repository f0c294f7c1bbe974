"""Idefics3 and SmolVLM: rows of tiles, each announced by its row and column, and an overview at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from featcache.engine.families.base import ImageOptions, Pixels
from featcache.engine.families.tiles import TiledFamily
from featcache.features import Layout


class Idefics3(TiledFamily):
    name = "idefics3"
    options = frozenset({"max_tiles"})
    image_kwargs = {"return_row_col_info": True}  # noqa: RUF012 - a constant

    def structure(self, image: Image.Image, options: ImageOptions) -> Any:
        return [[image]]

    def processor_options(self, options: ImageOptions) -> dict[str, Any]:
        """The longest side in tiles, so that not more than max_tiles come out whatever the shape."""
        if options.max_tiles is None:
            return {}
        tile = self.image_processor.max_image_size["longest_edge"]
        longest = min(int(self.image_processor.size["longest_edge"]), math.isqrt(options.max_tiles) * tile)
        return {"size": {"longest_edge": longest}}

    def tile_tokens(self, tiles: torch.Tensor) -> int:
        return int(self.processor.image_seq_len)

    def pixels(self, inputs: Any, image: Image.Image, options: ImageOptions) -> Pixels:
        rows, columns = int(inputs["rows"][0][0]), int(inputs["cols"][0][0])
        tiles, mask = inputs["pixel_values"][0], inputs["pixel_attention_mask"][0].bool()
        return self.tiled(tiles, image, (rows or 1, columns or 1), pixel_attention_mask=mask)

    def collate(self, batch: Sequence[Pixels]) -> dict[str, Any]:
        names = ("pixel_values", "pixel_attention_mask")
        return {name: self.joined(batch, name)[None] for name in names}

    def replacement(self, layout: Layout) -> str:
        fake, mark = self.processor.fake_image_token, self.overview_mark
        tile = self.image_token * int(self.processor.image_seq_len)
        overview = f"{fake}{mark}{tile}{fake}"
        rows, columns = layout.tiles or (1, 1)
        if (rows, columns) == (1, 1):
            return overview
        lines = (
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return "".join(lines) + "\n" + overview

    @property
    def overview_mark(self) -> str:
        return str(self.processor.global_image_tag)


class SmolVLM(Idefics3):
    name = "smolvlm"

    @property
    def overview_mark(self) -> str:
        return str(self.processor.global_image_token)
