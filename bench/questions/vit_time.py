"""The stages of a new image, one by one, and whole requests beside transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from featcache.bench.models import Transformers, asks, page, qwen2_vl
from featcache.bench.setting import Row, Setting, checked, ms, seconds_of
from featcache.engine import CachedVLM
from featcache.engine.families.base import ImageOptions
from featcache.features import Features
from featcache.images import open_image
from featcache.keys import source_digest
from featcache.store import FeatureStore

Messages = list[dict[str, Any]]


def measure(setting: Setting) -> Iterator[Row]:
    yield from _stages(setting)
    yield from _requests(setting)


def _stages(setting: Setting) -> Iterator[Row]:
    loaded = qwen2_vl(setting)
    family, device = loaded.family, setting.device
    spent: dict[str, list[float]] = {}

    def note(stage: str, seconds: float) -> None:
        spent.setdefault(stage, []).append(seconds)

    with FeatureStore.open(None, host_bytes="256MiB", device="cuda" if device == "cuda" else None) as store:
        for number in range(setting.rounds(4, 20) + 1):
            data = page(number, setting)
            note("hash", seconds_of(partial(source_digest, data)))
            note("decode", seconds_of(partial(open_image, data)))
            image = open_image(data)
            note("preprocess", seconds_of(partial(family.preprocess, image, ImageOptions())))
            pixels = family.preprocess(image, ImageOptions())
            encode = partial(family.encode, [pixels])
            note("copy in and tower", seconds_of(encode, device))
            rows = encode()[0]["rows"].clone()
            note("features by .cpu()", seconds_of(rows.cpu, device))
            features = Features({"rows": rows}, pixels.layout)
            key = number.to_bytes(32, "big")
            note("features by put(), the caller's time", seconds_of(partial(store.put, key, features)))
            store.flush()
    for stage, seconds in spent.items():
        is_void = stage == "features by .cpu()" and device == "cpu"
        remark = "on a CPU nothing is copied" if is_void else ""
        yield ms(f"stage: {stage}", seconds[1:], note=remark)  # the first is the warm-up


def _requests(setting: Setting) -> Iterator[Row]:
    """Each request by both, one right after the other: a machine's speed drifts."""
    plain, loaded = Transformers(qwen2_vl(setting)), qwen2_vl(setting)
    number = setting.rounds(4, 20)
    spent: dict[str, list[float]] = {
        "transformers": [],
        "featcache, first pass": [],
        "featcache, second pass": [],
    }
    wrong = 0
    with CachedVLM.from_pretrained(loaded, store=None) as vlm:
        for n in range(-3, number):  # the first three are the warm-up
            messages = asks("what is written", page(100 + n, setting))
            answers: list[list[int]] = []
            for name in spent:
                run = plain.generate if name == "transformers" else partial(_ask, vlm)
                seconds = seconds_of(partial(_keep, answers, run, messages), setting.device)
                if n >= 0:
                    spent[name].append(seconds)
            wrong += answers[1] != answers[0] or answers[2] != answers[0]
    for name, times in spent.items():
        yield ms(f"request with one token: {name}", times)
    if loaded.dtype == torch.float32:  # bfloat16 kernels of other shapes have other last bits
        yield checked("answers that differ from transformers'", wrong, 0)


def _ask(vlm: CachedVLM, messages: Messages, tokens: int) -> list[int]:
    return list(vlm.chat(messages, max_tokens=tokens, ignore_eos=True).token_ids)


def _keep(answers: list[list[int]], run: Callable[[Messages, int], list[int]], messages: Messages) -> None:
    answers.append(run(messages, 1))
