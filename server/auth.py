"""API keys: who calls, and in which namespace their images live."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from featcache.errors import ConfigError
from featcache.server.errors import ApiError

_KEY = re.compile(r"[!-9;-~]+")  # printable ASCII but the colon, which ends a name
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Caller:
    """namespace: of uuids and URLs, always the caller's own. features: of image features and KV blocks."""

    namespace: str = ""
    features: str = ""
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    caller: Caller


class Keys:
    """The keys of a server. Without any, everybody may call, in the namespace "".

    api_keys: "sk-..." or "name:sk-...". The name is the namespace, so that a key may be replaced and the
        tenant's images stay; without one the namespace follows from the key.
    shared_features: features and KV blocks are shared by all; uuids and URLs still are not.
    """

    def __init__(
        self, api_keys: Iterable[str], admin_key: str | None, *, shared_features: bool = False
    ) -> None:
        self._keys = [self._parsed(text, shared_features) for text in api_keys]
        self._admin = _digest(admin_key) if admin_key else None
        self.is_open = not self._keys

    @staticmethod
    def _parsed(text: str, shared: bool) -> _Key:
        name, named, key = text.strip().partition(":")
        if not named:
            name, key = "", name
        if not _KEY.fullmatch(key) or (named and not _NAME.fullmatch(name)):
            raise ConfigError(
                "an API key is KEY or NAME:KEY; KEY printable ASCII without :, NAME letters, digits, ._-"
            )
        digest = _digest(key)
        namespace = name or f"key-{digest.hex()[:16]}"
        return _Key(digest, Caller(namespace, "" if shared else namespace))

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this Authorization header. Raises ApiError 401 if nobody that is known.

        Takes as long for a wrong key as for any right one.
        """
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip()) if scheme.lower() == "bearer" else b""
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.caller
        if is_admin:
            return Caller(is_admin=True)
        if found is None and not self.is_open:
            reason = "wrong API key" if digest else "no API key; send one as Authorization: Bearer KEY"
            raise ApiError(401, reason, kind="authentication_error", code="invalid_api_key")
        return found or Caller()

    def has_namespace(self, name: str) -> bool:
        return any(key.caller.namespace == name for key in self._keys) or (self.is_open and not name)

    def admin(self, authorization: str | None) -> None:
        """Raises ApiError unless the admin key is given."""
        if self._admin is None:
            raise ApiError(403, "this server was started without --admin-key", kind="permission_error")
        if not self.caller(authorization).is_admin:
            raise ApiError(403, "this needs the admin key", kind="permission_error")


def read_keys(path: Path) -> list[str]:
    """API keys of a file: one a line; empty lines and lines that begin with # don't count."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"api_key_file: {path} can't be read: {getattr(exc, 'strerror', exc)}") from exc
    return [line for line in lines if line and not line.startswith("#")]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
