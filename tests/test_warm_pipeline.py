"""Warming in one process: a tiny random model, a real store, real files."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build
from PIL import Image
from warm_helpers import encoded, photos, picture

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.imageref import ImageRef
from featcache.engine.loading import Loaded, load_model
from featcache.engine.warm import Failure, Progress, WarmReport, WarmSettings, warm
from featcache.engine.warm.batches import Prepared, Ready
from featcache.engine.warm.inbox import Inbox
from featcache.engine.warm.items import SourceItem, held
from featcache.engine.warm.survey import survey
from featcache.errors import ConfigError, ModelError, RequestError, StoreError
from featcache.lease import Lease
from featcache.store import FeatureStore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(build("qwen2_vl", tmp_path_factory.mktemp("model")), device="cpu", tower_only=True)


MakeEncoder = Callable[..., VisionEncoder]


@pytest.fixture
def encoder_at(model: Loaded) -> Iterator[MakeEncoder]:
    """Makes encoders over the store in a folder; what one process after another would see."""
    opened: list[Any] = []

    def make(
        path: Path | None, *, disk_bytes: str = "512MiB", readonly: bool = False, **rest: Any
    ) -> VisionEncoder:
        store = FeatureStore.open(
            path, host_bytes="64MiB", disk_bytes=disk_bytes, readonly=readonly, sync=False
        )
        encoder = VisionEncoder(model, store, **rest)
        opened.extend((encoder, store))
        return encoder

    yield make
    for one in opened:
        one.close()


def balanced(report: WarmReport) -> bool:
    parts = report.cached + report.encoded + report.duplicates + report.shared + report.failed
    return report.seen == parts + report.unfinished


def test_the_second_run_neither_encodes_nor_decodes(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path / "set", 40)
    (tmp_path / "set" / "twin.bmp").write_bytes(encoded(7, "BMP"))
    (tmp_path / "set" / "copy.png").write_bytes(encoded(8))
    (tmp_path / "set" / "broken.png").write_bytes(encoded(9)[:90])
    (tmp_path / "set" / "notes.txt").write_text("no image")
    first = encoder_at(tmp_path / "store")
    report = warm(first, tmp_path / "set")
    assert (report.seen, report.encoded, report.duplicates, report.failed) == (43, 40, 2, 1)
    assert report.passed_over == 1 and report.cached == report.unfinished == 0 and balanced(report)
    assert report.bytes_read == sum(
        p.stat().st_size for p in (tmp_path / "set").iterdir() if p.suffix != ".txt"
    )
    assert report.stopped is None and report.images_per_second > 0
    [failure] = report.failures
    assert failure.source.endswith("broken.png") and "truncated" in failure.error
    disk = first.store.stats().disk
    assert disk is not None and disk.entries == 40 and disk.data_bytes == report.feature_bytes
    first.store.close()

    (tmp_path / "set" / "broken.png").unlink()
    second = encoder_at(tmp_path / "store")
    report = warm(second, [tmp_path / "set"])
    assert (report.seen, report.cached, report.encoded, report.failed) == (42, 42, 0, 0) and balanced(report)
    stats = second.stats()
    assert stats["decoded"] == stats["preprocessed"] == stats["tower_calls"] == 0
    assert second.store.check() == [] and second.store.verify().is_clean


def test_what_is_warmed_is_what_a_chat_would_make(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    """The same bytes, also of images of many sizes that went through the tower in other company."""
    sizes = [(60 + 31 * n, 40 + 17 * n) for n in range(9)]
    for n, size in enumerate(sizes):
        (tmp_path / f"{n}.png").write_bytes(encoded(n, size=size))
    options = ImageOptions(max_pixels=28 * 28 * 12)
    warmed, chatted = encoder_at(tmp_path / "store"), encoder_at(None)
    for asked in (ImageOptions(), options):
        warm(warmed, f"{tmp_path}/*.png", WarmSettings(images=asked))
    for n in range(len(sizes)):
        for asked in (ImageOptions(), options):
            refs = [e.identify(tmp_path / f"{n}.png", asked) for e in (warmed, chatted)]
            assert refs[0].key == refs[1].key
            [a], [b] = (e.features([ref]) for e, ref in zip((warmed, chatted), refs, strict=True))
            assert isinstance(a, Lease) and isinstance(b, Lease)
            assert a.tier in ("host", "disk") and b.tier == "encoded" and a.layout == b.layout
            assert torch.equal(a.features.rows, b.features.rows)
            a.release()
            b.release()
    assert warmed.stats()["tower_images"] == 2 * len(sizes)


def test_images_of_requests_keep_their_own_options(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    (tmp_path / "a.png").write_bytes(encoded(1, size=(200, 160)))
    part = {"type": "image_url", "image_url": "a.png"}
    rows = [
        {"messages": [{"role": "user", "content": [{**part, "max_pixels": 28 * 28 * 6}]}]},
        {"image": "a.png"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    encoder = encoder_at(tmp_path / "store")
    report = warm(
        encoder, tmp_path / "rows.jsonl", WarmSettings(images=ImageOptions(max_pixels=28 * 28 * 20))
    )
    assert report.encoded == 2
    for pixels in (28 * 28 * 6, 28 * 28 * 20):
        ref = encoder.identify(tmp_path / "a.png", ImageOptions(max_pixels=pixels))
        assert encoder.store.tier_of(ref.key) is not None


def test_pil_images_and_bytes_and_a_store_in_memory(encoder_at: MakeEncoder) -> None:
    encoder = encoder_at(None)
    report = warm(encoder, [picture(1), encoded(1), encoded(2), Image.new("RGB", (30, 40))])
    assert (report.seen, report.encoded, report.duplicates) == (4, 3, 1)
    assert warm(encoder, [encoded(2)]).cached == 1


def test_the_tower_is_kept_full(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    for n in range(60):
        (tmp_path / f"{n}.png").write_bytes(encoded(n, size=(60 + 40 * (n % 4), 60)))
    encoder = encoder_at(None, max_batch_cost=200)
    batches: list[list[int]] = []
    run = encoder.family.encode

    def counted(batch: Any) -> Any:
        batches.append([pixels.cost for pixels in batch])
        return run(batch)

    encoder.family.encode = counted  # type: ignore[method-assign]
    try:
        report = warm(encoder, tmp_path)
    finally:
        del encoder.family.encode
    assert report.encoded == 60 and sum(map(len, batches)) == 60
    assert all(sum(batch) <= 200 for batch in batches)
    most = max(cost for batch in batches for cost in batch)
    assert all(sum(batch) > 200 - most for batch in batches[:-1])
    assert report.tower_calls == len(batches)


def test_batch_size_limits_the_images_of_a_call(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path, 10)
    report = warm(encoder_at(None), tmp_path, WarmSettings(batch_size=3))
    assert report.encoded == 10 and report.tower_calls == 4


def test_limit_share_and_shuffle(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path / "set", 20)
    encoder = encoder_at(tmp_path / "store")
    assert warm(encoder, tmp_path / "set", WarmSettings(limit=0)).seen == 0
    first = warm(encoder, tmp_path / "set", WarmSettings(limit=7))
    assert (first.seen, first.encoded) == (7, 7)
    shuffled = warm(encoder, tmp_path / "set", WarmSettings(limit=7, shuffle_seed=3))
    assert shuffled.seen == 7 and 0 < shuffled.encoded < 7
    parts = [warm(encoder, tmp_path / "set", WarmSettings(share=(n, 3))).seen for n in range(3)]
    assert parts == [7, 7, 6]
    disk = encoder.store.stats().disk
    assert disk is not None and disk.entries == 20


def test_failures_are_told_one_by_one_and_may_be_too_many(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    for n in range(30):
        (tmp_path / f"{n:02}.png").write_bytes(b"not an image")
    photos(tmp_path / "good", 5)
    told: list[Failure] = []
    report = warm(encoder_at(None), tmp_path, on_failure=told.append)
    assert (report.failed, report.encoded, report.stopped) == (30, 5, None) and report.failures == tuple(told)
    report = warm(encoder_at(None), tmp_path, WarmSettings(max_failures=4))
    assert report.stopped == "too many failures" and 4 < report.failed < 30 and balanced(report)


def test_progress_is_told_and_ends_complete(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path, 30)
    told: list[Progress] = []
    report = warm(encoder_at(None), tmp_path, progress=told.append)
    assert told[-1].done == told[-1].seen == report.seen == 30 and told[-1].encoded == 30
    assert all(a.done <= b.done and b.done <= b.seen for a, b in itertools.pairwise(told))


def test_stop_ends_after_the_running_batch_and_keeps_what_was_done(
    tmp_path: Path, encoder_at: MakeEncoder
) -> None:
    photos(tmp_path / "set", 60)
    encoder = encoder_at(tmp_path / "store", max_batch_cost=80)
    stop = threading.Event()
    run = encoder.family.encode

    def stopping(batch: Any) -> Any:
        stop.set()
        return run(batch)

    encoder.family.encode = stopping  # type: ignore[method-assign]
    try:
        report = warm(encoder, tmp_path / "set", stop=stop)
    finally:
        del encoder.family.encode
    assert report.stopped == "interrupted" and report.tower_calls == 1 and balanced(report)
    disk = encoder.store.stats().disk
    assert disk is not None and 0 < report.encoded == disk.entries < 60
    rest = warm(encoder, tmp_path / "set")
    assert (rest.cached, rest.encoded) == (report.encoded, 60 - report.encoded)


def test_a_failure_of_the_tower_ends_the_run_and_says_why(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path, 5)
    encoder = encoder_at(None)

    def broken(batch: Any) -> Any:
        raise RuntimeError("the device is gone")

    encoder.family.encode = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(ModelError, match="the device is gone"):
            warm(encoder, tmp_path)
    finally:
        del encoder.family.encode
    assert warm(encoder, tmp_path).encoded == 5
    assert not [t for t in threading.enumerate() if t.name.startswith("featcache-warm")]


def test_a_listener_that_raises_ends_the_run(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path, 5)
    (tmp_path / "bad.png").write_bytes(b"x")

    def raising(failure: Failure) -> None:
        raise OSError("the failures file is full")

    with pytest.raises(OSError, match="failures file is full"):
        warm(encoder_at(None), tmp_path, on_failure=raising)


def test_twins_of_an_image_that_cannot_be_encoded_fail_with_it(encoder_at: MakeEncoder) -> None:
    thin = [Image.new("RGB", (1, 3000)), Image.new("RGB", (1, 3000))]  # beyond the aspect ratio of Qwen2-VL
    report = warm(encoder_at(None), [*thin, picture(1)])
    assert (report.seen, report.encoded, report.failed) == (3, 1, 2)
    assert all("can't be prepared" in failure.error for failure in report.failures)


def test_two_runs_at_once_share_the_work(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path / "set", 80)
    encoders = [encoder_at(tmp_path / "store", max_batch_cost=100) for _ in range(2)]
    reports: list[WarmReport] = []
    threads = [
        threading.Thread(target=lambda e=e: reports.append(warm(e, tmp_path / "set"))) for e in encoders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(report.encoded for report in reports) == 80 and all(balanced(report) for report in reports)
    assert all(report.seen == 80 and not report.failed for report in reports)


def test_a_disk_that_takes_no_more_ends_the_run(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path / "set", 200)
    encoder = encoder_at(tmp_path / "store", max_batch_cost=40)
    write = type(encoder.store._stack.disk).write  # type: ignore[arg-type]

    def failing(tier: Any, records: Any, *rest: Any, **named: Any) -> Any:
        return write(tier, [(h, [memoryview(b"")]) for h, _ in records], *rest, **named)

    type(encoder.store._stack.disk).write = failing  # type: ignore[method-assign,union-attr]
    try:
        with pytest.raises(StoreError, match="could not be stored"):
            warm(encoder, tmp_path / "set")
    finally:
        type(encoder.store._stack.disk).write = write  # type: ignore[method-assign,union-attr]


def test_settings_that_cannot_be(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    with pytest.raises(ConfigError, match="workers: 0"):
        WarmSettings(workers=0)
    with pytest.raises(ConfigError, match="share"):
        WarmSettings(share=(2, 2))
    with pytest.raises(RequestError, match="max_tiles"):
        warm(encoder_at(None), tmp_path, WarmSettings(images=ImageOptions(max_tiles=3)))


def test_a_survey_tells_what_a_run_will_do_and_does_nothing(tmp_path: Path, encoder_at: MakeEncoder) -> None:
    photos(tmp_path / "set", 30)
    (tmp_path / "set" / "copy.png").write_bytes(encoded(3))
    (tmp_path / "set" / "notes.txt").write_text("x")
    writing = encoder_at(tmp_path / "store")
    warm(writing, tmp_path / "set", WarmSettings(limit=10))
    writing.store.close()
    encoder = encoder_at(tmp_path / "store", readonly=True)
    sources = [tmp_path / "set", tmp_path / "missing.png"]
    found = survey(encoder, sources, WarmSettings())
    assert (found.seen, found.cached, found.missing, found.failed, found.passed_over) == (32, 11, 20, 1, 1)
    assert found.sampled == 20 and found.seconds is not None and found.seconds > 0
    encoder.store.close()
    report = warm(encoder_at(tmp_path / "store"), sources)
    assert report.encoded == found.missing and report.feature_bytes == found.feature_bytes
    assert report.cached == found.cached


# The pools


def prepared(cost: int, nbytes: int = 1) -> Prepared:
    ref: ImageRef = object.__new__(ImageRef)
    return Prepared(SourceItem("s", str(cost), lambda: b""), ref, cost, nbytes)


def costs(batch: list[Prepared] | None) -> list[int] | None:
    return None if batch is None else [image.cost for image in batch]


def test_batches_begin_with_the_largest_and_are_filled_up() -> None:
    ready = Ready(1000)
    for cost in (5, 60, 40, 90, 10, 30):
        assert ready.put(prepared(cost))
    take = {"max_images": 100, "patience_s": 60.0, "timeout_s": 0.0}
    assert costs(ready.take(100, **take)) == [90, 10]  # type: ignore[arg-type]
    assert costs(ready.take(100, **take)) == [60, 40]  # type: ignore[arg-type]
    assert costs(ready.take(100, **take)) == []  # type: ignore[arg-type]  # 35 isn't enough yet
    ready.put(prepared(500))
    assert costs(ready.take(100, **take)) == [500]  # type: ignore[arg-type]  # alone, it may be larger
    ready.end()
    assert costs(ready.take(100, **take)) == [30, 5]  # type: ignore[arg-type]
    assert ready.take(100, **take) is None  # type: ignore[arg-type]


def test_a_batch_does_not_wait_for_ever() -> None:
    ready = Ready(1000)
    ready.put(prepared(5))
    assert costs(ready.take(100, 100, patience_s=0.05, timeout_s=30)) == [5]


def test_a_full_pool_holds_workers_back_and_is_then_taken() -> None:
    ready = Ready(10)
    ready.put(prepared(1, nbytes=8))
    worker = threading.Thread(target=ready.put, args=(prepared(2, nbytes=8),))
    worker.start()
    assert costs(ready.take(100, 100, patience_s=60, timeout_s=30)) == [1]
    worker.join()
    ready.discard()
    assert not ready.put(prepared(3)) and ready.take(1, 1, patience_s=60, timeout_s=30) is None


def test_the_inbox_is_bounded_by_number_and_bytes() -> None:
    inbox = Inbox(2, 100)
    assert inbox.put(held("a", "", bytes(500)))  # one alone may be larger
    blocked = threading.Thread(target=inbox.put, args=(held("b", "", bytes(1)),))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    first = inbox.get()
    blocked.join()
    inbox.end()
    second = inbox.get()
    assert first is not None and second is not None and (first.source, second.source) == ("a", "b")
    assert inbox.get() is None
    inbox.close()
    assert not inbox.put(held("c", "", b"x"))
