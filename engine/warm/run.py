"""`warm`: one run over image sets, from the sources to the report."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from featcache.engine.encoder import VisionEncoder
from featcache.engine.warm.items import PassedOver
from featcache.engine.warm.pipeline import Pipeline, WarmSettings
from featcache.engine.warm.report import Failure, Progress, Tally, WarmReport
from featcache.engine.warm.sources import Source, count_files, find, shuffled
from featcache.engine.warm.web import Web
from featcache.errors import StoreError
from featcache.store import FeatureStore
from featcache.tiers.claims import Claims

MAX_WORKERS = 16
DEFAULTS = WarmSettings()


def warm(
    encoder: VisionEncoder,
    sources: Source | Iterable[Source],
    settings: WarmSettings = DEFAULTS,
    *,
    progress: Callable[[Progress], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    on_passed_over: Callable[[PassedOver], None] | None = None,
    stop: threading.Event | None = None,
) -> WarmReport:
    """Encode all images of `sources` that no tier of the encoder's store holds, and store them.

    sources: files, folders, globs, lists ("@list.txt", "-"), URLs, archives, tables and request files, see
        `sources.find`; bytes and PIL images too.
    progress: called on this thread about ten times a second. on_failure, on_passed_over: called for each, on
        another thread.
    stop: set it to end after the running batch; what was done until then is stored and reported.

    An image that fails harms no other. When this returns, everything is stored; several runs over one store,
    in this process or others, share the work. The features are those that a chat would make.

    Raises StoreError if the disk doesn't take what was made, ModelError if the tower fails, and RequestError
    if the model doesn't understand the settings' image options.
    """
    if isinstance(sources, (str, bytes, os.PathLike)) or not isinstance(sources, Iterable):
        sources = [sources]
    given = list(sources)
    encoder.family.options_for(settings.images, 1)
    tally = Tally(on_failure)
    web = Web(encoder.limits)
    found = find(given, web, encoder.limits)
    if settings.shuffle_seed is not None:
        found = shuffled(found, settings.shuffle_seed)
    kept = _Kept(encoder.store)
    try:
        with _claims(encoder.store) as claims, _counting(given, settings, tally, progress is not None):
            pipeline = Pipeline(
                encoder,
                settings,
                claims,
                tally,
                stop=stop or threading.Event(),
                num_workers=settings.workers or min(MAX_WORKERS, os.cpu_count() or 1),
                not_kept=kept.lost,
                on_passed_over=on_passed_over,
            )
            try:
                stopped = pipeline.run(found, progress)
            except BaseException:
                with suppress(StoreError):  # the first error is the one to tell
                    encoder.store.flush()
                raise
            with tally.stage("flush"):
                encoder.store.flush()
    finally:
        web.close()
    tally.count("not_kept", kept.lost())
    tally.count("evicted", kept.evicted())
    if progress is not None:
        progress(tally.progress())
    return tally.report(stopped)


class _Kept:
    """What has become of a store's features since this was made."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self._lost, self._evicted = self._now()

    def _now(self) -> tuple[int, int]:
        stats = self._store.stats()
        if stats.disk is None:
            return stats.counts["no_room"], 0
        dropped = 0 if stats.writer is None else stats.writer.dropped
        return stats.counts["unwritten"] + stats.disk.dropped + dropped, stats.disk.evicted

    def lost(self) -> int:
        """Features that the disk, or memory if there is no disk tier, didn't take."""
        return self._now()[0] - self._lost

    def evicted(self) -> int:
        return self._now()[1] - self._evicted


@contextmanager
def _claims(store: FeatureStore) -> Iterator[Claims]:
    """Claims beside the store's records; if it is in memory alone, in a folder of their own."""
    if store.path is not None:
        with Claims.open(store.path) as claims:
            yield claims
    else:
        with tempfile.TemporaryDirectory(prefix="featcache-") as folder, Claims.open(Path(folder)) as claims:
            yield claims


@contextmanager
def _counting(sources: list[Source], settings: WarmSettings, tally: Tally, is_wanted: bool) -> Iterator[None]:
    """Meanwhile, find out how many images there are, for whoever shows the time that is left."""

    def count() -> None:
        total = count_files(sources)
        if total is not None and settings.limit is not None:
            total = min(total, settings.limit)
        tally.total = None if total is None else len(range(*settings.share[:1], total, settings.share[1]))

    if is_wanted:
        threading.Thread(target=count, name="featcache-warm-count", daemon=True).start()
    yield
