"""Two processes that answer the same requests: LMDeploy as it is, and ours on LMDeploy.

Both engines load the same folder with the same settings, take the same messages, and are asked in turn by
`h200_lmdeploy.py`. Each process holds one, because LMDeploy's map of model classes is one for a process.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LMDEPLOY_ENABLE_CHECK_ENV", "0")

SESSION_LEN = 16384
THREADS = 32
Message = dict[str, Any]


class Request(NamedTuple):
    messages: list[Message]
    tokens: int = 4
    logprobs: bool = False


class Got(NamedTuple):
    """Milliseconds: prepare_ms until the engine has the request, ttft_ms and total_ms from the very start."""

    tokens: list[int]
    logprobs: list[float]
    prepare_ms: float
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    cached: int
    tiers: list[str]


class Run(NamedTuple):
    got: list[Got]
    seconds: float


class Stock:
    """LMDeploy's own pipeline: VLAsyncEngine on the PyTorch engine, as its api_server runs it."""

    def __init__(self, folder: Path, share: float, stand_in: bool) -> None:
        from lmdeploy import PytorchEngineConfig
        from lmdeploy.serve.core import VLAsyncEngine
        from lmdeploy.utils import get_logger

        get_logger("lmdeploy").setLevel("WARNING")  # else it writes two lines a request
        config = PytorchEngineConfig(
            dtype="float16" if stand_in else "bfloat16",
            session_len=SESSION_LEN,
            max_batch_size=64,
            cache_max_entry_count=share,
            enable_prefix_caching=True,  # LMDeploy turns it off for models whose processing can't have it
            enable_metrics=False,
            logprobs_mode="raw_logprobs",
        )
        cls = _without_engine(VLAsyncEngine) if stand_in else VLAsyncEngine
        self.loop = asyncio.new_event_loop()
        self.engine = cls(str(folder), backend="pytorch", backend_config=config)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._attach(), self.loop).result()

    async def _attach(self) -> None:
        self.engine.session_mgr.attach_event_loop(asyncio.get_running_loop())

    def run(self, requests: Sequence[Request], prepared: bool = False) -> Run:
        return asyncio.run_coroutine_threadsafe(self._run(requests, prepared), self.loop).result()

    async def _run(self, requests: Sequence[Request], prepared: bool) -> Run:
        ready: list[Any] = [None] * len(requests)
        if prepared:
            ready = [await self._prepare(request) for request in requests]
        began = time.perf_counter()
        got = await asyncio.gather(
            *(self._one(request, done) for request, done in zip(requests, ready, strict=True))
        )
        return Run(list(got), time.perf_counter() - began)

    async def _prepare(self, request: Request) -> Any:
        from lmdeploy import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=request.tokens,
            ignore_eos=True,
            do_sample=False,
            top_k=1,
            logprobs=1 if request.logprobs else None,
        )
        session = self.engine.session_mgr.get()
        return await self.engine.preprocess(messages=request.messages, session_id=session, gen_config=config)

    async def _one(self, request: Request, ready: Any) -> Got:
        began = time.perf_counter()
        ready = ready or await self._prepare(request)
        prepared, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        logprobs: list[float] = []
        prompt, cached = 0, 0
        async for output in self.engine.generate(ready):
            new = list(output.token_ids or ())
            if new and not first:
                first = time.perf_counter()
            tokens += new
            if request.logprobs and output.logprobs:
                logprobs += [float(found[token]) for token, found in zip(new, output.logprobs, strict=False)]
            prompt, cached = output.input_token_len, max(cached, output.cached_tokens or 0)
        ended = time.perf_counter()
        ms = [1e3 * (at - began) for at in (prepared, first, ended)]
        return Got(tokens, logprobs, *ms, prompt, cached, [])

    def close(self) -> None:
        pass


