"""`Sequence`: one request inside the engine, and the states it goes through.

WAITING ──▶ ENCODING ──▶ READY ──▶ RUNNING ──▶ FINISHED
   └─────── nothing to encode ──▶┘ ◀─ preempted ─┘
any ──▶ FAILED, CANCELLED
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from featcache.engine.generation import Generation, ImageTier, ImageUse, Timings, Usage
from featcache.engine.kv import BLOCK
from featcache.engine.prefix import PrefixChain
from featcache.engine.prompt import Prompt
from featcache.engine.sampling import Sampler, SamplingParams, TokenLogprobs
from featcache.engine.stopping import TextStream
from featcache.lease import Lease

if TYPE_CHECKING:
    import torch


class State(Enum):
    WAITING = "waiting"
    ENCODING = "encoding"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})
_NEXT: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.WAITING: frozenset({State.ENCODING, State.READY}) | _ENDS,
        State.ENCODING: frozenset({State.READY}) | _ENDS,
        State.READY: frozenset({State.RUNNING, State.WAITING}) | _ENDS,
        State.RUNNING: frozenset({State.WAITING}) | _ENDS,
        **{end: frozenset[State]() for end in _ENDS},
    }
)


class Sequence:
    """One request. Only the engine's thread touches it, but for `generation`.

    ids: prompt and answer. table: its blocks. computed: tokens whose KV is in them.
    leases: of images whose rows are still to be prefilled, by number. features_ready: a CUDA event after
        which they may be read. tiers: where each image came from, once that is known.
    epoch: of the blocks when it was admitted. cached: prompt tokens that others had computed already.
    """

    def __init__(
        self, prompt: Prompt, params: SamplingParams, generation: Generation, tokenizer: Any, max_len: int
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.generation = generation
        self.sampler = Sampler(params, prompt.ids)
        self.text = TextStream(tokenizer, params.stop)
        self.max_len = min(max_len, len(prompt.ids) + params.max_tokens)
        self.state = State.WAITING
        self.is_cancelled = False
        self.ids = list(prompt.ids)
        self.chain = PrefixChain(prompt)
        self.table: list[int] = []
        self.computed = 0
        self.published = 0
        self.epoch = 0
        self.cached = 0
        self.is_preempted = False  # at least once: its own KV is found again, which isn't counted as cached
        self.leases: dict[int, Lease] = {}
        self.features_ready: torch.cuda.Event | None = None
        self.tiers: list[ImageTier | None] = [None] * len(prompt.images)
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self._marks = {"submitted": time.perf_counter()}
        self.encode_s = 0.0

    def to(self, state: State) -> None:
        assert state in _NEXT[self.state], (self.state, state)
        self.state = state

    @property
    def is_over(self) -> bool:
        return self.state in _ENDS

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.ids)

    @property
    def answer(self) -> list[int]:
        return self.ids[self.num_prompt :]

    @property
    def pending(self) -> int:
        """Tokens that have to be computed before the next one can be chosen."""
        return len(self.ids) - self.computed

    @property
    def num_blocks_wanted(self) -> int:
        return -(-len(self.ids) // BLOCK)

    def images_after(self, computed: int) -> list[int]:
        """Images with rows at or behind this token."""
        return sorted({run.image for run in self.prompt.runs if run.stop > computed})

    def release_leases(self, computed: int | None = None) -> None:
        """Let go of images that are prefilled up to `computed`; of all if None."""
        needed = set() if computed is None else set(self.images_after(computed))
        for image in [image for image in self.leases if image not in needed]:
            self.leases.pop(image).release()

    def mark(self, name: str) -> None:
        """Note when something happened for the first time."""
        self._marks.setdefault(name, time.perf_counter())

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
