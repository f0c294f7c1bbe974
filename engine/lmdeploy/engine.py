"""`LMDeployEngine`: requests in, tokens out, as `Engine` does it, with LMDeploy's engine generating.

One thread runs LMDeploy's event loop, and every request is a task on it: get the features of its images, hand
them over as spans, pass tokens on. Two threads beside it get features (see `engine/encoding.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from featcache.engine.answer import Answer
from featcache.engine.encoder import VisionEncoder
from featcache.engine.encoding import Encoded, EncodingThread, Wanted, engine_error
from featcache.engine.engine import stop_ids_of
from featcache.engine.generation import FinishReason, Generation
from featcache.engine.lmdeploy.sampling import (
    Adjustment,
    check_sampling,
    generation_config,
    token_logprobs,
)
from featcache.engine.lmdeploy.spans import cut
from featcache.engine.loading import Loaded
from featcache.engine.prompt import Prompt
from featcache.engine.sampling import SamplingParams
from featcache.errors import (
    CancelledError,
    ConfigError,
    ContextLengthError,
    FeatcacheError,
    QueueFullError,
    RequestError,
)
from featcache.features import Features

log = logging.getLogger("featcache")


@dataclass(frozen=True, slots=True)
class LMDeploySettings:
    """Limits of LMDeploy's engine.

    tp: GPUs that share one model. kv_share: of the GPU memory that is free once the model is loaded, for KV
        blocks; the rest is for features, the vision tower and activations.
    max_model_len: tokens of prompt and answer at most; by default what the model and the blocks allow.
    max_running, max_waiting: requests that run, and that may wait. max_batch_tokens: of one prefill.
    block: tokens of a KV block. prefix_cache: reuse KV blocks across requests.
    cuda_graphs: decode by CUDA graphs.
    """

    tp: int = 1
    kv_share: float = 0.7
    max_model_len: int | None = None
    max_running: int = 64
    max_waiting: int = 1024
    max_batch_tokens: int = 8192
    block: int = 64
    prefix_cache: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("tp", "max_model_len", "max_running", "max_waiting", "max_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value}; it is at least 1")
        if not 0 < self.kv_share < 1:
            raise ConfigError(f"kv_share: {self.kv_share}; it is a share, above 0 and below 1")


class _Handed(NamedTuple):
    """Spans for LMDeploy, and what has to stay until it is done with them."""

    items: list[Any]
    held: list[Any]  # leases whose rows are still being copied
    copied: torch.cuda.Event | None


class LMDeployEngine:
    """Runs requests on LMDeploy's engine. Thread-safe. `close` it.

    pipeline: lmdeploy.pytorch.engine.Engine, made inside `our_module_map()`.
    """

    def __init__(
        self, loaded: Loaded, encoder: VisionEncoder, settings: LMDeploySettings, pipeline: Any
    ) -> None:
        self.settings = settings
        self._loaded = loaded
        self._encoder = encoder
        self._pipeline = pipeline
        limits = [loaded.family.max_positions, int(pipeline.max_session_len)]
        self.max_model_len = min([*limits, settings.max_model_len or limits[0]])
        self.stop_ids = stop_ids_of(loaded)
        self._in_process = settings.tp == 1
        self._stream: torch.cuda.Stream | None = None
        if self._in_process and loaded.device.type == "cuda":
            self._stream = torch.cuda.Stream(loaded.device)  # type: ignore[no-untyped-call]
        self._session_ids = itertools.count(1)
        self._epoch = 0  # of the prefix cache: part of every content hash
        self._changed = threading.Lock()  # guards the three below
        self._num_open = 0
        self._closing = False
        self._counts: Counter[str] = Counter()
        # touched by the loop's thread alone
        self._tasks: dict[Answer, asyncio.Task[None]] = {}
        self._featured: dict[Answer, asyncio.Future[Encoded[Answer]]] = {}
        self._streaming: dict[Answer, tuple[Any, int]] = {}
        self._idle = [pipeline.create_instance() for _ in range(settings.max_running)]
        self._slots = asyncio.Semaphore(settings.max_running)
        self._loop = asyncio.new_event_loop()
        self._encoding = EncodingThread[Answer]("featcache-encode", encoder, self._wake)
        self._looking_up = EncodingThread[Answer]("featcache-lookup", encoder, self._wake)
        self._thread = threading.Thread(target=self._run, name="featcache-lmdeploy", daemon=True)
        self._thread.start()

    # For callers

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Start a request.

        Raises ContextLengthError, QueueFullError, RequestError for sampling that LMDeploy can't do, or
        CancelledError if the engine is closed.
        """
        params = params or SamplingParams()
        check_sampling(params, in_process=self._in_process)
        if len(prompt.ids) >= self.max_model_len:
            raise ContextLengthError(
                f"messages: the prompt has {len(prompt.ids)} tokens, "
                f"and with its answer at most {self.max_model_len} are possible"
            )
        if not prompt.ids:
            raise RequestError("messages: the prompt has no tokens")
        answer: Answer
        generation = Generation(lambda: self._cancel(answer))
        answer = Answer(prompt, params, generation, self._loaded.tokenizer, self.max_model_len)
        with self._changed:
            if self._closing:
                raise CancelledError("the engine is closed")
            if self._num_open >= self.settings.max_waiting + self.settings.max_running:
                raise QueueFullError(f"{self._num_open} requests are under way or waiting; try again later")
            self._num_open += 1
        self._loop.call_soon_threadsafe(self._begin, answer)
        return generation

    def clear_prefix_cache(self) -> int:
        """Let no KV block of now be found again; LMDeploy drops them as it needs their memory. Returns 0."""
        self._epoch += 1
        return 0

    def stats(self) -> dict[str, int]:
        """Requests and blocks now, and counters since the start."""
        with self._changed:
            counts, num_open = Counter(self._counts), self._num_open
        metrics = self._pipeline.get_schedule_metrics()
        blocks = int(self._pipeline.engine_config.num_gpu_blocks)
        running = len(self._streaming)
        counted = ["finished", "failed", "cancelled", "prompt_tokens", "cached_tokens", "completion_tokens"]
        return {
            "running": running,
            "waiting": num_open - running,
            "blocks": blocks,
            "blocks_used": round(metrics.cache_usage * blocks),
            **{name: counts[name] for name in counted},
        }

    def check(self) -> list[str]:
        """LMDeploy keeps its own accounts; there is nothing of ours to recount."""
        return []

    def close(self) -> None:
        """Cancel what runs or waits, and end LMDeploy's engine and the threads. May be called again."""
        with self._changed:
            is_first, self._closing = not self._closing, True
        if is_first:
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._encoding.close()
        self._looking_up.close()

    # The loop

    def _run(self) -> None:
        if self._loaded.device.type == "cuda":
            torch.cuda.set_device(self._loaded.device)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin(self, answer: Answer) -> None:
        task = self._loop.create_task(self._serve(answer))
        self._tasks[answer] = task
        task.add_done_callback(functools.partial(self._end_task, answer))

    def _end_task(self, answer: Answer, task: asyncio.Task[None]) -> None:
        del self._tasks[answer]
        if task.cancelled():  # before it streamed, perhaps before its first step
            if self._closing:
                self._fail(answer, CancelledError("the engine was closed"))
            else:
                self._finish(answer, "cancelled")

    async def _serve(self, answer: Answer) -> None:
        try:
            async with self._slots:
                self._finish(answer, await self._answered(answer))
        except Exception as exc:
            if not isinstance(exc, FeatcacheError):
                log.exception("engine: a request failed")
            self._fail(answer, engine_error(exc))

    async def _answered(self, answer: Answer) -> FinishReason:
        handed = await self._hand_over(answer)
        instance = self._idle.pop()
        session_id = next(self._session_ids)
        self._streaming[answer] = (instance, session_id)
        try:
            return await self._stream_tokens(answer, handed, instance, session_id)
        finally:
            del self._streaming[answer]
            self._idle.append(instance)
            if handed.copied is not None:
                handed.copied.synchronize()
            for lease in handed.held:
                lease.release()

    async def _stream_tokens(
        self, answer: Answer, handed: _Handed, instance: Any, session_id: int
    ) -> FinishReason:
        adjustment = Adjustment(answer) if Adjustment.is_needed(answer.params) else None
        answer.mark("running")
        outputs: AsyncIterator[Any] = instance.async_stream_infer(
            session_id,
            answer.prompt.ids,
            gen_config=generation_config(answer, self.stop_ids, adjustment),
            multimodal=[{"featcache": handed.items}] if handed.items else None,
        )
        reason: FinishReason | None = "cancelled" if answer.is_cancelled else None
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                _check(output.status)
                self._account(answer, output)
                if reason is None and adjustment is not None and adjustment.error is not None:
                    await instance.async_cancel(session_id)
                    raise adjustment.error
                for token, logprobs in _tokens(answer, output):
                    if reason is None:
                        reason = answer.take(token, logprobs, self.stop_ids)
                        if reason is not None and output.status.name == "SUCCESS":
                            await instance.async_cancel(session_id)  # at a stop text, which is ours to see
                if output.status.name != "SUCCESS":
                    break
        if reason is None and not answer.is_cancelled and self._closing:
            raise CancelledError("the engine was closed")
        return reason or ("cancelled" if answer.is_cancelled else "length")

    def _account(self, answer: Answer, output: Any) -> None:
        """What LMDeploy found in its prefix cache, at the first output."""
        if len(answer.ids) > answer.num_prompt or output.req_metrics is None:
            return
        answer.cached = int(output.req_metrics.cached_tokens)
        needed = set(answer.images_after(answer.cached))
        answer.tiers = [tier if image in needed else None for image, tier in enumerate(answer.tiers)]

    # Features

    async def _hand_over(self, answer: Answer) -> _Handed:
        """The spans of a prompt with their rows. Raises what one of its images failed with."""
        prompt = answer.prompt
        if self._epoch:
            prompt = _salted(prompt, self._epoch)
        encoded = await self._features(answer) if prompt.images else None
        per_image: dict[int, list[torch.Tensor]] = {}
        held: list[Any] = []
        copied = None if encoded is None else encoded.ready
        leases = {} if encoded is None else encoded.leases
        try:
            for image, lease in leases.items():
                per_image[image], is_copying = self._placed(lease.features, copied)
                (held.append if is_copying else _release)(lease)
            if held and self._stream is not None:
                copied = self._stream.record_event()
            return _Handed(self._items(prompt, per_image, copied), held, copied if held else None)
        except BaseException:
            for lease in leases.values():
                if not lease.is_released:
                    lease.release()
            raise

    def _items(
        self, prompt: Prompt, per_image: Mapping[int, list[torch.Tensor]], ready: torch.cuda.Event | None
    ) -> list[Any]:
        from featcache.engine.lmdeploy.models import item_of

        token = self._loaded.family.image_token_id
        return [
            item_of(
                span,
                []
                if span.image is None
                else [level[span.row : span.row + span.stop - span.start] for level in per_image[span.image]],
                token,
                ready if self._in_process else None,
            )
            for span in cut(prompt, self.settings.block)
        ]

    def _placed(self, features: Features, ready: torch.cuda.Event | None) -> tuple[list[torch.Tensor], bool]:
        """The tensors where LMDeploy may keep them as long as it likes, and whether they are being copied.

        A tensor of the device tier lives as long as somebody holds it, evicted or not; memory of the host
        tier is used again, and what stands in it is copied.
        """
        levels = [f"deepstack.{level}" for level in range(len(features.tensors) - 1)]
        tensors = [features.tensors[name] for name in ("rows", *levels)]
        if self._stream is None:
            return [tensor.to("cpu", copy=True) for tensor in tensors], False
        if all(tensor.is_cuda for tensor in tensors):
            return tensors, False
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            return [tensor.to(self._loaded.device, non_blocking=True) for tensor in tensors], True

    async def _features(self, answer: Answer) -> Encoded[Answer]:
        images = list(range(len(answer.prompt.images)))
        store = self._encoder.store
        is_held = all(store.tier_of(ref.key) is not None for ref in answer.prompt.images)
        future = self._featured[answer] = self._loop.create_future()
        (self._looking_up if is_held else self._encoding).want([Wanted(answer, images)])
        try:
            encoded: Encoded[Answer] = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # both in one turn of the loop
                future.result().release()
            raise
        finally:
            del self._featured[answer]
        if encoded.error is not None:
            encoded.release()
            raise encoded.error
        answer.encode_s += encoded.seconds
        for image, lease in encoded.leases.items():
            answer.tiers[image] = lease.tier
        return encoded

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_encoded)

    def _take_encoded(self) -> None:
        for encoded in [*self._looking_up.take(), *self._encoding.take()]:
            future = self._featured.get(encoded.sequence)
            if future is not None and not future.done():
                future.set_result(encoded)
            else:
                encoded.release()

    # Ends

    def _cancel(self, answer: Answer) -> None:
        answer.is_cancelled = True
        self._loop.call_soon_threadsafe(self._stop, answer)

    def _stop(self, answer: Answer) -> None:
        """End a request, whatever it waits for."""
        if answer in self._streaming:
            instance, session_id = self._streaming[answer]
            self._loop.create_task(instance.async_cancel(session_id))
        elif answer in self._tasks:
            self._tasks[answer].cancel()

    async def _end_all(self) -> None:
        for answer in list(self._tasks):
            self._stop(answer)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=10)
        self._pipeline.close()
        await asyncio.sleep(0)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=10)

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        delta, reply = answer.end(reason)
        with self._changed:
            self._num_open -= 1
            self._counts["cancelled" if reason == "cancelled" else "finished"] += 1
            self._counts["prompt_tokens"] += reply.usage.prompt_tokens
            self._counts["cached_tokens"] += reply.usage.cached_tokens
            self._counts["completion_tokens"] += reply.usage.completion_tokens
        answer.generation.finish(delta, reply)

    def _fail(self, answer: Answer, error: FeatcacheError) -> None:
        with self._changed:
            self._num_open -= 1
            self._counts["failed"] += 1
        answer.generation.fail(error)


def _release(lease: Any) -> None:
    lease.release()


def _salted(prompt: Prompt, epoch: int) -> Prompt:
    return dataclasses.replace(prompt, salt=f"{prompt.salt}#{epoch}")


def _tokens(answer: Answer, output: Any) -> list[tuple[int, Any]]:
    """New tokens, each with its log-probabilities if they were asked for."""
    if answer.params.logprobs is None:
        return [(token, None) for token in output.token_ids]
    found = output.logprobs or []
    return [
        (token, token_logprobs(answer.params, token, logprobs))
        for token, logprobs in zip(output.token_ids, found, strict=False)
    ]


def _check(status: Any) -> None:
    """Raises what a request fails with at this status of LMDeploy's."""
    name = status.name
    if name in ("SUCCESS", "FINISH", "CANCEL"):
        return
    if name == "INPUT_LENGTH_ERROR":
        raise ContextLengthError("messages: the prompt is longer than LMDeploy's session length")
    if name == "OUT_OF_MEMORY":
        raise RequestError("not enough memory for this request beside the others; try again later")
    raise FeatcacheError(f"LMDeploy's engine failed on this request: {name}")
