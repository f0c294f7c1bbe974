"""Keys: any difference that matters gives another key, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from featcache import keys
from featcache.errors import ConfigError
from featcache.keys import (
    EncoderFingerprint,
    PixelDigest,
    alias_key,
    canonical_json,
    encoder_fingerprint,
    feature_key,
    framed,
    pixel_header,
    source_digest,
)

Weight = tuple[str, str, tuple[int, ...], bytes]

PIXELS = PixelDigest(bytes(range(32)))
ENCODER = EncoderFingerprint(bytes(range(32, 64)))

texts = st.text(max_size=8)
parts = st.lists(st.tuples(texts, st.binary(max_size=8)), max_size=4)
options = st.dictionaries(texts, st.one_of(st.none(), st.integers(), texts), max_size=3)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
weights = st.lists(
    st.tuples(texts, st.sampled_from(["float32", "bfloat16"]), shapes, st.binary(max_size=6)), max_size=3
)


# Framing


@given(st.tuples(texts, parts), st.tuples(texts, parts))
def test_different_inputs_never_share_a_preimage(a: tuple[str, list], b: tuple[str, list]) -> None:
    assert (framed(*a) == framed(*b)) == (a == b)


@given(texts, parts)
def test_parts_can_be_read_back_from_their_preimage(
    domain: str, given_parts: list[tuple[str, bytes]]
) -> None:
    """Which shows that no other parts give it."""
    assert list(unframed(framed(domain, given_parts))) == [(domain, b""), *given_parts]


def unframed(preimage: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at < len(preimage):
        tag_bytes, nbytes = (int.from_bytes(preimage[at : at + 4], "little"), preimage[at + 4 : at + 12])
        at += 12
        tag = preimage[at : at + tag_bytes].decode("utf-8", "surrogatepass")
        at += tag_bytes
        size = int.from_bytes(nbytes, "little")
        yield tag, preimage[at : at + size]
        at += size


def test_the_split_between_parts_counts() -> None:
    assert framed("d", [("a", b"bc")]) != framed("d", [("ab", b"c")])
    assert framed("d", [("a", b"b"), ("c", b"")]) != framed("d", [("a", b"bc")])
    assert framed("d", [("a", b"")]) != framed("d", [])
    assert framed("da", []) != framed("d", [("a", b"")])


def test_buffers_of_any_kind_are_taken_as_bytes() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert framed("d", [("a", array)]) == framed("d", [("a", array.tobytes())])
    assert framed("d", [("a", np.empty((0, 3)))]) == framed("d", [("a", b"")])
    assert framed("d", [("a", memoryview(b"xyz")[1:])]) == framed("d", [("a", b"yz")])


# Digests


def test_source_digest_is_plain_blake3() -> None:
    """As `b3sum` prints it, so that any program can compute it; the value is BLAKE3's own test vector."""
    assert source_digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    data = bytes(range(256)) * 5000
    assert source_digest(data) == source_digest(memoryview(data)) == blake3(data).digest()
    assert source_digest(data) != source_digest(data[:-1])


def test_pixel_headers_differ_by_size_and_mode() -> None:
    headers = {
        pixel_header(6, 4, "RGB"),
        pixel_header(4, 6, "RGB"),
        pixel_header(6, 4, "RGBA"),
        pixel_header(64, 0, "RGB"),
    }
    assert len(headers) == 4
    assert len({len(header) for header in headers}) <= 2


# Encoders


def fingerprint(**changed: object) -> EncoderFingerprint:
    given_parts: dict[str, object] = {
        "family": "qwen2_vl",
        "layout_version": 1,
        "configs": {
            "vision": {"depth": 2, "names": ["a", "b"]},
            "processor": {"mean": [0.5, 0.5], "ids": {1: "x"}},
        },
        "weights": [
            ("a.weight", "float32", (2, 2), bytes(16)),
            ("b.weight", "float32", (4,), bytes(range(16))),
        ],
        "epoch": 0,
    }
    return encoder_fingerprint(**{**given_parts, **changed})  # type: ignore[arg-type]


