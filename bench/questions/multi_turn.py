"""Conversations about pages, turn by turn: transformers, nothing kept, features kept, features and KV kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from featcache.bench.models import Transformers, asks, page, qwen2_vl
from featcache.bench.setting import Point, Row, Setting, checked, ms, percentile
from featcache.engine import CachedVLM
from featcache.engine.engine import EngineSettings
from featcache.store import FeatureStore

TOKENS = 8
PLOT = "Time to the first token by turn, ms"
KEPT: dict[str, tuple[int | str, bool]] = {
    "nothing": (0, False),
    "features": ("1GiB", False),
    "features and KV": ("1GiB", True),
}


class Turn(NamedTuple):
    """tiers: where the features of each of its images came from."""

    ttft_s: float
    answer: tuple[int, ...]
    tiers: tuple[str, ...] = ()


Asked = Callable[[list[dict[str, Any]]], Turn]
Talks = dict[int, list[Turn]]


def measure(setting: Setting) -> Iterator[Row]:
    conversations, turns = setting.rounds(3, 16), setting.rounds(4, 10)
    plain = Transformers(qwen2_vl(setting))

    def by_transformers(messages: list[dict[str, Any]]) -> Turn:
        answer, ttft_s = plain.timed(messages, TOKENS)
        return Turn(ttft_s, tuple(answer))

    by_transformers(asks("warm up", page(999, setting)))
    right, seconds = _run(by_transformers, setting, conversations, turns, 1)
    yield Row("transformers, 1 client", conversations * turns / seconds, "requests/s")
    yield from _by_turn("transformers", right)
    loaded = qwen2_vl(setting)
    device = "cuda" if setting.device == "cuda" else None
    for name, (host_bytes, prefixes) in KEPT.items():
        with FeatureStore.open(None, host_bytes=host_bytes, device=device) as store:
            settings = EngineSettings(prefix_cache=prefixes)
            with CachedVLM.from_pretrained(loaded, store=store, settings=settings) as vlm:

                def ask(messages: list[dict[str, Any]], vlm: CachedVLM = vlm) -> Turn:
                    reply = vlm.chat(messages, max_tokens=TOKENS, ignore_eos=True)
                    tiers = tuple(image.tier for image in reply.images)
                    return Turn(reply.timings.ttft_s, reply.token_ids, tiers)

                ask(asks("warm up", page(999, setting)))
                alone, seconds = _run(ask, setting, conversations, turns, 1)
                yield Row(f"{name} kept, 1 client", conversations * turns / seconds, "requests/s")
                others, seconds = _run(ask, setting, conversations, turns, conversations)
                yield Row(
                    f"{name} kept, {conversations} clients",
                    conversations * turns / seconds,
                    "requests/s",
                    note=_shares(others),
                )
        yield from _by_turn(f"{name} kept", alone)
        if loaded.dtype == torch.float32:
            wrong = sum(alone[n][t].answer != right[n][t].answer for n in right for t in range(turns))
            yield checked(f"{name} kept: answers that differ from transformers'", wrong, 0)


def _by_turn(name: str, talks: Talks) -> Iterator[Row]:
    later = [turn.ttft_s for talk in talks.values() for turn in talk[1:]]
    tail = ", ".join(f"p{p} {percentile(later, p) * 1e3:.1f}" for p in (50, 90, 99))
    number = len(talks[0])
    for turn in range(number):
        yield ms(
            f"{name}: first token, turn {turn + 1}",
            [talk[turn].ttft_s for talk in talks.values()],
            note=f"{tail} over turns 2 to {number}" if turn == number - 1 else "",
            point=Point(PLOT, name, turn + 1),
        )


def _shares(talks: Talks) -> str:
    tiers = Counter(tier for talk in talks.values() for turn in talk for tier in turn.tiers)
    return ", ".join(f"{tier} {count / tiers.total():.0%}" for tier, count in tiers.most_common())


def _run(ask: Asked, setting: Setting, number: int, turns: int, clients: int) -> tuple[Talks, float]:
    """Conversations by their number, and the seconds that all took. Of other pages with more than one client."""
    talks: Talks = {}

    def work(client: int) -> None:
        for n in range(client, number, clients):
            talks[n] = _talk(ask, setting, n + number * (clients > 1), turns)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return talks, time.perf_counter() - began


def _talk(ask: Asked, setting: Setting, number: int, turns: int) -> list[Turn]:
    """One conversation: two to four pages in its first turn, then questions."""
    messages: list[dict[str, Any]] = []
    told: list[Turn] = []
    for turn in range(turns):
        images = [page(10 * number + n, setting) for n in range(2 + number % 3)] if turn == 0 else []
        messages += asks(f"question {turn}: what is written on the pages", *images)
        told.append(ask(messages))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"answer {turn}"}]})
    return told
