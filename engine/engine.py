"""`Engine`: requests in, tokens out. One thread runs the model; two beside it get the features of images.

A step: take what came in, see which images are wanted, admit, plan, run, choose, emit. Encoding has its own
thread, so that a new image doesn't hold up those who are already reading; and looking up has another one, so
that neither does it hold up those whose images are known.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from featcache.engine.encoder import VisionEncoder
from featcache.engine.encoding import EncodingThread, Wanted, engine_error
from featcache.engine.generation import FinishReason, Generation, Reply, TokenDelta
from featcache.engine.kv import BLOCK, Blocks, block_bytes
from featcache.engine.loading import Loaded
from featcache.engine.prompt import Prompt
from featcache.engine.runner import ModelRunner
from featcache.engine.sampling import SamplingParams, TokenLogprobs
from featcache.engine.scheduler import Scheduler
from featcache.engine.sequence import Sequence, State
from featcache.errors import (
    CancelledError,
    ConfigError,
    ContextLengthError,
    FeatcacheError,
    QueueFullError,
    RequestError,
)
from featcache.sizes import parse_size

log = logging.getLogger("featcache")

__all__ = ["Engine", "EngineSettings", "Generation", "Reply", "TokenDelta"]

GPU_SHARE = 0.5  # of the memory that is free once the model is loaded, for KV blocks
CPU_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the native engine.

    kv_bytes: memory for KV blocks; by default half of the GPU's free memory, or 512 MiB on a CPU.
    max_model_len: tokens of prompt and answer at most; by default what the model and the blocks allow.
    max_batch_tokens: tokens in one step. max_running, max_waiting: requests that run, and that may wait.
    prefix_cache: reuse KV blocks across requests.
    cuda_graphs: decode by CUDA graphs, where the GPU has the kernels for it.
    """

    kv_bytes: int | str | None = None
    max_model_len: int | None = None
    max_batch_tokens: int = 2048
    max_running: int = 64
    max_waiting: int = 1024
    prefix_cache: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_waiting", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value}; it is at least 1")


