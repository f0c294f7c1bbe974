"""How the next token is chosen: `SamplingParams`, and `Sampler`, which obeys them for one sequence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from featcache.errors import RequestError

LogitsHook = Callable[[list[int], torch.Tensor], torch.Tensor]

MAX_LOGPROBS = 20
MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of its answer.

    max_tokens: tokens at most. temperature: 0 is greedy. top_p, top_k (0: all), min_p: which tokens may be
        drawn. seed: makes the draw repeatable, whatever else runs beside it.
    repetition_penalty: over prompt and answer; presence_penalty, frequency_penalty: over the answer.
    stop: texts at which the answer ends, without them; stop_token_ids: tokens at which it ends.
    ignore_eos: go on behind the model's own end. logit_bias: added to the logits, by token id.
    logprobs: how many alternatives to report with each token; None is no report.
    logits_hook: called with the answer's tokens so far and the logits (vocabulary,); returns the logits.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    logits_hook: LogitsHook | None = None

    def __post_init__(self) -> None:
        whole: dict[str, tuple[int, int | None]] = {"max_tokens": (1, None), "top_k": (-1, None)}
        whole |= {"seed": (-(2**63), 2**63 - 1), "logprobs": (0, MAX_LOGPROBS)}
        for name, (low, high) in whole.items():
            _check_int(name, getattr(self, name), low, high, none=name in ("seed", "logprobs"))
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if len(self.stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop: at most {MAX_STOPS} texts, none of them empty")
        for token in (*self.stop_token_ids, *self.logit_bias):
            _check_int("stop_token_ids and logit_bias", token, 0, None)
        for bias in self.logit_bias.values():
            _check_number("logit_bias", bias, -100, 100)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SamplingParams:
        """From keyword arguments; `stop` may be one text. Raises RequestError that names what is wrong."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise RequestError(
                f"{unknown[0]}: not a sampling parameter; there are {', '.join(sorted(known))}"
            )
        values = dict(given)
        for name in ("stop", "stop_token_ids"):
            if name in values:
                value = values[name]
                one = isinstance(value, (str, int))
                values[name] = (value,) if one else tuple(value or ())
        return cls(**values)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the largest raw logit is all that is asked for."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and not self.presence_penalty
            and not self.frequency_penalty
            and not self.logit_bias
            and self.logits_hook is None
            and self.logprobs is None
        )


def _check_int(name: str, value: Any, low: int | None, high: int | None, *, none: bool = False) -> None:
    if none and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name}: {value!r}; it is a whole number")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"is at least {low}" if high is None else f"lies between {low} and {high}"
        raise RequestError(f"{name}: {value}; it {bounds}")


def _check_number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (above and value == low):
        bounds = f"is above {low} and at most {high}" if above else f"lies between {low} and {high}"
        raise RequestError(f"{name}: {value!r}; it {bounds}")


class Logprob(NamedTuple):
    """token_id, and the natural logarithm of its probability before any penalty or temperature."""

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """Of one token of the answer, and of the likeliest in its place."""

    token_id: int
    logprob: float
    top: tuple[Logprob, ...]


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self._prompt = sorted(set(prompt_ids)) if params.repetition_penalty != 1 else []
        self._answer: list[int] = []
        self._counts: Counter[int] = Counter()
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    def note(self, token: int) -> None:
        """A token that was chosen."""
        self._answer.append(token)
        self._counts[token] += 1

    def choose(self, logits: torch.Tensor) -> tuple[int, TokenLogprobs | None]:
        """The next token from raw logits (vocabulary,). Raises what the logits hook raises."""
        raw = logits.float().cpu()
        token = self._draw(self._adjusted(raw.clone()))
        return token, None if self.params.logprobs is None else self._report(raw, token)

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        params = self.params
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted({*self._prompt, *self._counts}))
            seen = seen[seen < logits.shape[0]]
            values = logits[seen]
            scaled = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
            logits[seen] = scaled
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            ids = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * times
        for token, bias in params.logit_bias.items():
            if token >= logits.shape[0]:
                raise RequestError(f"logit_bias: token {token} is beyond the vocabulary of {logits.shape[0]}")
            logits[token] += bias
        if params.logits_hook is not None:
            logits = params.logits_hook(list(self._answer), logits)
        return logits

    def _draw(self, logits: torch.Tensor) -> int:
        params = self.params
        if params.temperature == 0:
            return int(logits.argmax())
        logits = (logits - logits.max()) / max(params.temperature, 1e-5)
        if 0 < params.top_k < logits.shape[0]:
            least = logits.topk(params.top_k).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(-1)
        if params.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            probabilities[order[before >= params.top_p]] = 0
        if params.min_p > 0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _report(self, raw: torch.Tensor, token: int) -> TokenLogprobs:
        logprobs = raw.log_softmax(-1)
        top: tuple[Logprob, ...] = ()
        if self.params.logprobs:
            best = logprobs.topk(min(self.params.logprobs, logprobs.shape[0]))
            top = tuple(
                Logprob(i, v) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            )
        return TokenLogprobs(token, float(logprobs[token]), top)
