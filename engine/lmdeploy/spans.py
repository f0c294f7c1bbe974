"""`Span`: a piece of an image as LMDeploy's prefix cache sees it.

A hit of that cache never ends inside a span, and its blocks are whole: an image in one span is reused only if
a whole block of equal text follows it. Cut at block boundaries, every common block is reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.engine.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a prompt that are rows [row, row + stop - start) of an image.

    image: its number in the prompt; None for the span without rows that keeps salted prompts apart.
    content_hash: what stands there; equal tokens of equal hashes share KV blocks.
    positions: (stop - start, 3) int64 with M-RoPE, as LMDeploy counts them; None without.
    """

    image: int | None
    start: int
    stop: int
    row: int
    content_hash: str
    positions: NDArray[np.int64] | None


def cut(prompt: Prompt, block: int) -> list[Span]:
    """The spans of a prompt, in order, none across a boundary of `block` tokens."""
    pieces: list[tuple[int | None, int, int, int]] = [
        (run.image, start, stop, run.row + start - run.start)
        for run in prompt.runs
        for start, stop in _pieces(run.start, run.stop, block)
    ]
    if prompt.salt and not (pieces and pieces[0][1] == 0):
        pieces.insert(0, (None, 0, 1, 0))
    positions = _relative(prompt, [(start, stop) for _, start, stop, _ in pieces])
    return [
        Span(image, start, stop, row, _content_hash(prompt, image, row, stop - start), places)
        for (image, start, stop, row), places in zip(pieces, positions, strict=True)
    ]


def _pieces(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min(stop, (start // block + 1) * block)
        yield start, end
        start = end


def _content_hash(prompt: Prompt, image: int | None, row: int, rows: int) -> str:
    key = "text" if image is None else prompt.images[image].key.hex()
    return f"{key}:{row}:{row + rows}" + (f":{prompt.salt}" if prompt.salt else "")


def _relative(prompt: Prompt, spans: list[tuple[int, int]]) -> list[NDArray[np.int64] | None]:
    """Positions of spans, less what LMDeploy adds to them again.

    It lets text count on by one, takes a span's positions relative to that count, and goes on behind the
    largest position of the span's last token.
    """
    if prompt.positions.shape[0] == 1:
        return [None] * len(spans)
    absolute = prompt.positions.numpy().T
    relative: list[NDArray[np.int64] | None] = []
    offset = 0  # of the next token's position before its index
    for start, stop in spans:
        places = absolute[start:stop] - (start + offset)
        relative.append(places)
        offset += int(places[-1].max()) + 1 - (stop - start)
    return relative
