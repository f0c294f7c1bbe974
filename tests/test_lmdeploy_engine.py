"""The LMDeploy backend gives transformers' answers, whatever its prefix cache and our tiers hold.

LMDeploy's scheduler and prefix cache are the real ones; its kernels need a GPU, and a stand-in computes in their
place (`lmdeploy_standin.py`). `bench/h200_lmdeploy.py` is the same check with the kernels.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed: see tests/lmdeploy.txt")

import torch
from lmdeploy_standin import PROCESSORS, StandInEngine, open_stand_in
from pictures import patches
from test_engine import NEW_TOKENS, ask, by_transformers, turns

from featcache import FeatureStore
from featcache.engine import CachedVLM
from featcache.engine.families.base import ImageOptions
from featcache.engine.lmdeploy.engine import LMDeploySettings
from featcache.engine.loading import load_model
from featcache.engine.prompt import build_prompt
from featcache.engine.sampling import SamplingParams
from featcache.errors import (
    CancelledError,
    ConfigError,
    ContextLengthError,
    FeatcacheError,
    ImageError,
    QueueFullError,
    RequestError,
)
from featcache.features import Features

FAMILIES = sorted(PROCESSORS)
BLOCK = 16


def opened(folder: Path, store: FeatureStore, **settings: Any) -> CachedVLM:
    loaded = load_model(folder, dtype="float32", device="cpu")
    return open_stand_in(loaded, store, block=BLOCK, **settings)


def stand_in_of(vlm: CachedVLM) -> StandInEngine:
    pipeline: StandInEngine = vlm.engine._pipeline  # type: ignore[union-attr]
    return pipeline


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Path:
    return model_folder(request.param)


@pytest.fixture
def vlm(model_folder: Callable[[str], Path]) -> Iterator[CachedVLM]:
    with opened(model_folder("qwen2_vl"), FeatureStore.open(None)) as vlm:
        yield vlm


# Right answers


def test_greedy_tokens_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """New, behind reused blocks, from the store alone, from disk after a restart, and side by side."""
    conversations = turns(1)
    expected = by_transformers(folder, conversations, "float32")
    with opened(folder, FeatureStore.open(tmp_path / "store")) as vlm:
        first = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in first] == expected
        assert [image.tier for image in first[1].images] == ["prefix", "encoded"]
        assert {image.tier for image in first[2].images} <= {"prefix", "host"}
        again = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in again] == expected
        assert all(r.usage.prompt_tokens - r.usage.cached_tokens <= BLOCK for r in again)
        vlm.engine.clear_prefix_cache()
        hits = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in hits] == expected
        assert hits[0].usage.cached_tokens == 0 and hits[0].images[0].tier == "host"
        assert vlm.encoder.stats()["tower_images"] == 2
    with opened(folder, FeatureStore.open(tmp_path / "store")) as vlm:
        restarted = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in restarted] == expected
        assert restarted[0].images[0].tier == "disk"
        assert vlm.encoder.stats()["tower_images"] == vlm.encoder.stats()["preprocessed"] == 0
        together = vlm.chat_batch([*conversations, *turns(50)[1:], *turns(60)], max_tokens=NEW_TOKENS)
        assert [list(r.token_ids) for r in together[:3]] == expected  # type: ignore[union-attr]
        assert vlm.store.check() == []


def test_wrong_features_are_seen(folder: Path) -> None:
    """The control: with another image's features under the same key the tokens must change."""
    with opened(folder, FeatureStore.open(None)) as vlm:
        changed = 0
        for seed in range(6):
            messages, other = turns(seed)[0], turns(seed + 20)[0]
            right = ask(vlm, messages).token_ids
            options = vlm.loaded.family.options_for(ImageOptions(), 1)
            ref = vlm.encoder.identify(messages[0]["content"][0]["image"], options)
            wrong = vlm.encode([other[0]["content"][0]["image"]])[0]
            vlm.store.delete(ref.key)
            vlm.store.put(ref.key, Features(wrong.tensors, wrong.layout, ref.fingerprint))
            vlm.engine.clear_prefix_cache()
            changed += ask(vlm, messages).token_ids != right
        assert changed >= 3


