"""`VisionEncoder`: only misses are decoded, preprocessed and encoded, each once; nothing wrong is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import SIZES, encoded, noise
from PIL import Image

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions, Pixels
from featcache.engine.families.qwen import Qwen2VL
from featcache.engine.imageref import ImageRef
from featcache.engine.loading import Loaded, load_model
from featcache.errors import ConfigError, FeatcacheError, ImageError
from featcache.features import Features
from featcache.lease import Lease
from featcache.store import FeatureStore

IMAGES = [noise(*size, 1) for size in SIZES]
FILES = [encoded(image) for image in IMAGES]


@pytest.fixture(scope="module")
def loaded(model_folder: Callable[[str], Path]) -> Loaded:
    return load_model(model_folder("qwen2_vl"), device="cpu")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeatureStore]:
    with FeatureStore.open(tmp_path / "store", host_bytes="32MiB", disk_bytes="64MiB") as store:
        yield store


@pytest.fixture
def encoder(loaded: Loaded, store: FeatureStore) -> Iterator[VisionEncoder]:
    encoder = VisionEncoder(loaded, store)
    yield encoder
    encoder.close()


def rows_of(encoder: VisionEncoder, refs: Sequence[ImageRef]) -> tuple[list[torch.Tensor], list[str]]:
    """(rows, tiers) of images that must all be there."""
    rows, tiers = [], []
    for outcome in encoder.features(refs):
        assert isinstance(outcome, Lease), outcome
        rows.append(outcome.features.rows.clone())
        tiers.append(outcome.tier)
        outcome.release()
    return rows, tiers


def work(encoder: VisionEncoder) -> tuple[Any, ...]:
    stats = encoder.stats()
    return tuple(stats[name] for name in ("decoded", "preprocessed", "tower_calls", "tower_images"))


def fresh_rows(loaded: Loaded, image: Image.Image) -> torch.Tensor:
    return loaded.family.encode([loaded.family.preprocess(image, ImageOptions())])[0]["rows"]


# A hit does nothing


def test_a_hit_is_neither_decoded_nor_preprocessed(loaded: Loaded, tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path) as store:
        encoder = VisionEncoder(loaded, store)
        first, tiers = rows_of(encoder, [encoder.identify(data) for data in FILES])
        assert tiers == ["encoded"] * 3
        assert work(encoder) == (3, 3, 1, 3)
        again, tiers = rows_of(encoder, [encoder.identify(data) for data in FILES])
        assert tiers == ["host"] * 3
        assert work(encoder) == (3, 3, 1, 3)
        encoder.close()
    with FeatureStore.open(tmp_path) as store:  # and nothing after a restart
        encoder = VisionEncoder(loaded, store)
        refs = [encoder.identify(data) for data in FILES]
        layouts = encoder.layouts(refs)
        restarted, tiers = rows_of(encoder, refs)
        assert tiers == ["disk"] * 3
        assert work(encoder) == (0, 0, 0, 0)
        assert [layout.num_tokens for layout in layouts] == [len(rows) for rows in restarted]
        encoder.close()
    for image, *kept in zip(IMAGES, first, again, restarted, strict=True):
        assert all(torch.equal(rows, kept[0]) for rows in kept)
        assert (kept[0] - fresh_rows(loaded, image)).abs().max() <= 1e-6


def test_an_image_whose_layout_was_needed_first_is_preprocessed_once(encoder: VisionEncoder) -> None:
    refs = [encoder.identify(data) for data in FILES]
    assert [encoder.layout(ref).num_tokens for ref in refs] == [8, 7, 25]
    assert encoder.layouts(refs) == encoder.layouts(refs)
    rows_of(encoder, refs)
    assert work(encoder) == (3, 3, 1, 3)


def test_an_image_given_three_times_is_encoded_once(encoder: VisionEncoder, loaded: Loaded) -> None:
    sources = [FILES[0], IMAGES[0], encoded(IMAGES[0], "BMP"), FILES[1]]
    rows, _ = rows_of(encoder, [encoder.identify(source) for source in sources])
    assert work(encoder) == (3, 2, 1, 2)  # three files decoded, two pictures encoded
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert rows[3].shape != rows[0].shape


def test_sixteen_threads_with_one_new_image_do_the_work_once(encoder: VisionEncoder) -> None:
    barrier = threading.Barrier(16)

    def ask(_: int) -> torch.Tensor:
        barrier.wait()
        ref = encoder.identify(FILES[2])
        encoder.layout(ref)
        return rows_of(encoder, [ref])[0][0]

    with ThreadPoolExecutor(16) as pool:
        rows = list(pool.map(ask, range(16)))
    assert work(encoder) == (1, 1, 1, 1)
    assert all(torch.equal(r, rows[0]) for r in rows)


def test_paths_bytes_and_pil_images_are_one_image(encoder: VisionEncoder, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(FILES[0])
    keys = {encoder.identify(source).key for source in (path, str(path), FILES[0], IMAGES[0])}
    assert len(keys) == 1
    path.write_bytes(FILES[1])  # a path is never an identity
    assert encoder.identify(path).key == encoder.identify(IMAGES[1]).key not in keys


# What can't be an image


def test_a_broken_image_harms_no_other(encoder: VisionEncoder) -> None:
    too_wide = encoder.identify(noise(1093, 5, 0), name="page 4")
    refs = [encoder.identify(image) for image in IMAGES]
    outcomes = encoder.features([refs[0], too_wide, *refs[1:]])
    assert isinstance(outcomes[1], ImageError)
    assert str(outcomes[1]).startswith("page 4: 1093x5 can't be prepared for qwen2_vl: ")
    for i, outcome in enumerate(outcomes):
        if i != 1:
            assert isinstance(outcome, Lease)
            outcome.release()
    assert encoder.stats()["tower_images"] == 3
    with pytest.raises(ImageError, match=r"page 4: .* aspect ratio"):
        encoder.layout(too_wide)
    with pytest.raises(ImageError, match=r"image bytes \(30 bytes\): can't be decoded|header"):
        encoder.identify(FILES[0][:30])


def test_a_digest_alone_serves_while_its_features_are_held(encoder: VisionEncoder) -> None:
    known = encoder.identify(FILES[0])
    rows, _ = rows_of(encoder, [known])
    ref = encoder.identify_digest(known.pixel_digest, name="uuid cat")
    assert ref.key == known.key
    assert encoder.layout(ref).num_tokens == 8
    assert torch.equal(rows_of(encoder, [ref])[0][0], rows[0])
    del known
    encoder.store.delete(ref.key)
    unknown = encoder.identify_digest(encoder.identify(IMAGES[1]).pixel_digest, name="uuid dog")
    with pytest.raises(
        ImageError, match="uuid dog: its features aren't held any more; send the image itself"
    ):
        encoder.layout(unknown)
    (outcome,) = encoder.features([unknown])
    assert isinstance(outcome, ImageError)


# Batches


def test_micro_batches_keep_to_the_bound(loaded: Loaded, store: FeatureStore) -> None:
    encoder = VisionEncoder(loaded, store, max_batch_cost=130, workers=2)  # images of 32, 28 and 100 patches
    images = [noise(*SIZES[i % 3], i) for i in range(12)]
    rows, _ = rows_of(encoder, [encoder.identify(image) for image in images])
    assert work(encoder) == (0, 12, 8, 12)
    for image, made in zip(images, rows, strict=True):
        assert (made - fresh_rows(loaded, image)).abs().max() <= 1e-6
    encoder.close()


class ScarceMemory(Qwen2VL):
    """Fault injection: a tower that has memory for so many patches at once (a CPU's can't be limited)."""

    limit = 64
    tried: list[int]

    def encode(self, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        cost = sum(pixels.cost for pixels in batch)
        self.tried.append(cost)
        if cost > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        return super().encode(batch)


def test_out_of_memory_halves_the_batch_and_goes_on(loaded: Loaded, store: FeatureStore) -> None:
    family = ScarceMemory(loaded.model, loaded.processor)
    family.tried = []
    encoder = VisionEncoder(replace(loaded, family=family), store)
    images = [noise(100, 60, i) for i in range(7)]  # 32 patches each
    outcomes = encoder.features([encoder.identify(i) for i in (*images, noise(150, 151, 0))])
    (failed,) = [outcome for outcome in outcomes if isinstance(outcome, FeatcacheError)]
    assert str(failed) == "PIL image 150x151: not enough memory to encode it alone (100 patches)"
    for image, outcome in zip(images, outcomes, strict=False):
        assert isinstance(outcome, Lease)
        assert (outcome.features.rows - fresh_rows(loaded, image)).abs().max() <= 1e-6
        outcome.release()
    assert max(family.tried) == 7 * 32 + 100
    family.tried.clear()
    rows_of(encoder, [encoder.identify(noise(100, 60, 50 + i)) for i in range(6)])
    assert max(family.tried) <= ScarceMemory.limit  # what didn't fit isn't tried again
    encoder.close()


def test_features_belong_to_themselves(encoder: VisionEncoder) -> None:
    for features in encoder.encode(FILES):
        rows = features.rows
        assert rows.is_contiguous()
        assert rows.untyped_storage().nbytes() == rows.nbytes
        before = rows.clone()
        rows.add_(1)  # the caller's own: the store doesn't see it
        assert not torch.equal(before, rows)
    for data, image in zip(FILES, IMAGES, strict=True):
        (again,) = encoder.encode([data])
        assert (again.rows - fresh_rows(encoder.loaded, image)).abs().max() <= 1e-6
    with pytest.raises(ImageError, match="no such file"):
        encoder.encode([FILES[0], "/nowhere.png"])


def test_an_error_of_the_tower_reaches_the_caller_and_leaves_no_trace(
    loaded: Loaded, store: FeatureStore
) -> None:
    class Broken(Qwen2VL):  # fault injection: the error of a bug
        broken = True

        def encode(self, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
            if self.broken:
                raise RuntimeError("a kernel failed")
            return super().encode(batch)

    family = Broken(loaded.model, loaded.processor)
    encoder = VisionEncoder(replace(loaded, family=family), store)
    (failed,) = encoder.features([encoder.identify(FILES[0])])
    assert isinstance(failed, FeatcacheError)
    assert isinstance(failed.__cause__, RuntimeError)
    assert "a kernel failed" in str(failed)
    family.broken = False
    rows, tiers = rows_of(encoder, [encoder.identify(FILES[0])])
    assert tiers == ["encoded"]
    assert (rows[0] - fresh_rows(loaded, IMAGES[0])).abs().max() <= 1e-6
    encoder.close()


def test_an_image_that_the_tower_fails_on_fails_alone(loaded: Loaded, store: FeatureStore) -> None:
    class Broken(Qwen2VL):  # fault injection: the error of a bug
        def encode(self, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
            if any(torch.equal(pixels.tensors["pixel_values"], bad) for pixels in batch):
                raise RuntimeError("a kernel failed")
            return super().encode(batch)

    family = Broken(loaded.model, loaded.processor)
    encoder = VisionEncoder(replace(loaded, family=family), store)
    refs = [encoder.identify(data) for data in FILES]
    bad = encoder.prepare(refs[1]).tensors["pixel_values"]
    outcomes = encoder.features(refs)
    assert "a kernel failed" in str(outcomes[1])
    for number, outcome in enumerate(outcomes):
        if number != 1:
            assert isinstance(outcome, Lease)
            assert (outcome.features.rows - fresh_rows(loaded, IMAGES[number])).abs().max() <= 1e-6
            outcome.release()
    assert store.tier_of(refs[1].key) is None and store.check() == []
    encoder.close()


# Identity


def test_options_and_namespaces_are_in_the_key(encoder: VisionEncoder) -> None:
    data = FILES[2]
    small = ImageOptions(max_pixels=9 * 784)
    refs = [
        encoder.identify(data),
        encoder.identify(data, small),
        encoder.identify(data, namespace="tenant"),
        encoder.identify(data, small, namespace="tenant"),
    ]
    assert len({ref.key for ref in refs}) == 4
    assert encoder.stats()["decoded"] == 2  # once a namespace: no tenant learns what another has
    rows, tiers = rows_of(encoder, refs)
    assert tiers == ["encoded"] * 4
    assert len(rows[1]) < len(rows[0]) == len(rows[2])
    assert encoder.identify(refs[1]).key == refs[0].key  # taken again, without the option
    assert encoder.identify(refs[3]).key == refs[2].key


def test_swapped_sides_are_another_image(encoder: VisionEncoder) -> None:
    flat = Image.frombytes("RGB", (60, 40), bytes(range(256)) * 28 + bytes(32))
    tall = Image.frombytes("RGB", (40, 60), flat.tobytes())
    assert encoder.identify(flat).key != encoder.identify(tall).key


def fingerprint_of(loaded: Loaded) -> bytes:
    with FeatureStore.open(None, host_bytes="1MiB") as store:
        encoder = VisionEncoder(loaded, store)
        encoder.close()
        return encoder.fingerprint


def test_what_changes_features_changes_the_fingerprint(model_folder: Callable[[str], Path]) -> None:
    from transformers import Qwen2VLImageProcessorPil

    folder = model_folder("qwen2_vl")

    def fresh(**kwargs: Any) -> Loaded:
        return load_model(folder, device="cpu", **kwargs)

    def edited(change: Callable[[Loaded], object]) -> Loaded:
        loaded = fresh()
        change(loaded)
        return replace(loaded, family=type(loaded.family)(loaded.model, loaded.processor))

    def first_weight(part: str) -> Callable[[Loaded], object]:
        def change(loaded: Loaded) -> None:
            weight = next(p for n, p in loaded.model.named_parameters() if part in n)
            with torch.no_grad():
                weight.view(-1)[3] += 2**-10

        return change

    def pil(loaded: Loaded) -> None:
        settings = loaded.processor.image_processor.to_dict()
        loaded.processor.image_processor = Qwen2VLImageProcessorPil(**settings)

    def smaller(loaded: Loaded) -> None:
        size = loaded.processor.image_processor.size
        loaded.processor.image_processor.size = {**dict(size), "longest_edge": size["longest_edge"] - 1}

    base = fingerprint_of(fresh())
    same = [fresh(), edited(first_weight("language_model")), edited(first_weight("lm_head"))]
    same.append(edited(lambda loaded: loaded.model.set_attn_implementation({"text_config": "eager"})))
    assert {fingerprint_of(loaded) for loaded in same} == {base}
    others = [
        edited(first_weight("visual.patch_embed")),
        edited(first_weight("visual.merger")),
        fresh(dtype="bfloat16"),
        fresh(attention="eager"),
        edited(pil),
        edited(smaller),
    ]
    fingerprints = [fingerprint_of(loaded) for loaded in others]
    assert len({base, *fingerprints}) == 1 + len(others)


SCRIPT = """
import json, sys
from featcache.engine.encoder import VisionEncoder
from featcache.engine.loading import load_model
from featcache.store import FeatureStore
with FeatureStore.open(sys.argv[2]) as store:
    encoder = VisionEncoder(load_model(sys.argv[1], device="cpu"), store)
    outcomes = encoder.features([encoder.identify(sys.argv[3])])
    tiers = [outcome.tier for outcome in outcomes]
    for outcome in outcomes:
        outcome.release()
    encoder.close()
    print(json.dumps([encoder.stats(), tiers]))
