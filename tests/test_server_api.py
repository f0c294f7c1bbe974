"""What a server has to stand: malformed requests, tenants, administrators, schemas, the status page."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import schemathesis
from browser import CHROMIUM, Browser
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from models import build
from safetensors.torch import load
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as conformance
from server_helpers import ChatServer, data_uri, png, user

from featcache.engine.engine import EngineSettings
from featcache.engine.loading import Loaded, load_model
from featcache.engine.vlm import CachedVLM

ALICE, BOB, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice", "sk-bob", "root"))
CHAT = "/v1/chat/completions"
HTTP = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(build("qwen2_vl", tmp_path_factory.mktemp("model")), device="cpu", dtype="float32")


def serve(loaded: Loaded, store: Path, **settings: Any) -> ChatServer:
    def open_vlm() -> CachedVLM:
        return CachedVLM.from_pretrained(loaded, store=store, host_bytes="32MiB", disk_bytes="64MiB")

    return ChatServer(open_vlm, served_model_name="tiny", store=store, **settings)


@pytest.fixture(scope="module")
def server(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """Open to all, with small limits."""
    with serve(loaded, tmp_path_factory.mktemp("store"), max_images=3, max_body_bytes=1 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def tenants(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """With keys."""
    keys = {
        "api_key": ("alice:sk-alice", "bob:sk-bob"),
        "admin_key": "root",
        "cors_origin": ("https://ui.example",),
    }
    with serve(loaded, tmp_path_factory.mktemp("store"), allow_private_media=True, **keys) as server:
        yield server


def post(
    server: ChatServer, body: Any, path: str = CHAT, headers: dict[str, str] | None = None
) -> httpx.Response:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    headers = {"Content-Type": "application/json", **(headers or {})}
    return HTTP.post(server.url + path, content=content, headers=headers)


def good(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [user("hello", data_uri(png()))], "max_tokens": 1, **more}


def with_part(part: Any) -> dict[str, Any]:
    return good(messages=[{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])


def with_url(url: Any) -> dict[str, Any]:
    return with_part({"type": "image_url", "image_url": {"url": url}})


def message(**fields: Any) -> dict[str, Any]:
    return good(messages=[{"role": "user", "content": "hi"}, fields])


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PART = "messages[0].content[1]"

# (body, what the message names, status)
MALFORMED: list[tuple[Any, str, int]] = [
    ("", "JSON", 400),
    ("{", "JSON", 400),
    ("[]", "body", 400),
    ("null", "body", 400),
    ('"text"', "body", 400),
    (b"\xff\xfe{}", "JSON", 400),
    ('{"messages": "\\ud800"}', "JSON", 400),
    ("[" * 100_000, "JSON", 400),
    ({}, "messages", 400),
    (good(messages=None), "messages", 400),
    (good(messages=[]), "messages", 400),
    (good(messages={}), "messages", 400),
    (good(messages=["hi"]), "messages[0]", 400),
    (message(role="robot", content="x"), "messages[1].role", 400),
    (message(content="x"), "messages[1].role", 400),
    (message(role="user"), "messages[1].content", 400),
    (message(role="user", content=None), "messages[1].content", 400),
    (message(role="user", content=3), "messages[1].content", 400),
    (message(role="user", content={"type": "text"}), "messages[1].content", 400),
    (message(role="user", content=[3]), "messages[1].content", 400),
    (message(role="user", content="x", colour="red"), "messages[1].colour", 400),
    (message(role="tool", content="x", tool_call_id="1"), "messages[1].role", 400),
    (good(model="gpt-7"), "model", 404),
    (good(model=7), "model", 400),
    (good(max_tokens=0), "max_tokens", 400),
    (good(max_tokens="many"), "max_tokens", 400),
    (good(max_completion_tokens=-1), "max_completion_tokens", 400),
    (good(temperature=-0.1), "temperature", 400),
    (good(temperature="hot"), "temperature", 400),
    ('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature", 400),
    (good(top_p=0), "top_p", 400),
    (good(top_k=-5), "top_k", 400),
    (good(min_p=2), "min_p", 400),
    (good(n=0), "n", 400),
    (good(n=1000), "n", 400),
    (good(seed=1 << 70), "seed", 400),
    (good(presence_penalty=3), "presence_penalty", 400),
    (good(stop=["a"] * 17), "stop", 400),
    (good(stop=""), "stop", 400),
    (good(stop=5), "stop", 400),
    (good(logit_bias={"tok": 1}), "logit_bias", 400),
    (good(logit_bias={"999999": 1}), "logit_bias", 400),
    (good(logprobs=True, top_logprobs=21), "top_logprobs", 400),
    (good(stream="yes"), "stream", 400),
    (good(stream_options=5), "stream_options", 400),
    (good(response_format={"type": "xml"}), "response_format.type", 400),
    (good(response_format={"type": "json_schema"}), "response_format", 400),
    (
        good(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}
        ),
        "response_format.json_schema.schema",
        400,
    ),
    (good(tools=[TOOL]), "tools", 400),
    (good(tools=[{"type": "function"}]), "tools[0].function", 400),
    (good(tool_choice="required"), "tool_choice", 400),
    (good(functions=[]), "functions", 400),
    (good(audio={"voice": "x"}), "audio", 400),
    (good(modalities=["text", "audio"]), "modalities", 400),
    (good(frobnicate=True), "frobnicate", 400),
    (good(mm_processor_kwargs={"max_pixels": 0}), "mm_processor_kwargs.max_pixels", 400),
    (good(mm_processor_kwargs={"min_pixels": 9, "max_pixels": 4}), "min_pixels", 400),
    (good(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs", 400),
    (good(cache_salt=""), "cache_salt", 400),
    (with_part({"type": "video_url", "video_url": {"url": "x"}}), f"{PART}.type", 400),
    (with_part({"type": "text"}), f"{PART}.text", 400),
    (with_part({"type": "image_url", "image_url": None}), PART, 400),
    (with_part({"type": "image", "uuid": "never-seen"}), f"{PART}.uuid", 400),
    (with_url("data:image/png;base64,####"), PART, 400),
    (with_url("data:image/png;base64," + "QUJD" * 50), PART, 400),
    (with_url(data_uri(png())[:-60]), PART, 400),
    (with_url("file:///etc/passwd"), PART, 400),
    (with_url("/etc/passwd"), PART, 400),
    (with_url("http://127.0.0.1:1/a.png"), PART, 400),
    (with_url("http://169.254.169.254/latest/meta-data"), PART, 400),
    (with_url("http://2130706433/a.png"), PART, 400),
    (with_url("http://[::ffff:127.0.0.1]/a.png"), PART, 400),
    (with_url("http://localhost/a.png"), PART, 400),
    (with_url("http://user:pw@example.org/a.png"), PART, 400),
    (with_url("ftp://example.org/a.png"), PART, 400),
    (with_url("x" * 100), PART, 400),
    (good(messages=[user("many", *[data_uri(png())] * 4)]), "messages", 400),
    (good(messages=[user("word " * 9000)]), "messages", 400),
    (good(user="u" * (1 << 20)), "body", 413),
]


def test_malformed_requests_are_told_what_is_wrong_and_harm_nobody(server: ChatServer) -> None:
    assert len(MALFORMED) >= 60
    expected = post(server, good()).json()["choices"]
    for body, names, status in MALFORMED:
        answer = post(server, body)
        shown = str(body)[:200]
        assert answer.status_code == status, (shown, answer.text)
        error = answer.json()["error"]
        assert names in error["message"], (shown, error)
        assert error["param"] is None or error["message"].startswith(error["param"]), (shown, error)
        assert error["type"] == "invalid_request_error" and answer.headers["x-request-id"]
        assert "/work" not in answer.text and "Traceback" not in answer.text and " 0x" not in answer.text
        assert post(server, good()).json()["choices"] == expected
    assert server.service.vlm.engine.check() == []


def test_malformed_requests_are_refused_before_a_stream_begins(server: ChatServer) -> None:
    for body in (with_url("data:image/png;base64,####"), good(messages=[user("word " * 9000)])):
        answer = post(server, {**body, "stream": True})
        assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"


def test_other_paths_methods_and_types(server: ChatServer) -> None:
    assert HTTP.get(f"{server.url}/v2/nothing").json()["error"]["type"] == "invalid_request_error"
    assert HTTP.get(server.url + CHAT).status_code == 405
    assert HTTP.get(server.url + CHAT).headers["allow"] == "POST"
    assert post(server, good(), headers={"Content-Type": "text/plain"}).status_code == 415
    assert HTTP.get(f"{server.url}/cache/stats?recent=maybe").status_code == 400
    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # a length that lies
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{{".encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_images_of_strange_shapes_get_an_answer_or_a_reason(server: ChatServer) -> None:
    for size in ((1, 1), (1, 100), (332, 27), (1093, 5), (3000, 2)):
        for stream in (False, True):
            answer = post(server, good(messages=[user("look", data_uri(png(size=size)))], stream=stream))
            assert answer.status_code in (200, 400), (size, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["message"].startswith("messages[0].content[0]")


def test_models_health_and_readiness(server: ChatServer) -> None:
    (model,) = HTTP.get(f"{server.url}/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == server.service.max_model_len
    assert HTTP.get(f"{server.url}/v1/models/tiny").json() == model
    assert HTTP.get(f"{server.url}/v1/models/other").status_code == 404
    assert HTTP.get(f"{server.url}/health").json() == {"status": "ok"}
    assert HTTP.get(f"{server.url}/ready").json()["model"] == "tiny"


def test_metrics_count_what_happened(server: ChatServer) -> None:
    def metrics() -> dict[str, float]:
        lines = HTTP.get(f"{server.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    before = metrics()
    picture = data_uri(png((3, 5, 7)))
    for _ in range(2):
        post(server, good(messages=[user("measured", picture)], max_tokens=3))
    after = metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown(f'featcache_requests_total{{route="{CHAT}",status="200"}}') == 2
    assert (
        grown('featcache_images_total{tier="encoded"}') == grown('featcache_images_total{tier="prefix"}') == 1
    )
    assert grown("featcache_time_to_first_token_seconds_count") == 2
    assert grown("featcache_inter_token_seconds_count") == 4
    assert grown("featcache_completion_tokens_total") == 6
    assert grown("featcache_request_seconds_count") == 2
    assert grown("featcache_encoder_tower_images_total") == 1
    assert (
        after['featcache_tier_bytes{tier="host"}'] > 0
        and after['featcache_tier_max_bytes{tier="disk"}'] == 64 << 20
    )
    assert after["featcache_saved_seconds_total"] > before["featcache_saved_seconds_total"]
    assert after["featcache_quarantined_total"] == 0 and after["featcache_engine_running"] == 0


# Features


def test_features_can_be_looked_up_warmed_and_taken_away(server: ChatServer) -> None:
    picture = data_uri(png((11, 22, 33)))
    asked = {"images": [picture, {"type": "image", "image": picture}, "nonsense"], "warm": False}
    found = post(server, asked, "/v1/features").json()["data"]
    assert found[0] == found[1] and found[0]["tier"] is None and found[0]["layout"] is None
    assert found[2]["key"] is None and found[2]["error"].startswith("images[2]")
    assert HTTP.get(f"{server.url}/v1/features/{found[0]['key']}").status_code == 404
    warmed = post(server, {**asked, "warm": True}, "/v1/features").json()["data"]
    assert warmed[0]["tier"] == "encoded" and warmed[0]["layout"]["num_tokens"] > 0
    assert warmed[0]["key"] == found[0]["key"] and warmed[2]["error"]
    record = HTTP.get(f"{server.url}/v1/features/{found[0]['key']}")
    assert load(record.content)["rows"].shape[0] == warmed[0]["layout"]["num_tokens"]
    answer = post(server, good(messages=[user("now", picture)])).json()
    assert answer["featcache"]["images"][0]["tier"] == "host"
    assert answer["featcache"]["images"][0]["key"] == found[0]["key"]
    assert HTTP.get(f"{server.url}/v1/features/zz").status_code == 404
    assert post(server, {"images": []}, "/v1/features").status_code == 400


# Tenants


def test_without_a_key_nothing_is_told(tenants: ChatServer) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("POST", "/v1/features"),
        ("GET", "/cache/stats"),
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = HTTP.request(method, tenants.url + path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert (
        HTTP.get(f"{tenants.url}/health").status_code == HTTP.get(f"{tenants.url}/ready").status_code == 200
    )


def test_tenants_share_neither_images_nor_names_nor_prefixes(tenants: ChatServer) -> None:
    picture = {"type": "image_url", "image_url": data_uri(png((90, 30, 10))), "uuid": "mine"}
    asked = good(messages=[user("whose is it? " * 8, picture)])
    alice = post(tenants, asked, headers=ALICE).json()
    bob = post(tenants, asked, headers=BOB).json()
    assert bob["featcache"]["images"][0]["tier"] == "encoded"
    assert bob["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert alice["featcache"]["images"][0]["key"] != bob["featcache"]["images"][0]["key"]
    assert post(tenants, asked, headers=ALICE).json()["featcache"]["images"][0]["tier"] == "prefix"
    post(tenants, good(messages=[user("x", {**picture, "uuid": "only-alice"})]), headers=ALICE)
    by_name = good(messages=[user("x", {"type": "image", "uuid": "only-alice"})])
    assert post(tenants, by_name, headers=ALICE).status_code == 200
    assert post(tenants, by_name, headers=BOB).status_code == 400
    key = alice["featcache"]["images"][0]["key"]
    statuses = [
        HTTP.get(f"{tenants.url}/v1/features/{key}", headers=h).status_code for h in (ALICE, BOB, ADMIN)
    ]
    assert statuses == [200, 404, 200]
    stats = [
        HTTP.get(f"{tenants.url}/cache/stats?recent=true", headers=headers).json()["recent"]
        for headers in (ALICE, BOB, ADMIN)
    ]
    assert {image["key"] for image in stats[0]} & {image["key"] for image in stats[1]} == set()
    assert len(stats[2]) == len(stats[0]) + len(stats[1])


def test_only_the_administrator_deletes(tenants: ChatServer) -> None:
    picture = data_uri(png((1, 90, 1)))
    asked = good(messages=[user("delete me, when this is long enough to fill a block", picture)])
    key = post(tenants, asked, headers=ALICE).json()["featcache"]["images"][0]["key"]
    paths = [f"/v1/features/{key}", "/v1/namespaces/alice", "/v1/prefix-cache"]
    for path in paths:
        assert HTTP.delete(tenants.url + path, headers=ALICE).status_code == 403
    for path in paths:
        assert HTTP.delete(tenants.url + path, headers=ADMIN).json()["deleted"] >= (path != paths[2])
    assert HTTP.delete(f"{tenants.url}/v1/namespaces/carol", headers=ADMIN).status_code == 404
    again = post(tenants, asked, headers=ALICE).json()
    assert again["featcache"]["images"][0]["tier"] == "encoded"
    assert again["featcache"]["images"][0]["key"] != key  # the namespace begins anew
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_browsers_of_allowed_origins_only(tenants: ChatServer) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = HTTP.options(tenants.url + CHAT, headers={"Origin": "https://ui.example", **ask})
    assert allowed.headers["access-control-allow-origin"] == "https://ui.example"
    other = HTTP.options(tenants.url + CHAT, headers={"Origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_says_when_to_come_back(loaded: Loaded, tmp_path: Path) -> None:
    def open_vlm() -> CachedVLM:
        limits = EngineSettings(max_running=1, max_waiting=1)
        return CachedVLM.from_pretrained(loaded, store=None, settings=limits)

    with ChatServer(open_vlm) as server:
        engine = server.service.vlm.engine
        long = {"messages": [user("go on")], "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 2}
        with HTTP.stream("POST", server.url + CHAT, json=long, timeout=60) as stream:
            assert stream.status_code == 200
            refused = HTTP.post(server.url + CHAT, json={"messages": [user("me too")]})
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
        while engine.stats()["running"]:
            pass
        assert (
            HTTP.post(server.url + CHAT, json={"messages": [user("x")], "max_tokens": 1}).status_code == 200
        )


def test_what_takes_too_long_is_given_up(loaded: Loaded, tmp_path: Path) -> None:
    with serve(loaded, tmp_path, request_timeout=0.3) as server:
        long = {"messages": [user("go on")], "max_tokens": 4000, "ignore_eos": True}
        answer = post(server, long)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        events = post(server, {**long, "stream": True}).text.split("\n\n")
        assert "not answered within 0.3 s" in events[-3] and events[-2] == "data: [DONE]"
        assert post(server, good()).status_code == 200
        assert server.service.vlm.engine.check() == []


# Tools

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}, by <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_their_results_read(loaded: Loaded, tmp_path: Path, stream: bool) -> None:
    with_tools = load_model(loaded.path, device="cpu", dtype="float32", chat_template=TOOL_TEMPLATE)
    parameters = {
        "type": "object",
        "properties": {"at": {"enum": ["left", "right"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("look", "go")
    ]
    asked = {
        "messages": [user("where is it?", data_uri(png()))],
        "tools": tools,
        "max_tokens": 80,
        "stream": stream,
    }
    with serve(with_tools, tmp_path) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create
            for choice in ("required", {"type": "function", "function": {"name": "go"}}):
                answer = create(model="tiny", tool_choice=choice, **asked)
                if stream:
                    chunks = [chunk.choices[0] for chunk in answer]
                    (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
                    assert call.index == 0 and chunks[-1].finish_reason == "tool_calls"
                    assert not any(chunk.delta.content for chunk in chunks)
                else:
                    (call,) = answer.choices[0].message.tool_calls
                    assert answer.choices[0].finish_reason == "tool_calls"
                    assert answer.choices[0].message.content is None
                assert json.loads(call.function.arguments)["at"] in ("left", "right")
                assert call.function.name in (("go",) if isinstance(choice, dict) else ("look", "go"))
            result = [
                *asked["messages"],
                {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]},
                {"role": "tool", "tool_call_id": call.id, "content": "it is there"},
            ]
            free = create(model="tiny", **{**asked, "messages": result, "stream": False})
            assert free.choices[0].finish_reason in ("length", "stop")
            assert free.usage.prompt_tokens_details.cached_tokens > 0
        broken = [*asked["messages"], {**result[1], "tool_calls": [{**result[1]["tool_calls"][0]}]}]
        broken[1]["tool_calls"][0]["function"] = {"name": "go", "arguments": "{"}
        refused = post(server, {**asked, "messages": [*broken, result[2]], "stream": False})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


# The schema


CHECKS = [
    conformance.status_code_conformance,
    conformance.content_type_conformance,
    conformance.response_schema_conformance,
    conformance.response_headers_conformance,
    not_a_server_error,
]


def test_the_openapi_document_holds(loaded: Loaded, tmp_path: Path) -> None:
    limits = EngineSettings(max_model_len=96)  # whatever is asked for, an answer is short

    def open_vlm() -> CachedVLM:
        return CachedVLM.from_pretrained(loaded, store=None, settings=limits)

    with ChatServer(open_vlm, admin_key="root", media_timeout=0.2) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) >= 13
        for operation in operations:

            @given(case=operation.as_strategy())
            @hypothesis_settings(
                max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
            )
            def check(case: Any) -> None:
                case.call_and_validate(headers=ADMIN, checks=CHECKS, timeout=60)

            check()
        assert server.service.vlm.engine.check() == []


# The page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_status_page_on_a_phone_and_by_keyboard(tenants: ChatServer, tmp_path: Path) -> None:
    with Browser(390, 844, dark=True) as browser:
        browser.open(f"{tenants.url}/")
        browser.wait_for("!document.getElementById('ask').hidden")
        assert "API key" in browser.run("document.getElementById('message').textContent")
        browser.press("Tab")
        assert browser.run("document.activeElement.id") == "pause"
        browser.press("Tab")
        assert browser.run("document.activeElement.id") == "key"
        browser.problems.clear()  # the browser writes the 401 to its console
        browser.type("sk-alice")
        browser.press("Enter")
        browser.wait_for("!document.getElementById('shown').hidden")
        post(tenants, good(messages=[user("see", data_uri(png((250, 120, 0), (60, 40))))]), headers=ALICE)
        newest = "document.querySelector('#recent li')"
        browser.wait_for(f"{newest}.querySelector('img').alt === 'image of 60 by 40 pixels'")
        assert browser.run(f"{newest}.querySelector('img').naturalWidth") == 60
        assert "encoded now" in browser.run(f"{newest}.textContent")
        assert browser.run("document.querySelectorAll('[role=meter]').length") == 2
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        small = "[...document.querySelectorAll('button')].filter(e => e.offsetParent && e.offsetHeight < 44)"
        assert browser.run(f"{small}.length") == 0
        assert browser.run(
            "performance.getEntriesByType('resource').every(r => r.name.startsWith(location.origin))"
        )
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        browser.run("document.getElementById('pause').focus()")
        browser.press("Enter")
        assert browser.run("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        assert browser.problems == []


# Other clients


NODE = shutil.which("node"), shutil.which("npm")
SCRIPT = """
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: [
  { type: "image_url", image_url: { url: process.argv[3] } }, { type: "text", text: "hello" }] }];
(async () => {
  const whole = await client.chat.completions.create({ model: "tiny", messages, max_tokens: 6 });
  let text = "", usage;
  for await (const chunk of await client.chat.completions.create({
      model: "tiny", messages, max_tokens: 6, stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const tiers = whole.featcache.images;
  console.log(JSON.stringify({ whole: whole.choices[0].message.content, text, usage, tiers }));
})();
"""


@pytest.mark.skipif(None in NODE, reason="no node and npm on this machine")
def test_the_npm_client(server: ChatServer, tmp_path: Path) -> None:
    assert NODE[0] and NODE[1]
    install = [NODE[1], "install", "--silent", "--no-audit", "--no-fund", "openai@6"]
    if subprocess.run(install, cwd=tmp_path, timeout=120, capture_output=True).returncode:
        pytest.skip("npm can't install openai here")
    (tmp_path / "ask.js").write_text(SCRIPT)
    command = [NODE[0], "ask.js", server.url, data_uri(png())]
    done = subprocess.run(command, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    doc = json.loads(done.stdout)
    assert doc["text"] == doc["whole"] and doc["usage"]["completion_tokens"] == 6 and len(doc["tiers"]) == 1