def test_wrong_blocks_are_seen(folder: Path) -> None:
    """The other control: were two images' spans alike to LMDeploy, the second would get the first's answer."""
    with opened(folder, FeatureStore.open(None)) as vlm:
        messages, other = turns(3)[0], turns(23)[0]
        ask(vlm, messages)
        right = ask(vlm, other).token_ids
    with opened(folder, FeatureStore.open(None)) as vlm:
        ask(vlm, messages)
        stand_in = stand_in_of(vlm)
        genuine = stand_in.input_processor.preprocess_input
        [seen] = stand_in.given

        def all_alike(ids: Any, multimodals: Any) -> Any:
            result = genuine(ids, multimodals)
            for span, first in zip(result.input_multimodals["image"], seen, strict=False):
                span.content_hash = first.content_hash
            return result

        stand_in.input_processor.preprocess_input = all_alike
        assert ask(vlm, other).token_ids != right


# The prefix cache


def test_a_new_question_about_a_known_image_reuses_all_of_it_but_part_of_a_block(folder: Path) -> None:
    image = patches(150, 151, 7)

    def asked(text: str) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}
        ]

    with opened(folder, FeatureStore.open(None)) as vlm:
        ask(vlm, asked("what is it"))
        prompt = build_prompt(vlm.loaded, vlm.encoder, asked("how many red circles are there"))
        reply = vlm.engine.submit(prompt, SamplingParams(max_tokens=2)).result()
        assert reply.usage.cached_tokens >= prompt.runs[-1].stop // BLOCK * BLOCK > 0
        last = [image.tier for image in reply.images]
        assert last == (["prefix"] if reply.usage.cached_tokens >= prompt.runs[-1].stop else ["host"])


def test_swapped_images_share_no_block_behind_the_first(vlm: CachedVLM) -> None:
    a, b = patches(90, 60, 72), patches(90, 60, 73)

    def asked(first: Any, second: Any) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": first}, {"type": "image", "image": second}]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "which is red"}]}]

    ask(vlm, asked(a, b))
    prompt = build_prompt(vlm.loaded, vlm.encoder, asked(b, a))
    reply = ask(vlm, asked(b, a))
    assert reply.usage.cached_tokens == prompt.runs[0].start // BLOCK * BLOCK