class Engine:
    """Runs requests on one model. Thread-safe. `close` it."""

    def __init__(
        self, loaded: Loaded, encoder: VisionEncoder, settings: EngineSettings | None = None
    ) -> None:
        self.settings = settings or EngineSettings()
        self._loaded = loaded
        family = loaded.family
        num_blocks = self._num_blocks()
        self.max_model_len = min(
            self.settings.max_model_len or family.max_positions, family.max_positions, num_blocks * BLOCK
        )
        self.stop_ids = stop_ids_of(loaded)
        self._runner = ModelRunner(loaded, num_blocks, cuda_graphs=self.settings.cuda_graphs)
        self._scheduler = Scheduler(
            Blocks(num_blocks),
            max_batch_tokens=self.settings.max_batch_tokens,
            max_running=self.settings.max_running,
            reuses_prefixes=self.settings.prefix_cache,
            keeps_images_whole=family.bidirectional_images,
        )
        self._encoder = encoder
        self._encoding = EncodingThread[Sequence]("featcache-encode", encoder, self._wake)
        self._looking_up = EncodingThread[Sequence]("featcache-lookup", encoder, self._wake)
        self._changed = threading.Condition()  # guards the four below
        self._incoming: deque[Sequence] = deque()
        self._num_open = 0
        self._has_news = False
        self._closing = False
        self._stepping = threading.Lock()  # held during a step: guards scheduler and pool
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="featcache-engine", daemon=True)
        self._thread.start()

    def _num_blocks(self) -> int:
        size = block_bytes(self._loaded.family.text_config, self._loaded.dtype)
        given = self.settings.kv_bytes
        if given is not None:
            budget = parse_size(given, "kv_bytes")
        elif self._loaded.device.type == "cuda":
            budget = int(GPU_SHARE * torch.cuda.mem_get_info(self._loaded.device)[0])
        else:
            budget = CPU_BYTES
        if budget < 2 * size:
            raise ConfigError(f"kv_bytes: {budget}; two blocks of this model take {2 * size}")
        return budget // size

    # For callers

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Start a request.

        Raises ContextLengthError, QueueFullError, or CancelledError if the engine is closed.
        """
        params = params or SamplingParams()
        if len(prompt.ids) >= self.max_model_len:
            raise ContextLengthError(
                f"messages: the prompt has {len(prompt.ids)} tokens, "
                f"and with its answer at most {self.max_model_len} are possible"
            )
        if not prompt.ids:
            raise RequestError("messages: the prompt has no tokens")
        sequence: Sequence
        generation = Generation(lambda: self._cancel(sequence))
        sequence = Sequence(prompt, params, generation, self._loaded.tokenizer, self.max_model_len)
        with self._changed:
            if self._closing:
                raise CancelledError("the engine is closed")
            if self._num_open >= self.settings.max_waiting + self.settings.max_running:
                raise QueueFullError(f"{self._num_open} requests are under way or waiting; try again later")
            self._num_open += 1
            self._incoming.append(sequence)
            self._news()
        return generation

    def _cancel(self, sequence: Sequence) -> None:
        sequence.is_cancelled = True
        self._wake()

    def clear_prefix_cache(self) -> int:
        """Forget all KV blocks that nobody uses now, and let none in use be found. Returns how many."""
        with self._stepping:
            return self._scheduler.blocks.clear()

    def stats(self) -> dict[str, int]:
        """Requests and blocks now, and counters since the start."""
        blocks = self._scheduler.blocks
        counted = ["finished", "failed", "cancelled", "steps"]
        counted += ["prompt_tokens", "cached_tokens", "completion_tokens"]
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting) + len(self._incoming),
            "blocks": blocks.num_blocks,
            "blocks_used": blocks.num_used,
            "blocks_kept": blocks.num_kept,
            "blocks_evicted": blocks.evicted,
            "preemptions": self._scheduler.preemptions,
            "graph_steps": 0 if self._runner.graphs is None else self._runner.graphs.replays,
            **{name: self._counts[name] for name in counted},
        }

    def check(self) -> list[str]:
        """Recount the blocks; what doesn't add up."""
        with self._stepping:
            return self._scheduler.check()

    def close(self) -> None:
        """Cancel what runs or waits, and end the threads. May be called again."""
        with self._changed:
            self._closing = True
            self._news()
        self._thread.join()
        self._encoding.close()
        self._looking_up.close()

    # The loop

    def _wake(self) -> None:
        with self._changed:
            self._news()

    def _news(self) -> None:
        self._has_news = True
        self._changed.notify_all()

    def _run(self) -> None:
        if self._loaded.device.type == "cuda":
            torch.cuda.set_device(self._loaded.device)  # of this thread: Triton and graphs launch on it
        while True:
            with self._changed:
                while not (self._has_news or self._scheduler.has_work):
                    self._changed.wait()
                self._has_news = False
                is_last = self._closing
                incoming = list(self._incoming)
                self._incoming.clear()
            with self._stepping:
                for sequence in incoming:
                    self._scheduler.add(sequence)
                if is_last:
                    self._cancel_all()
                    return
                self.step()

    def step(self) -> None:
        """One step of all sequences."""
        self._take_encoded()
        self._drop_cancelled()
        self._get_features(self._scheduler.prepare())
        self._scheduler.admit()
        parts = self._scheduler.plan()
        if not parts:
            return
        try:
            complete, logits = self._runner.run(parts)
            self._scheduler.computed(parts)
            self._choose(complete, logits)
        except Exception as exc:  # out of memory, a bug: it ends these requests, not the engine
            log.exception("engine: a step failed")
            for sequence in {part.sequence for part in parts}:
                if not sequence.is_over:
                    self._fail(sequence, engine_error(exc))
        self._counts["steps"] += 1

    def _get_features(self, all_wanted: Items[Wanted[Sequence]]) -> None:
        """Those that are all held don't wait for those that have to be made."""
        held: list[Wanted[Sequence]] = []
        missing: list[Wanted[Sequence]] = []
        for wanted in all_wanted:
            keys = [wanted.sequence.prompt.images[image].key for image in wanted.images]
            is_held = all(self._encoder.store.tier_of(key) is not None for key in keys)
            (held if is_held else missing).append(wanted)
        self._looking_up.want(held)
        self._encoding.want(missing)

    def _take_encoded(self) -> None:
        for encoded in [*self._looking_up.take(), *self._encoding.take()]:
            sequence = encoded.sequence
            sequence.encode_s += encoded.seconds
            if sequence.is_over:
                for lease in encoded.leases.values():
                    lease.release()
                continue
            sequence.leases |= encoded.leases
            sequence.features_ready = encoded.ready
            for image, lease in encoded.leases.items():
                sequence.tiers[image] = sequence.tiers[image] or lease.tier
            if encoded.error is not None:
                self._fail(sequence, encoded.error)
            else:
                sequence.to(State.READY)

    def _drop_cancelled(self) -> None:
        for sequence in [*self._scheduler.waiting, *self._scheduler.running]:
            if sequence.is_cancelled:
                self._finish(sequence, State.CANCELLED, "cancelled")

    def _choose(self, sequences: Items[Sequence], logits: torch.Tensor) -> None:
        """The next token of each sequence, of which `logits` has a row."""
        if not sequences:
            return
        best = logits.argmax(-1).tolist()  # waits for the device: the only time in a step
        for row, sequence in enumerate(sequences):
            try:
                if sequence.params.is_plain_greedy:
                    self._take_token(sequence, best[row], None)
                else:
                    self._take_token(sequence, *sequence.sampler.choose(logits[row]))
            except Exception as exc:  # of its logits hook, say
                self._fail(sequence, engine_error(exc))

    def _take_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        sequence.sampler.note(token)
        reason = sequence.take(token, logprobs, self.stop_ids)
        if reason is not None:
            self._finish(sequence, State.FINISHED, reason)

    # Ends

    def _finish(self, sequence: Sequence, state: State, reason: FinishReason) -> None:
        delta, reply = sequence.end(reason)
        self._end(sequence, state)
        self._counts["prompt_tokens"] += reply.usage.prompt_tokens
        self._counts["cached_tokens"] += reply.usage.cached_tokens
        self._counts["completion_tokens"] += reply.usage.completion_tokens
        sequence.generation.finish(delta, reply)

    def _fail(self, sequence: Sequence, error: FeatcacheError) -> None:
        self._end(sequence, State.FAILED)
        sequence.generation.fail(error)

    def _end(self, sequence: Sequence, state: State) -> None:
        self._scheduler.remove(sequence)
        sequence.to(state)
        self._counts[state.value] += 1
        with self._changed:
            self._num_open -= 1

    def _cancel_all(self) -> None:
        self._take_encoded()
        for sequence in [*self._scheduler.waiting, *self._scheduler.running]:
            self._fail(sequence, CancelledError("the engine was closed"))


def stop_ids_of(loaded: Loaded) -> frozenset[int]:
    """The tokens at which the model itself ends an answer."""
    eos = loaded.model.generation_config.eos_token_id
    if eos is None:
        eos = loaded.tokenizer.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
