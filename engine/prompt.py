"""`Prompt`: token ids, where the images' rows go among them, and their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import Family, ImageOptions
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
    ids = loaded.template.encode(_expanded(loaded.family, text, layouts))
    runs = image_runs(np.asarray(ids), loaded.family.image_token_id, layouts)
    positions, delta = loaded.family.positions(torch.tensor(ids), layouts)
    return Prompt(ids, images, layouts, runs, positions, delta, encoder.namespace if salt is None else salt)


def _expanded(family: Family, text: str, layouts: Sequence[Layout]) -> str:
    first, *others = text.split(family.placeholder)
    assert len(others) == len(layouts)
    return first + "".join(
        family.replacement(layout) + other for layout, other in zip(layouts, others, strict=True)
    )


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
