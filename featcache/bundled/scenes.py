"""Synthetic scenes: coloured figures, printed words and numbers on pale ground. What `tiny` was trained on.

A `Scene` is plain data that knows everything true about its picture; `Scene.draw()` makes the picture.
Only Pillow and `random` are needed, and a given `random.Random` always yields the same scene.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from featcache.bundled.words import WORDS
from featcache.errors import ConfigError

Rgb = tuple[int, int, int]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

COLOURS: dict[str, Rgb] = {
    "red": (214, 38, 40),
    "orange": (244, 130, 22),
    "yellow": (238, 204, 30),
    "green": (44, 150, 62),
    "blue": (36, 92, 212),
    "purple": (128, 56, 168),
    "pink": (240, 122, 182),
    "black": (26, 26, 28),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLUMNS = ("left", "", "right")
ROWS = ("top", "", "bottom")
MIDDLE = "middle"
MIN_SIDE, MAX_SIDE = 112, 336  # pixels of a scene's side
TOKEN_SIDE = 28  # pixels of the square that a model of this kind makes one token of
MAX_FIGURES = 6
MIN_FIGURE, MAX_FIGURE = 28, 88  # pixels of a figure's side
FONT_SIZES = (28, 44)  # pixels; capitals are about 0.7 of it
DEFAULT_FONT = "default"  # Pillow's own, which is always there

_INKS: tuple[Rgb, ...] = ((20, 20, 24), (40, 40, 60), (70, 30, 30), (20, 50, 40))
_SUPERSAMPLE = 3  # figures are drawn this much larger, then reduced, for smooth edges
_GAP = 5  # pixels kept free around every thing
_SAME_IN_BOTH_CASES = frozenset("cosuvwxzCOSUVWXZ")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `x`, `y` are the centre and `size` the side of its box, in pixels."""

    shape: str
    colour: str
    rgb: Rgb
    x: int
    y: int
    size: int

    @property
    def box(self) -> Box:
        half = self.size / 2
        return (self.x - half, self.y - half, self.x + half, self.y + half)


@dataclass(frozen=True, slots=True)
class Text:
    """One printed word or number. `left`, `top` is where its ink begins; `font_size` is in pixels."""

    text: str
    left: int
    top: int
    font: str
    font_size: int
    ink: Rgb

    @property
    def is_number(self) -> bool:
        return self.text.isdigit()

    @property
    def box(self) -> Box:
        left, top, right, bottom = _ink_box(self.font, self.font_size, self.text)
        return (self.left, self.top, self.left + right - left, self.top + bottom - top)

    def glyphs(self) -> list[tuple[str, Box]]:
        """Every character with the box it is printed in."""
        font = _font(self.font, self.font_size)
        origin = self.left - _ink_box(self.font, self.font_size, self.text)[0]
        _, top, _, bottom = self.box
        edges = [origin + font.getlength(self.text[:i]) for i in range(len(self.text) + 1)]
        return [(c, (edges[i], top, edges[i + 1], bottom)) for i, c in enumerate(self.text)]


