"""Batches to train `tiny` on: dialogues drawn, tokenized and packed as flat arrays, ready for the GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from featcache.bundled.dialogues import Dialogue, make_dialogue
from featcache.bundled.questions import KINDS
from featcache.bundled.scenes import COLOURS, MAX_FIGURES, SHAPES, Scene
from featcache.bundled.tiny_model import (
    CONTEXT,
    IMAGE,
    MAX_PIXELS,
    MIN_PIXELS,
    TURN,
    TURN_END,
    VISION_END,
    VISION_START,
)

PATCH, MERGE = 14, 2
GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CHUNKS = 4  # images of a batch attend in so many groups of like size
MAX_TOKENS = 384  # of one dialogue in training
ANSWER_TOKENS = 24  # room kept for an answer
TURNS = {1: 14, 2: 12, 3: 10}  # by number of pictures: rows of about equal length

Array = npt.NDArray[Any]
_COUNT = np.arange(CONTEXT)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of `rows` by `columns` patches, (rows * columns, 588) uint8, and what is true of each."""

    patches: Array
    rows: int
    columns: int
    labels: Array


@dataclass(frozen=True, slots=True)
class Row:
    """One dialogue as the language model reads it."""

    ids: list[int]
    positions: Array  # (3, tokens): time, row, column, as Qwen2-VL's M-RoPE counts
    targets: list[tuple[int, int, int]]  # (index, the token that follows it, turn) of every answered token
    pictures: list[tuple[int, Picture]]  # each with the index of its first token


def patches(picture: Image.Image) -> tuple[Array, tuple[int, int]]:
    """`picture` as the image processor cuts it, before scaling of values.

    Returns patches (rows * columns, 3 * 14 * 14) uint8, four that are merged next to each other, and the grid
    (rows, columns) in patches.
    """
    height, width = smart_resize(picture.height, picture.width, PATCH * MERGE, MIN_PIXELS, MAX_PIXELS)
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(picture, dtype=np.uint8)
    rows, columns = height // PATCH, width // PATCH
    cut = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1), (rows, columns)