def test_when_few_blocks_are_there_the_old_ones_go_and_answers_stay_right(folder: Path) -> None:
    conversations = [turns(seed)[1] for seed in range(5)]
    expected = by_transformers(folder, conversations, "float32")
    with opened(folder, FeatureStore.open(None)) as vlm:
        longest = max(len(build_prompt(vlm.loaded, vlm.encoder, messages).ids) for messages in conversations)
    with opened(folder, FeatureStore.open(None), blocks=(longest + NEW_TOKENS) // BLOCK + 2) as vlm:
        for _ in range(2):
            replies = [ask(vlm, messages) for messages in conversations]
            assert [list(reply.token_ids) for reply in replies] == expected
        assert any(r.usage.prompt_tokens - r.usage.cached_tokens > BLOCK for r in replies)


def test_prompts_of_different_salts_share_no_block(vlm: CachedVLM) -> None:
    for messages in (
        turns(4)[0],
        [{"role": "user", "content": "how many red circles are in the picture on the mat"}],
    ):
        prompts = [build_prompt(vlm.loaded, vlm.encoder, messages, salt=salt) for salt in ("", "a", "b", "a")]
        assert len({tuple(prompt.ids) for prompt in prompts}) == 1
        params = SamplingParams(max_tokens=3)
        replies = [vlm.engine.submit(prompt, params).result() for prompt in prompts]
        assert [reply.usage.cached_tokens > 0 for reply in replies] == [False, False, False, True]
        assert len({reply.token_ids for reply in replies}) == 1


def test_one_image_three_times_in_a_prompt_is_encoded_once(vlm: CachedVLM) -> None:
    image = patches(90, 90, 71)
    reply = vlm.chat([{"role": "user", "content": [{"type": "image", "image": image}] * 3}], max_tokens=2)
    assert vlm.encoder.stats()["tower_images"] == 1
    assert len(reply.images) == 3 and len({image.key for image in reply.images}) == 1


# One request among others


def test_a_broken_image_fails_its_own_conversation(vlm: CachedVLM) -> None:
    good = [turns(80 + n)[0] for n in range(7)]
    bad = [{"role": "user", "content": [{"type": "image", "image": b"not an image"}]}]
    replies = vlm.chat_batch([*good[:3], bad, *good[3:]], max_tokens=3)
    assert isinstance(replies[3], ImageError)
    assert [type(r).__name__ for i, r in enumerate(replies) if i != 3] == ["Reply"] * 7


def test_a_tower_that_fails_on_one_image_fails_one_request(
    vlm: CachedVLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, encode = vlm.encoder.family, vlm.encoder.family.encode
    bad = vlm.encoder.identify(patches(70, 70, 666), family.options_for(ImageOptions(), 1))
    bad_cost = family.preprocess(patches(70, 70, 666), ImageOptions()).tensors

    def fails_on_it(batch: Any) -> Any:
        for pixels in batch:
            if all(torch.equal(pixels.tensors[name], tensor) for name, tensor in bad_cost.items()):
                raise RuntimeError("the tower failed")
        return encode(batch)

    monkeypatch.setattr(family, "encode", fails_on_it)
    conversations = [turns(80 + n)[0] for n in range(3)]
    conversations.insert(1, [{"role": "user", "content": [{"type": "image", "image": patches(70, 70, 666)}]}])
    replies = vlm.chat_batch(conversations, max_tokens=3)
    assert isinstance(replies[1], FeatcacheError) and "the tower failed" in str(replies[1])
    assert [type(r).__name__ for i, r in enumerate(replies) if i != 1] == ["Reply"] * 3
    assert vlm.store.tier_of(bad.key) is None and vlm.store.check() == []


def test_cancelling_ends_one_request_and_frees_its_place(vlm: CachedVLM) -> None:
    prompt = build_prompt(vlm.loaded, vlm.encoder, turns(5)[0])
    expected = ask(vlm, turns(6)[0]).token_ids
    running = vlm.engine.submit(prompt, SamplingParams(max_tokens=1500, ignore_eos=True))
    begun = threading.Event()
    running.listen(lambda delta: begun.set() if delta.token_ids else None)
    assert begun.wait(60)
    waiting = vlm.engine.submit(prompt, SamplingParams(max_tokens=1500, ignore_eos=True))
    running.cancel()
    waiting.cancel()
    assert running.result().finish_reason == waiting.result().finish_reason == "cancelled"
    assert 0 < len(running.result().token_ids) < 1500
    assert ask(vlm, turns(6)[0]).token_ids == expected
    stats = vlm.engine.stats()
    assert (stats["running"], stats["waiting"], stats["cancelled"]) == (0, 0, 2)


def test_cancelled_in_the_turn_that_its_features_come_it_holds_none(
    vlm: CachedVLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = vlm.engine
    take, features = engine._take_encoded, vlm.encoder.features
    leases: list[Any] = []

    def take_and_cancel() -> None:
        answers = list(engine._featured)
        take()
        for answer in answers:
            engine._stop(answer)

    def seen(refs: Any) -> Any:
        outcomes = features(refs)
        leases.extend(outcomes)
        return outcomes

    monkeypatch.setattr(engine, "_take_encoded", take_and_cancel)
    monkeypatch.setattr(vlm.encoder, "features", seen)
    prompt = build_prompt(vlm.loaded, vlm.encoder, turns(5)[0])
    assert engine.submit(prompt).result(timeout_s=60).finish_reason == "cancelled"
    assert len(leases) == 1 and leases[0].is_released


def test_more_than_may_wait_are_refused(model_folder: Callable[[str], Path]) -> None:
    with opened(model_folder("qwen2_vl"), FeatureStore.open(None), max_running=1, max_waiting=1) as vlm:
        prompt = build_prompt(vlm.loaded, vlm.encoder, turns(5)[0])
        long = SamplingParams(max_tokens=1000, ignore_eos=True)
        two = [vlm.engine.submit(prompt, long) for _ in range(2)]
        with pytest.raises(QueueFullError):
            vlm.engine.submit(prompt, long)
        for generation in two:
            generation.cancel()
            generation.result()
        assert ask(vlm, turns(5)[0]).token_ids


def test_closing_ends_what_runs_and_refuses_more(model_folder: Callable[[str], Path]) -> None:
    vlm = opened(model_folder("qwen2_vl"), FeatureStore.open(None))
    prompt = build_prompt(vlm.loaded, vlm.encoder, turns(5)[0])
    running = [vlm.engine.submit(prompt, SamplingParams(max_tokens=1900, ignore_eos=True)) for _ in range(3)]
    stand_in = stand_in_of(vlm)
    vlm.close()
    vlm.close()
    for generation in running:
        with pytest.raises(CancelledError):
            generation.result(timeout_s=30)
    with pytest.raises(CancelledError, match="closed"):
        vlm.engine.submit(prompt)
    assert stand_in.is_closed


# What is asked for


def test_a_prompt_that_is_too_long_is_refused(model_folder: Callable[[str], Path]) -> None:
    with opened(model_folder("qwen2_vl"), FeatureStore.open(None), max_model_len=64) as vlm:
        with pytest.raises(ContextLengthError, match="at most 64 are possible"):
            ask(vlm, turns(5)[2])
        short = [{"role": "user", "content": "how many"}]
        reply = vlm.chat(short, max_tokens=500, ignore_eos=True)
        assert reply.finish_reason == "length"
        assert reply.usage.prompt_tokens + reply.usage.completion_tokens == 64


def test_log_probabilities_are_the_native_engines(folder: Path) -> None:
    with CachedVLM.from_pretrained(folder, store=None, dtype="float32", device="cpu") as native:
        right = native.chat(turns(2)[0], max_tokens=4, logprobs=3)
    with opened(folder, FeatureStore.open(None)) as vlm:
        reply = vlm.chat(turns(2)[0], max_tokens=4, logprobs=3)
    for ours, theirs in zip(reply.logprobs, right.logprobs, strict=True):
        assert ours.token_id == theirs.token_id and len(ours.top) == 3
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]


def test_a_stop_text_ends_the_answer_as_in_the_native_engine(folder: Path) -> None:
    messages = turns(2)[0]
    with CachedVLM.from_pretrained(folder, store=None, dtype="float32", device="cpu") as native:
        text = native.chat(messages, max_tokens=12, ignore_eos=True).text
        stop = text[len(text) // 2 :][:2]
        right = native.chat(messages, max_tokens=12, ignore_eos=True, stop=[stop])
    with opened(folder, FeatureStore.open(None)) as vlm:
        reply = vlm.chat(messages, max_tokens=12, ignore_eos=True, stop=[stop])
        assert (reply.text, reply.finish_reason) == (right.text, right.finish_reason)
        assert reply.token_ids == right.token_ids and stop not in reply.text
        assert vlm.engine.stats()["running"] == 0


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": {40: 30.0, 41: -30.0}},
    ],
)
def test_penalties_and_biases_are_the_native_engines(
    params: dict[str, Any], model_folder: Callable[[str], Path]
) -> None:
    folder, messages = model_folder("qwen2_vl"), turns(2)[0]
    with CachedVLM.from_pretrained(folder, store=None, dtype="float32", device="cpu") as native:
        right = native.chat(messages, max_tokens=8, ignore_eos=True, **params)
        plain = native.chat(messages, max_tokens=8, ignore_eos=True)
    with opened(folder, FeatureStore.open(None)) as vlm:
        reply = vlm.chat(messages, max_tokens=8, ignore_eos=True, **params)
    assert reply.token_ids == right.token_ids != plain.token_ids


def test_a_hook_that_fails_ends_its_own_request(vlm: CachedVLM) -> None:
    def fails(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(answer) == 2:
            raise ValueError("the grammar is broken")
        return logits

    prompt = build_prompt(vlm.loaded, vlm.encoder, turns(5)[0])
    params = SamplingParams(max_tokens=50, ignore_eos=True, logits_hook=fails)
    broken = vlm.engine.submit(prompt, params)
    fine = vlm.engine.submit(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    with pytest.raises(FeatcacheError, match="failed on this request: ValueError"):
        broken.result()
    assert len(fine.result().token_ids) == 4
    assert vlm.engine.stats()["failed"] == 1


def test_what_lmdeploy_cannot_sample_is_refused(vlm: CachedVLM) -> None:
    prompt = build_prompt(vlm.loaded, vlm.encoder, turns(5)[0])
    with pytest.raises(RequestError, match="temperature: 3"):
        vlm.engine.submit(prompt, SamplingParams(temperature=3.0))
    with pytest.raises(RequestError, match="logit_bias: token 900000"):
        vlm.engine.submit(prompt, SamplingParams(max_tokens=2, logit_bias={900000: 1.0})).result()
    with pytest.raises(RequestError, match="no tokens"):
        vlm.engine.submit(dataclasses.replace(prompt, ids=[]))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"tp": 0}, "tp"), ({"kv_share": 1.0}, "kv_share"), ({"max_running": 0}, "max_running")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        LMDeploySettings(**settings)