"""


def test_another_process_finds_what_this_one_made(
    encoder: VisionEncoder, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(FILES[0])
    rows_of(encoder, [encoder.identify(tmp_path / "cat.png")])
    encoder.store.flush()
    arguments = [str(model_folder("qwen2_vl")), str(tmp_path / "store"), str(tmp_path / "cat.png")]
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stats, tiers = json.loads(done.stdout)
    assert tiers == ["disk"]
    assert stats["fingerprint"] == encoder.fingerprint.hex()
    assert stats["decoded"] == stats["preprocessed"] == stats["tower_images"] == 0


def test_after_a_refresh_no_old_feature_is_served(
    model_folder: Callable[[str], Path], store: FeatureStore
) -> None:
    loaded = load_model(model_folder("qwen2_vl"), device="cpu")
    encoder = VisionEncoder(loaded, store)
    ref = encoder.identify(FILES[0])
    old, _ = rows_of(encoder, [ref])
    before = encoder.fingerprint
    assert encoder.refresh() == before  # nothing changed: everything still holds
    weight = loaded.model.model.visual.patch_embed.proj.weight
    weight.data.mul_(1.5)
    assert encoder.refresh() == encoder.fingerprint != before
    new, tiers = rows_of(encoder, [ref])  # identified before the refresh
    assert tiers == ["encoded"]
    assert not torch.allclose(new[0], old[0], atol=1e-3)
    assert (new[0] - fresh_rows(loaded, IMAGES[0])).abs().max() <= 1e-6
    weight.data.div_(1.5)
    encoder.refresh()
    encoder.close()


# Checking


def test_checked_hits_that_are_right_stay(loaded: Loaded, store: FeatureStore) -> None:
    encoder = VisionEncoder(loaded, store, check=0.5)
    for _ in range(4):
        rows_of(encoder, [encoder.identify(FILES[0])])
    stats = encoder.stats()
    assert (stats["checked"], stats["check_failed"]) == (1, 0)  # three hits, of which every second
    encoder.close()
    with pytest.raises(ConfigError, match=r"check: 1\.5; it is a share"):
        VisionEncoder(loaded, store, check=1.5)


def test_a_wrong_feature_is_found_and_replaced(loaded: Loaded, store: FeatureStore) -> None:
    encoder = VisionEncoder(loaded, store, check=1.0)
    ref = encoder.identify(FILES[0])
    wrong = loaded.family.encode([loaded.family.preprocess(noise(*SIZES[0], 99), ImageOptions())])[0]
    store.put(ref.key, Features(wrong, encoder.layout(ref), encoder.fingerprint))
    rows, tiers = rows_of(encoder, [ref])
    assert tiers == ["encoded"]
    assert (rows[0] - fresh_rows(loaded, IMAGES[0])).abs().max() <= 1e-6
    rows, tiers = rows_of(encoder, [ref])
    assert tiers == ["host"]
    stats = encoder.stats()
    assert (stats["checked"], stats["check_failed"]) == (2, 1)
    encoder.close()