@dataclass(frozen=True, slots=True)
class Ground:
    """The ground of a scene: a run from `start` to `end`, downwards or (`sideways`) to the right."""

    start: Rgb
    end: Rgb
    sideways: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """All that is true of one picture."""

    width: int
    height: int
    ground: Ground
    figures: tuple[Figure, ...]
    texts: tuple[Text, ...]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(t.text for t in self.texts if not t.is_number)

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(t.text for t in self.texts if t.is_number)

    def find(self, shape: str | None = None, colour: str | None = None) -> list[Figure]:
        """The figures of this shape and this colour; None stands for any."""
        return [f for f in self.figures if shape in (None, f.shape) and colour in (None, f.colour)]

    def position(self, box: Box) -> str | None:
        """Which of the nine parts of the picture `box` lies in, or None when that is open to question."""
        column = _third((box[0] + box[2]) / 2 / self.width)
        row = _third((box[1] + box[3]) / 2 / self.height)
        if column is None or row is None:
            return None
        return f"{ROWS[row]} {COLUMNS[column]}".strip() or MIDDLE

    def draw(self) -> Image.Image:
        """The picture, RGB."""
        picture = _draw_ground(self.ground, self.width, self.height)
        for figure in self.figures:
            mask = _figure_mask(figure.shape, figure.size)
            picture.paste(figure.rgb, (figure.x - figure.size // 2, figure.y - figure.size // 2), mask)
        draw = ImageDraw.Draw(picture)
        for text in self.texts:
            font = _font(text.font, text.font_size)
            left, top = _ink_box(text.font, text.font_size, text.text)[:2]
            draw.text((text.left - left, text.top - top), text.text, fill=text.ink, font=font)
        return picture


def make_scene(
    rng: random.Random, *, max_figures: int = MAX_FIGURES, fonts: Sequence[str] = (DEFAULT_FONT,)
) -> Scene:
    """A fresh scene of up to `max_figures` figures, with or without a word and a number.

    fonts: files to print with, as Pillow finds them; by default Pillow's own font, the one `tiny` was taught.
    """
    width, height = _side(rng), _side(rng)
    ground = Ground(_pale(rng), _pale(rng), rng.random() < 0.5)
    boxes: list[Box] = []
    wanted: list[str] = []
    if rng.random() < 0.55:
        wanted.append(make_word(rng))
    if rng.random() < 0.5:
        wanted.append(make_number(rng))
    texts = tuple(t for w in wanted if (t := _place_text(w, width, height, boxes, rng, fonts)))
    figures = _place_figures(width, height, boxes, rng, max_figures, can_be_none=bool(texts))
    return Scene(width, height, ground, figures, texts)


def _side(rng: random.Random) -> int:
    """A side in pixels; two in three are whole numbers of tokens, whose pictures needn't be scaled."""
    side = rng.triangular(MIN_SIDE, MAX_SIDE, 170)
    return round(side / TOKEN_SIDE) * TOKEN_SIDE if rng.random() < 0.67 else round(side)


def make_word(rng: random.Random) -> str:
    """A common word, or (one in ten) letters that can be spoken; lower case, capitals, or Capitalised."""
    while True:
        word = rng.choice(WORDS) if rng.random() < 0.9 else _spoken_letters(rng)
        word = rng.choice((str.lower, str.upper, str.upper, str.capitalize))(word)
        if not set(word) <= _SAME_IN_BOTH_CASES:  # "cow" and "COW" differ in nothing but their size
            return word


def make_number(rng: random.Random) -> str:
    """A number of one, two or three digits."""
    return str(rng.randrange(*rng.choice(((0, 10), (10, 100), (100, 1000), (100, 1000)))))


def _spoken_letters(rng: random.Random) -> str:
    # Without i and l: printed alone, "I" and "l" are one and the same stroke.
    return "".join(
        rng.choice("bcdfghjkmnprstvz" if i % 2 == 0 else "aeouy") for i in range(rng.randint(3, 5))
    )


def _place_text(
    wanted: str, width: int, height: int, boxes: list[Box], rng: random.Random, fonts: Sequence[str]
) -> Text | None:
    font, ink = rng.choice(fonts), rng.choice(_INKS)
    for _ in range(12):
        size = rng.randint(*FONT_SIZES)
        left, top, right, bottom = _ink_box(font, size, wanted)
        box = _free_place(right - left, bottom - top, width, height, boxes, rng)
        if box is not None:
            boxes.append(box)
            return Text(wanted, round(box[0]), round(box[1]), font, size, ink)
    return None


def _place_figures(
    width: int, height: int, boxes: list[Box], rng: random.Random, max_figures: int, *, can_be_none: bool
) -> tuple[Figure, ...]:
    # Few shapes and few colours in one scene make counting worth asking for.
    shapes = rng.sample(SHAPES, rng.choice((1, 2, 3, len(SHAPES))))
    colours = rng.sample(list(COLOURS), rng.choice((1, 2, 3, len(COLOURS))))
    number = rng.randint(1, max_figures)
    if can_be_none and rng.random() < 0.1:
        number = 0
    largest = min(MAX_FIGURE, min(width, height) // (2 if number < 3 else 3))
    figures: list[Figure] = []
    for _ in range(number * 8):
        if len(figures) == number:
            break
        size = 2 * (rng.randint(MIN_FIGURE, max(MIN_FIGURE, largest)) // 2)
        box = _free_place(size, size, width, height, boxes, rng)
        if box is not None:
            boxes.append(box)
            colour = rng.choice(colours)
            x, y = round(box[0]) + size // 2, round(box[1]) + size // 2
            figures.append(Figure(rng.choice(shapes), colour, _near(COLOURS[colour], rng), x, y, size))
    return tuple(figures)


def _free_place(
    box_width: float, box_height: float, width: int, height: int, boxes: list[Box], rng: random.Random
) -> Box | None:
    room_x, room_y = width - box_width - 2 * _GAP, height - box_height - 2 * _GAP
    if room_x < 0 or room_y < 0:
        return None
    for _ in range(12):
        left, top = round(_GAP + rng.random() * room_x), round(_GAP + rng.random() * room_y)
        box = (left, top, left + box_width, top + box_height)
        if not any(_touch(box, other) for other in boxes):
            return box
    return None


def _touch(a: Box, b: Box) -> bool:
    return a[0] < b[2] + _GAP and b[0] < a[2] + _GAP and a[1] < b[3] + _GAP and b[1] < a[3] + _GAP


def _third(share: float) -> int | None:
    """0, 1 or 2 for the first, middle or last third of 0..1; None close to a border between two."""
    if abs(share - 1 / 3) < 0.04 or abs(share - 2 / 3) < 0.04:
        return None
    return min(2, int(share * 3))


def _pale(rng: random.Random) -> Rgb:
    return (rng.randint(222, 255), rng.randint(222, 255), rng.randint(222, 255))


def _near(rgb: Rgb, rng: random.Random) -> Rgb:
    red, green, blue = (min(255, max(0, value + rng.randint(-12, 12))) for value in rgb)
    return (red, green, blue)


def _draw_ground(ground: Ground, width: int, height: int) -> Image.Image:
    slope = Image.linear_gradient("L")
    if ground.sideways:
        slope = slope.transpose(Image.Transpose.ROTATE_90)
    length = (width, 1) if ground.sideways else (1, height)
    strip = Image.new("RGB", length, ground.end)
    strip.paste(ground.start, None, slope.resize(length, Image.Resampling.NEAREST))
    return strip.resize((width, height), Image.Resampling.NEAREST)


@lru_cache(maxsize=1024)
def _figure_mask(shape: str, size: int) -> Image.Image:
    side = size * _SUPERSAMPLE
    mask = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(mask)
    if shape == "circle":
        draw.ellipse((0, 0, side - 1, side - 1), fill=255)
    else:
        draw.polygon([(x * (side - 1), y * (side - 1)) for x, y in _outline(shape)], fill=255)
    return mask.reduce(_SUPERSAMPLE)


def _outline(shape: str) -> list[tuple[float, float]]:
    """Corners of a shape in the unit square, y downwards."""
    if shape == "square":
        return [(0.04, 0.04), (0.96, 0.04), (0.96, 0.96), (0.04, 0.96)]
    if shape == "triangle":
        return [(0.5, 0.03), (1, 0.95), (0, 0.95)]
    if shape == "star":
        turns = [(-math.pi / 2 + i * math.pi / 5, 0.5 if i % 2 == 0 else 0.2) for i in range(10)]
        return [(0.5 + r * math.cos(a), 0.53 + r * math.sin(a)) for a, r in turns]
    if shape == "cross":
        a, b = 0.33, 0.67
        return [
            (a, 0),
            (b, 0),
            (b, a),
            (1, a),
            (1, b),
            (b, b),
            (b, 1),
            (a, 1),
            (a, b),
            (0, b),
            (0, a),
            (a, a),
        ]
    if shape == "heart":
        around = [i * math.pi / 24 for i in range(48)]
        curve = [
            (
                16 * math.sin(t) ** 3,
                13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t),
            )
            for t in around
        ]
        return [(0.5 + x / 33, 0.42 - y / 31) for x, y in curve]
    raise ConfigError(f"no such shape: {shape!r}; there are {', '.join(SHAPES)}")


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size) if name == DEFAULT_FONT else ImageFont.truetype(name, size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ConfigError("this Pillow was built without FreeType; install Pillow's own wheel to draw scenes")
    return font


@lru_cache(maxsize=4096)
def _ink_box(font: str, size: int, text: str) -> Box:
    return _font(font, size).getbbox(text)
