"""From what a row or list says of an image (bytes, path, URL, data: URI, base64) to the image."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from featcache.engine.datauri import decode_base64, decode_data_uri, is_data_uri
from featcache.engine.warm.items import Found, PassedOver, SourceItem, Unreadable, held
from featcache.engine.warm.kinds import begins_image
from featcache.engine.warm.web import Web, is_url
from featcache.errors import ConfigError, FeatcacheError
from featcache.images import ImageLimits, read_source

_IN_OBJECT = ("bytes", "url", "image_url", "path", "base64", "data", "image")


class Addresses:
    """Turns values of one table, list or request file into images.

    folders: where relative paths are looked for, in order.
    """

    def __init__(self, folders: tuple[str, ...], web: Web, limits: ImageLimits) -> None:
        self.folders = folders
        self.web = web
        self.limits = limits

    def item(self, source: str, member: str, value: Any, **rest: Any) -> Found:
        """The image that `value` is or names; `rest` are fields of SourceItem."""
        if value is None:
            return PassedOver(source, member, "is empty")
        try:
            if isinstance(value, (bytes, bytearray)):
                return held(source, member, bytes(value), **rest)
            if isinstance(value, os.PathLike):
                return self._file(source, member, os.fsdecode(value), rest)
            if isinstance(value, str):
                return self._text(source, member, value, rest)
            if isinstance(value, Mapping):
                return self._object(source, member, value, rest)
        except FeatcacheError as exc:
            return Unreadable(source, member, exc)
        what = f"a {type(value).__name__}, and neither bytes nor an address of an image"
        return Unreadable(source, member, ConfigError(f"{member}: {what}"))

    def _object(self, source: str, member: str, value: Mapping[str, Any], rest: dict[str, Any]) -> Found:
        given = [name for name in _IN_OBJECT if value.get(name) is not None]
        if not given:
            if value.keys() & set(_IN_OBJECT):
                return PassedOver(source, member, "is empty")
            raise ConfigError(f"{member}: an object with none of {', '.join(_IN_OBJECT)}")
        content = value[given[0]]
        if given[0] in ("base64", "data", "bytes") and isinstance(content, str) and not is_data_uri(content):
            return held(source, member, decode_base64(content, member), **rest)
        return self.item(source, member, content, **rest)

    def _text(self, source: str, member: str, text: str, rest: dict[str, Any]) -> Found:
        if is_data_uri(text):
            return held(source, member, decode_data_uri(text, member), **rest)
        if is_url(text.lstrip()):
            return self._url(source, member, text.strip(), rest)
        if text[:5].lower() == "file:":
            return self._file(source, member, _file_path(text.strip(), member), rest)
        if _is_base64_image(text):
            return held(source, member, decode_base64(text, member), **rest)
        return self._file(source, member, text, rest)

    def _url(self, source: str, member: str, url: str, rest: dict[str, Any]) -> SourceItem:
        return SourceItem(source, member, lambda: self.web.fetch(url, url), **rest)

    def _file(self, source: str, member: str, path: str, rest: dict[str, Any]) -> SourceItem:
        return SourceItem(source, member, lambda: read_source(self.find(path), self.limits), **rest)

    def find(self, path: str) -> str:
        """`path`, where it is first found; as it would be in the first folder, if nowhere."""
        candidates = [str(Path(folder, expanded(path))) for folder in self.folders]
        return next((candidate for candidate in candidates if os.path.lexists(candidate)), candidates[0])


def expanded(path: str) -> str:
    """With the home folder in place of `~/`, which no shell sees in a quoted name, list or table."""
    return str(Path.home() / path[2:]) if path.startswith("~/") else path


def _file_path(url: str, where: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{where}: {url}: a file: URL of another machine; write file:///path")
    return unquote(parts.path)


def _is_base64_image(text: str) -> bool:
    """Whether this is an image in bare base64, and no path."""
    if len(text) < 64:
        return False
    try:
        return begins_image(base64.b64decode(text[:64], validate=True))
    except (binascii.Error, ValueError):
        return False
