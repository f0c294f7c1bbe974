"""The server's parts that need no model: settings, keys, errors, tool calls, grammars, requests."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import build
from pydantic import ValidationError
from server_helpers import png
from transformers import AutoTokenizer

from featcache.errors import ConfigError, ImageError, QueueFullError, RequestError, StoreError
from featcache.server.answers.grammar import Grammar, Grammars
from featcache.server.answers.tools import ToolCallReader, understands_tools
from featcache.server.auth import Caller, Keys, read_keys
from featcache.server.errors import ApiError, api_error, clean, invalid_body
from featcache.server.logs import REQUEST_ID, JsonLines, TextLines
from featcache.server.media.fetcher import MediaError
from featcache.server.namespaces import Namespaces
from featcache.server.protocol import ChatRequest, FunctionDefinition, ServedImage, UnsupportedFieldError
from featcache.server.recent import RecentImages, Savings, thumbnail
from featcache.server.settings import ServerSettings, settings

# Settings


def resolve(given: dict[str, Any], config: Path | None = None, **environ: str) -> ServerSettings:
    return ServerSettings.resolve(given, config=config, environ=environ)


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "featcache.toml"
    config.write_text(
        'port = 1\nhost_bytes = "3GiB"\nmedia_ttl = "15m"\napi_key = ["a", "b"]\nlog_json = true\n'
    )
    read = resolve({"port": "3"}, config, FEATCACHE_PORT="2", FEATCACHE_HOST_BYTES="4GiB")
    assert (read.port, read.host_bytes, read.media_ttl, read.api_key, read.log_json) == (
        *(3, 4 << 30, 900.0, ("a", "b"), True),
    )


def test_every_setting_can_be_a_variable() -> None:
    values = {"host": "::", "store": "/s", "check": "0.5", "shared_features": "yes", "api_key": "x, n:y"}
    values |= {"max_model_len": "99", "media_timeout": "2m", "dtype": "bfloat16", "cors_origin": "*"}
    read = resolve({}, **{f"FEATCACHE_{name.upper()}": value for name, value in values.items()})
    assert read.api_key == ("x", "n:y")
    assert (read.store, read.check, read.max_model_len, read.media_timeout) == (Path("/s"), 0.5, 99, 120.0)
    assert read.shared_features is True and read.allow_private_media is False
    names = [setting.name for setting in settings()]
    assert len(names) == len(set(names)) and all(setting.help.endswith(".") for setting in settings())


def test_a_backend_that_is_not_there_or_cannot_share_a_model_is_refused() -> None:
    assert resolve({"backend": "lmdeploy", "tp": "2"}).tp == 2
    with pytest.raises(ConfigError, match="backend: 'vllm'"):
        resolve({"backend": "vllm"})
    with pytest.raises(
        ConfigError, match="tp: 2; the native backend runs on one GPU: use --backend lmdeploy"
    ):
        resolve({}, FEATCACHE_TP="2")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"port": "x"}, "--port: 'x'; it is a whole number"),
        ({"port": "70000"}, "port: 70000"),
        ({"host_bytes": "many"}, "--host-bytes"),
        ({"media_ttl": "soon"}, "--media-ttl"),
        ({"dtype": "int3"}, "dtype: 'int3'; there are auto"),
        ({"check": "2"}, "check: 2"),
        ({"log_level": "loud"}, "log_level"),
        ({"shared_features": "perhaps"}, "--shared-features"),
        ({"request_timeout": "0"}, "request_timeout"),
        ({"max_model_len": "1"}, "max_model_len"),
    ],
)
def test_a_bad_setting_is_named(given: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names.replace("(", "\\(")):
        resolve(given)


def test_a_bad_config_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    with pytest.raises(ConfigError, match="can't be read"):
        resolve({}, config)
    config.write_text("port = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        resolve({}, config)
    config.write_text("prot = 1")
    with pytest.raises(ConfigError, match="unknown setting 'prot'"):
        resolve({}, config)
    config.write_text("api_key = 5")
    with pytest.raises(ConfigError, match=r"c\.toml: api_key: 5; it is a list"):
        resolve({}, config)


# Keys


def test_a_key_leads_to_its_namespace(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\n\nalice:sk-1\nsk-2==\n")
    keys = Keys(read_keys(tmp_path / "keys"), "root")
    assert keys.caller("Bearer sk-1") == Caller("alice", "alice")
    anonymous = keys.caller("bearer sk-2==")
    assert anonymous.namespace.startswith("key-") and anonymous.features == anonymous.namespace
    assert keys.caller("Bearer root").is_admin
    keys.admin("Bearer root")
    assert keys.has_namespace("alice") and not keys.has_namespace("bob")
    for header in (None, "", "Bearer", "Bearer ", "Basic sk-1", "Bearer sk-1x", "Bearer alice:sk-1", "sk-1"):
        with pytest.raises(ApiError) as caught:
            keys.caller(header)
        assert caught.value.status == 401 and caught.value.headers()["WWW-Authenticate"] == "Bearer"
    with pytest.raises(ApiError, match="needs the admin key"):
        keys.admin("Bearer sk-1")


def test_shared_features_leave_uuids_apart() -> None:
    keys = Keys(["alice:1", "bob:2"], None, shared_features=True)
    assert [keys.caller(f"Bearer {k}") for k in "12"] == [Caller("alice", ""), Caller("bob", "")]


def test_an_open_server_has_no_admin_until_it_is_given_a_key() -> None:
    assert Keys([], None).caller(None) == Caller()
    with pytest.raises(ApiError, match="without --admin-key"):
        Keys([], None).admin("Bearer ")
    assert not Keys([], "root").caller(None).is_admin


@pytest.mark.parametrize("text", ["", ":x", "a b", "na me:x", "name:", "a:b:c", "naïve"])
def test_keys_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="an API key is"):
        Keys([text], None)


def test_a_forgotten_namespace_stays_forgotten(tmp_path: Path) -> None:
    alice = Caller("alice", "alice")
    Namespaces(tmp_path).forget("alice")
    Namespaces(tmp_path).forget("alice")
    again = Namespaces(tmp_path)
    assert again.current(alice) == Caller("alice#2", "alice#2")
    assert again.current(Caller("bob", "")) == Caller("bob", "")
    (tmp_path / "namespaces.json").write_text("{")
    with pytest.raises(StoreError, match="forgotten images would return"):
        Namespaces(tmp_path)
    assert Namespaces(None).current(alice) == alice


# Errors


def test_errors_have_the_status_that_fits() -> None:
    cases: list[tuple[Exception, int, str | None, str | None]] = [
        (RequestError("messages[0].role: 'x'"), 400, "messages[0].role", None),
        (ImageError("messages[0].content[1]", "is empty"), 400, "messages[0].content[1]", "invalid_image"),
        (
            MediaError("messages[0].content[1]", "gone", "image_not_fetched"),
            400,
            "messages[0].content[1]",
            "image_not_fetched",
        ),
        (QueueFullError("256 requests are waiting"), 503, None, "queue_full"),
        (StoreError("/srv/x is broken"), 500, None, None),
        (RuntimeError("secret"), 500, None, None),
    ]
    for exc, status, param, code in cases:
        error = api_error(exc, "req-1")
        assert (error.status, error.param, error.code) == (status, param, code), exc
    assert "secret" not in api_error(RuntimeError("secret"), "req-1").message
    assert "req-1" in api_error(StoreError("x"), "req-1").message
    assert api_error(QueueFullError("full"), "").headers() == {"Retry-After": "1"}


@pytest.mark.parametrize(
    ("message", "cleaned"),
    [
        ("can't open /srv/models/secret/config.json: no", "can't open <path>: no"),
        ("<Image at 0x7f0011>", "<Image>"),
        ("http://example.org/a/b.png is fine", "http://example.org/a/b.png is fine"),
        ("image/png and a/b stay", "image/png and a/b stay"),
        ("two\nlines  here", "two lines here"),
    ],
)
def test_messages_hold_no_paths_and_no_addresses(message: str, cleaned: str) -> None:
    assert clean(message) == cleaned


# Requests


def request_error(**doc: Any) -> tuple[str | None, str]:
    whole = {"messages": [{"role": "user", "content": "hi"}], **doc}
    try:
        ChatRequest.model_validate_json(json.dumps(whole))
    except ValidationError as exc:
        error = invalid_body(exc)
        return error.param, error.message
    except UnsupportedFieldError as exc:
        return exc.name, str(exc)
    raise AssertionError("accepted")


@pytest.mark.parametrize(
    ("doc", "param"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"mm_processor_kwargs": {"size": 3}}, "mm_processor_kwargs.size"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_a_field_that_cannot_be_is_named(doc: dict[str, Any], param: str) -> None:
    found, message = request_error(**doc)
    assert found == param and message.startswith(param)


def test_fields_that_change_nothing_are_taken() -> None:
    doc = {
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "audio": None,
    }
    doc |= {"messages": [{"role": "user", "content": "hi"}], "user": "u", "prompt_cache_key": "k"}
    assert ChatRequest.model_validate_json(json.dumps(doc)).messages[0].content == "hi"


# Tool calls

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "<b>"}}\n</tool_call>'


@given(st.lists(st.integers(1, 9), max_size=60))
def test_tool_calls_are_read_however_the_text_is_cut(sizes: list[int]) -> None:
    text, reader, plain, calls = (
        f"I <tool it.{CALL} and{CALL}<tool_call>no</tool_call>!",
        ToolCallReader(),
        "",
        [],
    )
    while text:
        size = sizes.pop() if sizes else 7
        piece, text = text[:size], text[size:]
        new, found = reader.feed(piece)
        plain, calls = plain + new, calls + found
    new, found = reader.finish()
    assert plain + new == "I <tool it. and<tool_call>no</tool_call>!" and not found
    assert [(c.function.name, json.loads(c.function.arguments), c.index) for c in calls] == [
        ("look", {"at": "<b>"}, 0),
        ("look", {"at": "<b>"}, 1),
    ]


def test_an_unclosed_tool_call_counts_if_it_is_whole() -> None:
    reader = ToolCallReader()
    assert reader.feed(CALL.removesuffix("</tool_call>")) == ("", [])
    assert [c.function.name for c in reader.finish()[1]] == ["look"]
    reader = ToolCallReader()
    reader.feed('<tool_call>{"name": "lo')
    assert reader.finish() == ('<tool_call>{"name": "lo', [])


def test_templates_that_understand_tools() -> None:
    assert understands_tools("{% if tools %}<tool_call>{% endif %}")
    assert not understands_tools("{{ messages }}") and not understands_tools(None)


# Grammars


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(build("qwen2_vl", tmp_path_factory.mktemp("model")))


def generate(grammar: Grammar, tokenizer: Any, seed: int) -> str:
    """What comes of random logits."""
    generator, ids = torch.Generator().manual_seed(seed), list[int]()
    while True:
        logits = grammar(ids, torch.randn(512, generator=generator))
        token = int(logits.argmax())
        assert logits[token] > float("-inf")
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(ids)
        ids.append(token)
        assert len(ids) < 2000


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_random_logits_obey_the_grammar(tokenizer: Any, seed: int) -> None:
    grammars = Grammars(tokenizer, 512, [tokenizer.eos_token_id])
    first = grammars.json_schema(SCHEMA, "response_format")
    twin = first.copy()
    doc = json.loads(generate(first, tokenizer, seed))
    assert doc["colour"] in ("red", "blue") and 0 <= doc["count"] <= 9 and len(doc) == 2
    assert json.loads(generate(twin, tokenizer, seed)) == doc  # unmoved by the first one's progress
    assert isinstance(json.loads(generate(grammars.json_object(), tokenizer, seed)), dict)
    reader = ToolCallReader()
    tool = FunctionDefinition(name="look", parameters=SCHEMA)
    reader.feed(generate(grammars.tool_call([tool]), tokenizer, seed))
    assert json.loads(reader.calls[0].function.arguments)["colour"] in ("red", "blue")


@pytest.mark.parametrize(
    "schema", [{"type": "strange"}, {"$ref": "http://example.org/x"}, {"pattern": "(", "type": "string"}]
)
def test_schemas_that_cannot_be_enforced_are_refused(tokenizer: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^response_format: "):
        Grammars(tokenizer, 512, [tokenizer.eos_token_id]).json_schema(schema, "response_format")


# The status page's numbers, and logs


def test_savings_are_measured_not_guessed() -> None:
    savings = Savings()
    hit, miss = ServedImage(tier="disk", tokens=100, key=""), ServedImage(tier="encoded", tokens=50, key="")
    assert savings.account([hit], prompt_tokens=200, cached_tokens=200, encode_s=0.0, prefill_s=0.0) == 0
    assert savings.account([miss], prompt_tokens=100, cached_tokens=0, encode_s=0.5, prefill_s=0.2) == 0
    saved = savings.account([hit], prompt_tokens=150, cached_tokens=50, encode_s=0.0, prefill_s=0.2)
    assert saved == pytest.approx(100 * 0.5 / 50 + 50 * 0.4 / 200)
    assert savings.total_s == saved and savings.images == {"disk": 2, "encoded": 1}


def test_recent_images_belong_to_their_namespace_and_hold_no_picture_unwatched() -> None:
    from featcache.features import Layout

    recent, layout = RecentImages(), Layout(num_tokens=4, width=56, height=28)
    image = ServedImage(tier="host", tokens=4, key="ab" * 32)
    recent.add("alice", image, layout, png())
    assert recent.show("bob") == []
    (shown,) = recent.show("alice")
    assert (shown["tier"], shown["width"], shown["thumbnail"]) == ("host", 56, None)
    recent.add("alice", image, layout, png())  # now somebody watches
    assert recent.show(None)[0]["thumbnail"].startswith("data:image/jpeg;base64,")
    assert recent.knows("alice", image.key) and not recent.knows("bob", image.key)
    assert thumbnail(b"no image") == ""


def test_log_lines_carry_the_request_id() -> None:
    record = logging.LogRecord("featcache.server", logging.INFO, "", 0, "request", None, None)
    record.status = 200
    token = REQUEST_ID.set("r-1")
    try:
        doc = json.loads(JsonLines().format(record))
        assert (doc["message"], doc["request_id"], doc["status"], doc["level"]) == (
            "request",
            "r-1",
            200,
            "info",
        )
        assert TextLines().format(record).endswith("request request_id=r-1 status=200")
    finally:
        REQUEST_ID.reset(token)
