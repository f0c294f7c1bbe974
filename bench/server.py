"""What HTTP costs on top of the engine, and `featcache serve` beside `transformers serve`, on a CPU.

    python bench/server.py [--alone] [--json FILE]

The first part serves a model of tiny's shape, so that the server's own work shows; the second one of middle
size with random weights, by both servers in turn, as their users start them. `transformers serve` needs
accelerate (`pip install accelerate`).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx2 as httpx
import torch
import transformers

from engine import figure, make_model, picture, show
from featcache.bundled import tiny_model
from featcache.engine import CachedVLM

SCRIPTS = Path(sys.executable).parent
TOKENS = 16
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
LIMITS = httpx.Limits(max_connections=32, max_keepalive_connections=0)  # idle ones may be closed meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--alone", action="store_true", help="leave transformers serve out")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as scratch:
        rows = over_http(Path(scratch))
        if not options.alone:
            rows += beside_transformers(Path(scratch))
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "figures": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))
    show(report)


# What HTTP costs


def over_http(scratch: Path) -> list[dict[str, Any]]:
    """All images known and all prefixes held: what is left is the server's work."""
    torch.manual_seed(0)
    tokenizer = tiny_model.make_tokenizer()
    folder = scratch / "tiny"
    tiny_model.save(tiny_model.make_model(tokenizer), tokenizer, folder)
    requests = [
        {"messages": [question(f"question {n % 8}: what is there?", n % 8)], "max_tokens": TOKENS}
        for n in range(96)
    ]
    with CachedVLM.from_pretrained(folder, store=None, device="cpu") as vlm:
        own_rate, own_ttft = engine_rate(vlm, requests), engine_ttft(vlm, requests[:8])
    began = time.perf_counter()
    with serving("featcache", folder, scratch / "store-tiny") as url:
        start = time.perf_counter() - began
        rate = http_rate(url, requests, 8)
        ttft = http_ttft(url, requests[:8])
        late = lateness(url)
    return [
        figure(
            "requests/s over HTTP / by the engine's own loop, 8 at once", rate / own_rate, 0.9, at_least=True
        ),
        {"figure": "requests/s: engine, HTTP", "value": [round(own_rate, 1), round(rate, 1)]},
        figure("TTFT of a prefix hit over HTTP / by the engine itself", ttft / own_ttft, 1.3),
        {"figure": "TTFT: engine, HTTP, ms", "value": [round(own_ttft * 1e3, 1), round(ttft * 1e3, 1)]},
        figure("seconds from the command to /ready", start, 10.0),
        figure("share of samples in which the event loop was more than 40 ms late", late, 0.0),
    ]


def question(text: str, seed: int) -> dict[str, Any]:
    out = BytesIO()
    picture(seed).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def engine_rate(vlm: CachedVLM, requests: list[dict[str, Any]]) -> float:
    """Requests a second with 8 under way, from messages to text, in one process."""

    def work(number: int) -> None:
        for request in requests[number::8]:
            vlm.chat(request["messages"], max_tokens=TOKENS, ignore_eos=True)

    def once() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    once()
    return len(requests) / best_of(once)


def http_rate(url: str, requests: list[dict[str, Any]], clients: int) -> float:
    """The same over HTTP. The bodies are ready: what a client does for them is not the server's work."""
    bodies = [json.dumps({**request, "ignore_eos": True}).encode() for request in requests]

    def client(number: int) -> None:
        with closing(connection(url)) as http:
            for body in bodies[number::clients]:
                http.request("POST", CHAT, body, JSON)
                answer = http.getresponse()
                text = answer.read()
                assert answer.status == 200, text

    def once() -> None:
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(client, range(clients)))

    once()
    return len(requests) / best_of(once)


def connection(url: str) -> HTTPConnection:
    return HTTPConnection(urlsplit(url).netloc, timeout=60)


def engine_ttft(vlm: CachedVLM, requests: list[dict[str, Any]]) -> float:
    def once(request: dict[str, Any]) -> float:
        began = time.perf_counter()
        generation = vlm.submit(request["messages"], max_tokens=TOKENS, ignore_eos=True)
        next(iter(generation))
        seconds = time.perf_counter() - began
        generation.result()
        return seconds

    return statistics.median([once(request) for request in requests * 12][len(requests) :])


