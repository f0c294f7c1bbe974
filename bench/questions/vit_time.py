"""The stages of a new image, one by one, and whole requests beside transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from featcache.bench.models import Transformers, asks, page, qwen2_vl
from featcache.bench.setting import Point, Row, Setting, checked, ms, seconds_of
from featcache.engine import CachedVLM
from featcache.engine.families.base import ImageOptions
from featcache.features import Features
from featcache.images import open_image
from featcache.keys import FeatureKey, source_digest
from featcache.store import FeatureStore

PLOT = "Stages of an image until its features are there, ms"
TOKENS = 9
Messages = list[dict[str, Any]]


def measure(setting: Setting) -> Iterator[Row]:
    yield from _stages(setting)
    yield from _requests(setting)


def _stages(setting: Setting) -> Iterator[Row]:
    loaded = qwen2_vl(setting)
    family, on_cuda = loaded.family, setting.device == "cuda"
    new: dict[str, list[float]] = {}
    out: dict[str, list[float]] = {}
    known: dict[str, list[float]] = {}

    def note(stages: dict[str, list[float]], stage: str, call: Callable[[], object]) -> None:
        stages.setdefault(stage, []).append(seconds_of(call, setting.device))

    with FeatureStore.open(None, host_bytes="256MiB", device="cuda" if on_cuda else None) as store:
        for number in range(setting.rounds(4, 20) + 1):
            data = page(number, setting)
            note(new, "hash", partial(source_digest, data))
            note(new, "decode", partial(open_image, data))
            image = open_image(data)
            note(new, "preprocess", partial(family.preprocess, image, ImageOptions()))
            pixels = family.preprocess(image, ImageOptions())
            if on_cuda:
                began = time.perf_counter()
                family.encode([pixels])
                out.setdefault("until the tower's kernels are launched", []).append(
                    time.perf_counter() - began
                )
            note(new, "copy in and tower", partial(family.encode, [pixels]))
            rows = family.encode([pixels])[0]["rows"].clone()
            if on_cuda:
                tensors = list(pixels.tensors.values())
                note(out, "copying the pixels in", lambda tensors=tensors: [t.to("cuda") for t in tensors])  # type: ignore[misc]
                note(out, "features out by .cpu()", rows.cpu)
                pinned = torch.empty_like(rows, device="cpu", pin_memory=True)
                note(
                    out,
                    "features out to pinned memory, waiting",
                    partial(pinned.copy_, rows, non_blocking=True),
                )
            features = Features({"rows": rows}, pixels.layout)
            key = FeatureKey(number.to_bytes(32, "big"))
            began = time.perf_counter()
            store.put(key, features)
            out.setdefault("features out by put(), the caller's time", []).append(time.perf_counter() - began)
            store.flush()
            note(known, "hash", partial(source_digest, data))
            note(known, "look up", partial(_look_up, store, key))
    for stages, x in ((new, "new image"), (known, "known image")):
        for stage, seconds in stages.items():
            yield ms(f"{x}: {stage}", seconds[1:], point=Point(PLOT, stage, x))  # the first is the warm-up
    for stage, seconds in out.items():
        yield ms(f"new image: of that, or beside it: {stage}", seconds[1:])


def _look_up(store: FeatureStore, key: FeatureKey) -> None:
    lease = store.get(key)
    assert lease is not None
    lease.release()


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
        messages = asks("what is written", page(99, setting))
        replies = [
            vlm.chat(messages, max_tokens=TOKENS, ignore_eos=True) for _ in range(setting.rounds(3, 10))
        ]
    for name, times in spent.items():
        yield ms(f"request with one token: {name}", times)
    steps = [(r.timings.total_s - r.timings.ttft_s) / (TOKENS - 1) for r in replies]
    yield ms(
        "request about a known page, its KV held: prefill of the rest",
        [r.timings.prefill_s for r in replies[1:]],
    )
    yield ms("a decoding step", steps[1:])
    if loaded.dtype == torch.float32:  # bfloat16 kernels of other shapes have other last bits
        yield checked("answers that differ from transformers'", wrong, 0)


def _ask(vlm: CachedVLM, messages: Messages, tokens: int) -> list[int]:
    return list(vlm.chat(messages, max_tokens=tokens, ignore_eos=True).token_ids)


def _keep(answers: list[list[int]], run: Callable[[Messages, int], list[int]], messages: Messages) -> None:
    answers.append(run(messages, 1))
