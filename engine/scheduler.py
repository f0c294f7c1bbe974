"""`Scheduler`: which sequences run in a step, with how many tokens, on which blocks.

Continuous batching: decoding sequences go first, one token each; what is left of the step's budget goes to
prefills, in order of arrival and in chunks. What several have in common is computed by the first of them; the
others adopt its blocks. A sequence is admitted when its prompt's blocks can be had; when decoding runs out of
blocks, the youngest is preempted and computes its tokens again later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from featcache.engine.encoding import Wanted
from featcache.engine.kv import BLOCK, Blocks
from featcache.engine.prefix import is_inside, longest_held
from featcache.engine.sequence import Sequence, State


class Part(NamedTuple):
    """`new` tokens of a sequence, from token `start`, to be computed in one step."""

    sequence: Sequence
    start: int
    new: int


class Scheduler:
    """The waiting and running sequences, and the blocks they share. One thread uses it."""

    def __init__(
        self,
        blocks: Blocks,
        *,
        max_batch_tokens: int,
        max_running: int,
        reuses_prefixes: bool,
        keeps_images_whole: bool,
    ) -> None:
        self.blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._reuses_prefixes = reuses_prefixes
        self._keeps_images_whole = keeps_images_whole
        self.waiting: list[Sequence] = []  # in order of arrival: WAITING, ENCODING and READY
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def _next(self) -> list[Sequence]:
        """Those of the waiting that are prepared ahead."""
        return self.waiting[: 2 * self._max_running]

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, without any news."""
        return bool(self.running) or any(s.state is not State.ENCODING for s in self._next)

    # Which images are wanted

    def prepare(self) -> list[Wanted[Sequence]]:
        """Move on those that wait; returns what they want to be encoded or looked up."""
        wanted = []
        for sequence in self._next:
            if sequence.state is State.WAITING:
                held = self._hold_prefix(sequence)
                self.blocks.release(held)
                if images := self._missing(sequence, len(held) * BLOCK):
                    sequence.to(State.ENCODING)
                    wanted.append(Wanted(sequence, images))
                else:
                    sequence.to(State.READY)
        return wanted

    def _hold_prefix(self, sequence: Sequence) -> list[int]:
        if not self._reuses_prefixes:
            return []
        sequence.chain.extend(sequence.ids)
        return longest_held(sequence.chain, self.blocks, len(sequence.ids))

    @staticmethod
    def _missing(sequence: Sequence, computed: int) -> list[int]:
        return [image for image in sequence.images_after(computed) if image not in sequence.leases]

    # Who runs

    def admit(self) -> None:
        """Give blocks to READY sequences, in order, as long as there are any."""
        for sequence in [s for s in self.waiting if s.state is State.READY]:
            if len(self.running) >= self._max_running or not self._admit(sequence):
                return

    def _admit(self, sequence: Sequence) -> bool:
        held = self._hold_prefix(sequence)
        if self._missing(sequence, len(held) * BLOCK):  # a prefix was evicted since it was looked at
            self.blocks.release(held)
            sequence.to(State.WAITING)
            return True
        wanted = sequence.num_blocks_wanted - len(held)
        spare = len(self.running)  # a block for each of those that decode, lest this one be preempted at once
        fresh = self.blocks.allocate(wanted) if wanted + spare <= self.blocks.num_available else None
        if fresh is None:
            self.blocks.release(held)
            return False
        sequence.table = held + fresh
        sequence.computed = len(held) * BLOCK
        sequence.published = len(held)
        sequence.epoch = self.blocks.epoch
        if not sequence.is_preempted:
            sequence.cached = sequence.computed
        sequence.release_leases(sequence.computed)
        sequence.to(State.RUNNING)
        sequence.mark("running")
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def plan(self) -> list[Part]:
        """What to compute in the next step."""
        for sequence in [s for s in self.running if s.pending == 1]:
            if sequence.state is State.RUNNING:
                self._grow(sequence)  # which may preempt others, or itself
        parts = [Part(s, s.computed, 1) for s in self.running if s.pending == 1]
        budget = self._max_batch_tokens - len(parts)
        coming: set[bytes] = set()  # blocks that this step fills
        for sequence in [s for s in self.running if s.pending > 1]:
            if budget <= 0:
                break
            self._adopt(sequence)
            if self._next_block(sequence) in coming:
                continue  # somebody before it computes the same: it adopts that in the next step
            new = self._chunk(sequence, budget)
            parts.append(Part(sequence, sequence.computed, new))
            budget -= new
            if self._reuses_prefixes:
                full = range(sequence.computed // BLOCK, (sequence.computed + new) // BLOCK)
                coming.update(sequence.chain.blocks[number].hash for number in full)
        return parts

    def _adopt(self, sequence: Sequence) -> None:
        """Take over the blocks that others have filled since this sequence was admitted."""
        if not self._reuses_prefixes or sequence.computed % BLOCK or sequence.epoch != self.blocks.epoch:
            return
        for number in range(sequence.computed // BLOCK, (len(sequence.ids) - 1) // BLOCK):
            block = self.blocks.find(*sequence.chain.blocks[number])
            if block is None:
                break
            self.blocks.share(block)
            self.blocks.release([sequence.table[number]])
            sequence.table[number] = block
            sequence.computed += BLOCK
            sequence.published = number + 1
            if not sequence.is_preempted:
                sequence.cached += BLOCK
        sequence.release_leases(sequence.computed)

    def _next_block(self, sequence: Sequence) -> bytes | None:
        """The hash of the block that it computes next, if another one could compute it for it."""
        number, inside = divmod(sequence.computed, BLOCK)
        if not self._reuses_prefixes or inside or number >= (len(sequence.ids) - 1) // BLOCK:
            return None
        return sequence.chain.blocks[number].hash

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How much of a prefill fits; where images' tokens see each other both ways, no image is cut."""
        stop = sequence.computed + min(sequence.pending, budget)
        if stop < len(sequence.ids) and stop // BLOCK * BLOCK > sequence.computed:
            stop = stop // BLOCK * BLOCK  # full blocks, which others can adopt
        runs = sequence.prompt.runs
        if self._keeps_images_whole and is_inside(runs, stop):
            run = next(run for run in runs if run.start < stop < run.stop)
            stop = run.start if run.start > sequence.computed else run.stop
        return stop - sequence.computed

    def _grow(self, sequence: Sequence) -> None:
        """A block for the next token; somebody younger may have to give way, or the sequence itself."""
        while sequence.num_blocks_wanted > len(sequence.table):
            block = self.blocks.allocate(1)
            if block is not None:
                sequence.table += block
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._let_go(sequence)
        sequence.computed = sequence.published = 0
        sequence.is_preempted = True
        sequence.to(State.WAITING)
        self.running.remove(sequence)
        self.waiting.insert(0, sequence)

    # After a step

    def computed(self, parts: Iterable[Part]) -> None:
        """The KV of these parts is in the pool: full blocks can be found from now on."""
        for sequence, start, new in parts:
            sequence.computed = start + new
            if self._reuses_prefixes and sequence.epoch == self.blocks.epoch:
                self._publish(sequence)
            sequence.release_leases(sequence.computed)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // BLOCK
        if full > sequence.published:
            sequence.chain.extend(sequence.ids)
            for number in range(sequence.published, full):
                self.blocks.publish(sequence.table[number], *sequence.chain.blocks[number])
            sequence.published = full

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        self._let_go(sequence)
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.table)
        sequence.table = []
        sequence.release_leases()

    def check(self) -> list[str]:
        return self.blocks.check(sequence.table for sequence in self.running)
