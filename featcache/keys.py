"""Keys: 32-byte blake3 digests that say exactly which image, which encoder and which options made a feature.

    SourceDigest        the encoded bytes of an image
    PixelDigest         its canonical pixels (images.py makes it)
    EncoderFingerprint  vision tower, projector and processor, weights included
    FeatureKey          namespace, fingerprint, pixels and the request's options: names one record

Everything hashed from more than one part is framed by tag and length, so that no two different inputs share a
preimage, and no digest is ever cut. Nothing here depends on the process (hash seeds, addresses, time).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Literal, NewType, get_args

from blake3 import blake3

from featcache.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

SourceDigest = NewType("SourceDigest", bytes)
PixelDigest = NewType("PixelDigest", bytes)
EncoderFingerprint = NewType("EncoderFingerprint", bytes)
FeatureKey = NewType("FeatureKey", bytes)

AliasKind = Literal["source", "uuid", "url"]

DIGEST_BYTES = 32
PIXELS_VERSION = 1  # of the canonical decode: raise it when the same file would give other pixels
_DOMAIN = "featcache/1/"


def framed(domain: str, parts: Iterable[tuple[str, Buffer]]) -> bytes:
    """One preimage of a domain and tagged parts, in order; different inputs give different bytes."""
    out = bytearray(_frame(domain, 0))
    for tag, value in parts:
        view = _flat(value)
        out += _frame(tag, view.nbytes)
        out += view
    return bytes(out)


def _frame(tag: str, nbytes: int) -> bytes:
    name = _utf8(tag)
    return struct.pack("<IQ", len(name), nbytes) + name


def _flat(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape can't be cast


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # file names may hold lone surrogates; still one to one


def _digest(domain: str, parts: Iterable[tuple[str, Buffer]]) -> bytes:
    return blake3(framed(_DOMAIN + domain, parts)).digest()


def source_digest(data: bytes | bytearray | memoryview) -> SourceDigest:
    """blake3 of the encoded bytes of an image, as `b3sum` prints it. 32 bytes."""
    return SourceDigest(blake3(data).digest())


def pixel_header(width: int, height: int, mode: str) -> bytes:
    """What goes before the pixels in a PixelDigest: 6x4 and 4x6 of the same bytes are two images."""
    size = struct.pack("<QQ", width, height)
    parts = [("version", struct.pack("<Q", PIXELS_VERSION)), ("size", size), ("mode", _utf8(mode))]
    return framed(_DOMAIN + "pixels", parts)


def encoder_fingerprint(
    *,
    family: str,
    layout_version: int,
    configs: Mapping[str, Mapping[str, object]],
    weights: Iterable[tuple[str, str, Iterable[int], Buffer]],
    epoch: int = 0,
) -> EncoderFingerprint:
    """The identity of an encoder: change anything that changes its output, and it is another one.

    configs: plain dictionaries by name ("vision", "processor", ...), compared as JSON: the order of their
        entries doesn't matter, tuples are lists.
    weights: (name, dtype, shape, bytes) of every tensor of tower and projector, contiguous, in the model's
        own order; consumed one at a time, so an iterator may load them as it goes.
    epoch: raised when weights change in a way that the bytes given here don't show.

    Raises ConfigError if a config holds something that isn't plain data.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    texts = [(f"config/{name}", canonical_json(doc, name).encode()) for name, doc in sorted(configs.items())]
    fixed = [
        ("family", _utf8(family)),
        ("layout_version", str(int(layout_version)).encode()),
        ("epoch", str(int(epoch)).encode()),
        *texts,
    ]
    hasher.update(framed(_DOMAIN + "encoder", fixed))
    for name, dtype, shape, buffer in weights:
        what = json.dumps([name, dtype, [int(n) for n in shape]]).encode()
        data = _flat(buffer)
        hasher.update(_frame("weight", len(what)) + what + _frame("data", data.nbytes))
        hasher.update(data)
    return EncoderFingerprint(hasher.digest())


def canonical_json(value: object, name: str) -> str:
    """`value` as JSON text in one form only: sorted names, no spaces, ASCII.

    Raises ConfigError that tells where in `name` something isn't plain data.
    """
    return json.dumps(_plain(value, name), sort_keys=True, separators=(",", ":"))


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        doc = {str(name): _plain(item, f"{where}.{name}") for name, item in value.items()}
        if len(doc) != len(value):
            raise ConfigError(f"{where}: two of its names are the same as text, as 1 and '1' are")
        return doc
    raise ConfigError(
        f"{where} is a {type(value).__name__}; an encoder's configuration holds only "
        "None, booleans, numbers, text, lists and dictionaries"
    )


def feature_key(
    fingerprint: EncoderFingerprint,
    pixel_digest: PixelDigest,
    options: Mapping[str, int | str | None],
    namespace: str = "",
) -> FeatureKey:
    """The key of one image's features.

    options: what the request asked of the processor (min_pixels, max_tiles, ...); None means not asked, and
        is the same as absent, so that a new option leaves existing keys as they are.
    namespace: a tenant's own; entries of different namespaces never meet.
    """
    given = [(name, value) for name, value in sorted(options.items()) if value is not None]
    return FeatureKey(
        _digest(
            "feature",
            [
                ("namespace", _utf8(namespace)),
                ("encoder", _whole(fingerprint, "encoder fingerprint")),
                ("pixels", _whole(pixel_digest, "pixel digest")),
                *((f"option/{name}", _option(name, value)) for name, value in given),
            ],
        )
    )


def _option(name: str, value: int | str) -> bytes:
    if isinstance(value, str):
        return b"s" + _utf8(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return b"i%d" % value
    raise ConfigError(f"option {name!r} is {value!r}; options are whole numbers, text or None")


def _whole(digest: bytes, what: str) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise ConfigError(f"{what} has {len(digest)} bytes; it is never cut, and has {DIGEST_BYTES}")
    return digest


def alias_key(kind: AliasKind, namespace: str, value: bytes) -> bytes:
    """The key of another name for an image in the alias table. 32 bytes.

    kind "source": of encoded bytes, by SourceDigest. It holds only for the decoder that was used: after an
        update of Pillow a file is decoded once more, and still finds its features if its pixels are the same.
    kind "uuid", "url": a client's own name, which means something in its namespace only.
    """
    if kind not in get_args(AliasKind):
        raise ConfigError(f"alias kind {kind!r}; there are {', '.join(get_args(AliasKind))}")
    decoder = _decoder() if kind == "source" else ""
    parts = [("namespace", _utf8(namespace)), ("decoder", decoder.encode()), ("value", value)]
    return _digest(f"alias/{kind}", parts)


@cache
def _decoder() -> str:
    import PIL

    return f"{PIXELS_VERSION}/pillow-{PIL.__version__}"