class Ours:
    """CachedVLM with backend="lmdeploy"."""

    def __init__(self, folder: Path, share: float, stand_in: bool, store: Path) -> None:
        self.vlm = _stand_in(folder, store) if stand_in else _open(folder, share, store)
        self.pool = ThreadPoolExecutor(THREADS)

    def run(self, requests: Sequence[Request], prepared: bool = False) -> Run:
        prompts: list[Any] = [None] * len(requests)
        if prepared:
            prompts = list(self.pool.map(self._prompt, requests))
        began = time.perf_counter()
        got = list(self.pool.map(self._one, requests, prompts))
        return Run(got, time.perf_counter() - began)

    def _prompt(self, request: Request) -> Any:
        from featcache.engine.prompt import build_prompt

        return build_prompt(self.vlm.loaded, self.vlm.encoder, request.messages)

    def _one(self, request: Request, prompt: Any) -> Got:
        from featcache.engine.sampling import SamplingParams

        began, first = time.perf_counter(), [0.0]

        def listen(delta: Any) -> None:
            if delta.token_ids and not first[0]:
                first[0] = time.perf_counter()

        prompt = prompt or self._prompt(request)
        prepared = time.perf_counter()
        params = SamplingParams(
            max_tokens=request.tokens, ignore_eos=True, logprobs=0 if request.logprobs else None
        )
        generation = self.vlm.engine.submit(prompt, params)
        generation.listen(listen)
        reply = generation.result()
        ms = [1e3 * (at - began) for at in (prepared, first[0], time.perf_counter())]
        return Got(
            list(reply.token_ids),
            [item.logprob for item in reply.logprobs],
            *ms,
            reply.usage.prompt_tokens,
            reply.usage.cached_tokens,
            [image.tier for image in reply.images],
        )

    # What only ours can do

    def forget_prefixes(self) -> None:
        self.vlm.engine.clear_prefix_cache()

    def swap_features(self, first: list[Message], second: list[Message]) -> None:
        """Put the features of the image in `second` under the key of the one in `first`: the wrong ones."""
        from featcache.engine.prompt import build_prompt
        from featcache.features import Features

        store = self.vlm.store
        right, wrong = (build_prompt(self.vlm.loaded, self.vlm.encoder, m).images[0] for m in (first, second))
        [lease] = self.vlm.encoder.features([wrong])
        tensors = {name: tensor.clone() for name, tensor in lease.features.tensors.items()}
        features = Features(tensors, lease.features.layout, right.fingerprint)
        lease.release()
        store.delete(right.key)
        store.put(right.key, features)

    def copy_synchronously(self, flag: bool) -> None:
        """Let every call of the tower end with `.cpu()` on its rows, beside the store's own copies."""
        family = self.vlm.encoder.family
        family.__dict__.pop("encode", None)
        if flag:
            encode = family.encode

            def with_cpu(batch: Any) -> Any:
                images = encode(batch)
                for tensors in images:
                    for tensor in tensors.values():
                        tensor.cpu()
                return images

            family.encode = with_cpu

    def tower_difference(self, folder: Path, messages: list[list[Message]]) -> float:
        """The largest difference between this tower's rows and transformers', as a share of the largest."""
        from featcache import FeatureStore
        from featcache.engine.encoder import VisionEncoder
        from featcache.engine.loading import load_model
        from featcache.engine.prompt import build_prompt

        loaded = load_model(folder, dtype="bfloat16", tower_only=True)
        worst = 0.0
        with FeatureStore.open(None) as store:
            encoder = VisionEncoder(loaded, store)
            for one in messages:
                mine, theirs = (
                    e.encode([build_prompt(self.vlm.loaded, e, one).images[0].source])[0].rows.float()
                    for e in (self.vlm.encoder, encoder)
                )
                worst = max(worst, float((mine - theirs).abs().max() / theirs.abs().max()))
        return worst

    def flush(self) -> None:
        self.vlm.store.flush()

    def close(self) -> None:
        self.vlm.close()


def _open(folder: Path, share: float, store: Path) -> Any:
    from featcache.engine import CachedVLM
    from featcache.engine.lmdeploy.engine import LMDeploySettings

    settings = LMDeploySettings(kv_share=share, max_model_len=SESSION_LEN)
    return CachedVLM.from_pretrained(
        folder,
        backend="lmdeploy",
        dtype="bfloat16",
        store=store,
        host_bytes="8GiB",
        settings=settings,
    )


def _stand_in(folder: Path, store: Path) -> Any:
    from lmdeploy_standin import open_stand_in

    from featcache import FeatureStore
    from featcache.engine.loading import load_model

    loaded = load_model(folder, device="cpu", dtype="float32")
    return open_stand_in(
        loaded,
        FeatureStore.open(store),
        block=64,
        blocks=1024,
        session_len=SESSION_LEN,
        max_model_len=SESSION_LEN,
    )


def _without_engine(cls: Any) -> Any:
    """LMDeploy's pipeline with all but the engine, to try the script where there is no GPU."""
    from lmdeploy.messages import EngineOutput, ResponseType

    class Instance:
        async def async_stream_infer(self, session_id: int, gen_config: Any, **_: Any) -> Any:
            for number in range(gen_config.max_new_tokens):
                is_last = number + 1 == gen_config.max_new_tokens
                yield EngineOutput(
                    ResponseType.FINISH if is_last else ResponseType.SUCCESS, [40], [{40: -1.0}]
                )
                await asyncio.sleep(0)

        async def async_cancel(self, session_id: int) -> None: ...
        async def async_end(self, session_id: int) -> None: ...

    class Engine:
        def __init__(self, config: Any) -> None:
            self.engine_config = config

        def create_instance(self, *_: Any) -> Instance:
            return Instance()

        def close(self) -> None: ...

    class WithoutEngine(cls):  # type: ignore[misc]
        def _build_pytorch(self, model_path: str, backend_config: Any = None, **_: Any) -> Engine:
            return Engine(backend_config)

    return WithoutEngine


class Worker:
    """One of them in its process: `worker.run(...)` calls its `run(...)`."""

    def __init__(self, kind: str, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, kind, args), daemon=True)
        self._process.start()
        there.close()
        self.started_s = self._receive()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pipe.send((name, args, kwargs))
            return self._receive()

        return call

    def _receive(self) -> Any:
        try:
            is_right, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the worker process is gone") from None
        if not is_right:
            raise RuntimeError(value)
        return value

    def end(self) -> None:
        self.close()
        self._process.terminate()
        self._process.join()


def _serve(pipe: Any, kind: str, args: Any) -> None:
    began = time.perf_counter()
    try:
        worker = {"stock": Stock, "ours": Ours}[kind](*args)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    gc.freeze()
    pipe.send((True, time.perf_counter() - began))
    while True:
        name, positional, named = pipe.recv()
        try:
            pipe.send((True, getattr(worker, name)(*positional, **named)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
