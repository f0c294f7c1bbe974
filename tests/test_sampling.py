"""How tokens are chosen, and where answers end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featcache.engine.sampling import Sampler, SamplingParams
from featcache.engine.stopping import TextStream
from featcache.errors import RequestError

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])


def choose(params: SamplingParams, *, answer: tuple[int, ...] = (), prompt: tuple[int, ...] = ()) -> int:
    sampler = Sampler(params, prompt)
    for token in answer:
        sampler.note(token)
    return sampler.choose(LOGITS)[0]


def draws(number: int = 4000, **params: Any) -> Counter[int]:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5, **params), ())
    return Counter(sampler.choose(LOGITS)[0] for _ in range(number))


def test_greedy_takes_the_largest_whatever_the_seed() -> None:
    assert {choose(SamplingParams(seed=seed)) for seed in range(10)} == {1}


def test_draws_follow_the_softmax() -> None:
    counts = draws()
    expected = LOGITS.softmax(-1) * 4000
    assert all(abs(counts[token] - float(expected[token])) < 150 for token in range(5))


def test_top_k_top_p_and_min_p_rule_out_what_they_should() -> None:
    assert set(draws(top_k=2)) == {1, 2}
    assert set(draws(top_p=0.6)) == {1}
    assert set(draws(top_p=0.7)) == {1, 2}
    assert set(draws(min_p=0.3)) == {1, 2}
    assert set(draws(top_k=1)) == {1}


def test_a_seed_repeats_the_draw_and_others_differ() -> None:
    def sequence(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed), ())
        return [sampler.choose(LOGITS)[0] for _ in range(30)]

    assert sequence(1) == sequence(1)
    assert len({tuple(sequence(seed)) for seed in range(10)}) == 10


def test_penalties_and_bias_move_the_choice() -> None:
    assert choose(SamplingParams(repetition_penalty=2.0), prompt=(1,)) == 2
    assert choose(SamplingParams(repetition_penalty=2.0), answer=(1,)) == 2
    assert choose(SamplingParams(presence_penalty=1.5), answer=(1,)) == 2
    assert choose(SamplingParams(presence_penalty=1.5), prompt=(1,)) == 1, "the prompt doesn't count"
    assert choose(SamplingParams(frequency_penalty=0.6), answer=(1, 1)) == 2
    assert choose(SamplingParams(frequency_penalty=0.6), answer=(1,)) == 1
    assert choose(SamplingParams(logit_bias={4: 10})) == 4
    with pytest.raises(RequestError, match="logit_bias"):
        choose(SamplingParams(logit_bias={99: 1}))


def test_logprobs_are_of_the_raw_logits() -> None:
    sampler = Sampler(SamplingParams(logprobs=2, logit_bias={4: 10}), ())
    token, report = sampler.choose(LOGITS)
    assert token == 4 and report is not None
    expected = LOGITS.log_softmax(-1)
    assert report.logprob == pytest.approx(float(expected[4]))
    assert [top.token_id for top in report.top] == [1, 2]
    assert report.top[0].logprob == pytest.approx(float(expected[1]))


def test_the_hook_sees_the_answer_and_has_the_last_word() -> None:
    seen: list[list[int]] = []

    def hook(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(generated)
        return logits.masked_fill(torch.arange(5) != 3, float("-inf"))

    assert choose(SamplingParams(logits_hook=hook), answer=(2, 4)) == 3
    assert seen == [[2, 4]]


@pytest.mark.parametrize(
    "given_",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"top_k": -2},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
        {"logprobs": 21},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"seed": "a"},
        {"logit_bias": {1: 200}},
    ],
)
def test_what_cannot_be_is_refused_by_name(given_: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(given_))):
        SamplingParams.of(given_)


def test_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="maxtokens"):
        SamplingParams.of({"maxtokens": 1})
    assert SamplingParams.of({"stop": "a", "stop_token_ids": [3]}).stop == ("a",)


class Bytes:
    """A tokenizer whose tokens are bytes, as the pieces of byte-level ones are."""

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(text: str, stops: list[str]) -> None:
    stream = TextStream(Bytes(), stops)
    got = ""
    for byte in text.encode("utf-8", "surrogatepass") if text.isprintable() else b"":
        got += stream.add(byte)
        if stream.stopped:
            break
    got += stream.finish()
    whole = text if text.isprintable() else ""
    ends = [whole.find(stop) for stop in stops if stop in whole]
    assert got == (whole[: min(ends)] if ends else whole)


def test_nothing_of_a_stop_text_is_shown_early_and_half_characters_wait() -> None:
    stream = TextStream(Bytes(), ["END"])
    assert [stream.add(byte) for byte in "aENé".encode()] == ["a", "", "", "", "ENé"]
    stream = TextStream(Bytes(), ["END"])
    assert "".join(stream.add(byte) for byte in b"xENDy") == "x" and stream.stopped


def test_what_was_held_back_comes_at_the_end() -> None:
    stream = TextStream(Bytes(), ["END"])
    assert "".join(stream.add(byte) for byte in b"the EN") == "the "
    assert stream.finish() == "EN"
