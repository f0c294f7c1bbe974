"""`VisionEncoder`: from image inputs to leased features, with only misses through the tower.

identify    bytes -> source digest -> alias -> pixel digest -> key; what is known isn't decoded
layout      from the store's metadata, else by preprocessing, which is kept for the encoding
features    all tiers; misses are preprocessed in parallel and encoded in bounded micro-batches
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from PIL import Image

from featcache.engine.budget import BatchBudget
from featcache.engine.families.base import Family, ImageOptions, Pixels
from featcache.engine.imageref import ImageRef, Prepared
from featcache.engine.loading import Loaded
from featcache.errors import ConfigError, FeatcacheError, ImageError
from featcache.features import Features, Layout, bytes_of
from featcache.images import (
    DEFAULT_LIMITS,
    ImageLimits,
    ImageSource,
    describe,
    digest_pixels,
    open_image,
    read_source,
)
from featcache.keys import (
    EncoderFingerprint,
    FeatureKey,
    PixelDigest,
    alias_key,
    encoder_fingerprint,
    feature_key,
    source_digest,
)
from featcache.lease import Lease
from featcache.store import FeatureStore

_LOG = logging.getLogger("featcache.encoder")
_LOCKS = 64

# Of a recomputed hit, against the largest value: another batch shape or thread count moves the last bits.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class _Found(NamedTuple):
    """source: bytes, or a canonical image. image: its canonical pixels, if they had to be made."""

    pixel_digest: PixelDigest
    source: bytes | Image.Image | None
    image: Image.Image | None


class VisionEncoder:
    """The whole path of an image. Thread-safe.

    namespace: a tenant's own; its features and aliases are seen by no other.
    workers: threads that preprocess. max_batch_cost: vision patches in one call of the tower at most; by
        default what memory allows.
    check: the share of hits, 0 to 1, that are encoded again and compared; what doesn't agree is counted,
        logged, and replaced.
    """

    def __init__(
        self,
        loaded: Loaded,
        store: FeatureStore,
        *,
        namespace: str = "",
        workers: int | None = None,
        max_batch_cost: int | None = None,
        check: float = 0.0,
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        if not 0 <= check <= 1:
            raise ConfigError(f"check: {check}; it is a share of hits, from 0 to 1")
        self.loaded = loaded
        self.family: Family = loaded.family
        self.store = store
        self.namespace = namespace
        self.limits = limits
        self._workers = workers or min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="featcache-prepare")
        self._budget = BatchBudget(loaded.device, max_batch_cost)
        self._tower = threading.Lock()  # guards the budget and the tower: one batch after another
        self._decoding = [threading.Lock() for _ in range(_LOCKS)]  # by digest: equal bytes are decoded once
        self._prepared: WeakValueDictionary[FeatureKey, Prepared] = WeakValueDictionary()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()  # guards _counts, _prepared, _unchecked
        self._check = check
        self._unchecked = 0.0
        self._fingerprint = self._identify_encoder()

    @property
    def max_batch_cost(self) -> int:
        """Vision patches that may go through the tower in one call now."""
        return self._budget.max_cost()

    @property
    def fingerprint(self) -> EncoderFingerprint:
        return self._fingerprint

    def refresh(self) -> EncoderFingerprint:
        """Hash the weights again, after they were changed in place while no request ran.

        Returns the fingerprint that holds now. Features made before keep the old one, and aren't found any
        more if it differs.
        """
        with self._tower:
            self._fingerprint = self._identify_encoder()
        return self._fingerprint

    def _identify_encoder(self) -> EncoderFingerprint:
        family = self.family
        configs = family.encoder_configs()
        fingerprint = encoder_fingerprint(
            family=family.name,
            layout_version=family.layout_version,
            configs=configs,
            weights=(
                (name, str(tensor.dtype), tensor.shape, bytes_of(tensor.cpu().contiguous()))
                for name, tensor in family.encoder_weights()
            ),
        )
        self.store.put_encoder(
            fingerprint,
            {
                "family": family.name,
                "model": self.loaded.name,
                "dtype": str(self.loaded.dtype).removeprefix("torch."),
                "configs": configs,
            },
        )
        return fingerprint

    # Which image it is

    def identify(
        self,
        source: ImageSource | ImageRef,
        options: ImageOptions | None = None,
        name: str | None = None,
        namespace: str | None = None,
    ) -> ImageRef:
        """The key of an image. Its bytes are hashed; they are decoded only if nobody has seen them yet.

        source: a path, encoded bytes, a PIL image, or what `identify` returned before (to be taken with other
            options, in its own namespace).
        name: what errors call it; a description of the source if None.
        namespace: whose image it is; the encoder's own if None.

        Raises ImageError if it can't be read or decoded.
        """
        options = options or ImageOptions()
        if isinstance(source, ImageRef):
            found = _Found(source.pixel_digest, source.source, source.prepared.image)
            return self._ref(name or source.name, found, options, source.namespace)
        name = name or describe(source)
        namespace = self.namespace if namespace is None else namespace
        content = read_source(source, self.limits, name)
        if isinstance(content, bytes):
            return self._identify_bytes(content, options, name, namespace)
        image = open_image(content, self.limits, name)
        return self._ref(name, _Found(digest_pixels(image), image, image), options, namespace)

    def identify_digest(
        self,
        pixel_digest: PixelDigest,
        options: ImageOptions | None = None,
        name: str = "image",
        namespace: str | None = None,
    ) -> ImageRef:
        """An image that is known by its PixelDigest alone; it can be used while its features are held."""
        namespace = self.namespace if namespace is None else namespace
        return self._ref(name, _Found(pixel_digest, None, None), options or ImageOptions(), namespace)

    def _identify_bytes(self, data: bytes, options: ImageOptions, name: str, namespace: str) -> ImageRef:
        """By the pixel digest of encoded bytes: from the alias table or, once, by decoding them."""
        digest = source_digest(data)
        alias = alias_key("source", namespace, digest)
        if known := self.store.alias(alias):
            return self._ref(name, _Found(PixelDigest(known), data, None), options, namespace)
        with self._decoding[digest[0] % _LOCKS]:
            if known := self.store.alias(alias):
                return self._ref(name, _Found(PixelDigest(known), data, None), options, namespace)
            image = self._decode(data, name)
            ref = self._ref(name, _Found(digest_pixels(image), data, image), options, namespace)
            self.store.put_alias(alias, ref.pixel_digest)  # last: who finds it finds the decoded image too
        return ref

    def _ref(self, name: str, found: _Found, options: ImageOptions, namespace: str) -> ImageRef:
        fingerprint = self._fingerprint
        key = feature_key(fingerprint, found.pixel_digest, options.to_json(), namespace)
        with self._counting:
            prepared = self._prepared.get(key)
            if prepared is None:
                prepared = self._prepared[key] = Prepared()
            if found.image is not None and prepared.layout() is None:
                prepared.image = found.image
        return ImageRef(
            name=name,
            namespace=namespace,
            key=key,
            fingerprint=fingerprint,
            pixel_digest=found.pixel_digest,
            options=options,
            source=found.source,
            prepared=prepared,
        )

    def _decode(self, data: bytes, name: str) -> Image.Image:
        self._count("decoded")
        return open_image(data, self.limits, name)

    # What the prompt needs

    def layout(self, ref: ImageRef) -> Layout:
        """Token count and grid of an image. Raises ImageError if it isn't held and can't be encoded."""
        return self._held_layout(ref) or ref.prepared.layout_made(lambda: self._preprocess(ref))

    def _held_layout(self, ref: ImageRef) -> Layout | None:
        if ref.layout is None:
            ref.layout = ref.prepared.layout() or self.store.layout(ref.key)
        return ref.layout

    def layouts(self, refs: Sequence[ImageRef]) -> list[Layout]:
        """As `layout`, for several images; those that have to be preprocessed are so in parallel."""
        missing = [ref for ref in refs if self._held_layout(ref) is None]
        if len(missing) > 1:
            list(self._pool.map(self.layout, missing))
        return [self.layout(ref) for ref in refs]

    def prepare(self, ref: ImageRef) -> Pixels:
        """Preprocess an image now; the pixels are kept until it is encoded. Raises ImageError."""
        return ref.prepared.pixels(lambda: self._preprocess(ref))

    def _preprocess(self, ref: ImageRef) -> Pixels:
        image = ref.prepared.image
        if image is None:
            if ref.source is None:
                raise ImageError(ref.name, "its features aren't held any more; send the image itself")
            image = ref.source if isinstance(ref.source, Image.Image) else self._decode(ref.source, ref.name)
        self._count("preprocessed")
        return self.family.preprocess(image, ref.options, ref.name)

    # Its features

    def features(self, refs: Sequence[ImageRef], *, wait: bool = False) -> list[Lease | FeatcacheError]:
        """Leases on the features of images, each to be released, in order.

        Only misses go through the tower, equal images once. An image that can't be one has its ImageError in
        its place, and harms no other.

        wait: wait for the disk instead of keeping features in memory only when it can't follow.
        """
        refs = [self._current(ref) for ref in refs]
        by_key = {ref.key: ref for ref in refs}
        keys = [ref.key for ref in refs]
        outcomes = self.store.outcomes(
            keys, lambda missing: self._encode([by_key[FeatureKey(key)] for key in missing]), wait=wait
        )
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, Lease):
                refs[i].prepared.let_go()
                self._count(f"tier_{outcome.tier}")
                if self._is_sampled(outcome):
                    outcomes[i] = self._checked(refs[i], outcome)
        return outcomes

    def _current(self, ref: ImageRef) -> ImageRef:
        """`ref`, under the fingerprint that holds now: the weights may have been refreshed since."""
        return ref if ref.fingerprint == self._fingerprint else self.identify(ref, ref.options)

    def encode(self, sources: Sequence[ImageSource], options: ImageOptions | None = None) -> list[Features]:
        """The features of images, as tensors on the host that belong to the caller.

        Raises ImageError for the first image that can't be one.
        """
        options = self.family.options_for(options or ImageOptions(), 1)
        outcomes = self.features([self.identify(source, options) for source in sources])
        try:
            for outcome in outcomes:
                if isinstance(outcome, FeatcacheError):
                    raise outcome
            return [_owned(outcome.features) for outcome in outcomes if isinstance(outcome, Lease)]
        finally:
            for outcome in outcomes:
                if isinstance(outcome, Lease):
                    outcome.release()

    def _encode(self, refs: Sequence[ImageRef]) -> dict[FeatureKey, Features | Exception]:
        """The features of missed images, by key; an Exception for one that can't be encoded."""
        made: dict[FeatureKey, Features | Exception] = {}
        batch: list[tuple[ImageRef, Pixels]] = []
        cost = 0
        for ref, future in self._prepare_ahead(refs):
            try:
                pixels = future.result()
            except FeatcacheError as exc:
                made[ref.key] = exc
                continue
            if batch and cost + pixels.cost > self._budget.max_cost():
                made |= self._run_tower(batch)
                batch, cost = [], 0
            batch.append((ref, pixels))
            cost += pixels.cost
        if batch:
            made |= self._run_tower(batch)
        return made

    def _prepare_ahead(self, refs: Sequence[ImageRef]) -> Iterator[tuple[ImageRef, Future[Pixels]]]:
        """Preprocess in the pool, in order, never more than twice as many ahead as there are workers."""
        ahead: deque[tuple[ImageRef, Future[Pixels]]] = deque()
        try:
            for ref in refs:
                ahead.append((ref, self._pool.submit(self.prepare, ref)))
                if len(ahead) > 2 * self._workers:
                    yield ahead.popleft()
            while ahead:
                yield ahead.popleft()
        finally:
            for _, future in ahead:
                future.cancel()

    def _run_tower(self, batch: Sequence[tuple[ImageRef, Pixels]]) -> dict[FeatureKey, Features | Exception]:
        """One call of the tower; two of half the size where it fails, so that one image fails alone."""
        cost = sum(pixels.cost for _, pixels in batch)
        try:
            with self._tower, self._budget.measure(cost):
                return self._encoded(batch)
        except Exception as exc:
            is_out_of_memory = _is_out_of_memory(exc)
            if len(batch) == 1 and not is_out_of_memory:
                batch[0][0].prepared.let_go()
                return {batch[0][0].key: exc}
        # outside of the handler: the exception's frames hold the tensors that didn't fit
        if is_out_of_memory:
            self._count("out_of_memory")
            with self._tower:
                self._budget.ran_out(cost)
            if self.loaded.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(batch) > 1:
            half = len(batch) // 2
            return self._run_tower(batch[:half]) | self._run_tower(batch[half:])
        ref = batch[0][0]
        ref.prepared.let_go()
        return {ref.key: ImageError(ref.name, f"not enough memory to encode it alone ({cost} patches)")}

    def _encoded(self, batch: Sequence[tuple[ImageRef, Pixels]]) -> dict[FeatureKey, Features | Exception]:
        encoded = self.family.encode([pixels for _, pixels in batch])
        self._count("tower_calls")
        self._count("tower_images", len(batch))
        made: dict[FeatureKey, Features | Exception] = {}
        for (ref, pixels), tensors in zip(batch, encoded, strict=True):
            ref.prepared.let_go()
            if ref.fingerprint != self._fingerprint:
                made[ref.key] = ImageError(ref.name, "the weights were refreshed meanwhile; ask again")
                continue
            # clones: a view would keep the whole batch alive in the store
            own = {n: tensor.clone(memory_format=torch.contiguous_format) for n, tensor in tensors.items()}
            made[ref.key] = Features(own, pixels.layout, ref.fingerprint)
        return made

    # Whether a hit is right

    def _is_sampled(self, lease: Lease) -> bool:
        if not self._check or lease.tier == "encoded":
            return False
        with self._counting:
            self._unchecked += self._check
            if self._unchecked < 1:
                return False
            self._unchecked -= 1
        return True

    def _checked(self, ref: ImageRef, lease: Lease) -> Lease | FeatcacheError:
        """The lease if its features agree with freshly made ones; else one on the fresh ones."""
        if ref.source is None:
            return lease
        self._count("checked")
        fresh = self._encode([ref])[ref.key]
        if isinstance(fresh, Exception) or _agree(lease.features, fresh):
            return lease
        lease.release()
        self._count("check_failed")
        _LOG.error("%s: cached features differ from fresh ones and are replaced (key %s)", ref, ref.key.hex())
        self.store.delete(ref.key)
        return self.store.outcomes([ref.key], lambda _: {ref.key: fresh})[0]

    # What happened

    def _count(self, what: str, number: int = 1) -> None:
        with self._counting:
            self._counts[what] += number

    def stats(self) -> dict[str, int | str]:
        """Counters since the start: images decoded, preprocessed and encoded, and hits by tier."""
        names = [
            *("decoded", "preprocessed", "tower_calls", "tower_images", "out_of_memory", "checked"),
            *("check_failed", "tier_device", "tier_host", "tier_disk", "tier_encoded"),
        ]
        with self._counting:
            return {"fingerprint": self._fingerprint.hex(), **{name: self._counts[name] for name in names}}

    def close(self) -> None:
        """Stop the preprocessing threads; the store stays open."""
        self._pool.shutdown(cancel_futures=True)


def _owned(features: Features) -> Features:
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in features.tensors.items()}
    return Features(tensors, features.layout, features.fingerprint)


def _agree(held: Features, fresh: Features) -> bool:
    if held.layout != fresh.layout or held.tensors.keys() != fresh.tensors.keys():
        return False
    return all(_close(held.tensors[name], tensor) for name, tensor in fresh.tensors.items())


def _close(held: torch.Tensor, fresh: torch.Tensor) -> bool:
    if held.shape != fresh.shape or held.dtype != fresh.dtype:
        return False
    wide = fresh.float()
    difference = (held.to(fresh.device).float() - wide).abs().max()
    return bool(difference <= TOLERANCE.get(fresh.dtype, 1e-4) * wide.abs().max())


def _is_out_of_memory(exc: BaseException) -> bool:
    if isinstance(exc, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(exc)  # torch's CPU allocator raises a plain RuntimeError
