"""`Service`: a loaded model behind the routes, and what they share. One lives as long as the server runs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from featcache.engine.engine import Generation
from featcache.engine.families.base import ImageOptions
from featcache.engine.prompt import Prompt, build_prompt
from featcache.engine.sampling import SamplingParams
from featcache.engine.vlm import CachedVLM
from featcache.server.answers.grammar import Grammars
from featcache.server.answers.tools import understands_tools
from featcache.server.auth import Caller, Keys, read_keys
from featcache.server.errors import ApiError
from featcache.server.media.addresses import CheckedNetwork, is_public
from featcache.server.media.fetcher import MediaFetcher, MediaRules
from featcache.server.media.images import ImageReader
from featcache.server.media.urls import UrlMemory
from featcache.server.metrics import Metrics
from featcache.server.namespaces import Namespaces
from featcache.server.recent import RecentImages, Savings
from featcache.server.settings import ServerSettings

LOG = logging.getLogger("featcache.server")

_T = TypeVar("_T")

_WORKERS = (
    16  # threads that parse, hash, decode and build prompts; pictures decode without the interpreter's lock
)
_WARMERS = 2  # /v1/features waits for the tower in threads of its own, so that chats never wait for them


class Service:
    """Made on the event loop, once the model is loaded. Everything that blocks goes through `run`."""

    def __init__(self, vlm: CachedVLM, settings: ServerSettings) -> None:
        self.vlm = vlm
        self.settings = settings
        self.name = settings.served_model_name or vlm.loaded.name
        self.started = time.time()
        self.keys = keys_of(settings)
        self.namespaces = Namespaces(vlm.store.path)
        self.recent = RecentImages()
        self.savings = Savings()
        self.has_tools = understands_tools(vlm.loaded.template.source)
        self._executor = ThreadPoolExecutor(_WORKERS, thread_name_prefix="featcache-request")
        self._warmers = ThreadPoolExecutor(_WARMERS, thread_name_prefix="featcache-warm")
        self.media = MediaFetcher(
            media_rules(settings),
            UrlMemory(vlm.store),
            self._executor,
            CheckedNetwork(_anywhere if settings.allow_private_media else is_public),
        )
        self.images = ImageReader(vlm.encoder, self.media, self._executor, settings.max_images)
        self.metrics = Metrics(self)
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()  # held while the tokenizer is read: once
        self._defaults = sampling_defaults(vlm.loaded.model.generation_config)

    async def run(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    async def run_warm(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._warmers, call, *args)

    @property
    def max_model_len(self) -> int:
        return self.vlm.engine.max_model_len

    @property
    def fingerprint(self) -> str:
        return f"fc_{self.vlm.encoder.fingerprint.hex()[:16]}"

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that isn't served."""
        if name is not None and name not in (self.name, self.vlm.loaded.name):
            message = f"model: {name[:100]!r} isn't served here; there is {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def caller(self, authorization: str | None) -> Caller:
        return self.namespaces.current(self.keys.caller(authorization))

    def grammars(self) -> Grammars:
        """Reads the tokenizer the first time, which may take a second: call it off the event loop."""
        with self._making_grammars:
            if self._grammars is None:
                loaded = self.vlm.loaded
                vocabulary = loaded.model.get_output_embeddings().weight.shape[0]
                self._grammars = Grammars(loaded.tokenizer, vocabulary, sorted(self.vlm.engine.stop_ids))
            return self._grammars

    def build_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ImageOptions,
        salt: str,
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> Prompt:
        return build_prompt(
            self.vlm.loaded,
            self.vlm.encoder,
            messages,
            options=options,
            salt=salt,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def submit(self, prompt: Prompt, sampling: dict[str, Any]) -> Generation:
        given = {name: value for name, value in sampling.items() if value is not None}
        return self.vlm.engine.submit(prompt, SamplingParams.of({**self._defaults, **given}))

    async def close(self) -> None:
        """Ends downloads and running requests, writes what is queued, closes the store."""
        await self.media.close()
        await asyncio.get_running_loop().run_in_executor(None, self.vlm.close)
        for executor in (self._executor, self._warmers):
            executor.shutdown(wait=False, cancel_futures=True)


def keys_of(settings: ServerSettings) -> Keys:
    listed = read_keys(settings.api_key_file) if settings.api_key_file else []
    return Keys([*settings.api_key, *listed], settings.admin_key, shared_features=settings.shared_features)


def media_rules(settings: ServerSettings) -> MediaRules:
    return MediaRules(
        max_bytes=settings.media_max_bytes,
        timeout_s=settings.media_timeout,
        allowed_domains=settings.allowed_media_domain,
        local_path=settings.allowed_local_media_path,
        ttl_s=settings.media_ttl,
    )


def sampling_defaults(config: Any) -> dict[str, Any]:
    """What a model's own generation config says, where a request doesn't: greedy unless it samples."""
    if not getattr(config, "do_sample", False):
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


def _anywhere(address: str) -> bool:
    return True
