"""`Sequence`: one request inside the engine, and the states it goes through.

WAITING ──▶ ENCODING ──▶ READY ──▶ RUNNING ──▶ FINISHED
   └─────── nothing to encode ──▶┘ ◀─ preempted ─┘
any ──▶ FAILED, CANCELLED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from featcache.engine.answer import Answer
from featcache.engine.generation import Generation
from featcache.engine.kv import BLOCK
from featcache.engine.prefix import PrefixChain
from featcache.engine.prompt import Prompt
from featcache.engine.sampling import Sampler, SamplingParams
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


class Sequence(Answer):
    """One request. Only the engine's thread touches it, but for `generation`.

    table: its blocks. computed: tokens whose KV is in them.
    leases: of images whose rows are still to be prefilled, by number. features_ready: a CUDA event after
        which they may be read. epoch: of the blocks when it was admitted.
    """

    def __init__(
        self, prompt: Prompt, params: SamplingParams, generation: Generation, tokenizer: Any, max_len: int
    ) -> None:
        super().__init__(prompt, params, generation, tokenizer, max_len)
        self.sampler = Sampler(params, prompt.ids)
        self.state = State.WAITING
        self.chain = PrefixChain(prompt)
        self.table: list[int] = []
        self.computed = 0
        self.published = 0
        self.epoch = 0
        self.is_preempted = False  # at least once: its own KV is found again, which isn't counted as cached
        self.leases: dict[int, Lease] = {}
        self.features_ready: torch.cuda.Event | None = None

    def to(self, state: State) -> None:
        assert state in _NEXT[self.state], (self.state, state)
        self.state = state

    @property
    def is_over(self) -> bool:
        return self.state in _ENDS

    @property
    def pending(self) -> int:
        """Tokens that have to be computed before the next one can be chosen."""
        return len(self.ids) - self.computed

    @property
    def num_blocks_wanted(self) -> int:
        return -(-len(self.ids) // BLOCK)

    def release_leases(self, computed: int | None = None) -> None:
        """Let go of images that are prefilled up to `computed`; of all if None."""
        needed = set() if computed is None else set(self.images_after(computed))
        for image in [image for image in self.leases if image not in needed]:
            self.leases.pop(image).release()
