"""`SamplingParams` in LMDeploy's words, and its log-probabilities in ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from featcache.engine.answer import Answer
from featcache.engine.encoding import engine_error
from featcache.engine.sampling import Logprob, SamplingParams, TokenLogprobs
from featcache.errors import FeatcacheError, RequestError

log = logging.getLogger("featcache")

MAX_TEMPERATURE = 2.0  # LMDeploy's own limit


class Adjustment:
    """Penalties, biases and the logits hook of one request, as a logits processor of LMDeploy.

    It runs inside the engine's loop, where an exception would end all requests: the first one is kept in
    `error`, and ends this request alone.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.error: FeatcacheError | None = None

    @staticmethod
    def is_needed(params: SamplingParams) -> bool:
        penalties = params.presence_penalty or params.frequency_penalty
        return bool(penalties or params.logit_bias or params.logits_hook is not None)

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """ids: (length,) prompt and answer so far. logits: (vocabulary,). Both may lie on the device."""
        if self.error is not None:
            return logits
        try:
            return self._adjusted(ids, logits)
        except Exception as exc:
            self.error = engine_error(exc)
            log.warning("a request's logits can't be adjusted, and it ends: %s", exc)
            return logits

    def _adjusted(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        params = self._answer.params
        answer = ids[self._answer.num_prompt :].to("cpu", torch.int64)
        values = logits.float().cpu()
        if len(answer) and (params.presence_penalty or params.frequency_penalty):
            times = torch.bincount(answer, minlength=values.shape[0])
            values -= params.presence_penalty * (times > 0) + params.frequency_penalty * times
        for token, bias in params.logit_bias.items():
            if token >= values.shape[0]:
                raise RequestError(f"logit_bias: token {token} is beyond the vocabulary of {values.shape[0]}")
            values[token] += bias
        if params.logits_hook is not None:
            values = params.logits_hook(answer.tolist(), values)
        return values.to(logits)


def check_sampling(params: SamplingParams, *, in_process: bool) -> None:
    """Raises RequestError for what LMDeploy can't do.

    in_process: whether the model runs in this process, so that it can call back for every token.
    """
    if params.temperature > MAX_TEMPERATURE:
        raise RequestError(
            f"temperature: {params.temperature}; with backend lmdeploy it is at most {MAX_TEMPERATURE:g}"
        )
    if not in_process and Adjustment.is_needed(params):
        raise RequestError(
            "presence_penalty, frequency_penalty, logit_bias, grammars and logits hooks need the model in this "
            "process: with backend lmdeploy, tp is 1"
        )


def generation_config(answer: Answer, stop_ids: frozenset[int], adjustment: Adjustment | None) -> Any:
    """What LMDeploy's engine is told of a request. Greedy where the temperature is 0."""
    from lmdeploy.messages import GenerationConfig

    params = answer.params
    is_greedy = params.temperature == 0
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else stop_ids)
    return GenerationConfig(
        max_new_tokens=answer.max_len - answer.num_prompt,
        do_sample=not is_greedy,
        temperature=1.0 if is_greedy else params.temperature,
        top_k=1 if is_greedy else max(params.top_k, 0),
        top_p=1.0 if is_greedy else params.top_p,
        min_p=0.0 if is_greedy else params.min_p,
        repetition_penalty=params.repetition_penalty,
        random_seed=None if params.seed is None else params.seed % 2**63,
        stop_token_ids=sorted(stops),
        logprobs=None if params.logprobs is None else max(params.logprobs, 1),
        logits_processors=None if adjustment is None else [adjustment],
    )


def token_logprobs(params: SamplingParams, token: int, found: Mapping[int, float]) -> TokenLogprobs:
    """found: LMDeploy's, by token id: the chosen token and the likeliest."""
    best = sorted(found.items(), key=lambda item: -item[1])[: params.logprobs or 0]
    return TokenLogprobs(token, float(found[token]), tuple(Logprob(i, float(v)) for i, v in best))
