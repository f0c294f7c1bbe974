"""The images of a request, with a real encoder and a real store behind them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from models import build
from server_helpers import ImageServer, png

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.imageref import ImageRef
from featcache.engine.loading import Loaded, load_model
from featcache.errors import FeatcacheError, RequestError
from featcache.lease import Lease
from featcache.server.auth import Caller
from featcache.server.media.addresses import CheckedNetwork
from featcache.server.media.fetcher import MediaFetcher, MediaRules
from featcache.server.media.images import ImageReader
from featcache.server.media.urls import UrlMemory
from featcache.store import FeatureStore

T = TypeVar("T")

ALICE, BOB = Caller("alice", "alice"), Caller("bob", "bob")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(build("qwen2_vl", tmp_path_factory.mktemp("model")), device="cpu", dtype="float32")


@pytest.fixture
def encoder(loaded: Loaded, tmp_path: Path) -> Iterator[VisionEncoder]:
    with FeatureStore.open(tmp_path, host_bytes="32MiB", disk_bytes="64MiB") as store:
        encoder = VisionEncoder(loaded, store)
        yield encoder
        encoder.close()


@pytest.fixture
def web() -> Iterator[ImageServer]:
    with ImageServer() as server:
        yield server


def run(encoder: VisionEncoder, work: Callable[[ImageReader], Awaitable[T]], max_images: int = 8) -> T:
    async def main() -> T:
        with ThreadPoolExecutor(4) as executor:
            network = CheckedNetwork(lambda address: True)
            media = MediaFetcher(MediaRules(), UrlMemory(encoder.store), executor, network)
            try:
                return await work(ImageReader(encoder, media, executor, max_images))
            finally:
                await media.close()

    return asyncio.run(main())


def read(
    encoder: VisionEncoder, *parts: Any, caller: Caller = ALICE, options: ImageOptions | None = None
) -> list[ImageRef]:
    """Refs of parts in one message; their features are made, as a chat would make them."""
    messages = [{"role": "user", "content": list(parts)}]

    async def work(reader: ImageReader) -> list[ImageRef]:
        read, refs = await reader.read_messages(messages, options or ImageOptions(), caller)
        assert [part["image"] for part in read[0]["content"] if "image" in part] == refs
        return refs

    refs = run(encoder, work)
    for outcome in encoder.features(refs):
        assert isinstance(outcome, Lease), outcome
        outcome.release()
    return refs


def refusal(encoder: VisionEncoder, part: Any, caller: Caller = ALICE) -> str:
    with pytest.raises(FeatcacheError) as caught:
        read(encoder, {"type": "text", "text": "look"}, part, caller=caller)
    assert str(caught.value).startswith("messages[0].content[1]"), caught.value
    return str(caught.value)


def data_uri(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def test_all_ways_to_send_an_image_lead_to_one_key(encoder: VisionEncoder, web: ImageServer) -> None:
    data = png()
    url, uri, plain = web.image("/a.png", data), data_uri(data), base64.b64encode(data).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"image_url": url},
        {"type": "input_image", "image_url": f"  {url} "},
        {"type": "image", "image": uri},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": plain}},
        {"type": "image", "source": {"type": "url", "url": url}},
    ]
    refs = read(encoder, *parts)
    assert len({ref.key for ref in refs}) == 1
    assert encoder.stats()["tower_images"] == 1


def test_a_known_url_is_neither_fetched_nor_decoded_nor_encoded(
    encoder: VisionEncoder, web: ImageServer
) -> None:
    url = web.image("/a.png", png(), ETag='"1"')
    (first,) = read(encoder, {"image_url": url})
    before = encoder.stats()
    web.routes["/a.png"] = lambda request: (request.send_response(304), request.end_headers())[0]  # type: ignore[assignment, return-value, func-returns-value]
    (again,) = read(encoder, {"image_url": url})
    after = encoder.stats()
    assert again.key == first.key and again.source is None
    assert [after[n] - before[n] for n in ("decoded", "preprocessed", "tower_images")] == [0, 0, 0]


def test_when_the_features_are_gone_the_url_is_fetched_again(
    encoder: VisionEncoder, web: ImageServer
) -> None:
    url = web.image("/a.png", png(), ETag='"1"')
    (first,) = read(encoder, {"image_url": url})
    encoder.store.delete(first.key)
    (again,) = read(encoder, {"image_url": url})
    assert again.key == first.key and again.source is not None
    assert web.requests[-1][1].get("if-none-match") is None


def test_a_uuid_stands_for_an_image_in_its_own_namespace(encoder: VisionEncoder) -> None:
    (first,) = read(encoder, {"image_url": data_uri(png()), "uuid": "page-1"})
    for part in (
        {"type": "image_url", "image_url": None, "uuid": "page-1"},
        {"type": "image", "uuid": "page-1"},
    ):
        (again,) = read(encoder, part)
        assert again.key == first.key and again.source is None
    assert "send the image" in refusal(encoder, {"type": "image", "uuid": "page-1"}, BOB)
    assert "send the image" in refusal(encoder, {"type": "image", "uuid": "page-2"})
    read(encoder, {"image_url": data_uri(png((1, 2, 3))), "uuid": "page-1"})  # the name moves on
    assert read(encoder, {"type": "image", "uuid": "page-1"})[0].key != first.key
    read(encoder, {"image_url": data_uri(png()), "uuid": "page-3"})
    encoder.store.delete(first.key)
    assert "isn't known here any more" in refusal(encoder, {"type": "image", "uuid": "page-3"})


def test_a_uuid_says_nothing_against_the_bytes_beside_it(encoder: VisionEncoder) -> None:
    red, blue = data_uri(png((255, 0, 0))), data_uri(png((0, 0, 255)))
    (first,) = read(encoder, {"image_url": red, "uuid": "x"})
    (second,) = read(encoder, {"image_url": blue, "uuid": "x"})
    assert first.key != second.key


def test_tenants_share_no_features_unless_they_are_told_to(encoder: VisionEncoder) -> None:
    part = {"image_url": data_uri(png())}
    alice, bob = read(encoder, part)[0], read(encoder, part, caller=BOB)[0]
    assert alice.key != bob.key and alice.pixel_digest == bob.pixel_digest
    assert encoder.stats()["tower_images"] == 2
    shared = [Caller("alice", ""), Caller("bob", "")]
    assert len({read(encoder, part, caller=caller)[0].key for caller in shared}) == 1


def test_detail_and_limits_are_part_of_the_key(encoder: VisionEncoder) -> None:
    encoder.family.image_processor.size["longest_edge"] = 1 << 20
    uri = data_uri(png(size=(900, 900)))
    low, high, small, same = read(
        encoder,
        {"image_url": {"url": uri, "detail": "low"}},
        {"image_url": {"url": uri, "detail": "high"}},
        {"type": "image", "image": uri, "max_pixels": 56 * 56},
        {"image_url": {"url": uri, "detail": "auto"}},
    )
    layouts = [encoder.layout(ref).num_tokens for ref in (low, high, small)]
    assert layouts[0] < layouts[1] and layouts[2] < layouts[0]
    assert same.key == high.key
    (whole,) = read(encoder, {"image_url": uri}, options=ImageOptions(max_pixels=56 * 56))
    assert whole.key == small.key


def test_a_url_has_its_own_limits_too(encoder: VisionEncoder, web: ImageServer) -> None:
    url = web.image("/a.png", png(size=(300, 300)), ETag='"1"')
    first, small = read(encoder, {"image_url": url}, {"image_url": url, "max_pixels": 56 * 56})
    assert first.key != small.key
    web.routes["/a.png"] = lambda request: (request.send_response(304), request.end_headers())[0]  # type: ignore[assignment, return-value, func-returns-value]
    assert read(encoder, {"image_url": url, "max_pixels": 56 * 56})[0].key == small.key


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image_url", "image_url": None}, "needs exactly one of them"),
        ({"type": "image_url"}, "needs exactly one of them"),
        ({"type": "image_url", "image_url": 5}, "not text"),
        ({"type": "image_url", "image_url": {}}, "url: missing"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "without a comma"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "holds no data"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:text/plain,hello"}}, "is no image"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "files can't be named"),
        ({"type": "image", "image": "secret.png"}, "files can't be named"),
        ({"type": "image", "path": "/etc/passwd"}, "files can't be named"),
        ({"type": "image", "image": "file:///etc/passwd"}, "not allowed on this server"),
        ({"type": "image_url", "image_url": {"url": data_uri(png()), "crop": 1}}, "crop"),
        ({"type": "image_url", "image_url": {"url": data_uri(png()), "detail": "extreme"}}, "detail"),
        ({"type": "image_url", "image_url": data_uri(png()), "colour": "red"}, "colour"),
        ({"type": "image_url", "image_url": data_uri(png()), "max_pixels": -1}, "max_pixels"),
        ({"type": "image_url", "image_url": data_uri(png()), "max_tiles": 2}, "max_tiles"),
        ({"type": "image_url", "image_url": data_uri(png()), "uuid": ""}, "uuid"),
        ({"type": "image_url", "image_url": data_uri(png()), "uuid": 7}, "uuid"),
        ({"type": "image", "image": data_uri(png()), "image_url": data_uri(png())}, "exactly one"),
        ({"type": "image_url", "image_url": "ftp://example.org/a.png"}, "neither a data: URI"),
        ({"type": "image_url", "image_url": data_uri(b"\x89PNG\r\n\x1a\n not one")}, "is no image"),
    ],
)
def test_what_cannot_be_an_image_is_named(encoder: VisionEncoder, part: dict[str, Any], why: str) -> None:
    assert why in refusal(encoder, part)


def test_no_more_images_than_allowed(encoder: VisionEncoder) -> None:
    messages = [{"role": "user", "content": [{"image_url": data_uri(png())}] * 3}]
    with pytest.raises(RequestError, match=r"^messages: 3 images; this server takes 2"):
        run(encoder, lambda reader: reader.read_messages(messages, ImageOptions(), ALICE), max_images=2)


def test_one_bad_image_of_several_is_the_one_named(encoder: VisionEncoder, web: ImageServer) -> None:
    good = {"image_url": web.image("/a.png", png())}
    with pytest.raises(FeatcacheError, match=r"^messages\[0\]\.content\[2\]: its server answered 404"):
        read(encoder, good, good, {"image_url": web.url("/none.png")}, good)


def test_text_that_looks_like_an_image_stays_text(encoder: VisionEncoder) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": data_uri(png())}]}]
    read, refs = run(encoder, lambda reader: reader.read_messages(messages, ImageOptions(), ALICE))
    assert refs == [] and read == messages


def test_each_image_of_a_list_has_its_own_outcome(encoder: VisionEncoder) -> None:
    data = png()
    parts = [{"image_url": data_uri(data)}, {"image_url": "nonsense"}, {"image_url": data_uri(b"x" * 40)}]
    outcomes = run(encoder, lambda reader: reader.read_each(parts, ImageOptions(), ALICE))
    assert isinstance(outcomes[0], ImageRef) and outcomes[0].pixel_digest
    assert [str(outcome).partition(":")[0].partition(".")[0] for outcome in outcomes[1:]] == [
        "images[1]",
        "images[2]",
    ]
