"""`ImageRef`: one image of a request, identified, and opened only if somebody has to look at it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from PIL import Image

from featcache.engine.families.base import ImageOptions, Pixels
from featcache.features import Layout
from featcache.keys import EncoderFingerprint, FeatureKey, PixelDigest


class Prepared:
    """What was made of one image on its way to the tower, once for all requests that ask for it.

    image: canonical pixels, if it had to be decoded to be identified. All is let go when it is encoded.
    """

    __slots__ = ("__weakref__", "_layout", "_lock", "_pixels", "image")

    def __init__(self) -> None:
        self.image: Image.Image | None = None
        self._lock = threading.Lock()  # held while preprocessing: the others wait for the one result
        self._pixels: Pixels | None = None
        self._layout: Layout | None = None

    def pixels(self, make: Callable[[], Pixels]) -> Pixels:
        with self._lock:
            return self._pixels or self._keep(make())

    def layout(self) -> Layout | None:
        return self._layout

    def layout_made(self, make: Callable[[], Pixels]) -> Layout:
        """The layout; unlike the pixels, it stays known when they were let go meanwhile."""
        with self._lock:
            return self._layout or self._keep(make()).layout

    def _keep(self, pixels: Pixels) -> Pixels:
        self._pixels, self._layout, self.image = pixels, pixels.layout, None
        return pixels

    def let_go(self) -> None:
        self._pixels = self.image = None


class ImageRef:
    """What `VisionEncoder.identify` returns.

    name: for messages. key: of its features.
    namespace, fingerprint, pixel_digest, options: what the key was made of.
    source: encoded bytes, or a canonical PIL image; None if only its identity was given.
    """

    __slots__ = (
        *("fingerprint", "key", "layout", "name", "namespace", "options"),
        *("pixel_digest", "prepared", "source"),
    )

    def __init__(
        self,
        *,
        name: str,
        namespace: str,
        key: FeatureKey,
        fingerprint: EncoderFingerprint,
        pixel_digest: PixelDigest,
        options: ImageOptions,
        source: bytes | Image.Image | None,
        prepared: Prepared,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.key = key
        self.fingerprint = fingerprint
        self.pixel_digest = pixel_digest
        self.options = options
        self.source = source
        self.prepared = prepared
        self.layout: Layout | None = None

    def __repr__(self) -> str:
        return f"ImageRef({self.name!r}, {self.key.hex()[:12]})"
