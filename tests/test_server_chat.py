"""The chat API, spoken to by the openai client over a real socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from models import build
from server_helpers import ChatServer, ImageServer, data_uri, png, user

from featcache import FeatureStore
from featcache.engine.loading import Loaded, load_model
from featcache.engine.vlm import CachedVLM

OpenVLM = Callable[[Loaded, Path], CachedVLM]

RED, BLUE, GREEN = png((220, 20, 20)), png((20, 20, 220), (84, 56)), png((20, 220, 20), (56, 112))
HTTP = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(build("qwen2_vl", tmp_path_factory.mktemp("model")), device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=["native", "lmdeploy"])
def open_vlm(request: pytest.FixtureRequest) -> OpenVLM:
    """Either backend; LMDeploy's with a stand-in for its kernels."""
    if request.param == "native":
        return lambda loaded, store: CachedVLM.from_pretrained(
            loaded, store=store, host_bytes="64MiB", disk_bytes="64MiB"
        )
    pytest.importorskip("lmdeploy", reason="LMDeploy is not installed: see tests/lmdeploy.txt")
    from lmdeploy_standin import open_stand_in

    return lambda loaded, store: open_stand_in(
        load_model(
            loaded.path, device="cpu", dtype="float32"
        ),  # the native engine changed the other's attention
        FeatureStore.open(store, host_bytes="64MiB", disk_bytes="64MiB"),
    )


