"""The pipeline of warming.

    reader    sources, one after another                                             one thread
    workers   read -> hash -> what is known is done -> claim -> decode, preprocess   several threads
    caller    batches of what is ready -> the encoder -> the store                   the caller's thread

Between them are bounded pools, so memory stays the same however many images come, and a slow disk slows the
reader down. Whatever is given up half-way is found missing and made by the next run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.imageref import ImageRef
from featcache.engine.warm.batches import Prepared, Ready
from featcache.engine.warm.inbox import Inbox
from featcache.engine.warm.items import Content, Found, PassedOver, SourceItem, Unreadable
from featcache.engine.warm.report import Failure, Progress, Stopped, Tally
from featcache.errors import ConfigError, FeatcacheError, ModelError, StoreError
from featcache.keys import PixelDigest, alias_key, source_digest
from featcache.lease import Lease
from featcache.tiers.claims import Claim, Claims

TARGET_COST = 65_536  # vision patches in one batch at most: more at once isn't faster on any device
READY_BYTES = 256 << 20  # of pixels that wait for the tower
INBOX_BYTES = 128 << 20  # of encoded images that wait for a worker
DEFERRED_ITEMS, DEFERRED_BYTES = 1024, 128 << 20  # that wait for another run
PATIENCE_S = 2.0  # for which a batch waits to be full while images come slowly
TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """How to warm.

    images: options of all images that don't ask for their own.
    workers: threads that decode and preprocess; by default one a core, 16 at most.
    batch_size: images in one call of the tower at most; by default what memory allows.
    limit: stop after so many images. shuffle_seed: take them in a random order.
    max_failures: give up when there are more; None never does.
    share: (i, n): only every n-th of what is found, from the i-th on.
    """

    images: ImageOptions = field(default_factory=ImageOptions)
    workers: int | None = None
    batch_size: int | None = None
    limit: int | None = None
    shuffle_seed: int | None = None
    max_failures: int | None = None
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("batch_size", 1), ("limit", 0), ("max_failures", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}: {value}; it is at least {least}")
        if not 0 <= self.share[0] < self.share[1]:
            raise ConfigError(f"share: {self.share}; it is (i, n) with i from 0 to n - 1")


class _Task(NamedTuple):
    """An item for a worker. claimed: the key that another run had claimed when this one came to it."""

    item: SourceItem
    claimed: bytes | None = None


class Pipeline:
    """One run. `run` may be called once."""

    def __init__(
        self,
        encoder: VisionEncoder,
        settings: WarmSettings,
        claims: Claims,
        tally: Tally,
        *,
        stop: threading.Event,
        num_workers: int,
        not_kept: Callable[[], int],
        on_passed_over: Callable[[PassedOver], None] | None = None,
    ) -> None:
        self._encoder = encoder
        self._store = encoder.store
        self._settings = settings
        self._claims = claims
        self._tally = tally
        self._asked_to_stop = stop
        self._not_kept = not_kept
        self._on_passed_over = on_passed_over
        self._num_workers = num_workers
        self._inbox = Inbox(2 * num_workers, INBOX_BYTES)
        self._ready = Ready(READY_BYTES)
        self._lock = threading.Lock()  # guards all below
        self._in_flight: dict[bytes, list[SourceItem]] = {}  # by key: others with the same pixels
        self._deferred: deque[_Task] = deque()
        self._deferred_bytes = 0
        self._working = num_workers
        self._crash: BaseException | None = None
        self._ended = False

    def run(self, found: Iterable[Found], on_progress: Callable[[Progress], None] | None) -> Stopped | None:
        """Warm all that is found. Returns why it stopped before the end; None if it didn't."""
        reader = threading.Thread(target=self._read, args=(found,), name="featcache-warm-read", daemon=True)
        workers = [
            threading.Thread(target=self._work, name=f"featcache-warm-{n}", daemon=True)
            for n in range(self._num_workers)
        ]
        torch_threads = torch.get_num_threads()
        try:
            for thread in (reader, *workers):
                thread.start()
            return self._encode_all(on_progress)
        finally:
            self._ended = True
            self._inbox.close()
            self._ready.discard()
            for thread in workers:
                thread.join()
            reader.join(timeout=1)  # it may be waiting for a pipe, and there it may stay
            torch.set_num_threads(torch_threads)
            if self._crash is not None:
                raise self._crash

    # The reader

    def _read(self, found: Iterable[Found]) -> None:
        try:
            index, of = self._settings.share
            for item in islice(self._limited(found), index, None, of):
                if isinstance(item, PassedOver):
                    self._tally.count("passed_over")
                    if self._on_passed_over is not None:
                        self._on_passed_over(item)
                    continue
                self._tally.count("seen")
                if isinstance(item, Unreadable):
                    self._fail(item, item.error)
                elif not self._inbox.put(item):
                    return
        except BaseException as exc:
            self._crashed(exc)
        finally:
            self._inbox.end()

    def _limited(self, found: Iterable[Found]) -> Iterable[Found]:
        left = self._settings.limit
        for item in found:
            if left is not None and not isinstance(item, PassedOver):
                if left == 0:
                    return
                left -= 1
            yield item

    # The workers

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: the workers are the parallelism
        try:
            while (task := self._next()) is not None and not self._is_over():
                self._process(task)
        except BaseException as exc:
            self._crashed(exc)
        finally:
            with self._lock:
                self._working -= 1
                is_last = not self._working
            if is_last:
                self._ready.end()

    def _next(self) -> _Task | None:
        with self._lock:
            many = len(self._deferred) >= DEFERRED_ITEMS or self._deferred_bytes >= DEFERRED_BYTES
        if not many:
            if (item := self._inbox.get()) is not None:
                return _Task(item)
            if self._deferred:
                self._ready.hasten()
        return self._next_deferred()

    def _next_deferred(self) -> _Task | None:
        """One that another run has finished or given up, as soon as there is one; None if none is left."""
        while not self._is_over():
            with self._lock:
                if not self._deferred:
                    return None
                task = self._deferred.popleft()
                self._deferred_bytes -= task.item.held_bytes
            if task.claimed is None or self._is_settled(task.claimed):
                return task
            self._defer(task.item, task.claimed)
            time.sleep(0.02)
        return None

    def _is_settled(self, key: bytes) -> bool:
        known = self._store.alias(key) is not None or self._store.tier_of(key) is not None
        return known or not self._claims.is_taken(key)

    def _defer(self, item: SourceItem, claimed: bytes) -> None:
        with self._lock:
            self._deferred.append(_Task(item, claimed))
            self._deferred_bytes += item.held_bytes

    def _process(self, task: _Task) -> None:
        item = task.item
        try:
            with self._tally.stage("read"):
                content = item.read()
            if isinstance(content, bytes) and task.claimed is None:
                self._tally.count("bytes_read", len(content))
            options = self._options(item)
            with self._tally.stage("identify"):
                ref = self._identify(item, content, options)
        except FeatcacheError as exc:
            self._fail(item, exc)
            return
        if ref is not None:
            self._admit(task, ref)

    def _options(self, item: SourceItem) -> ImageOptions:
        options = replace(self._settings.images, **dict[str, Any](item.options))
        return self._encoder.family.options_for(options, item.num_images)

    def _identify(self, item: SourceItem, content: Content, options: ImageOptions) -> ImageRef | None:
        """Which image it is; None if another run is finding that out. What is held isn't decoded."""
        encoder = self._encoder
        if not isinstance(content, bytes):
            return encoder.identify(content, options, item.name)
        source = alias_key("source", encoder.namespace, source_digest(content))
        if (known := self._store.alias(source)) is not None:
            ref = encoder.identify_digest(PixelDigest(known), options, item.name)
            if self._store.tier_of(ref.key) is not None:
                return ref
        elif self._claims.take(source) is Claim.TAKEN:
            self._defer(item, source)
            return None
        try:
            return encoder.identify(content, options, item.name)
        except FeatcacheError:
            self._claims.give_back([source])
            raise

    def _admit(self, task: _Task, ref: ImageRef) -> None:
        """Done if its features are held, or on their way; else prepare them for the tower."""
        item, key = task.item, ref.key
        with self._lock:
            if key in self._in_flight:
                self._in_flight[key].append(item)
                return
            self._in_flight[key] = []
        if self._is_held(key):
            own = self._claims.is_own(key)
            self._settle(key, item, "duplicates" if own else "shared" if task.claimed else "cached")
        elif self._claims.take(key) is Claim.TAKEN:
            for other in (item, *self._landed(key)):
                self._defer(other, key)
        elif self._is_held(key):  # its owner was just in time
            self._settle(key, item, "shared")
        else:
            self._prepare(item, ref)

    def _is_held(self, key: bytes) -> bool:
        return self._store.tier_of(key) is not None

    def _prepare(self, item: SourceItem, ref: ImageRef) -> None:
        try:
            with self._tally.stage("prepare"):
                pixels = self._encoder.prepare(ref)
        except FeatcacheError as exc:
            self._give_up(item, ref, exc)
            return
        encoded = len(ref.source) if isinstance(ref.source, bytes) else 0
        self._ready.put(Prepared(item, ref, pixels.cost, pixels.nbytes + encoded))

    def _landed(self, key: bytes) -> list[SourceItem]:
        with self._lock:
            return self._in_flight.pop(key)

    def _settle(self, key: bytes, item: SourceItem, outcome: str) -> None:
        self._tally.count(outcome)
        self._tally.count("duplicates", len(self._landed(key)))

    def _give_up(self, item: SourceItem, ref: ImageRef, error: FeatcacheError) -> None:
        self._claims.give_back([ref.key])
        for failed in (item, *self._landed(ref.key)):
            self._fail(failed, error)

    def _fail(self, item: SourceItem | Unreadable, error: FeatcacheError) -> None:
        self._tally.fail(Failure(item.source, item.member, str(error)))

    def _crashed(self, exc: BaseException) -> None:
        with self._lock:
            self._crash = self._crash or exc
        self._inbox.close()
        self._ready.discard()

    # The caller

    def _is_over(self) -> bool:
        over = self._ended or self._crash is not None
        return over or self._asked_to_stop.is_set() or self._has_failed_enough()

    def _has_failed_enough(self) -> bool:
        most = self._settings.max_failures
        return most is not None and self._tally.failed > most

    def _encode_all(self, on_progress: Callable[[Progress], None] | None) -> Stopped | None:
        told = 0.0
        while not self._is_over():
            max_cost = min(self._encoder.max_batch_cost, TARGET_COST)
            max_images = self._settings.batch_size or max_cost
            batch = self._ready.take(max_cost, max_images, patience_s=PATIENCE_S, timeout_s=TICK_S)
            if batch is None:
                break
            if batch:
                self._encode(batch)
            if on_progress is not None and time.monotonic() - told >= TICK_S:
                told = time.monotonic()
                on_progress(self._tally.progress())
        if self._asked_to_stop.is_set():
            return "interrupted"
        return "too many failures" if self._has_failed_enough() else None

    def _encode(self, batch: list[Prepared]) -> None:
        with self._tally.stage("tower"):
            outcomes = self._encoder.features([image.ref for image in batch], wait=True)
        self._tally.count("tower_calls")
        for image, outcome in zip(batch, outcomes, strict=True):
            if not isinstance(outcome, Lease):
                if isinstance(outcome, StoreError) and outcome.__cause__ is not None:
                    # not this image's fault: the next would fare no better
                    raise ModelError(f"the vision tower failed: {outcome.__cause__!r}") from outcome.__cause__
                self._give_up(image.item, image.ref, outcome)
                continue
            if outcome.tier == "encoded":
                self._tally.count("feature_bytes", outcome.features.nbytes)
            self._settle(image.ref.key, image.item, "encoded" if outcome.tier == "encoded" else "shared")
            outcome.release()
        self._check_kept()

    def _check_kept(self) -> None:
        """Serving goes on when the disk doesn't take any more; to warm would then be for nothing."""
        if lost := self._not_kept():
            error = self._store.stats().disk_error
            raise StoreError(
                f"{lost} of the features just made could not be stored: {error or 'the disk failed'}"
            )
