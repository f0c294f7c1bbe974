"""What the status page shows beside counters: the last images, and the seconds that hits have saved."""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image

from featcache.errors import FeatcacheError
from featcache.features import Layout
from featcache.images import ImageLimits, open_image
from featcache.server.protocol import ServedImage

_MAX_RECENT = 24
_MAX_SEEN = 65_536
_THUMBNAIL = 128  # pixels
_WATCHED_S = 15.0
# Larger ones have no thumbnail: it isn't worth the decoding, nor the keeping until then.
_LIMITS = ImageLimits(max_pixels=40_000_000, max_encoded_bytes=8 << 20)


@dataclass(frozen=True, slots=True)
class RecentImage:
    namespace: str
    key: str
    tier: str
    tokens: int
    width: int
    height: int


class RecentImages:
    """The last images that were served, and which keys each namespace has been told. Thread-safe.

    Nothing of a picture is kept unless somebody has the page open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below; no picture is decoded under it
        self._recent: deque[RecentImage] = deque(maxlen=_MAX_RECENT)
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._sources: OrderedDict[str, bytes] = (
            OrderedDict()
        )  # to make thumbnails of, while somebody watches
        self._thumbnails: OrderedDict[str, str] = OrderedDict()
        self._watched_until = 0.0

    def add(
        self,
        namespace: str,
        image: ServedImage,
        layout: Layout,
        source: bytes | Image.Image | None,
    ) -> None:
        size = (layout.width, layout.height)
        with self._lock:
            self._recent.appendleft(RecentImage(namespace, image.key, image.tier, image.tokens, *size))
            if time.monotonic() > self._watched_until:
                self._sources.clear()
            elif isinstance(source, bytes) and len(source) <= _LIMITS.max_encoded_bytes:
                self._sources[image.key] = source
                if len(self._sources) > _MAX_RECENT:
                    self._sources.popitem(last=False)
        self.tell(namespace, image.key)

    def tell(self, namespace: str, key: str) -> None:
        """Remember that a caller knows a key by having sent its image."""
        with self._lock:
            self._seen[namespace, key] = None
            self._seen.move_to_end((namespace, key))
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)

    def knows(self, namespace: str, key: str) -> bool:
        with self._lock:
            return (namespace, key) in self._seen

    def show(self, namespace: str | None) -> list[dict[str, Any]]:
        """The last images of a namespace (None: of all), newest first, with thumbnails.

        Decodes pictures: call it off the event loop.
        """
        with self._lock:
            self._watched_until = time.monotonic() + _WATCHED_S
            recent = [image for image in self._recent if namespace in (None, image.namespace)]
        return [
            {
                "key": image.key,
                "tier": image.tier,
                "tokens": image.tokens,
                "width": image.width,
                "height": image.height,
                "thumbnail": self._thumbnail(image.key),
            }
            for image in recent
        ]

    def _thumbnail(self, key: str) -> str | None:
        with self._lock:
            made, source = self._thumbnails.get(key), self._sources.pop(key, None)
        if made is None and source is not None:
            made = thumbnail(source)
            with self._lock:
                self._thumbnails[key] = made
                if len(self._thumbnails) > 2 * _MAX_RECENT:
                    self._thumbnails.popitem(last=False)
        return made or None


def thumbnail(source: bytes) -> str:
    """A small JPEG as a data: URI; "" if there can be none."""
    try:
        small = open_image(source, _LIMITS)
    except FeatcacheError:
        return ""
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    out = BytesIO()
    small.save(out, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


class Savings:
    """Seconds that hits have saved, by what the same work took in this process when it had to be done.

    An estimate: tokens not encoded and not prefilled, times the measured seconds a token. Before anything was
    measured it is 0, not a guess. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._encode = _Rate()
        self._prefill = _Rate()
        self.total_s = 0.0
        self.images: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def account(
        self,
        images: Iterable[ServedImage],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        encode_s: float,
        prefill_s: float,
    ) -> float:
        """Take in one finished request; returns the seconds that it saved."""
        images = list(images)
        encoded = sum(image.tokens for image in images if image.tier == "encoded")
        held = sum(image.tokens for image in images if image.tier != "encoded")
        with self._lock:
            self._encode.add(encode_s, encoded)
            self._prefill.add(prefill_s, prompt_tokens - cached_tokens)
            saved = self._encode.of(held) + self._prefill.of(cached_tokens)
            self.total_s += saved
            self.images.update(image.tier for image in images)
            self.prompt_tokens += prompt_tokens
            self.cached_tokens += cached_tokens
        return saved


@dataclass(slots=True)
class _Rate:
    seconds: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        if tokens > 0:
            self.seconds += seconds
            self.tokens += tokens

    def of(self, tokens: int) -> float:
        return tokens * self.seconds / self.tokens if self.tokens else 0.0
