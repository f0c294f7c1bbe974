"""The first request after a restart, with an empty store and with a warm one; and when a disk pays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from featcache.bench.models import asks, page, qwen2_vl
from featcache.bench.setting import Row, Setting, checked, ms, seconds_of
from featcache.engine import CachedVLM
from featcache.store import FeatureStore


def measure(setting: Setting) -> Iterator[Row]:
    loaded = qwen2_vl(setting)
    number = setting.rounds(4, 32)
    folder = setting.folder / "pages"
    folder.mkdir()
    pages = [page(n, setting) for n in range(number)]
    for n, data in enumerate(pages):
        (folder / f"{n:03}.jpg").write_bytes(data)
    store = setting.folder / "warm store"
    with CachedVLM.from_pretrained(loaded, store=store) as vlm:
        report = vlm.warm([folder])
        yield checked("warm: images encoded", report.encoded, number)
        yield Row(
            "warm",
            report.images_per_second,
            "images/s",
            note=f"{report.feature_bytes / number / 1024:.0f} KiB an image",
        )
    answers: dict[str, list[tuple[int, ...]]] = {}
    spent: dict[str, list[float]] = {}
    for name, where in (("empty", setting.folder / "empty store"), ("warm", store)):
        with CachedVLM.from_pretrained(loaded, store=where) as vlm:
            vlm.chat([{"role": "user", "content": "hello"}], max_tokens=1)
            answers[name], spent[name] = [], []
            for data in pages:
                reply = vlm.chat(asks("what is written", data), max_tokens=1)
                answers[name].append(reply.token_ids)
                spent[name].append(reply.timings.ttft_s)
            encoded = int(vlm.encoder.stats()["tower_images"])
            yield checked(f"{name} store: images encoded", encoded, number if name == "empty" else 0)
        yield ms(f"{name} store: first token of a first request about each", spent[name])
    if loaded.dtype == torch.float32:
        wrong = sum(a != b for a, b in zip(answers["empty"], answers["warm"], strict=True))
        yield checked("answers that differ", wrong, 0)
    device = "cuda" if setting.device == "cuda" else None
    with CachedVLM.from_pretrained(loaded, store=store) as vlm:
        keys = [vlm.encoder.identify(data).key for data in pages]
        read = sum(seconds_of(partial(_read, vlm.store, key), setting.device) for key in keys) / number
        held = [vlm.store.get(key) for key in keys]
        with FeatureStore.open(setting.folder / "written", device=device) as other:
            began = time.perf_counter()
            for lease in held:
                assert lease is not None
                other.put(lease.key, lease.features)
            other.flush()
            written = (time.perf_counter() - began) / number
        for lease in held:
            assert lease is not None
            lease.release()
    saved = (sum(spent["empty"]) - sum(spent["warm"])) / number
    yield Row("reading one image's features from disk", read * 1e3, "ms")
    yield Row("writing them there, beside the request", written * 1e3, "ms")
    yield Row("saved each time that an image comes back", saved * 1e3, "ms")
    if saved > 0:
        yield Row("returns after which the writing has paid", written / saved, "returns")


def _read(store: FeatureStore, key: bytes) -> None:
    lease = store.get(key)
    assert lease is not None and lease.tier == "disk"
    lease.release()