@lru_cache(maxsize=1024)
def patch_places(rows: int, columns: int) -> Array:
    """(rows * columns, 2): row and column of each patch, in the order of `patches`."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    cut = places.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return cut.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def patch_labels(scene: Scene, rows: int, columns: int) -> Array:
    """(rows * columns, 3) uint8: colour, shape and glyph in the middle of each patch, 0 for none."""
    labels = np.zeros((rows, columns, 3), dtype=np.uint8)
    across, down = columns / scene.width, rows / scene.height
    for figure in scene.figures:
        left, top, right, bottom = figure.box
        r0, r1 = round(top * down), round(bottom * down)
        c0, c1 = round(left * across), round(right * across)
        labels[r0:r1, c0:c1, 0] = list(COLOURS).index(figure.colour) + 1
        labels[r0:r1, c0:c1, 1] = SHAPES.index(figure.shape) + 1
    for text in scene.texts:
        for glyph, (left, top, right, bottom) in text.glyphs():
            r0, r1 = round(top * down), round(bottom * down)
            c0, c1 = round(left * across), round(right * across)
            labels[r0:r1, c0:c1, 2] = GLYPHS.index(glyph) + 1
    places = patch_places(rows, columns)
    return labels[places[:, 0], places[:, 1]]


class Packer:
    """Turns dialogues into rows and rows into batches."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = lru_cache(maxsize=200_000)(self._encode)
        self._tokenizer = tokenizer.backend_tokenizer
        self._special = {t: tokenizer.convert_tokens_to_ids(t) for t in (IMAGE, TURN, TURN_END)}
        self._around = (
            tokenizer.convert_tokens_to_ids(VISION_START),
            tokenizer.convert_tokens_to_ids(VISION_END),
        )
        self._pad: int = tokenizer.pad_token_id

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, dialogue: Dialogue, max_tokens: int | None = None) -> Row:
        """The dialogue, cut after the last turn that ends within `max_tokens`."""
        row = Row([], np.empty((3, CONTEXT), dtype=np.int64), [], [])
        scenes = iter(dialogue.scenes)
        position, turn = 0, 0
        for message in dialogue.messages:
            answers = message["role"] == "assistant"
            parts = self._parts(message)
            if message["role"] == "user" and max_tokens is not None and row.targets:
                needed = sum(len(p) if isinstance(p, list) else _num_tokens(p) for p in parts)
                if len(row.ids) + needed + ANSWER_TOKENS > max_tokens:
                    break
            for part in parts:
                if isinstance(part, list):
                    row.positions[:, len(row.ids) : len(row.ids) + len(part)] = _COUNT[
                        position : position + len(part)
                    ]
                    row.ids.extend(part)
                    position += len(part)
                    continue
                cut, (rows, columns) = patches(part)
                labels = patch_labels(next(scenes), rows, columns)
                row.pictures.append((len(row.ids), Picture(cut, rows, columns, labels)))
                tokens, span = _image_span(rows // MERGE, columns // MERGE, position)
                row.positions[:, len(row.ids) : len(row.ids) + tokens] = span
                row.ids.extend([self._special[IMAGE]] * tokens)
                position += max(rows, columns) // MERGE
            if answers:
                end = len(row.ids) - 1  # the newline after the end of the turn
                begin = end - len(parts[1])
                row.targets.extend((i - 1, row.ids[i], turn) for i in range(begin, end))
                turn += 1
        return replace(row, positions=row.positions[:, : len(row.ids)])

    def _parts(self, message: dict[str, Any]) -> list[Any]:
        """Token ids and pictures in the order of the chat template; an answer is the second part."""
        head = [self._special[TURN], *self.encode(f"{message['role']}\n")]
        tail = [self._special[TURN_END], *self.encode("\n")]
        content = message["content"]
        if message["role"] == "assistant":
            return [head, [*self.encode(content[0]["text"]), tail[0]], tail[1:]]
        if isinstance(content, str):
            return [[*head, *self.encode(content), *tail]]
        # A text that follows the head's newline is encoded alone: the newline is a token of its own anyway.
        parts: list[Any] = [head]
        for part in content:
            if part["type"] == "image":
                parts += [[self._around[0]], part["image"], [self._around[1]]]
            else:
                parts.append(list(self.encode(part["text"])))
        return [*parts, tail]

    def batch(self, dialogues: Sequence[Dialogue], max_tokens: int | None = None) -> dict[str, Any]:
        """The tensors that `pack` tells of."""
        rows = [self.row(d, max_tokens) for d in dialogues]
        kinds = [d.kinds[: r.targets[-1][2] + 1] for d, r in zip(dialogues, rows, strict=True)]
        return pack(rows, self._pad, kinds)


def pack(rows: Sequence[Row], pad: int, kinds: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Tensors of a batch of rows.

    - ids (B, L) and positions (3, B, L), padded on the right
    - targets (T, 3): flat index into B * L, next token, number of the answer in the batch
    - kinds: the kind of each answer
    - of the P patches of all images, smallest image first: pixels (P, 588) uint8, labels (P, 3) uint8 and
      places (P, 2), row and column; of their merged tokens: shares (P / 4, 2), where in its picture the
      middle lies, 0..1, and slots (P / 4), the flat index into B * L
    - chunks: what `_padded_layout` says of each group of images
    """
    length = max(len(r.ids) for r in rows)
    length += -length % 32
    ids = np.full((len(rows), length), pad, dtype=np.int64)
    positions = np.zeros((3, len(rows), length), dtype=np.int64)
    targets: list[tuple[int, int, int]] = []
    pictures: list[tuple[int, Picture]] = []
    answers = 0
    for b, row in enumerate(rows):
        ids[b, : len(row.ids)] = row.ids
        positions[:, b, : len(row.ids)] = row.positions
        targets.extend((b * length + i, token, answers + turn) for i, token, turn in row.targets)
        answers += len(kinds[b])
        pictures.extend((b * length + i, picture) for i, picture in row.pictures)
    return {
        "ids": torch.from_numpy(ids),
        "positions": torch.from_numpy(positions),
        "targets": torch.tensor(targets),
        "kinds": [kind for of_row in kinds for kind in of_row],
        **_pack_pictures(pictures),
    }


def _pack_pictures(pictures: list[tuple[int, Picture]]) -> dict[str, Any]:
    pictures = sorted(pictures, key=lambda p: len(p[1].patches))
    places = [patch_places(p.rows, p.columns) for _, p in pictures]
    shares = [
        (place[:: MERGE * MERGE] + 1) / (p.rows, p.columns)
        for place, (_, p) in zip(places, pictures, strict=True)
    ]
    slots = [np.arange(start, start + len(p.patches) // (MERGE * MERGE)) for start, p in pictures]
    groups = np.array_split(np.arange(len(pictures)), min(CHUNKS, len(pictures)))
    return {
        "pixels": torch.from_numpy(np.concatenate([p.patches for _, p in pictures])),
        "labels": torch.from_numpy(np.concatenate([p.labels for _, p in pictures])),
        "places": torch.from_numpy(np.concatenate(places)),
        "shares": torch.from_numpy(np.concatenate(shares).astype(np.float32)),
        "slots": torch.from_numpy(np.concatenate(slots)),
        "chunks": [_padded_layout([len(pictures[i][1].patches) for i in group]) for group in groups],
    }


def _padded_layout(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """How the patches of a group of images, of `lengths` patches, lie when all are padded to the longest.

    (images, longest) bool: which places hold a patch; (patches): the place of each in that layout, flattened.
    """
    longest = max(lengths) + -max(lengths) % 8
    is_patch = np.arange(longest)[None] < np.asarray(lengths)[:, None]
    return torch.from_numpy(is_patch), torch.from_numpy(np.flatnonzero(is_patch))


def _num_tokens(picture: Image.Image) -> int:
    height, width = smart_resize(picture.height, picture.width, PATCH * MERGE, MIN_PIXELS, MAX_PIXELS)
    return int(height * width) // (PATCH * MERGE) ** 2


def _image_span(rows: int, columns: int, position: int) -> tuple[int, Array]:
    """Number of merged tokens, and their M-RoPE positions (3, tokens): one time, rows, columns."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    return rows * columns, position + np.stack([np.zeros_like(row), row, column])


class Dialogues(Dataset[dict[str, Any]]):
    """Batch number i of a seed: always the same, whoever makes it, in whatever order.

    The first `easy` batches show one or two figures and ask short dialogues, so that sight comes before talk.
    kinds: of questions; one that is named twice is asked twice as often.
    """

    def __init__(
        self,
        packer: Packer,
        seed: str,
        number: int,
        size: int,
        easy: int,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self._packer, self._seed, self._number, self._size = packer, seed, number, size
        self._easy, self._kinds = easy, kinds

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._seed}/{index}")
        most = 2 if index < self._easy else MAX_FIGURES
        dialogues = []
        for _ in range(self._size):
            pictures = 1 if index < self._easy else rng.choices((1, 2, 3), (42, 40, 18))[0]
            turns = TURNS[pictures]
            dialogues.append(
                make_dialogue(
                    rng,
                    pictures=pictures,
                    turns=turns,
                    max_figures=most,
                    kinds=self._kinds,
                )
            )
        return self._packer.batch(dialogues, MAX_TOKENS)