def test_a_fingerprint_is_the_same_for_the_same_encoder() -> None:
    assert fingerprint() == fingerprint()
    assert len(fingerprint()) == 32
    reordered = {
        "processor": {"ids": {"1": "x"}, "mean": (0.5, 0.5)},
        "vision": {"names": ["a", "b"], "depth": 2},
    }
    assert fingerprint(configs=reordered) == fingerprint()
    buffers = iter(
        [
            ("a.weight", "float32", (2, 2), np.zeros((2, 2), np.float32)),
            ("b.weight", "float32", [4], bytearray(range(16))),
        ]
    )
    assert fingerprint(weights=buffers) == fingerprint()


A, B = ("a.weight", "float32", (2, 2), bytes(16)), ("b.weight", "float32", (4,), bytes(range(16)))


@pytest.mark.parametrize(
    "changed",
    [
        {"family": "qwen2_5_vl"},
        {"layout_version": 2},
        {"epoch": 1},
        {"configs": {"vision": {"depth": 2, "names": ["a", "b"]}}},
        {
            "configs": {
                "vision": {"depth": 2, "names": ["b", "a"]},
                "processor": {"mean": [0.5, 0.5], "ids": {1: "x"}},
            }
        },
        {
            "configs": {
                "vision": {"depth": 2.0, "names": ["a", "b"]},
                "processor": {"mean": [0.5, 0.5], "ids": {1: "x"}},
            }
        },
        {
            "configs": {
                "vision": {"depth": True, "names": ["a", "b"]},
                "processor": {"mean": [0.5, 0.5], "ids": {1: "x"}},
            }
        },
        {"weights": []},
        {"weights": [A]},
        {"weights": [B, A]},
        {"weights": [A, ("b.weight", "float32", (4,), bytes([*range(15), 16]))]},  # one bit of one weight
        {"weights": [A, ("b.weight", "bfloat16", (4,), bytes(range(16)))]},
        {"weights": [A, ("b.weight", "float32", (2, 2), bytes(range(16)))]},
        {"weights": [A, ("c.weight", "float32", (4,), bytes(range(16)))]},
        {
            "weights": [
                ("a.weight", "float32", (2, 2), bytes(16) + bytes(range(8))),
                ("b.weight", "float32", (4,), bytes(range(8, 16))),
            ]
        },
    ],
)
def test_any_change_to_an_encoder_makes_another(changed: dict[str, object]) -> None:
    assert fingerprint(**changed) != fingerprint()


@given(weights, weights)
def test_weights_are_told_apart_by_name_dtype_shape_bytes_and_order(a: list[Weight], b: list[Weight]) -> None:
    assert (fingerprint(weights=a) == fingerprint(weights=b)) == (a == b)


@given(json_values, json_values)
def test_configs_are_told_apart(a: object, b: object) -> None:
    same = fingerprint(configs={"vision": {"x": a}}) == fingerprint(configs={"vision": {"x": b}})
    assert same == (repr(by_name(a)) == repr(by_name(b)))


def by_name(value: object) -> object:
    if isinstance(value, dict):
        return {name: by_name(value[name]) for name in sorted(value)}
    return [by_name(item) for item in value] if isinstance(value, list) else value


def test_weights_are_taken_one_at_a_time() -> None:
    """A tower of gigabytes need not be in memory twice."""
    alive: list[int] = []

    def load() -> Iterator[Weight]:
        for n in range(3):
            alive.append(n)
            assert len(alive) == n + 1
            yield (f"w{n}", "float32", (1,), bytes(4))

    fingerprint(weights=load())
    assert alive == [0, 1, 2]


def test_what_is_no_plain_data_is_refused_by_place() -> None:
    with pytest.raises(ConfigError, match=r"vision\.layers\[1\]\.dtype is a Float32DType"):
        fingerprint(configs={"vision": {"layers": [1, {"dtype": np.dtype("float32")}]}})
    with pytest.raises(ConfigError, match="'1'"):
        canonical_json({1: "a", "1": "b"}, "ids")


# Keys


