"""How often an image is decoded, preprocessed and encoded for one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import transformers
from PIL import Image

from featcache.bench.models import Transformers, asks, page, qwen2_vl
from featcache.bench.setting import Row, Setting, checked, ms, seconds_of
from featcache.engine import CachedVLM
from featcache.engine.families.base import ImageOptions
from featcache.images import open_image

WORK = ("decoded", "preprocessed", "tower_images")


def measure(setting: Setting) -> Iterator[Row]:
    plain = Transformers(qwen2_vl(setting))
    loaded = qwen2_vl(setting)
    first, second = (asks(text, page(1, setting)) for text in ("what is written", "who wrote it"))
    with CachedVLM.from_pretrained(loaded, store=setting.folder / "store") as vlm:
        for name, messages, expected in (("miss", first, 1), ("hit", second, 0)):
            before = dict(vlm.encoder.stats())
            reply = vlm.chat(messages, max_tokens=4, ignore_eos=True)
            after = vlm.encoder.stats()
            for work in WORK:
                yield checked(f"on a {name}: {work}", int(after[work]) - int(before[work]), expected)
            if setting.device == "cpu":  # bfloat16 kernels of other shapes have other last bits
                same = list(reply.token_ids) == plain.generate(messages, 4)
                yield checked(f"on a {name}: answers that differ from transformers'", int(not same), 0)
        data, family, options = page(2, setting), loaded.family, ImageOptions()
        rounds = setting.rounds(5, 30)
        image = open_image(data)
        yield ms("decode", [seconds_of(lambda: open_image(data)) for _ in range(rounds)])
        yield ms("preprocess", [seconds_of(lambda: family.preprocess(image, options)) for _ in range(rounds)])
        for name, call in _processors(setting, image):
            call()
            yield ms(
                f"transformers' processor {name}", [seconds_of(call, setting.device) for _ in range(rounds)]
            )
        known = page(1, setting)
        tier = vlm.store.tier_of(vlm.encoder.identify(known).key)
        hits = [seconds_of(lambda: _hit(vlm, known), setting.device) for _ in range(rounds)]
        yield ms("a hit, from bytes to features", hits, note=f"tier {tier}")


def _processors(setting: Setting, image: Image.Image) -> Iterator[tuple[str, Callable[[], object]]]:
    """transformers' image processor by PIL, and by torchvision where it can run."""
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 4096}
    by_pil = transformers.Qwen2VLImageProcessorPil(size=size)
    by_torchvision = transformers.Qwen2VLImageProcessor(size=size)
    yield "by PIL", lambda: by_pil(images=image, return_tensors="pt")
    for device in ("cpu", "cuda") if setting.device == "cuda" else ("cpu",):
        run = partial(by_torchvision, images=image, return_tensors="pt", device=device)
        yield f"by torchvision on {device}", run


def _hit(vlm: CachedVLM, data: bytes) -> None:
    lease = vlm.store.get(vlm.encoder.identify(data).key)
    assert lease is not None
    lease.release()
