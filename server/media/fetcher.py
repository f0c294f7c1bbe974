"""Images by URL, fetched within limits: of time, bytes, redirects, type, and of where they may lie."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import stat
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import httpcore2 as httpcore
import httpx2 as httpx

from featcache import __version__
from featcache.errors import RequestError
from featcache.keys import SourceDigest, source_digest
from featcache.server.media.addresses import AddressError, CheckedNetwork
from featcache.server.media.urls import KnownUrl, UrlMemory, lower_names
from featcache.sizes import format_size

_MAX_URL = 8192  # characters
_REDIRECTS = (301, 302, 303, 307, 308)
_CONNECTIONS, _PER_HOST = 128, 16  # one slow host may hold 16, and leaves the others 112
_STEP = 1 << 20  # bytes inflated before other requests get their turn
_HEADERS = {
    "User-Agent": f"featcache/{__version__}",
    "Accept": "image/*, application/octet-stream;q=0.5",
    "Accept-Encoding": "identity",
}


_FAILED, _CLOSED = "image_not_fetched", "image_url_refused"
_OUTSIDE = "is not a file that this server may read"

_T = TypeVar("_T")


class MediaError(RequestError):
    """An image that can't be fetched, or may not be. `code` is for programs."""

    def __init__(self, name: str, reason: str, code: str = "invalid_image_url") -> None:
        super().__init__(f"{name}: {reason}")
        self.code = code


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What may be fetched.

    max_bytes: of one image, as it travels and after decompression.
    max_total_bytes: of all downloads that are under way.
    timeout_s: for one image, redirects and name look-ups included.
    allowed_domains: if not empty, these hosts only; "*.example.org" is every host below example.org.
    local_path: the folder that `file:` URLs may lead into; None refuses them all.
    ttl_s: how long a fetched URL is taken to be unchanged, without asking its server.
    """

    max_bytes: int = 64 << 20
    max_total_bytes: int = 1 << 30
    timeout_s: float = 10.0
    max_redirects: int = 5
    allowed_domains: tuple[str, ...] = ()
    local_path: Path | None = None
    ttl_s: float = 0.0


class Fetched(NamedTuple):
    """data: the bytes, or None if they weren't needed: the URL still leads to those with this digest."""

    digest: SourceDigest
    data: bytes | None


class _RefusedError(Exception):
    """A MediaError before it has its request's name."""

    def __init__(self, reason: str, code: str = "invalid_image_url") -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Fetched]
    waiters: int = 0