@given(options, options, texts, texts)
def test_feature_keys_are_told_apart(a: dict, b: dict, space_a: str, space_b: str) -> None:
    def meaning(given_options: dict, namespace: str) -> object:
        return namespace, {n: (type(v), v) for n, v in given_options.items() if v is not None}

    same = feature_key(ENCODER, PIXELS, a, space_a) == feature_key(ENCODER, PIXELS, b, space_b)
    assert same == (meaning(a, space_a) == meaning(b, space_b))


def test_a_feature_key_is_of_encoder_pixels_options_and_namespace() -> None:
    key = feature_key(ENCODER, PIXELS, {"max_pixels": 1000})
    assert len(key) == 32
    others = [
        feature_key(EncoderFingerprint(PIXELS), PixelDigest(ENCODER), {"max_pixels": 1000}),
        feature_key(ENCODER, PixelDigest(bytes(32)), {"max_pixels": 1000}),
        feature_key(ENCODER, PIXELS, {"max_pixels": "1000"}),
        feature_key(ENCODER, PIXELS, {"min_pixels": 1000}),
        feature_key(ENCODER, PIXELS, {"max_pixels": 1000}, "tenant"),
        feature_key(ENCODER, PIXELS, {}),
    ]
    assert len({key, *others}) == 7
    assert feature_key(ENCODER, PIXELS, {"max_tiles": None, "max_pixels": 1000}) == key  # not asked for


def test_digests_are_never_cut() -> None:
    with pytest.raises(ConfigError, match="pixel digest has 16 bytes"):
        feature_key(ENCODER, PixelDigest(bytes(16)), {})
    with pytest.raises(ConfigError, match="encoder fingerprint has 0 bytes"):
        feature_key(EncoderFingerprint(b""), PIXELS, {})
    with pytest.raises(ConfigError, match=r"option 'max_tiles' is 1\.5"):
        feature_key(ENCODER, PIXELS, {"max_tiles": 1.5})  # type: ignore[dict-item]


@given(
    st.tuples(st.sampled_from(["source", "uuid", "url"]), texts, st.binary(max_size=8)),
    st.tuples(st.sampled_from(["source", "uuid", "url"]), texts, st.binary(max_size=8)),
)
def test_aliases_are_told_apart_by_kind_namespace_and_value(a: tuple, b: tuple) -> None:
    assert (alias_key(*a) == alias_key(*b)) == (a == b)
    assert len(alias_key(*a)) == 32


def test_alias_kinds_are_known_ones() -> None:
    with pytest.raises(ConfigError, match="source, uuid, url"):
        alias_key("path", "", b"/tmp/a.png")  # type: ignore[arg-type]


def test_a_source_alias_holds_for_one_decoder_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Pillow may decode a JPEG to other pixels: it is decoded again, but a client's name stays."""
    names = [alias_key(kind, "", b"x") for kind in ("source", "uuid", "url")]
    monkeypatch.setattr(keys, "_decoder", lambda: "1/pillow-99")
    after = [alias_key(kind, "", b"x") for kind in ("source", "uuid", "url")]
    assert after[0] != names[0]
    assert after[1:] == names[1:]


def test_keys_stay_the_same_over_processes_and_releases() -> None:
    """A store outlives both; and nothing of the process, as its hash seed, may enter a key."""
    script = """
from featcache.keys import *
f = encoder_fingerprint(family="f", layout_version=1, configs={"b": {"y": 1, "x": [1.5, None]}, "a": {}},
                        weights=[("w", "float32", (2,), bytes(8))])
print(f.hex())
print(feature_key(f, PixelDigest(bytes(32)), {"b": 1, "a": "x"}, "ns").hex())
print(alias_key("uuid", "ns", b"u").hex())
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    golden = [
        "6863bfc103cdec98224166031eac04b02c32673cebef156463cb8d99cada7145",
        "a9c8ecc7c6d19c266b298353b4fa442821ce0c2ee0db0bba3a157d5a724e430f",
        "05c280b07033889a85bcf3fc6ac9c61829f96cfda4cf87b04c801529c23ce28c",
    ]
    assert outputs == {"".join(f"{line}\n" for line in golden)}
