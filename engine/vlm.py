"""`CachedVLM`: a vision-language model that never encodes the same image twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from featcache.engine.encoder import VisionEncoder
from featcache.engine.engine import Engine, EngineSettings, Generation, Reply, TokenDelta
from featcache.engine.families.base import ImageOptions
from featcache.engine.loading import Loaded, load_model
from featcache.engine.prompt import build_prompt
from featcache.engine.sampling import SamplingParams
from featcache.errors import ConfigError, FeatcacheError, RequestError
from featcache.features import Features
from featcache.images import ImageSource
from featcache.settings import DEFAULT_STORE
from featcache.store import FeatureStore

if TYPE_CHECKING:
    from featcache.engine.lmdeploy.engine import LMDeployEngine, LMDeploySettings
    from featcache.engine.warm.report import Progress, WarmReport
    from featcache.engine.warm.sources import Source

Message = Mapping[str, Any]
Backend = Literal["native", "lmdeploy"]


class CachedVLM:
    """A vision-language model whose image features, and the KV blocks that stand on them, are kept.

    Make one with `from_pretrained`. All methods may be called from several threads; a context manager.
    """

    def __init__(
        self,
        loaded: Loaded,
        store: FeatureStore,
        encoder: VisionEncoder,
        engine: Engine | LMDeployEngine,
        *,
        owns_store: bool,
    ) -> None:
        self.loaded = loaded
        self.store = store
        self.encoder = encoder
        self.engine = engine
        self._owns_store = owns_store

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | Loaded,
        *,
        store: str | os.PathLike[str] | FeatureStore | None = DEFAULT_STORE,
        host_bytes: int | str = "1GiB",
        disk_bytes: int | str = "20GiB",
        device_bytes: int | str = "2GiB",
        device: str | None = None,
        dtype: str = "auto",
        namespace: str = "",
        check: float = 0.0,
        compile_tower: bool = False,
        backend: Backend = "native",
        settings: EngineSettings | LMDeploySettings | None = None,
    ) -> Self:
        """Load a model and open the store.

        model: "tiny" (bundled), a local folder, a hub name, or what another CachedVLM has loaded.
        store: a folder, an open FeatureStore (which stays open), or None to keep features in memory only.
        device: "cuda" or "cpu"; by default CUDA if there is one. device_bytes only counts on CUDA.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        check: the share of hits, 0 to 1, that are encoded again and compared.
        compile_tower: run the tower's layers through torch.compile; its features have keys of their own.
        backend: "native" (transformers, on the CPU or one GPU), or "lmdeploy" (LMDeploy's PyTorch engine).
        settings: EngineSettings, or LMDeploySettings with backend="lmdeploy".

        Raises ModelError if the model can't be loaded or its images can't be cached exactly, ConfigError or
        StoreError if the store can't be opened.
        """
        pipeline: Any = None
        if backend == "lmdeploy":
            loaded, pipeline = _open_lmdeploy(model, settings, device, dtype, compile_tower)
        elif backend != "native":
            raise ConfigError(f"backend: {backend!r}; there are 'native' and 'lmdeploy'")
        elif isinstance(model, Loaded):
            loaded = model
        else:
            loaded = load_model(model, device=device, dtype=dtype, compile_tower=compile_tower)
        on_cuda = loaded.device.type == "cuda"
        opened = (
            store
            if isinstance(store, FeatureStore)
            else FeatureStore.open(
                None if store is None else Path(store).expanduser(),
                host_bytes=host_bytes,
                disk_bytes=disk_bytes,
                device=str(loaded.device) if on_cuda else None,
                device_bytes=device_bytes if on_cuda else 0,
            )
        )
        try:
            encoder = VisionEncoder(loaded, opened, namespace=namespace, check=check)
            engine = _engine(loaded, encoder, settings, pipeline)
        except BaseException:
            if pipeline is not None:
                pipeline.close()
            if opened is not store:
                opened.close()
            raise
        return cls(loaded, opened, encoder, engine, owns_store=opened is not store)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[False] = False,
        options: ImageOptions | None = None,
        **sampling: Any,
    ) -> Reply: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[True],
        options: ImageOptions | None = None,
        **sampling: Any,
    ) -> Iterator[TokenDelta]: ...
    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: bool = False,
        options: ImageOptions | None = None,
        **sampling: Any,
    ) -> Reply | Iterator[TokenDelta]:
        """Answer a conversation.

        messages: as OpenAI's chat API or transformers' templates take them.
        options: limits on the pixels or tiles of every image; part of each image's key.
        sampling: the fields of SamplingParams (max_tokens, temperature, stop, seed, …); greedy by default.

        Raises RequestError if the request can't be served as it stands, ImageError if an image can't be one.
        """
        generation = self.submit(messages, options=options, **sampling)
        return iter(generation) if stream else generation.result()

    def submit(
        self, messages: Sequence[Message], *, options: ImageOptions | None = None, **sampling: Any
    ) -> Generation:
        """Start a chat and return at once: iterate over it, wait for its `result()`, or `cancel()` it."""
        params = SamplingParams.of(sampling)
        prompt = build_prompt(self.loaded, self.encoder, messages, options=options or ImageOptions())
        return self.engine.submit(prompt, params)

    def chat_batch(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        options: ImageOptions | None = None,
        **sampling: Any,
    ) -> list[Reply | FeatcacheError]:
        """Answer several conversations at once; one that fails has its error in its place."""
        started: list[Generation | FeatcacheError] = []
        for messages in conversations:
            try:
                started.append(self.submit(messages, options=options, **sampling))
            except FeatcacheError as exc:
                started.append(exc)
        replies: list[Reply | FeatcacheError] = []
        for item in started:
            try:
                replies.append(item.result() if isinstance(item, Generation) else item)
            except FeatcacheError as exc:
                replies.append(exc)
        return replies

    def encode(self, images: Sequence[ImageSource], *, options: ImageOptions | None = None) -> list[Features]:
        """The features of images, on the host; only those that no tier has go through the tower.

        Raises ImageError for the first image that can't be one, RequestError for one image without a list.
        """
        if isinstance(images, (str, bytes, os.PathLike)) or not isinstance(images, Iterable):
            raise RequestError("images: it is a list of images; for one, write [image]")
        return self.encoder.encode(list(images), options or ImageOptions())

    def warm(
        self,
        sources: Source | Iterable[Source],
        *,
        options: ImageOptions | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> WarmReport:
        """Encode all images of `sources` that no tier holds, and store them; see featcache.engine.warm.

        sources: files, folders, globs, lists, URLs, archives, tables and request files.
        progress: called on this thread about ten times a second.
        """
        from featcache.engine.warm.pipeline import WarmSettings
        from featcache.engine.warm.run import warm

        settings = WarmSettings(images=options or ImageOptions())
        return warm(self.encoder, sources, settings, progress=progress)

    def stats(self) -> dict[str, Any]:
        """Counters of the store's tiers, the encoder and the engine, ready for JSON."""
        return {
            "store": self.store.stats().to_json(),
            "encoder": self.encoder.stats(),
            "engine": self.engine.stats(),
        }

    def refresh(self) -> None:
        """Call after weights were changed in place: nothing that was made before is served again."""
        self.encoder.refresh()
        self.engine.clear_prefix_cache()

    def close(self) -> None:
        """End running requests, write what is queued, and close the store if this object opened it."""
        self.engine.close()
        self.encoder.close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _engine(
    loaded: Loaded,
    encoder: VisionEncoder,
    settings: EngineSettings | LMDeploySettings | None,
    pipeline: Any,
) -> Engine | LMDeployEngine:
    """pipeline: LMDeploy's engine; None for the native backend."""
    if pipeline is None:
        if not isinstance(settings, EngineSettings | None):
            raise ConfigError("settings: the native backend takes EngineSettings")
        return Engine(loaded, encoder, settings)
    from featcache.engine.lmdeploy.engine import LMDeployEngine, LMDeploySettings

    assert isinstance(settings, LMDeploySettings | None)
    return LMDeployEngine(loaded, encoder, settings or LMDeploySettings(), pipeline)


def _open_lmdeploy(
    model: str | os.PathLike[str] | Loaded,
    settings: EngineSettings | LMDeploySettings | None,
    device: str | None,
    dtype: str,
    compile_tower: bool,
) -> tuple[Loaded, Any]:
    from featcache.engine.lmdeploy.engine import LMDeploySettings
    from featcache.engine.lmdeploy.opening import open_lmdeploy

    if isinstance(model, Loaded):
        raise ConfigError("model: backend lmdeploy loads models itself; give it a folder or a name")
    if not isinstance(settings, LMDeploySettings | None):
        raise ConfigError("settings: backend lmdeploy takes LMDeploySettings")
    if device not in (None, "cuda"):
        raise ConfigError(f"device: {device!r}; backend lmdeploy runs on CUDA")
    if compile_tower:
        raise ConfigError("compile_tower: only the native backend compiles its tower")
    return open_lmdeploy(model, settings or LMDeploySettings(), dtype=dtype)