def http_ttft(url: str, requests: list[dict[str, Any]]) -> float:
    times = []
    with closing(connection(url)) as http:
        for request in requests * 12:
            body = json.dumps({**request, "stream": True, "ignore_eos": True}).encode()
            began = time.perf_counter()
            http.request("POST", CHAT, body, JSON)
            answer = http.getresponse()
            assert answer.readline().startswith(b"data:")
            times.append(time.perf_counter() - began)
            answer.read()
    return statistics.median(times[len(requests) :])


def lateness(url: str) -> float:
    """The share of the server's own samples in which its event loop was more than 40 ms late."""
    text = httpx.get(f"{url}/metrics").text
    name = "featcache_event_loop_lag_seconds"
    within = re.search(rf'^{name}_bucket{{le="0.04"}} (\S+)$', text, re.MULTILINE)
    total = re.search(rf"^{name}_count (\S+)$", text, re.MULTILINE)
    assert within is not None and total is not None
    return 1 - float(within[1]) / float(total[1])


# Beside transformers serve


def beside_transformers(scratch: Path) -> list[dict[str, Any]]:
    """DashInfer's shapes: 1 client, 32 clients, 32 with two turns behind them and all images in the first."""
    if find_spec("accelerate") is None:
        return [{"figure": "beside transformers serve: not measured, it needs accelerate", "value": ""}]
    folder = make_model(scratch / "middle")
    seconds: dict[str, dict[str, float]] = {}
    for server in ("transformers", "featcache"):
        with serving(server, folder, scratch / "store-middle") as url:
            seconds[server] = asyncio.run(shapes(url, str(folder)))
    rows = []
    for shape in seconds["featcache"]:
        theirs, ours = seconds["transformers"][shape], seconds["featcache"][shape]
        rows.append(
            {"figure": f"{shape}: times faster than transformers serve", "value": round(theirs / ours, 2)}
        )
        rows.append(
            {"figure": f"{shape}: seconds, theirs and ours", "value": [round(theirs, 2), round(ours, 2)]}
        )
    return rows


async def shapes(url: str, model: str) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=1800, limits=LIMITS) as http:

        async def ask(messages: list[dict[str, Any]]) -> str:
            body = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
            answer = await http.post(url + CHAT, json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

        async def timed(conversations: list[list[dict[str, Any]]], at_once: int) -> float:
            began = time.perf_counter()
            for i in range(0, len(conversations), at_once):
                await asyncio.gather(*map(ask, conversations[i : i + at_once]))
            return time.perf_counter() - began

        await ask([question("warm up", 999)])
        seconds = {
            "1 client, 8 new images": await timed([[question("what is it?", n)] for n in range(8)], 1),
            "32 clients, 32 new images": await timed(
                [[question("what is it?", 100 + n)] for n in range(32)], 32
            ),
        }
        conversations = [[question("what is it?", 200 + n)] for n in range(32)]
        for turn in range(2):
            await asyncio.gather(*map(ask, conversations))
            for messages in conversations:  # not what a random model says: it may be anything
                messages += [
                    {"role": "assistant", "content": f"a red circle and {turn} squares"},
                    {"role": "user", "content": f"and now, {turn}?"},
                ]
        seconds["32 clients, third turn"] = await timed(conversations, 32)
    return seconds


# Servers


@contextmanager
def serving(server: str, folder: Path, store: Path) -> Iterator[str]:
    """Either server in a process of its own; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = {
        "featcache": [SCRIPTS / "featcache", "serve", folder, "--store", store, "--dtype", "float32"],
        "transformers": [SCRIPTS / "transformers", "serve", folder, "--device", "cpu", "--dtype", "float32"],
    }[server]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*map(str, command), "--port", str(port)], stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(
            lambda: httpx.get(f"{url}/{'ready' if server == 'featcache' else 'health'}").status_code == 200,
            process,
        )
        yield url
    finally:
        process.terminate()
        process.wait(60)


def wait_for(is_ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            if is_ready():
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, "the server doesn't start"
        time.sleep(0.2)


def best_of(call: Callable[[], None], runs: int = 3) -> float:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
