"""`Prompt`: token ids, where the images' rows go among them, and their positions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.imageref import ImageRef
from featcache.engine.loading import Loaded
from featcache.engine.messages import OWN_SOURCES, Message, SourceRules, read_messages
from featcache.errors import ModelError
from featcache.features import Layout


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Tokens [start, stop) of a prompt, in one piece, that are rows [row, row + stop - start) of an image."""

    image: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's input, ready for the engine.

    ids: token ids. images, layouts: in the order of their tokens.
    runs: where the images' tokens stand, in order; an image that is cut into tiles has several.
    positions: (axes, len(ids)) int64, on the CPU. delta: the token at index k behind the prompt has position
        k + delta on every axis.
    salt: prompts of different salts never share KV blocks.
    """

    ids: list[int]
    images: tuple[ImageRef, ...]
    layouts: tuple[Layout, ...]
    runs: tuple[ImageRun, ...]
    positions: torch.Tensor
    delta: int
    salt: str


def build_prompt(
    loaded: Loaded,
    encoder: VisionEncoder,
    messages: Sequence[Message],
    *,
    options: ImageOptions | None = None,
    rules: SourceRules = OWN_SOURCES,
    salt: str | None = None,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """A conversation as token ids: equal to those of the model's own processor.

    messages: as OpenAI's chat API or transformers' templates take them; an image part may hold what
        `encoder.identify` returned. options: for every image; a part's own fields go first.
    rules: where images may come from. salt: the encoder's namespace if None.
    tools, template_kwargs: for the chat template.

    Raises RequestError if the request can't be taken as it stands, ImageError if an image can't be one.
    """
    conversation = read_messages(messages, options or ImageOptions(), rules)
    number = len(conversation.images)
    images = tuple(
        encoder.identify(image.source, loaded.family.options_for(image.options, number), image.name)
        for image in conversation.images
    )
    text = loaded.template.render(
        conversation.messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=template_kwargs,
    )
    layouts = tuple(encoder.layouts(images))
    ids = _encoded(loaded, text, layouts)
    runs = image_runs(ids, loaded.family.image_token_id, layouts)
    positions, delta = loaded.family.positions(torch.from_numpy(ids), layouts)
    salt = encoder.namespace if salt is None else salt
    return Prompt(ids.tolist(), images, layouts, runs, positions, delta, salt)


def _encoded(loaded: Loaded, text: str, layouts: Sequence[Layout]) -> NDArray[np.int64]:
    """The ids of `text` with the images in their places.

    Each row of equal image tokens is tokenized as one token and multiplied afterwards: the tokenizer would
    spend more time on them than on all text. Added tokens stand for themselves, so that nothing else changes.
    """
    family = loaded.family
    row = re.compile(f"(?:{re.escape(family.image_token)})+")
    counts: list[int] = []

    def one(match: re.Match[str]) -> str:
        counts.append(len(match[0]) // len(family.image_token))
        return family.image_token

    first, *others = text.split(family.placeholder)
    places = [row.sub(one, family.replacement(layout)) for layout in layouts]
    text = first + "".join(place + other for place, other in zip(places, others, strict=True))
    ids = np.asarray(loaded.template.encode(text), dtype=np.int64)
    is_image = ids == family.image_token_id
    if int(is_image.sum()) != len(counts):
        raise ModelError(f"{int(is_image.sum())} image tokens came out of {len(counts)}: not an added token?")
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[is_image] = counts
    return np.repeat(ids, repeats)


def image_runs(
    ids: NDArray[np.int64], image_token_id: int, layouts: Sequence[Layout]
) -> tuple[ImageRun, ...]:
    """The runs of image tokens. Raises ModelError if there aren't as many as the layouts say."""
    at = np.flatnonzero(ids == image_token_id)
    counts = [layout.num_tokens for layout in layouts]
    if len(at) != sum(counts):
        raise ModelError(f"the prompt has {len(at)} image tokens where its images have {sum(counts)} rows")
    if not counts:
        return ()
    image = np.repeat(np.arange(len(counts)), counts)
    row = np.concatenate([np.arange(count) for count in counts])
    begins = np.flatnonzero((np.diff(at, prepend=-2) != 1) | (row == 0))
    ends = np.append(begins[1:], len(at))
    return tuple(
        ImageRun(int(image[a]), int(at[a]), int(at[b - 1]) + 1, int(row[a]))
        for a, b in zip(begins, ends, strict=True)
    )
