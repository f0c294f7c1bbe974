"""A dry run: how much there is to do, without doing it."""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions, Pixels
from featcache.engine.warm.items import Content, PassedOver, SourceItem, Unreadable
from featcache.engine.warm.job import cores
from featcache.engine.warm.pipeline import WarmSettings
from featcache.engine.warm.report import Failure
from featcache.engine.warm.sources import Source, find, shuffled
from featcache.engine.warm.web import Web
from featcache.errors import FeatcacheError
from featcache.images import open_image
from featcache.keys import PixelDigest, alias_key, feature_key, source_digest
from featcache.tiers.claims import Claim, Claims

SAMPLE = 24  # missing images that are tried, to estimate the rest
SAMPLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Survey:
    """What a run would find.

    missing: images to be encoded, at most: one that has the pixels of another in other bytes counts twice.
    failed: what can't be read; an image that can't be decoded is only found by decoding it.
    sampled: missing images that were tried. feature_bytes, seconds: what all would take, after them; None if
        none could be tried.
    """

    seen: int
    cached: int
    duplicates: int
    missing: int
    failed: int
    passed_over: int
    bytes_read: int
    sampled: int
    feature_bytes: int | None
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Known(NamedTuple):
    """What is known of one item. content: of a missing image."""

    outcome: str
    nbytes: int
    content: Content | None = None
    options: ImageOptions = ImageOptions()
    error: str = ""


def survey(
    encoder: VisionEncoder,
    sources: Sequence[Source],
    settings: WarmSettings,
    *,
    on_failure: Callable[[Failure], None] | None = None,
    on_passed_over: Callable[[PassedOver], None] | None = None,
) -> Survey:
    """Look at all images, and try a few of those that are missing. Nothing is stored."""
    names = ("seen", "cached", "duplicates", "missing", "failed", "passed_over", "bytes_read")
    counts = dict.fromkeys(names, 0)
    sample = _Sample()
    with tempfile.TemporaryDirectory(prefix="featcache-") as folder, Claims.open(Path(folder)) as met:
        for item, known in _look(encoder, sources, settings, met):
            if isinstance(item, PassedOver):
                counts["passed_over"] += 1
                if on_passed_over is not None:
                    on_passed_over(item)
                continue
            counts["seen"] += 1
            counts[known.outcome] += 1
            counts["bytes_read"] += known.nbytes
            if known.outcome == "failed" and on_failure is not None:
                on_failure(Failure(item.source, item.member, known.error))
            if known.outcome == "missing":
                sample.offer(known)
    sampled, nbytes, seconds = _tried(encoder, sample.kept, settings.workers or cores())
    scale = counts["missing"] / sampled if sampled else None
    return Survey(
        **counts,
        sampled=sampled,
        feature_bytes=None if scale is None else round(nbytes * scale),
        seconds=None if scale is None else seconds * scale,
    )


def _look(
    encoder: VisionEncoder, sources: Sequence[Source], settings: WarmSettings, met: Claims
) -> Iterator[tuple[SourceItem | PassedOver | Unreadable, _Known]]:
    """All items in order, each with what is known of it; several are read at a time."""
    web = Web(encoder.limits)
    found = find(sources, web, encoder.limits)
    if settings.shuffle_seed is not None:
        found = shuffled(found, settings.shuffle_seed)
    workers = settings.workers or cores()
    ahead: deque[tuple[Any, Future[_Known]]] = deque()
    left = settings.limit
    with ThreadPoolExecutor(workers, thread_name_prefix="featcache-survey") as pool:
        for item in found:
            if not isinstance(item, PassedOver) and left is not None:
                if left == 0:
                    break
                left -= 1
            ahead.append((item, pool.submit(_known, encoder, item, settings.images, met)))
            if len(ahead) > 2 * workers:
                first, future = ahead.popleft()
                yield first, future.result()
        for item, future in ahead:
            yield item, future.result()
    web.close()


def _known(
    encoder: VisionEncoder, item: SourceItem | PassedOver | Unreadable, images: ImageOptions, met: Claims
) -> _Known:
    if isinstance(item, PassedOver):
        return _Known("passed_over", 0)
    if isinstance(item, Unreadable):
        return _Known("failed", 0, error=str(item.error))
    try:
        content = item.read()
        options = replace(images, **dict[str, Any](item.options))
        options = encoder.family.options_for(options, item.num_images)
    except FeatcacheError as exc:
        return _Known("failed", 0, error=str(exc))
    if not isinstance(content, bytes):
        return _Known("missing", 0, content, options)
    digest = source_digest(content)
    known = encoder.store.alias(alias_key("source", encoder.namespace, digest))
    if known is not None:
        key = feature_key(encoder.fingerprint, PixelDigest(known), options.to_json(), encoder.namespace)
        if encoder.store.tier_of(key) is not None:
            return _Known("cached", len(content))
    # the same bytes with the same options, met before
    key = feature_key(encoder.fingerprint, PixelDigest(digest), options.to_json(), encoder.namespace)
    if met.take(key) is Claim.OWN:
        return _Known("duplicates", len(content))
    return _Known("missing", len(content), content, options)


class _Sample:
    """A few of the missing images, each as likely as any other to be among them."""

    def __init__(self) -> None:
        self.kept: list[_Known] = []
        self._generator = random.Random(0)
        self._offered = 0

    def offer(self, known: _Known) -> None:
        self._offered += 1
        if known.nbytes > SAMPLE_BYTES // SAMPLE:
            return
        if len(self.kept) < SAMPLE:
            self.kept.append(known)
        elif (at := self._generator.randrange(self._offered)) < SAMPLE:
            self.kept[at] = known


def _tried(encoder: VisionEncoder, sample: Sequence[_Known], workers: int) -> tuple[int, int, float]:
    """(images encoded, bytes of their features, seconds that a run takes for as many)."""
    for known in sample[:1]:
        _pixels(encoder, known)  # the first time is slower than all others
    started = time.perf_counter()
    pixels = [made for known in sample if (made := _pixels(encoder, known)) is not None]
    prepare_s = time.perf_counter() - started
    if pixels:
        _encoded_bytes(encoder, pixels[:1])
    started = time.perf_counter()
    nbytes = sum(_encoded_bytes(encoder, pixels[at : at + 8]) for at in range(0, len(pixels), 8))
    tower_s = time.perf_counter() - started
    return len(pixels), nbytes, _together(encoder, prepare_s / workers, tower_s)


def _pixels(encoder: VisionEncoder, known: _Known) -> Pixels | None:
    assert known.content is not None
    try:
        return encoder.family.preprocess(open_image(known.content, encoder.limits), known.options)
    except FeatcacheError:
        return None


def _encoded_bytes(encoder: VisionEncoder, batch: Sequence[Pixels]) -> int:
    encoded = encoder.family.encode(batch)
    if encoder.loaded.device.type == "cuda":
        torch.cuda.synchronize(encoder.loaded.device)
    return sum(tensor.nbytes for tensors in encoded for tensor in tensors.values())


def _together(encoder: VisionEncoder, prepare_s: float, tower_s: float) -> float:
    """Preparing goes on beside a GPU; on the CPU both want the same cores."""
    return max(prepare_s, tower_s) if encoder.loaded.device.type == "cuda" else prepare_s + tower_s
