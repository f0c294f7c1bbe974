"""Requests side by side: chunks, preemption, cancellation, limits, and errors that end only themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build
from pictures import noise

from featcache.engine import CachedVLM
from featcache.engine.engine import EngineSettings
from featcache.engine.kv import block_bytes
from featcache.errors import CancelledError, ContextLengthError, FeatcacheError, QueueFullError, RequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_vl", tmp_path_factory.mktemp("scheduler"))


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., CachedVLM]]:
    made: list[CachedVLM] = []

    def open_vlm(**settings: Any) -> CachedVLM:
        made.append(
            CachedVLM.from_pretrained(folder, store=None, device="cpu", settings=EngineSettings(**settings))
        )
        return made[-1]

    yield open_vlm
    for vlm in made:
        vlm.close()
        assert vlm.engine._scheduler.check() == []


def messages(seed: int, words: int = 5) -> list[dict[str, Any]]:
    parts = [
        {"type": "image", "image": noise(80, 60, seed)},
        {"type": "text", "text": f"what {'is ' * words}{seed}"},
    ]
    return [{"role": "user", "content": parts}]


def tokens(vlm: CachedVLM, conversations: list[Any], **sampling: Any) -> list[tuple[int, ...]]:
    return [r.token_ids for r in vlm.chat_batch(conversations, **sampling)]  # type: ignore[union-attr]


def blocks_of(vlm: CachedVLM, number: int) -> int:
    return number * block_bytes(vlm.loaded.family.text_config, vlm.loaded.dtype)


def test_together_in_chunks_and_alone_give_the_same(opened: Callable[..., CachedVLM]) -> None:
    conversations = [messages(n, words=3 + 17 * n) for n in range(6)]
    alone = opened()
    expected = [alone.chat(c, max_tokens=12).token_ids for c in conversations]
    for settings in ({}, {"max_batch_tokens": 16}, {"max_running": 2}, {"prefix_cache": False}):
        vlm = opened(**settings)
        assert tokens(vlm, conversations, max_tokens=12) == expected, settings
        assert tokens(vlm, conversations, max_tokens=12) == expected, settings


def test_preempted_sequences_end_as_if_nothing_had_been(opened: Callable[..., CachedVLM]) -> None:
    conversations = [messages(n, words=10) for n in range(5)]
    roomy = opened()
    expected = tokens(roomy, conversations, max_tokens=60, ignore_eos=True)
    tight = opened(kv_bytes=blocks_of(roomy, 14))
    assert tokens(tight, conversations, max_tokens=60, ignore_eos=True) == expected
    assert tight.engine.stats()["preemptions"] > 0
    assert tight.engine.check() == []


def test_evicted_blocks_are_computed_again(opened: Callable[..., CachedVLM]) -> None:
    roomy = opened()
    tight = opened(kv_bytes=blocks_of(roomy, 8))
    conversations = [messages(n, words=20) for n in range(6)]
    for _ in range(2):
        for conversation in conversations:
            assert (
                tight.chat(conversation, max_tokens=6).token_ids
                == roomy.chat(conversation, max_tokens=6).token_ids
            )
    assert tight.engine.stats()["blocks_evicted"] > 0 and tight.engine.check() == []


def test_cancelled_it_stops_within_a_step_and_frees_everything(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()
    generation = vlm.submit(messages(1), max_tokens=3000, ignore_eos=True)
    first = [next(iter(generation)) for _ in range(3)]
    generation.cancel()
    reply = generation.result(timeout_s=30)
    assert reply.finish_reason == "cancelled" and len(first) <= len(reply.token_ids) < 3000
    assert vlm.engine.stats()["running"] == 0 and vlm.engine.stats()["blocks_used"] == 0
    assert vlm.engine.check() == [] and vlm.store.check() == []
    assert list(generation)[-1].finish_reason == "cancelled"
    generation.cancel()


def test_cancelled_before_it_began_it_ends_too(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened(max_running=1)
    running = vlm.submit(messages(1), max_tokens=3000, ignore_eos=True)
    next(iter(running))
    waiting = [vlm.submit(messages(n), max_tokens=5) for n in range(2, 6)]
    for generation in waiting[1:]:
        generation.cancel()
    running.cancel()
    assert [g.result(30).finish_reason for g in waiting[1:]] == ["cancelled"] * 3
    assert waiting[0].result(30).finish_reason in ("length", "stop")
    assert vlm.engine.stats()["waiting"] == 0 and vlm.engine.check() == []


def test_limits_are_told_by_name_and_harm_nobody(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened(max_model_len=64, max_waiting=2, max_running=1)
    with pytest.raises(ContextLengthError, match="64"):
        vlm.chat(messages(1, words=200))
    assert len(vlm.chat(messages(1), max_tokens=500, ignore_eos=True).token_ids) < 64
    assert vlm.chat(messages(1), max_tokens=500, ignore_eos=True).finish_reason == "length"
    held = [vlm.submit(messages(n), max_tokens=30, ignore_eos=True) for n in range(2)]
    with pytest.raises(QueueFullError):
        held.extend(vlm.submit(messages(n), max_tokens=30, ignore_eos=True) for n in range(10))
    for generation in held:
        assert generation.result(60).finish_reason == "length"
    with pytest.raises(RequestError, match="max_tokens"):
        vlm.chat(messages(1), max_tokens=0)
    assert vlm.chat(messages(3), max_tokens=2).token_ids


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()
    expected = vlm.chat(messages(1), max_tokens=4).token_ids
    run = vlm.engine._runner.run

    def fail(parts: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("made to fail")

    vlm.engine._runner.run = fail  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="not enough memory"):
        vlm.chat(messages(2), max_tokens=4)
    vlm.engine._runner.run = run  # type: ignore[method-assign]
    assert vlm.chat(messages(1), max_tokens=4).token_ids == expected
    assert vlm.engine.check() == [] and vlm.engine.stats()["blocks_used"] == 0


def test_an_error_of_a_hook_ends_its_own_request(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()

    def hook(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise RequestError("made to fail")

    good = vlm.submit(messages(1), max_tokens=20, ignore_eos=True)
    bad = vlm.submit(messages(2), max_tokens=20, logits_hook=hook)
    with pytest.raises(RequestError, match="made to fail"):
        bad.result(60)
    assert len(good.result(60).token_ids) == 20


def test_sixteen_threads_with_one_new_image_encode_it_once(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()
    answers: list[Any] = []
    barrier = threading.Barrier(16)

    def ask() -> None:
        barrier.wait()
        answers.append(vlm.chat(messages(7), max_tokens=4).token_ids)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1 and len(answers) == 16
    stats = vlm.encoder.stats()
    assert (stats["tower_images"], stats["preprocessed"]) == (1, 1)


def test_a_seeded_draw_is_the_same_alone_and_in_a_batch(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()
    sampling = {"max_tokens": 10, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    alone = vlm.chat(messages(1), **sampling).token_ids
    together = tokens(vlm, [messages(n) for n in range(1, 5)], **sampling)
    assert together[0] == alone


def test_streamed_pieces_are_the_text(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()
    whole = vlm.chat(messages(4), max_tokens=25, ignore_eos=True)
    deltas = list(vlm.chat(messages(4), stream=True, max_tokens=25, ignore_eos=True))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(t for delta in deltas for t in delta.token_ids) == whole.token_ids
    assert [d.finish_reason for d in deltas] == [None] * 24 + ["length"]
    assert whole.usage.completion_tokens == 25 and whole.usage.prompt_tokens > 0


def test_stop_texts_and_tokens_end_the_answer(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()
    whole = vlm.chat(messages(4), max_tokens=25, ignore_eos=True)
    stop = whole.text[3:6]
    cut = vlm.chat(messages(4), max_tokens=25, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
    token = whole.token_ids[5]
    at = whole.token_ids.index(token)
    cut = vlm.chat(messages(4), max_tokens=25, ignore_eos=True, stop_token_ids=[token])
    assert cut.token_ids == whole.token_ids[: at + 1] and cut.finish_reason == "stop"


def test_closed_it_refuses_and_ends_what_runs(folder: Path) -> None:
    vlm = CachedVLM.from_pretrained(folder, store=None, device="cpu")
    generation = vlm.submit(messages(1), max_tokens=3000, ignore_eos=True)
    next(iter(generation))
    vlm.close()
    with pytest.raises(CancelledError):
        generation.result(30)
    with pytest.raises(FeatcacheError):
        vlm.chat(messages(1))
    vlm.close()


def test_random_comings_and_goings_leak_nothing(opened: Callable[..., CachedVLM]) -> None:
    import random

    rng = random.Random(4)
    reference = opened()
    vlm = opened(kv_bytes=blocks_of(reference, 40), max_batch_tokens=64, max_running=8)
    running = []
    for _ in range(60):
        seed = rng.randrange(8)
        running.append((seed, vlm.submit(messages(seed, 12), max_tokens=rng.randint(1, 20))))
        if rng.random() < 0.3:
            rng.choice(running)[1].cancel()
    expected = {seed: reference.chat(messages(seed, 12), max_tokens=20).token_ids for seed in range(8)}
    for seed, generation in running:
        reply = generation.result(120)
        assert reply.token_ids == expected[seed][: len(reply.token_ids)]
    assert vlm.engine.stats()["blocks_used"] == 0 and vlm.engine.check() == [] and vlm.store.check() == []


def test_one_image_without_a_list_is_told_apart_from_a_list(opened: Callable[..., CachedVLM]) -> None:
    vlm = opened()
    for single in ("page.png", b"\x89PNG", Path("page.png"), noise(80, 60, 1)):
        with pytest.raises(RequestError, match="it is a list of images"):
            vlm.encode(single)  # type: ignore[arg-type]
    assert len(vlm.encode(iter([noise(80, 60, 1), noise(80, 60, 2)]))) == 2  # type: ignore[arg-type]
