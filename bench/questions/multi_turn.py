"""Conversations about pages, turn by turn: nothing kept, features kept, features and KV blocks kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from featcache.bench.models import asks, page, qwen2_vl
from featcache.bench.setting import Row, Setting, checked, ms, percentile
from featcache.engine import CachedVLM
from featcache.engine.engine import EngineSettings
from featcache.store import FeatureStore

TOKENS = 8
Turn = tuple[int, float, tuple[int, ...]]


def measure(setting: Setting) -> Iterator[Row]:
    loaded = qwen2_vl(setting)
    conversations, turns = setting.rounds(3, 16), setting.rounds(4, 10)
    device = "cuda" if setting.device == "cuda" else None
    expected: dict[int, list[Turn]] | None = None
    for name, host_bytes, prefixes in (
        ("nothing", 0, False),
        ("features", "1GiB", False),
        ("features and KV", "1GiB", True),
    ):
        with FeatureStore.open(None, host_bytes=host_bytes, device=device) as store:
            settings = EngineSettings(prefix_cache=prefixes)
            with CachedVLM.from_pretrained(loaded, store=store, settings=settings) as vlm:
                vlm.chat(asks("warm up", page(999, setting)), max_tokens=2)
                for clients in (1, conversations):
                    began = time.perf_counter()
                    told = _run(vlm, setting, conversations, turns, clients)
                    seconds = time.perf_counter() - began
                    if clients == 1:
                        alone = told
                        continue
                    yield Row(
                        f"{name} kept, {clients} clients", conversations * turns / seconds, "requests/s"
                    )
        later = [ttft for talk in alone.values() for turn, ttft, _ in talk if turn > 0]
        tail = f"p90 {percentile(later, 90) * 1e3:.1f}, p99 {percentile(later, 99) * 1e3:.1f} over all later turns"
        yield ms(f"{name} kept: first token, turn 1", [talk[0][1] for talk in alone.values()])
        yield ms(
            f"{name} kept: first token, turn {turns}", [talk[-1][1] for talk in alone.values()], note=tail
        )
        if expected is None:
            expected = alone
        elif loaded.dtype == torch.float32:
            wrong = sum(alone[n][t][2] != expected[n][t][2] for n in alone for t in range(turns))
            yield checked(f"{name} kept: answers that differ from those with nothing kept", wrong, 0)


def _run(vlm: CachedVLM, setting: Setting, number: int, turns: int, clients: int) -> dict[int, list[Turn]]:
    told: dict[int, list[Turn]] = {}

    def work(client: int) -> None:
        for n in range(client, number, clients):
            told[n] = _talk(vlm, setting, n + number * (clients > 1), turns)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def _talk(vlm: CachedVLM, setting: Setting, number: int, turns: int) -> list[Turn]:
    """One conversation: two to four pages in its first turn, then questions."""
    messages: list[dict[str, Any]] = []
    told: list[Turn] = []
    for turn in range(turns):
        images = [page(10 * number + n, setting) for n in range(2 + number % 3)] if turn == 0 else []
        messages += asks(f"question {turn}: what is written on the pages", *images)
        reply = vlm.chat(messages, max_tokens=TOKENS, ignore_eos=True)
        told.append((turn, reply.timings.ttft_s, reply.token_ids))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"answer {turn}"}]})
    return told
