"""Pictures and image sets for the tests of warming, made in code."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw

from featcache.engine.warm.items import Found, PassedOver, SourceItem, Unreadable
from featcache.engine.warm.sources import Source, find
from featcache.engine.warm.web import Web
from featcache.images import DEFAULT_LIMITS


def picture(seed: int, size: tuple[int, int] = (60, 44)) -> Image.Image:
    """A picture of its own for every seed."""
    generator = random.Random(seed)
    image = Image.new("RGB", size, tuple(generator.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = generator.randrange(size[0]), generator.randrange(size[1])
        draw.ellipse((x, y, x + 15, y + 12), fill=tuple(generator.randrange(256) for _ in range(3)))
    return image


def encoded(seed: int, kind: str = "PNG", size: tuple[int, int] = (60, 44)) -> bytes:
    out = BytesIO()
    picture(seed, size).save(out, kind)
    return out.getvalue()


def photos(folder: Path, number: int, first: int = 0, size: tuple[int, int] = (60, 44)) -> Path:
    """A folder of `number` different pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(first, first + number):
        (folder / f"{seed:05}.png").write_bytes(encoded(seed, size=size))
    return folder


def found(*sources: Source) -> list[Found]:
    web = Web(DEFAULT_LIMITS, timeout_s=5)
    try:
        return list(find(sources, web, DEFAULT_LIMITS))
    finally:
        web.close()


def images(items: list[Found]) -> dict[str, bytes]:
    """member (or source, if it has none) -> bytes, of the images among `items`."""
    pairs = [(i.member or i.source, i.read()) for i in items if isinstance(i, SourceItem)]
    assert len(dict(pairs)) == len(pairs), "two images have one name"
    return {name: data for name, data in pairs if isinstance(data, bytes)}


def passed_over(items: list[Found]) -> dict[str, str]:
    return {i.member or i.source: i.reason for i in items if isinstance(i, PassedOver)}


def failures(items: list[Found]) -> dict[str, str]:
    return {i.member or i.source: str(i.error) for i in items if isinstance(i, Unreadable)}
