"""Images and archives by URL, for a person who names them; the server has guards of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from typing import TYPE_CHECKING

from featcache import __version__
from featcache.errors import ImageError
from featcache.images import ImageLimits

if TYPE_CHECKING:
    import httpx2 as httpx
    from typing_extensions import Buffer

_ATTEMPTS = 4
_BUSY = (429, 502, 503, 504)
_LONGEST_WAIT_S = 5.0


def is_url(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


class Web:
    """Fetches for several threads at once; busy servers are asked again, four times in all."""

    def __init__(self, limits: ImageLimits, *, timeout_s: float = 30.0, connections: int = 32) -> None:
        self._limits = limits
        self._timeout_s = timeout_s
        self._connections = connections
        self._client: httpx.Client | None = None
        self._making = threading.Lock()  # guards _client: made for the first URL, if there is one

    def fetch(self, url: str, name: str) -> bytes:
        """The bytes that a URL leads to. Raises ImageError."""
        import httpx2 as httpx

        wait_s = 0.25
        for attempt in range(_ATTEMPTS):
            try:
                with self._stream(url) as response:
                    if response.status_code not in _BUSY or attempt + 1 == _ATTEMPTS:
                        return self._body(response, name)
                    asked_s = _seconds(response.headers.get("retry-after"))
            except (httpx.TransportError, httpx.InvalidURL, httpx.TooManyRedirects) as exc:
                passing = isinstance(exc, httpx.TransportError)
                if not passing or isinstance(exc, httpx.UnsupportedProtocol) or attempt + 1 == _ATTEMPTS:
                    raise ImageError(name, f"can't be fetched: {exc or type(exc).__name__}") from exc
                asked_s = 0.0
            time.sleep(min(max(wait_s, asked_s), _LONGEST_WAIT_S))
            wait_s *= 2
        raise AssertionError("the last attempt returns or raises")

    def _body(self, response: httpx.Response, name: str) -> bytes:
        if response.status_code != 200:
            raise ImageError(name, f"can't be fetched: HTTP {response.status_code} {response.reason_phrase}")
        data = bytearray()
        for piece in response.iter_bytes():
            data += piece
            self._limits.check_encoded(name, len(data))  # while it comes: it may never end
        return bytes(data)

    @contextmanager
    def open(self, url: str, name: str) -> Iterator[BufferedReader]:
        """What a URL leads to as a stream, for archives of any size. Raises ImageError."""
        import httpx2 as httpx

        try:
            with self._stream(url) as response:
                if response.status_code != 200:
                    status = f"HTTP {response.status_code} {response.reason_phrase}"
                    raise ImageError(name, f"can't be fetched: {status}")
                yield BufferedReader(_Body(response.iter_bytes()), 1 << 20)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ImageError(name, f"can't be fetched: {exc or type(exc).__name__}") from exc

    @contextmanager
    def _stream(self, url: str) -> Iterator[httpx.Response]:
        with self._opened().stream("GET", url) as response:
            yield response

    def _opened(self) -> httpx.Client:
        import httpx2 as httpx

        with self._making:
            if self._client is None:
                self._client = httpx.Client(
                    headers={"User-Agent": f"featcache/{__version__}", "Accept-Encoding": "identity"},
                    follow_redirects=True,
                    max_redirects=5,
                    timeout=self._timeout_s,
                    limits=httpx.Limits(max_connections=self._connections),
                )
            return self._client

    def close(self) -> None:
        with self._making:
            if self._client is not None:
                self._client.close()


class _Body(RawIOBase):
    """The pieces of a response as a file that can only be read forward."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._rest))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.isdecimal() else 0.0
