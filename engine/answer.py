"""`Answer`: one request and what has been generated for it so far, whichever engine generates it."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

from featcache.engine.generation import (
    FinishReason,
    Generation,
    ImageTier,
    ImageUse,
    Reply,
    Timings,
    TokenDelta,
    Usage,
)
from featcache.engine.prompt import Prompt
from featcache.engine.sampling import SamplingParams, TokenLogprobs
from featcache.engine.stopping import TextStream


class Answer:
    """Only the engine's thread touches it, but for `generation` and `is_cancelled`.

    ids: prompt and answer. max_len: of both together. tiers: where each image came from, once that is known.
    cached: prompt tokens that others had computed already. encode_s: seconds in which its images' features
        were fetched or made.
    """

    def __init__(
        self, prompt: Prompt, params: SamplingParams, generation: Generation, tokenizer: Any, max_len: int
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.generation = generation
        self.text = TextStream(tokenizer, params.stop)
        self.max_len = min(max_len, len(prompt.ids) + params.max_tokens)
        self.is_cancelled = False
        self.ids = list(prompt.ids)
        self.cached = 0
        self.tiers: list[ImageTier | None] = [None] * len(prompt.images)
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.encode_s = 0.0
        self._marks = {"submitted": time.perf_counter()}
        self._last = TokenDelta("", ())

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.ids)

    @property
    def answer(self) -> list[int]:
        return self.ids[self.num_prompt :]

    def images_after(self, computed: int) -> list[int]:
        """Images with rows at or behind this token."""
        return sorted({run.image for run in self.prompt.runs if run.stop > computed})

    def mark(self, name: str) -> None:
        """Note when something happened for the first time."""
        self._marks.setdefault(name, time.perf_counter())

    def take(self, token: int, logprobs: TokenLogprobs | None, stop_ids: Set[int]) -> FinishReason | None:
        """Add a token and pass on the text that it makes. Why the answer ends here; None if it goes on."""
        self.mark("first token")
        self.ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        reported = () if logprobs is None else (logprobs,)
        params = self.params
        is_stop = token in params.stop_token_ids or (token in stop_ids and not params.ignore_eos)
        text = "" if is_stop else self.text.add(token)
        if is_stop or self.text.stopped or len(self.ids) >= self.max_len:
            self._last = TokenDelta(text, (token,), reported)
            return "stop" if is_stop or self.text.stopped else "length"
        self.pieces.append(text)
        self.generation.emit(TokenDelta(text, (token,), reported))
        return None

    def end(self, reason: FinishReason) -> tuple[TokenDelta, Reply]:
        """The last delta and the whole answer, for `Generation.finish`."""
        last = self._last
        text = last.text + self.text.finish()
        self.pieces.append(text)
        reply = Reply(
            text="".join(self.pieces),
            finish_reason=reason,
            token_ids=tuple(self.answer),
            usage=self.usage(),
            images=self.image_uses(),
            timings=self.timings(),
            logprobs=tuple(self.logprobs),
        )
        return TokenDelta(text, last.token_ids, last.logprobs, reason), reply

    # Accounts

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=len(self.answer),
            cached_tokens=self.cached,
            image_tokens=sum(layout.num_tokens for layout in self.prompt.layouts),
        )

    def image_uses(self) -> tuple[ImageUse, ...]:
        return tuple(
            ImageUse(ref.key.hex(), tier or "prefix", layout.num_tokens)
            for ref, tier, layout in zip(self.prompt.images, self.tiers, self.prompt.layouts, strict=True)
        )

    def timings(self) -> Timings:
        now = time.perf_counter()
        at = self._marks
        began = at.get("running", now)
        first = at.get("first token", now)
        return Timings(
            queue_s=began - at["submitted"] - self.encode_s,
            encode_s=self.encode_s,
            prefill_s=first - began,
            ttft_s=first - at["submitted"],
            total_s=now - at["submitted"],
        )
