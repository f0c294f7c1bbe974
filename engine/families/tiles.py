"""Families whose tower takes images, or the tiles that they are cut into, of one fixed size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from featcache.engine.families.base import Family, ImageOptions, Pixels
from featcache.features import Layout


class TiledFamily(Family):
    """pixel_values of an image are (tiles, 3, height, width), and each tile gives as many rows."""

    @abstractmethod
    def tile_tokens(self, tiles: torch.Tensor) -> int:
        """Rows that the tower makes of one tile."""

    def tiled(
        self, tiles: torch.Tensor, image: Image.Image, grid: tuple[int, int] | None, **more: torch.Tensor
    ) -> Pixels:
        """grid: (rows, columns) of tiles, if the family cuts images up. more: other tensors of the image."""
        layout = Layout(len(tiles) * self.tile_tokens(tiles), image.width, image.height, tiles=grid)
        tensors = {"pixel_values": self.tower_dtype(tiles), **more}
        return Pixels(tensors, layout, len(tiles) * self.tile_patches(tiles))

    def tile_patches(self, tiles: torch.Tensor) -> int:
        patch = self.config.vision_config.patch_size
        height, width = (patch, patch) if isinstance(patch, int) else patch
        return int((tiles.shape[-2] // height) * (tiles.shape[-1] // width))

    def pixels(self, inputs: Any, image: Image.Image, options: ImageOptions) -> Pixels:
        return self.tiled(inputs["pixel_values"], image, None)

    def collate(self, batch: Sequence[Pixels]) -> dict[str, Any]:
        return {"pixel_values": self.joined(batch, "pixel_values")}

    def joined(self, batch: Sequence[Pixels], name: str) -> torch.Tensor:
        return self.to_device(torch.cat([pixels.tensors[name] for pixels in batch]))

    def split(self, output: Any, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        rows = output.pooler_output
        flat = rows.flatten(0, 1) if isinstance(rows, torch.Tensor) else torch.cat(list(rows))
        counts = [pixels.layout.num_tokens for pixels in batch]
        return [{"rows": part} for part in torch.split(flat, counts)]
