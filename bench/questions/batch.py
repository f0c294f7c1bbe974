"""A loop over requests, a list of them, and clients side by side; with one image and with many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch

from featcache.bench.models import Transformers, asks, page, qwen2_vl
from featcache.bench.setting import Row, Setting, checked, seconds_of
from featcache.engine import CachedVLM
from featcache.engine.engine import Reply

TOKENS = 8
CLIENTS = 8
Requests = list[list[dict[str, Any]]]
Answers = list[tuple[int, ...]]


def measure(setting: Setting) -> Iterator[Row]:
    plain, loaded = Transformers(qwen2_vl(setting)), qwen2_vl(setting)
    number = setting.rounds(8, 64)
    kinds = {
        f"{number} images, one prompt each": [
            asks("what is written", page(n, setting)) for n in range(number)
        ],
        f"one image, {number} prompts": [
            asks(f"question {n}: what is written", page(0, setting)) for n in range(number)
        ],
    }
    for kind, requests in kinds.items():
        few = requests[: setting.rounds(4, 8)]
        plain.generate(few[0], TOKENS)
        right: Answers = []
        seconds = seconds_of(
            lambda few=few, right=right: right.extend(tuple(plain.generate(r, TOKENS)) for r in few),  # type: ignore[misc]
            setting.device,
        )
        yield Row(
            f"{kind}: transformers, loop", len(few) / seconds, "requests/s", note=f"of the first {len(few)}"
        )
        for name, run in (("loop", loop), ("list", as_list), (f"{CLIENTS} clients", clients)):
            with CachedVLM.from_pretrained(loaded, store=None) as vlm:
                vlm.chat(asks("warm up", page(999, setting)), max_tokens=TOKENS)
                before = dict(vlm.encoder.stats())
                answers: Answers = []
                seconds = seconds_of(lambda run=run: answers.extend(run(vlm, requests)))  # type: ignore[misc] # noqa: B023
                calls, images = (
                    int(vlm.encoder.stats()[name]) - int(before[name])
                    for name in ("tower_calls", "tower_images")
                )
            note = f"{images} images in {calls} calls of the tower"
            yield Row(f"{kind}: {name}", number / seconds, "requests/s", note=note)
            yield checked(
                f"{kind}: {name}: images encoded",
                images,
                len({id(r) for r in requests}) if "images," in kind else 1,
            )
            if loaded.dtype == torch.float32:
                wrong = sum(a != b for a, b in zip(answers, right, strict=False))
                yield checked(f"{kind}: {name}: answers that differ from transformers'", wrong, 0)


def loop(vlm: CachedVLM, requests: Requests) -> Answers:
    return [vlm.chat(messages, max_tokens=TOKENS, ignore_eos=True).token_ids for messages in requests]


def as_list(vlm: CachedVLM, requests: Requests) -> Answers:
    answers: Answers = []
    for reply in vlm.chat_batch(requests, max_tokens=TOKENS, ignore_eos=True):
        if not isinstance(reply, Reply):
            raise reply
        answers.append(reply.token_ids)
    return answers


def clients(vlm: CachedVLM, requests: Requests) -> Answers:
    found: dict[int, tuple[int, ...]] = {}

    def work(client: int) -> None:
        for n in range(client, len(requests), CLIENTS):
            found[n] = vlm.chat(requests[n], max_tokens=TOKENS, ignore_eos=True).token_ids

    threads = [threading.Thread(target=work, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[n] for n in range(len(requests))]
