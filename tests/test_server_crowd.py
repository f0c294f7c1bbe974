"""Many clients at once, some of whom go away: nothing leaks, and every answer is as it would be alone."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from models import build
from server_helpers import ChatServer, data_uri, png, user

from featcache.engine.engine import EngineSettings
from featcache.engine.loading import Loaded, load_model
from featcache.engine.vlm import CachedVLM

CHAT = "/v1/chat/completions"
PICTURES = [data_uri(png((40 * n, 255 - 30 * n, 90), (56 + 28 * (n % 3), 56))) for n in range(6)]
PROMPTS: list[dict[str, Any]] = [
    {
        "messages": [user(f"question {n}: how many red circles?", *PICTURES[n % 6 :][: 1 + n % 2])],
        "max_tokens": 5 + n,
    }
    for n in range(12)
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(build("qwen2_vl", tmp_path_factory.mktemp("model")), device="cpu", dtype="float32")


@pytest.fixture
def server(loaded: Loaded, tmp_path: Path) -> Iterator[ChatServer]:
    """With few KV blocks, so that requests preempt each other, and room for few images."""

    def open_vlm() -> CachedVLM:
        settings = EngineSettings(kv_bytes="1MiB", max_running=16)
        return CachedVLM.from_pretrained(
            loaded, store=tmp_path, host_bytes=4096, disk_bytes="32MiB", settings=settings
        )

    with ChatServer(open_vlm) as server:
        yield server


class Level:
    """What must be as it was when all clients are gone."""

    def __init__(self) -> None:
        gc.collect()
        self.tasks = sum(type(o) is asyncio.Task and not o.done() for o in gc.get_objects())
        self.descriptors = len(list(Path("/proc/self/fd").iterdir()))
        self.threads = threading.active_count()
        statm = Path("/proc/self/statm").read_text().split()
        self.memory = int(statm[1]) * 4096


def settle(server: ChatServer, before: Level, seconds: float = 30) -> Level:
    """Wait until nothing runs any more."""
    engine, store = server.service.vlm.engine, server.service.vlm.store
    deadline = time.monotonic() + seconds
    while True:
        now, stats, host = Level(), engine.stats(), store.stats().host
        assert host is not None
        idle = not (stats["running"] or stats["waiting"] or stats["blocks_used"] or host.held_bytes)
        if idle and (now.tasks, now.descriptors) <= (before.tasks, before.descriptors):
            return now
        assert time.monotonic() < deadline, (stats, host, vars(now), vars(before))
        time.sleep(0.05)


async def crowd(
    url: str, twins: list[str], clients: int, until: float, requests: int, seed: int
) -> tuple[int, int]:
    """(answers that were whole and right, requests given up)."""
    whole = gone = 0

    async def client(number: int) -> None:
        nonlocal whole, gone
        generator = random.Random(seed * 1000 + number)
        for _ in range(requests):
            if time.monotonic() > until:
                return
            at = generator.randrange(len(PROMPTS))
            leaves = generator.random() < 0.2
            text = await stream(http, url, PROMPTS[at], generator.randrange(4) if leaves else None)
            if text is None:
                gone += 1
            else:
                assert text == twins[at]
                whole += 1

    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
    return whole, gone


async def stream(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], leave_after: int | None
) -> str | None:
    """The text of a streamed answer; None if the client leaves after so many events."""
    text = ""
    async with http.stream("POST", url + CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        number = 0
        async for line in response.aiter_lines():
            if leave_after is not None and number >= leave_after:
                return None
            if line.startswith("data: {"):
                number += 1
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
    return text


def run_crowd(server: ChatServer, clients: int, seconds: float, requests: int) -> Level:
    twins = []
    for prompt in PROMPTS:
        answer = httpx.post(server.url + CHAT, json=prompt, timeout=60).json()
        twins.append(answer["choices"][0]["message"]["content"])
    assert len(set(twins)) > 6
    before = settle(server, Level())
    whole, gone = asyncio.run(crowd(server.url, twins, clients, time.monotonic() + seconds, requests, seed=1))
    assert whole > 2 * gone > 0
    after = settle(server, before)
    vlm = server.service.vlm
    assert vlm.engine.check() == []
    vlm.store.flush()
    assert vlm.store.check() == []
    assert vlm.engine.stats()["cancelled"] > 0 == vlm.engine.stats()["failed"]
    return after


def test_a_crowd_of_whom_a_fifth_go_away(server: ChatServer) -> None:
    run_crowd(server, clients=40, seconds=60, requests=3)


@pytest.mark.soak
def test_two_hundred_clients_for_half_a_minute(server: ChatServer) -> None:
    first = run_crowd(server, clients=200, seconds=30, requests=10_000)
    again = run_crowd(server, clients=200, seconds=30, requests=10_000)
    assert again.memory - first.memory < 32 << 20
    assert again.threads <= first.threads
