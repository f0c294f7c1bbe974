"""Answers with the cache are answers without it, for every family; and each check has its control."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BUILDERS, build
from pictures import patches

from featcache import FeatureStore
from featcache.engine import CachedVLM
from featcache.engine.encoder import VisionEncoder
from featcache.engine.engine import Engine, EngineSettings
from featcache.engine.loading import load_model
from featcache.engine.prompt import build_prompt
from featcache.features import Features

FAMILIES = sorted(BUILDERS)
NEW_TOKENS = 10
Message = dict[str, Any]


def turns(seed: int) -> list[list[Message]]:
    """Three turns of one conversation with two images; what the assistant said is given."""
    first, second = patches(100, 60, seed), patches(70, 90, seed + 1000)
    one = [
        {
            "role": "user",
            "content": [{"type": "image", "image": first}, {"type": "text", "text": "what is it"}],
        }
    ]
    two = [
        *one,
        {"role": "assistant", "content": [{"type": "text", "text": "a cat sitting on the mat"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "compare"}, {"type": "image", "image": second}],
        },
    ]
    three = [
        *two,
        {"role": "assistant", "content": [{"type": "text", "text": "the left one is larger"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "which of both is red and how many are there"}],
        },
    ]
    return [one, two, three]


def by_transformers(folder: Path, conversations: Sequence[list[Message]], dtype: str) -> list[list[int]]:
    """Greedy tokens of plain transformers, with the processor's own preparation."""
    loaded = load_model(folder, dtype=dtype, device="cpu")
    answers = []
    for messages in conversations:
        inputs = loaded.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(loaded.dtype)
        output = loaded.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def ask(vlm: CachedVLM, messages: list[Message]) -> Any:
    return vlm.chat(messages, max_tokens=NEW_TOKENS)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Path:
    return model_folder(request.param)


def plain(folder: Path, dtype: str = "float32") -> CachedVLM:
    """The engine with everything off: no tier keeps anything, and no block is reused.

    Images go through the tower one by one, as they do when each is new in its turn: in bf16, another batch
    has other last bits.
    """
    loaded, store = load_model(folder, dtype=dtype, device="cpu"), FeatureStore.open(None, host_bytes=0)
    encoder = VisionEncoder(loaded, store, max_batch_cost=1)
    engine = Engine(loaded, encoder, EngineSettings(prefix_cache=False))
    return CachedVLM(loaded, store, encoder, engine, owns_store=True)


def check_equal(folder: Path, tmp_path: Path, expected: list[list[int]], dtype: str) -> None:
    """(c) features, (d) features and blocks, (e) after a restart, and in fp32 (f) in a batch: as expected."""
    conversations = turns(1)
    options: dict[str, Any] = {"store": tmp_path / "store", "dtype": dtype, "device": "cpu"}
    off = EngineSettings(prefix_cache=False)
    with CachedVLM.from_pretrained(folder, settings=off, **options) as vlm:
        first = [ask(vlm, messages) for messages in conversations]
        again = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in first] == expected
        assert [list(r.token_ids) for r in again] == expected
        assert {image.tier for r in again for image in r.images} == {"host"}
        assert all(r.usage.cached_tokens == 0 for r in again)
    with CachedVLM.from_pretrained(folder, **options) as vlm:
        restarted = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in restarted] == expected
        assert restarted[0].images[0].tier == "disk"
        again = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in again] == expected
        assert all(r.usage.cached_tokens > 0 for r in again)
        assert vlm.encoder.stats()["preprocessed"] == 0
        if dtype == "float32":
            together = vlm.chat_batch([*conversations, *turns(50)[1:], *turns(60)], max_tokens=NEW_TOKENS)
            assert [list(r.token_ids) for r in together[:3]] == expected  # type: ignore[union-attr]
        assert vlm.engine.check() == [] and vlm.store.check() == [] and vlm.store.stats()


def test_greedy_tokens_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    conversations = turns(1)
    expected = by_transformers(folder, conversations, "float32")
    with plain(folder) as vlm:
        off = [ask(vlm, messages) for messages in conversations]
        assert [list(r.token_ids) for r in off] == expected
        assert all(image.tier == "encoded" for r in off for image in r.images)
    check_equal(folder, tmp_path, expected, "float32")


