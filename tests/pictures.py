"""Pictures for tests of the engine, made in code, each seed its own."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((100, 60), (33, 200), (150, 151))  # odd, tall, nearly square


def noise(width: int, height: int, seed: int) -> Image.Image:
    generator = np.random.default_rng([width, height, seed])
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def patches(width: int, height: int, seed: int) -> Image.Image:
    """4x4 fields of random colours: to a random model, two of these differ far more than two of noise."""
    generator = np.random.default_rng([width, height, seed])
    fields = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return fields.resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **kwargs: Any) -> bytes:
    out = BytesIO()
    image.save(out, kind, **kwargs)
    return out.getvalue()


def dialogue(images: list[Any]) -> list[dict[str, Any]]:
    """Up to three images over two turns, with text around them."""
    first = [{"type": "text", "text": "Look: "}, {"type": "image", "image": images[0]}]
    first += [{"type": "text", "text": "\nand\n"}, *({"type": "image", "image": i} for i in images[1:2])]
    second = [
        *({"type": "image", "image": i} for i in images[2:3]),
        {"type": "text", "text": "Which is red?"},
    ]
    return [
        {"role": "user", "content": first},
        {"role": "assistant", "content": [{"type": "text", "text": "The cat sits on the mat."}]},
        {"role": "user", "content": second},
    ]