class MediaFetcher:
    """Fetches images for requests. Lives on one event loop; `executor` does what would block it."""

    def __init__(
        self, rules: MediaRules, memory: UrlMemory, executor: Executor, network: CheckedNetwork
    ) -> None:
        self._rules = rules
        self._memory = memory
        self._executor = executor
        self._network = network
        # httpcore's pool and not an httpx client: no cookies shared between tenants, no proxy from the
        # environment (which would connect where nothing is checked), no redirects but ours.
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=_CONNECTIONS,
            max_keepalive_connections=32,
            keepalive_expiry=30,
            network_backend=self._network,
        )
        self._flights: dict[tuple[str, str, bytes], _Flight] = {}
        self._hosts: dict[str, tuple[asyncio.Semaphore, int]] = {}
        self._total_bytes = 0
        self.counts = {"fetched": 0, "revalidated": 0, "fresh": 0, "joined": 0, "failed": 0}

    async def fetch(
        self,
        url: str,
        *,
        name: str,
        namespace: str = "",
        is_known: Callable[[SourceDigest], bool] | None = None,
    ) -> Fetched:
        """The image that a URL leads to.

        name: what errors call it, as "messages[0].content[1]".
        is_known: says (off the event loop) whether the features of bytes with this digest are held, so that
            the bytes aren't needed; None if they are needed anyway.

        Raises MediaError, whose message tells nothing of this machine or its network.
        """
        if url[:5].lower() == "file:":
            return await self._run(self._read_local, url, name)
        target = self._checked(url, name)
        known = await self._run(self._known, namespace, url, is_known) if is_known else None
        if known is not None and time.time() - known.fetched_at < self._rules.ttl_s:
            self.counts["fresh"] += 1
            return Fetched(known.digest, None)
        key = (namespace, url, known.digest if known else b"")
        return await self._joined(key, lambda: self._download(target, url, namespace, known), name)

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.aclose()
        self._network.close()

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    def _known(self, namespace: str, url: str, is_known: Callable[[SourceDigest], bool]) -> KnownUrl | None:
        known = self._memory.get(namespace, url)
        return known if known is not None and is_known(known.digest) else None

    async def _joined(
        self, key: tuple[str, str, bytes], download: Callable[[], Coroutine[None, None, Fetched]], name: str
    ) -> Fetched:
        """One download for all who wait for it; it ends when the last of them goes away."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(download()))
        else:
            self.counts["joined"] += 1
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except _RefusedError as exc:
            raise MediaError(name, exc.reason, exc.code) from exc
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                del self._flights[key]
                flight.task.cancel()

    # From here on errors are _RefusedError: who waits for the download puts its own name to it.

    async def _download(self, target: httpx.URL, url: str, namespace: str, known: KnownUrl | None) -> Fetched:
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                return await self._follow(target, url, namespace, known)
        except TimeoutError as exc:
            self.counts["failed"] += 1
            raise _RefusedError(f"not fetched within {self._rules.timeout_s:g} s", _FAILED) from exc
        except BaseException:
            self.counts["failed"] += 1
            raise

    async def _follow(self, target: httpx.URL, url: str, namespace: str, known: KnownUrl | None) -> Fetched:
        for _ in range(self._rules.max_redirects + 1):
            # A validator belongs to the address that gave it: another one's might be the same by chance.
            conditions = known.conditions() if known and known.final_url == str(target) else {}
            async with self._response(target, conditions) as response:
                headers = lower_names(response.headers)
                if response.status in _REDIRECTS:
                    target = self._redirected(target, headers.get("location", ""))
                    continue
                if response.status == 304 and known is not None and conditions:
                    self.counts["revalidated"] += 1
                    renewed = dataclasses.replace(known, fetched_at=time.time())
                    await self._run(self._memory.put, namespace, url, renewed)
                    return Fetched(known.digest, None)
                data = await self._body(response, headers)
            digest = await self._run(source_digest, data)
            seen = KnownUrl.of(digest, str(target), time.time(), headers)
            if seen is not None:
                await self._run(self._memory.put, namespace, url, seen)
            self.counts["fetched"] += 1
            return Fetched(digest, data)
        raise _RefusedError(f"more than {self._rules.max_redirects} redirects")

    @asynccontextmanager
    async def _response(self, url: httpx.URL, headers: Mapping[str, str]) -> AsyncIterator[httpcore.Response]:
        address = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), self._rules.timeout_s)
        async with self._turn(url.host):
            try:
                async with self._pool.stream(
                    "GET",
                    address,
                    headers=[*_HEADERS.items(), *headers.items()],
                    extensions={"timeout": timeout},
                ) as response:
                    yield response
            except AddressError as exc:
                raise _RefusedError(f"{_short(url.host)} has no public address", _CLOSED) from exc
            except httpcore.TimeoutException as exc:
                raise _RefusedError(f"{_short(url.host)} did not answer in time", _FAILED) from exc
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as exc:
                raise _RefusedError(f"{_short(url.host)} can't be reached, or broke off", _FAILED) from exc

    @asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        """At most so many connections to one host; the rest wait for it, and for no other."""
        gate, users = self._hosts.get(host, (asyncio.Semaphore(_PER_HOST), 0))
        self._hosts[host] = (gate, users + 1)
        try:
            async with gate:
                yield
        finally:
            gate, users = self._hosts[host]
            if users == 1:
                del self._hosts[host]
            else:
                self._hosts[host] = (gate, users - 1)

    def _redirected(self, target: httpx.URL, location: str) -> httpx.URL:
        try:
            joined = str(target.join(location)) if location else ""
        except httpx.InvalidURL:
            joined = ""
        if not joined:
            raise _RefusedError("redirected to something that isn't an address")
        return self._allowed(joined)

    def _checked(self, url: str, name: str) -> httpx.URL:
        try:
            return self._allowed(url)
        except _RefusedError as exc:
            raise MediaError(name, exc.reason, exc.code) from exc

    def _allowed(self, url: str) -> httpx.URL:
        if len(url) > _MAX_URL:
            raise _RefusedError(f"a URL of {len(url)} characters; the limit is {_MAX_URL}")
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as exc:
            raise _RefusedError("is not a valid URL") from exc
        if parsed.scheme not in ("http", "https"):
            what = f"{parsed.scheme[:20]}: URLs aren't fetched" if parsed.scheme else "is not a URL"
            raise _RefusedError(f"{what}; give an http:, https: or data: URL")
        if not parsed.host:
            raise _RefusedError("is a URL without a host")
        if parsed.port is not None and not 0 < parsed.port < 65536:
            raise _RefusedError(f"is not a valid URL: there is no port {parsed.port}")
        if parsed.userinfo:
            raise _RefusedError("holds a user name or password; give a URL without")
        if self._rules.allowed_domains and not any(
            _matches(parsed.host, domain) for domain in self._rules.allowed_domains
        ):
            raise _RefusedError(
                f"{_short(parsed.host)} is not among the hosts this server fetches images from", _CLOSED
            )
        return parsed.copy_with(fragment=None)

    async def _body(self, response: httpcore.Response, headers: Mapping[str, str]) -> bytes:
        if response.status != 200:
            raise _RefusedError(f"its server answered {response.status}", _FAILED)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind and not kind.startswith("image/") and not kind.endswith("/octet-stream"):
            raise _RefusedError(f"is {_short(kind)}, not an image")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and int(length) > self._rules.max_bytes:
            self._too_large()
        inflate = _inflater(headers.get("content-encoding", "").strip().lower())
        body = bytearray()
        try:
            async for chunk in response.aiter_stream():
                for piece in inflate(chunk):
                    body += self._admitted(piece, len(body))
                    if len(piece) == _STEP:
                        await asyncio.sleep(0)
        except zlib.error as exc:
            raise _RefusedError("its compressed body is damaged", _FAILED) from exc
        finally:
            self._total_bytes -= len(body)
        return bytes(body)

    def _admitted(self, piece: bytes, have: int) -> bytes:
        if have + len(piece) > self._rules.max_bytes:
            self._too_large()
        if self._total_bytes + len(piece) > self._rules.max_total_bytes:
            raise _RefusedError("too many images are being fetched at the moment; try again", _FAILED)
        self._total_bytes += len(piece)
        return piece

    def _too_large(self) -> NoReturn:
        raise _RefusedError(f"more than {format_size(self._rules.max_bytes)}, the limit for a fetched image")

    def _read_local(self, url: str, name: str) -> Fetched:
        try:
            data = read_local(url, self._rules.local_path, self._rules.max_bytes)
        except _RefusedError as exc:
            raise MediaError(name, exc.reason, exc.code) from exc
        return Fetched(source_digest(data), data)


def read_local(url: str, root: Path | None, max_bytes: int) -> bytes:
    """The file that a `file:` URL names, if it lies below `root`; symbolic links may not lead out of it."""
    if root is None:
        raise _RefusedError("file: URLs are not allowed on this server", _CLOSED)
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise _RefusedError("is not a file: URL of an absolute path, as file:///folder/image.png")
    root = root.resolve()
    try:
        resolved = Path(path).resolve(strict=True)
        if not resolved.is_relative_to(root):
            raise _RefusedError(_OUTSIDE, _CLOSED)
        with open(resolved, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            # What was opened is looked at again: a folder may have become a link in between.
            opened = Path(f"/proc/self/fd/{file.fileno()}").readlink()
            if not opened.is_relative_to(root) or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _RefusedError(_OUTSIDE, _CLOSED)
            data = file.read(max_bytes + 1)
    except OSError as exc:
        raise _RefusedError(
            _OUTSIDE, _CLOSED
        ) from exc  # the same answer: which files exist elsewhere is no one's business
    if len(data) > max_bytes:
        raise _RefusedError(f"more than {format_size(max_bytes)}, the limit for a file")
    return data


def _matches(host: str, domain: str) -> bool:
    host, domain = host.lower().rstrip("."), domain.lower()
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


def _inflater(encoding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Takes the body's chunks, gives pieces of at most _STEP bytes: a bomb is met before it has gone off."""
    if encoding in ("", "identity"):
        return lambda chunk: iter((chunk,))
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise _RefusedError(f"comes with content-encoding {_short(encoding)}, which isn't supported", _FAILED)
    stream = zlib.decompressobj(32 + zlib.MAX_WBITS)  # gzip or zlib, by its header

    def inflate(chunk: bytes) -> Iterator[bytes]:
        while chunk:
            yield stream.decompress(chunk, _STEP)
            chunk = stream.unconsumed_tail

    return inflate


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