@pytest.fixture(scope="module")
def server(
    loaded: Loaded, open_vlm: OpenVLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    store = tmp_path_factory.mktemp("store")
    with ChatServer(
        lambda: open_vlm(loaded, store), served_model_name="tiny", allow_private_media=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ChatServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def web() -> Iterator[ImageServer]:
    with ImageServer() as web:
        yield web


def report(answer: Any) -> dict[str, Any]:
    """The `featcache` block of a response or chunk."""
    return answer.model_extra["featcache"]


def ask(client: openai.OpenAI, *messages: dict[str, Any], **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=list(messages), **{"max_tokens": 12, **more})


# Answers


def test_the_answer_is_the_models_own(server: ChatServer, client: openai.OpenAI) -> None:
    question = user("what is in the picture?", data_uri(RED))
    answer = ask(client, question)
    own = server.service.vlm.chat([question], max_tokens=12)
    assert answer.choices[0].message.content == own.text
    assert answer.choices[0].finish_reason == own.finish_reason == "length"
    assert answer.usage.prompt_tokens == own.usage.prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.model == "tiny" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    question = user("compare both", data_uri(RED), data_uri(BLUE))
    whole = ask(client, question)
    chunks = list(ask(client, question, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == "assistant" and all(choice.delta.role is None for choice in deltas[1:])
    assert [choice.finish_reason for choice in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [image["tier"] for image in report(chunks[-1])["images"]] == ["prefix", "prefix"]
    last = list(ask(client, question, stream=True))[-1]
    assert last.choices[0].finish_reason == "length" and len(report(last)["images"]) == 2


def test_the_async_client_and_many_at_once(server: ChatServer, client: openai.OpenAI) -> None:
    questions = [user(f"how many red circles are there? {n}", data_uri(RED)) for n in range(6)]
    alone = [ask(client, question).choices[0].message.content for question in questions]

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:

            async def one(question: dict[str, Any], stream: bool) -> str:
                create = many.chat.completions.create
                if not stream:
                    answer = await create(model="tiny", messages=[question], max_tokens=12)  # type: ignore[list-item]
                    return answer.choices[0].message.content or ""
                pieces = await create(model="tiny", messages=[question], max_tokens=12, stream=True)  # type: ignore[list-item]
                return "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])

            return await asyncio.gather(*(one(question, n % 2 == 0) for n, question in enumerate(questions)))

    assert asyncio.run(main()) == alone


def test_images_by_url_data_uri_and_uuid(client: openai.OpenAI, web: ImageServer) -> None:
    picture = png((7, 77, 177))
    url = web.image("/a.png", picture, ETag='"1"')
    texts = set()
    parts: list[Any] = [
        data_uri(picture),
        url,
        {"type": "image_url", "image_url": url, "uuid": "a"},
        {"type": "image_url", "image_url": None, "uuid": "a"},
    ]
    tiers = []
    for part in parts:
        answer = ask(client, user("describe this image", part))
        texts.add(answer.choices[0].message.content)
        tiers.append(report(answer)["images"][0]["tier"])
    assert len(texts) == 1
    assert tiers == ["encoded", "prefix", "prefix", "prefix"]
    other = ask(client, user("describe this image", data_uri(GREEN)))
    assert other.choices[0].message.content not in texts
    assert report(other)["images"][0]["tier"] == "encoded"


def test_a_conversation_encodes_each_image_once_and_a_restart_none(
    loaded: Loaded, open_vlm: OpenVLM, tmp_path: Path
) -> None:
    pictures = [data_uri(picture) for picture in (RED, BLUE, GREEN)]
    with CachedVLM.from_pretrained(loaded, store=None, host_bytes="64MiB") as plain:
        messages: list[dict[str, Any]] = []
        expected = []
        for turn in range(6):
            images = {0: pictures[:2], 2: pictures[2:]}.get(turn, [])
            messages.append(user(f"turn {turn}: describe this image", *images))
            expected.append(plain.chat(messages, max_tokens=12).text)
            messages.append({"role": "assistant", "content": expected[-1]})
    for start in range(2):
        with (
            ChatServer(lambda: open_vlm(loaded, tmp_path)) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            answers = conversation(client, server.service.name, pictures)
            assert [answer.choices[0].message.content for answer in answers] == expected
            tiers = [[image["tier"] for image in report(answer)["images"]] for answer in answers]
            first = "encoded" if start == 0 else "disk"
            assert tiers[0] == [first, first] and tiers[2] == ["prefix", "prefix", first]
            assert all(tier == "prefix" for turn in (1, 3, 4, 5) for tier in tiers[turn])
            cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
            assert cached[0] == 0 and all(a < b for a, b in itertools.pairwise(cached))
            assert all(a.usage.prompt_tokens_details.cached_tokens < a.usage.prompt_tokens for a in answers)
            assert server.service.vlm.encoder.stats()["tower_images"] == (3 if start == 0 else 0)


def conversation(client: openai.OpenAI, model: str, pictures: list[str]) -> list[Any]:
    """Six turns over three images: two at first, one at turn three."""
    messages: list[dict[str, Any]] = []
    answers = []
    for turn in range(6):
        images = {0: pictures[:2], 2: pictures[2:]}.get(turn, [])
        messages.append(user(f"turn {turn}: describe this image", *images))
        answers.append(client.chat.completions.create(model=model, messages=messages, max_tokens=12))  # type: ignore[arg-type]
        messages.append({"role": "assistant", "content": answers[-1].choices[0].message.content})
    return answers


# Options


def test_several_answers_differ_by_seed_and_are_repeatable(client: openai.OpenAI) -> None:
    question = user("describe this image", data_uri(RED))
    options = {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 8}
    first, again = ask(client, question, **options), ask(client, question, **options)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == sum(8 for _ in texts)
    streamed = ["", "", ""]
    for chunk in ask(client, question, **options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_log_probabilities(client: openai.OpenAI) -> None:
    question = user("describe this image", data_uri(RED))
    answer = ask(client, question, logprobs=True, top_logprobs=3, max_tokens=5)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 5
    for token in tokens:
        best = [other.logprob for other in token.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert token.logprob == best[0] <= 0  # greedy
    text = b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace")
    assert text.startswith(answer.choices[0].message.content.rstrip("\ufffd"))
    streamed = [
        token
        for chunk in ask(client, question, logprobs=True, max_tokens=5, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.logprob for token in streamed] == [token.logprob for token in tokens]
    assert streamed[0].top_logprobs == []


def test_stop_texts_end_the_answer_before_them(client: openai.OpenAI) -> None:
    question = user("describe this image", data_uri(RED))
    options = {"max_tokens": 40, "temperature": 1.0, "seed": 1}  # of a random model: varied text
    whole = ask(client, question, **options).choices[0].message.content
    found = re.search(r"[a-z]{2}", whole[8:-12])
    assert found is not None, whole
    stop = found[0]
    cut = ask(client, question, **options, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = ask(client, question, **options, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == cut.choices[0].message.content


def test_limits_and_biases(client: openai.OpenAI) -> None:
    question = user("describe this image", data_uri(RED))
    assert ask(client, question, max_completion_tokens=3).usage.completion_tokens == 3
    biased = ask(client, question, logit_bias={"40": 100}, max_tokens=4, logprobs=True)
    assert len({token.token for token in biased.choices[0].logprobs.content}) == 1
    small = ask(client, question, extra_body={"mm_processor_kwargs": {"max_pixels": 28 * 28}})
    assert report(small)["images"][0]["key"] != report(ask(client, question))["images"][0]["key"]


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_obey_a_schema(client: openai.OpenAI, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA, "strict": True}}
    options = {"response_format": wanted, "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 60}
    answer = ask(client, user("describe", data_uri(RED)), **options, stream=stream)
    texts = ["", ""]
    if stream:
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for text in texts:
        doc = json.loads(text)
        assert doc["colour"] in ("red", "blue") and 1 <= doc["count"] <= 9


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    question = user("a question of its own kind, long enough for a block of tokens", data_uri(BLUE))
    salted = {"extra_body": {"cache_salt": "pepper"}}
    cached = [
        ask(client, question, **more).usage.prompt_tokens_details.cached_tokens
        for more in ({}, salted, salted, {})
    ]
    assert cached[1] == 0 and cached[2] > 0 and cached[3] > 0


def test_the_headers_tell_what_took_how_long(server: ChatServer) -> None:
    body = {"messages": [user("hello", data_uri(RED))], "max_tokens": 2}
    answer = HTTP.post(f"{server.url}/v1/chat/completions", json=body, headers={"X-Request-Id": "r-17"})
    assert answer.headers["x-request-id"] == "r-17" and answer.json()["id"] == "chatcmpl-r-17"
    names = [span.partition(";")[0] for span in answer.headers["server-timing"].split(", ")]
    assert names == ["images", "prompt", "queue", "encode", "prefill", "total"]
    with HTTP.stream("POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["server-timing"].startswith("images;dur=")
        assert stream.read().endswith(b"data: [DONE]\n\n")


# Clients that go away


def running(server: ChatServer) -> int:
    stats = server.service.vlm.engine.stats()
    return int(stats["running"]) + int(stats["waiting"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_generation(server: ChatServer, stream: bool) -> None:
    engine = server.service.vlm.engine
    body = {"messages": [user("go on for ever", data_uri(RED))], "max_tokens": 3000, "ignore_eos": True}
    payload = json.dumps({**body, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)
        wait_until(lambda: engine.stats()["running"] == 1)
        before = engine.stats()["completion_tokens"]
    wait_until(lambda: running(server) == 0)
    assert engine.stats()["completion_tokens"] - before < 1000
    assert engine.check() == []
    gone = 'featcache_requests_total{route="/v1/chat/completions",status="499"}'
    wait_until(lambda: gone in HTTP.get(f"{server.url}/metrics").text)
    assert ask_raw(server)["choices"][0]["message"]["content"]


def wait_until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask_raw(server: ChatServer) -> Any:
    body = {"messages": [user("hello", data_uri(RED))], "max_tokens": 4}
    answer = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