def test_in_bf16_the_cache_changes_nothing(
    folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with plain(folder, "bfloat16") as vlm:
        expected = [list(ask(vlm, messages).token_ids) for messages in turns(1)]
    check_equal(folder, tmp_path, expected, "bfloat16")


def test_other_images_give_other_answers_and_wrong_features_are_seen(folder: Path) -> None:
    """The control: with another image's features under the same key the tokens must change."""
    with plain(folder) as vlm:
        answers = {tuple(ask(vlm, turns(seed)[0]).token_ids) for seed in range(6)}
        assert len(answers) >= 4, "the random weights don't look at the images"
    settings = EngineSettings(prefix_cache=False)
    with (
        FeatureStore.open(None) as store,
        CachedVLM.from_pretrained(
            folder, store=store, dtype="float32", device="cpu", settings=settings
        ) as vlm,
    ):
        changed = 0
        for seed in range(6):
            messages, other = turns(seed)[0], turns(seed + 20)[0]
            right = ask(vlm, messages).token_ids
            options = vlm.loaded.family.options_for
            ref = vlm.encoder.identify(messages[0]["content"][0]["image"], options(_no_options(), 1))
            wrong = vlm.encode([other[0]["content"][0]["image"]])[0]
            store.delete(ref.key)
            store.put(ref.key, Features(wrong.tensors, wrong.layout, ref.fingerprint))
            changed += ask(vlm, messages).token_ids != right
        assert changed >= 3


def _no_options() -> Any:
    from featcache.engine.families.base import ImageOptions

    return ImageOptions()


def test_prefill_logits_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Whole, in chunks, and behind reused blocks cut anywhere: within 1e-5 of the largest logit."""
    messages = turns(3)[2]
    loaded = load_model(folder, dtype="float32", device="cpu")
    inputs = loaded.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = loaded.model(**inputs).logits[0, -1]
    for chunk in (2048, 48):
        seen: list[torch.Tensor] = []
        settings = EngineSettings(max_batch_tokens=chunk)
        with (
            FeatureStore.open(None) as store,
            CachedVLM.from_pretrained(
                folder, store=store, dtype="float32", device="cpu", settings=settings
            ) as vlm,
        ):
            run = vlm.engine._runner.run

            def spy(parts: Any, run: Any = run, seen: Any = seen) -> Any:
                sequences, logits = run(parts)
                if sequences:
                    seen.append(logits[0].clone())
                return sequences, logits

            vlm.engine._runner.run = spy  # type: ignore[method-assign]
            vlm.chat(messages, max_tokens=1)
            vlm.chat(messages[:1], max_tokens=1)
            vlm.chat(messages, max_tokens=1)
            assert vlm.chat(messages, max_tokens=1).usage.cached_tokens >= 16
        for logits in (seen[0], seen[2], seen[3]):
            assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_the_prompt_is_the_processors_own(folder: Path) -> None:
    messages = turns(4)[2]
    with plain(folder) as vlm:
        prompt = build_prompt(vlm.loaded, vlm.encoder, messages)
        inputs = vlm.loaded.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert prompt.ids == inputs["input_ids"][0].tolist()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedVLM]:
    folder = build("qwen2_vl", tmp_path_factory.mktemp("engine"))
    with CachedVLM.from_pretrained(folder, store=None, device="cpu") as vlm:
        yield vlm


def test_an_image_that_is_prefilled_everywhere_is_not_even_looked_up(qwen: CachedVLM) -> None:
    messages = turns(70)[2]
    qwen.chat(messages, max_tokens=2)
    before = qwen.encoder.stats()
    reply = qwen.chat(messages, max_tokens=2)
    assert [image.tier for image in reply.images] == ["prefix", "prefix"]
    assert qwen.encoder.stats() == before


def test_one_image_three_times_in_a_prompt_is_encoded_once(qwen: CachedVLM) -> None:
    image = patches(90, 90, 71)
    before = qwen.encoder.stats()["tower_images"]
    reply = qwen.chat([{"role": "user", "content": [{"type": "image", "image": image}] * 3}], max_tokens=2)
    assert qwen.encoder.stats()["tower_images"] == int(before) + 1
    assert len(reply.images) == 3 and len({image.key for image in reply.images}) == 1


def test_swapped_images_share_no_block_behind_the_first(qwen: CachedVLM) -> None:
    a, b = patches(90, 60, 72), patches(90, 60, 73)

    def messages(first: Any, second: Any) -> list[Message]:
        parts = [{"type": "image", "image": first}, {"type": "image", "image": second}]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "which is red"}]}]

    one = build_prompt(qwen.loaded, qwen.encoder, messages(a, b))
    other = build_prompt(qwen.loaded, qwen.encoder, messages(b, a))
    assert one.ids == other.ids
    from featcache.engine.prefix import PrefixChain

    chains = [PrefixChain(prompt) for prompt in (one, other)]
    for chain in chains:
        chain.extend(one.ids)
    first_image_block = one.runs[0].start // 16
    same = [x.hash == y.hash for x, y in zip(chains[0].blocks, chains[1].blocks, strict=True)]
    assert same == [number < first_image_block for number in range(len(same))]


def test_a_broken_image_fails_its_own_conversation(qwen: CachedVLM) -> None:
    good = [turns(80 + n)[0] for n in range(7)]
    bad = [{"role": "user", "content": [{"type": "image", "image": b"not an image"}]}]
    replies = qwen.chat_batch([*good[:3], bad, *good[3:]], max_tokens=3)
    from featcache import ImageError

    assert isinstance(replies[3], ImageError)
    assert [type(r).__name__ for i, r in enumerate(replies) if i != 3] == ["Reply"] * 7


def test_weights_changed_in_place_and_refreshed_serve_nothing_old(tmp_path: Path) -> None:
    folder = build("qwen2_vl", tmp_path)
    messages = turns(90)[0]
    with CachedVLM.from_pretrained(folder, store=tmp_path / "store", device="cpu") as vlm:
        before = vlm.chat(messages, max_tokens=4)
        with torch.no_grad():
            for name, parameter in vlm.loaded.model.named_parameters():
                if "visual" in name:
                    parameter.mul_(1.5)
        vlm.refresh()
        after = vlm.chat(messages, max_tokens=4)
        assert after.images[0].tier == "encoded" and after.usage.cached_tokens == 0
        assert after.images[0].key != before.images[0].key
        fresh = vlm.encode([messages[0]["content"][0]["image"]])[0]
        assert not torch.equal(fresh.rows, torch.zeros_like(fresh.rows))
