"""What is known of a URL: which bytes it led to, and what its server says of them.

Kept in the store's alias table, in the caller's namespace, so that it outlives the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Protocol

from featcache.keys import SourceDigest, alias_key

_MAX_VALIDATOR = 256  # characters; a longer ETag is somebody's payload
_MIN_AGE_S = (
    60  # RFC 9110, 8.8.2.2: a Last-Modified younger than this at the response may hide a second change
)


class Aliases(Protocol):
    """The part of FeatureStore that is used here."""

    def alias(self, alias_key: bytes, /) -> bytes | None: ...
    def put_alias(self, alias_key: bytes, value: bytes, /) -> None: ...


@dataclass(frozen=True, slots=True)
class KnownUrl:
    """digest: of the bytes it led to. final_url: where redirects ended. fetched_at: seconds since 1970.

    etag, last_modified: its server's own, strong ones only; a weak validator doesn't promise the same bytes.
    """

    digest: SourceDigest
    final_url: str
    fetched_at: float
    etag: str | None = None
    last_modified: str | None = None

    def conditions(self) -> dict[str, str]:
        """The request headers that ask whether it is still so; none if its server can't be asked."""
        if self.etag is not None:
            return {"If-None-Match": self.etag}
        return {"If-Modified-Since": self.last_modified} if self.last_modified is not None else {}

    @classmethod
    def of(
        cls, digest: SourceDigest, final_url: str, now: float, headers: Mapping[str, str]
    ) -> KnownUrl | None:
        """From a response's headers (lower-case names); None if it asked not to be remembered."""
        if "no-store" in headers.get("cache-control", "").lower():
            return None
        etag = headers.get("etag", "")
        strong = etag.startswith('"') and etag.isascii() and len(etag) <= _MAX_VALIDATOR
        return cls(digest, final_url, now, etag if strong else None, _settled(headers))

    def to_bytes(self) -> bytes:
        doc = [self.final_url, self.fetched_at, self.etag, self.last_modified]
        return self.digest + json.dumps(doc).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> KnownUrl:
        final_url, fetched_at, etag, last_modified = json.loads(value[32:])
        return cls(SourceDigest(value[:32]), final_url, fetched_at, etag, last_modified)


def _settled(headers: Mapping[str, str]) -> str | None:
    """Last-Modified, if the file was left alone for a while before the response."""
    modified, date = headers.get("last-modified", ""), headers.get("date", "")
    if not modified or len(modified) > _MAX_VALIDATOR:
        return None
    try:
        age = parsedate_to_datetime(date) - parsedate_to_datetime(modified)
    except (ValueError, TypeError):
        return None
    return modified if age.total_seconds() >= _MIN_AGE_S else None


class UrlMemory:
    """URL -> KnownUrl, by namespace. Reads the store: call it off the event loop."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases

    def get(self, namespace: str, url: str) -> KnownUrl | None:
        value = self._aliases.alias(alias_key("url", namespace, url.encode()))
        return None if value is None else KnownUrl.from_bytes(value)

    def put(self, namespace: str, url: str, known: KnownUrl) -> None:
        self._aliases.put_alias(alias_key("url", namespace, url.encode()), known.to_bytes())


def lower_names(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
