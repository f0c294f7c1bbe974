"""`featcache serve` as a process: its start, its end, and being killed."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from click.testing import CliRunner
from models import build
from server_helpers import ServeCommand, data_uri, png, user

from featcache.cli import app
from featcache.tiers.disk import DiskTier

CHAT = "/v1/chat/completions"
HTTP = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("qwen2_vl", tmp_path_factory.mktemp("model")))


def body(number: int, **more: Any) -> dict[str, Any]:
    picture = data_uri(png((number * 37 % 256, number * 91 % 256, 80)))
    return {"messages": [user(f"number {number}: describe this image", picture)], "max_tokens": 8, **more}


def ask(url: str, doc: dict[str, Any]) -> Any:
    answer = HTTP.post(url + CHAT, json=doc)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sigterm_lets_answers_finish_writes_what_is_queued_and_ends_well(tmp_path: Path) -> None:
    with ServeCommand("tiny", tmp_path, "--drain-timeout", "20") as command:
        command.wait_ready()
        assert HTTP.get(f"{command.url}/v1/models").json()["data"][0]["id"] == "tiny"
        long = body(1, max_tokens=400, ignore_eos=True, stream=True)
        with httpx.stream("POST", command.url + CHAT, json=long, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert command.process.wait(30) == 0, "".join(command.lines)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{command.url}/health")
    tier = DiskTier.open(tmp_path, max_bytes=64 << 20, readonly=True)
    assert tier.stats().entries == 1
    assert not any("Traceback" in line for line in command.lines)


def test_what_hangs_beyond_the_drain_timeout_is_cut(model: str, tmp_path: Path) -> None:
    with ServeCommand(model, tmp_path, "--drain-timeout", "1") as command:
        command.wait_ready()
        endless = body(1, max_tokens=4000, ignore_eos=True, stream=True, n=8)
        with httpx.stream("POST", command.url + CHAT, json=endless, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            began = time.monotonic()
            assert command.end() == 0, "".join(command.lines)
            assert time.monotonic() - began < 30


def test_killed_under_load_it_comes_back_clean_with_right_answers(model: str, tmp_path: Path) -> None:
    _kill_and_come_back(model, tmp_path, kills=1)


@pytest.mark.soak
def test_killed_many_times_under_load(model: str, tmp_path: Path) -> None:
    _kill_and_come_back(model, tmp_path, kills=12)


def _kill_and_come_back(model: str, store: Path, kills: int) -> None:
    generator = random.Random(7)
    expected: dict[int, str] = {}
    with ServeCommand(model, store) as command:  # six images that were surely written
        command.wait_ready()
        for number in range(6):
            expected[number] = ask(command.url, body(number))["choices"][0]["message"]["content"]
        assert command.end() == 0
    for _ in range(kills):
        with ServeCommand(model, store) as command:
            command.wait_ready()
            answers = _killed_under_load(command, generator.randint(5, 25))
        for number, text in answers.items():
            assert expected.setdefault(number, text) == text
    tier = DiskTier.open(store, max_bytes=1 << 30)
    assert tier.check() == []
    assert not tier.verify().damaged
    tier.close()
    with ServeCommand(model, store) as command:
        command.wait_ready()
        for number, text in expected.items():
            answer = ask(command.url, body(number))
            assert answer["choices"][0]["message"]["content"] == text
            assert answer["featcache"]["images"][0]["tier"] in (
                ("disk",) if number < 6 else ("disk", "encoded")
            )
        assert command.end() == 0


def _killed_under_load(command: ServeCommand, enough: int) -> dict[int, str]:
    """The answers that four clients got until the server was killed, which is when there were `enough`."""
    answers: dict[int, str] = {}

    def load(worker: int) -> None:
        try:
            for number in range(worker, 4000, 4):
                answers[number] = ask(command.url, body(number % 400))["choices"][0]["message"]["content"]
        except httpx.TransportError:
            pass  # killed

    threads = [threading.Thread(target=load, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while len(answers) < enough:
        assert any(thread.is_alive() for thread in threads)
        time.sleep(0.002)
    command.process.kill()
    for thread in threads:
        thread.join()
    return {number % 400: text for number, text in answers.items()}


def test_a_model_that_cannot_be_loaded_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with ServeCommand(str(tmp_path), tmp_path / "store") as command:
        assert command.process.wait(60) == 1
        command._reader.join()
        assert "can't be served" in "".join(command.lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "x"], "--port: 'x'"),
        (["--host-bytes", "lots"], "--host-bytes"),
        (["--config", "/none.toml"], "--config: /none.toml can't be read"),
        (["--api-key", "a b"], "an API key is"),
        (["--api-key-file", "/none.keys"], "api_key_file: /none.keys"),
        (["--ssl-keyfile", "k.pem"], "--ssl-certfile and --ssl-keyfile go together"),
    ],
)
def test_bad_settings_are_told_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "tiny", *arguments])
    assert result.exit_code == 1 and message in result.output and result.output.count("\n") == 1


def test_help_names_every_setting() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    for flag in ("--max-images", "--allowed-media-domain", "--media-ttl", "--drain-timeout", "--no-log-json"):
        assert flag in text
