"""Messages as OpenAI's API and transformers' templates write them, in one form: text, and images in order.

Nothing is dropped in silence: a part, field or role that isn't understood is an error that says where.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from PIL import Image

from featcache.engine.datauri import decode_base64, decode_data_uri, is_data_uri
from featcache.engine.families.base import ImageOptions
from featcache.engine.imageref import ImageRef
from featcache.errors import RequestError
from featcache.images import ImageSource, describe

Message: TypeAlias = Mapping[str, Any]
Fetch: TypeAlias = Callable[[str], "bytes | ImageRef"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_IMAGE_TYPES = ("image", "image_url", "input_image")
_IMAGE_FIELDS = ("image", "image_url", "url", "path", "base64", "source")
_OPTIONS = ("min_pixels", "max_pixels", "max_tiles")
# Said of an image, but of no effect on what a model sees here; OpenAI's "detail" is a price class.
_IDLE_FIELDS = ("type", "detail", "mime_type", "media_type", "cache_control", "uuid", "index")


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image that a message holds.

    where: "messages[0].content[1]". name: what errors about it begin with.
    """

    source: ImageSource | ImageRef
    options: ImageOptions
    where: str
    name: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """messages: for the chat template; each content is text, or parts {"type": "text", "text": ...} and
    {"type": "image"}. images: those of the image parts, in order.
    """

    messages: list[dict[str, Any]]
    images: list[InputImage]


@dataclass(frozen=True, slots=True)
class SourceRules:
    """Where images may come from.

    fetch: gets the bytes of an http(s) URL (or what the encoder identified before); None: no URL is fetched.
    paths: whether strings may name files of this machine. Never for messages from others.
    """

    fetch: Fetch | None = None
    paths: bool = True


OWN_SOURCES = SourceRules()


def read_messages(
    messages: Sequence[Message], options: ImageOptions, rules: SourceRules = OWN_SOURCES
) -> Conversation:
    """Messages in the one form that the rest of the engine knows.

    Raises RequestError that names the message, part or field that can't be taken.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: a {type(messages).__name__}; it is a list of messages")
    if not messages:
        raise RequestError("messages: empty; there is nothing to answer")
    reader = _Reader(options, rules)
    return Conversation([reader.message(m, f"messages[{i}]") for i, m in enumerate(messages)], reader.images)


def read_image(part: Mapping[str, Any], options: ImageOptions, rules: SourceRules, where: str) -> InputImage:
    """One image part. Raises RequestError that begins with `where` if it can't be taken."""
    return _Reader(options, rules).image(part, where)


class _Reader:
    def __init__(self, options: ImageOptions, rules: SourceRules) -> None:
        self.options = options
        self.rules = rules
        self.images: list[InputImage] = []

    def message(self, message: Message, where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestError(f"{where}: a {type(message).__name__}; it is an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role: {role!r}; there are {', '.join(ROLES)}")
        content = message.get("content")
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise RequestError(f"{where}.content: missing")
        others = {name: value for name, value in message.items() if name != "content" and value is not None}
        return {**others, "content": self.content(content, f"{where}.content")}

    def content(self, content: Any, where: str) -> str | list[dict[str, Any]]:
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
            return [self.part(part, f"{where}[{i}]") for i, part in enumerate(content)]
        raise RequestError(f"{where}: a {type(content).__name__}; it is text or a list of parts")

    def part(self, part: Any, where: str) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RequestError(f"{where}: a {type(part).__name__}; a part is an object with a type")
        kind = part.get("type")
        has_image = any(part.get(name) is not None for name in _IMAGE_FIELDS)
        if kind in _IMAGE_TYPES or (kind is None and has_image):
            self.images.append(self.image(part, where))
            return {"type": "image"}
        if kind in _TEXT_TYPES or (kind is None and "text" in part):
            return {"type": "text", "text": _text(part, "refusal" if kind == "refusal" else "text", where)}
        known = ", ".join((*_TEXT_TYPES, *_IMAGE_TYPES))
        raise RequestError(f"{where}.type: {kind!r} isn't supported; there are {known}")

    def image(self, part: Mapping[str, Any], where: str) -> InputImage:
        allowed = {*_IMAGE_FIELDS, *_OPTIONS, *_IDLE_FIELDS}
        if unknown := sorted(str(name) for name in part if name not in allowed and part[name] is not None):
            raise RequestError(f"{where}.{unknown[0]}: not a field that featcache knows of an image")
        given = [name for name in _IMAGE_FIELDS if part.get(name) is not None]
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else f"has none of {', '.join(_IMAGE_FIELDS)}"
            raise RequestError(f"{where}: an image part {what}; it needs exactly one of them")
        field, where_field = given[0], f"{where}.{given[0]}"
        source = self.source(field, part[field], where_field)
        options = {name: part[name] for name in _OPTIONS if part.get(name) is not None}
        name = describe(source) if isinstance(source, (str, os.PathLike)) else where
        return InputImage(source, replace(self.options, **options), where, name)

    def source(self, field: str, value: Any, where: str) -> ImageSource | ImageRef:
        if field == "base64":
            return decode_base64(_string(value, where), where)
        if field == "source":  # Anthropic's form
            return self._nested(value, {"base64": "data", "url": "url"}, where)
        if isinstance(value, Mapping) and field == "image_url":
            if value.get("url") is None:
                raise RequestError(f"{where}.url: missing")
            return self.address(_string(value["url"], f"{where}.url"), f"{where}.url")
        if isinstance(value, (bytes, bytearray, memoryview, Image.Image, ImageRef)) and field == "image":
            return bytes(value) if isinstance(value, (bytearray, memoryview)) else value
        if isinstance(value, os.PathLike):
            return self.path(os.fspath(value), where)
        text = _string(value, where)
        return self.path(text, where) if field == "path" else self.address(text, where)

    def _nested(self, value: Any, fields: Mapping[str, str], where: str) -> ImageSource | ImageRef:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if not isinstance(kind, str) or kind not in fields:
            raise RequestError(f"{where}.type: {kind!r}; there are {', '.join(fields)}")
        field = fields[kind]
        text = _string(value.get(field), f"{where}.{field}")
        read = decode_base64 if kind == "base64" else self.address
        return read(text, f"{where}.{field}")

    def address(self, text: str, where: str) -> ImageSource | ImageRef:
        """A data: URI, an http(s) or file: URL, or a path."""
        if is_data_uri(text):
            return decode_data_uri(text, where)
        scheme = text[:8].lstrip().partition(":")[0].lower()
        if scheme in ("http", "https") or (scheme == "file" and not self.rules.paths):
            if self.rules.fetch is None:
                raise RequestError(
                    f"{where}: {scheme} URLs aren't fetched here; send the image's bytes instead"
                )
            return self.rules.fetch(text.strip())
        if scheme == "file":
            return _file_path(text.strip(), where)
        return self.path(text, where)

    def path(self, text: str, where: str) -> str:
        if not self.rules.paths:
            raise RequestError(
                f"{where}: neither a data: URI nor an http(s) URL, and files can't be named in a request"
            )
        return text


def _file_path(url: str, where: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise RequestError(f"{where}: {describe(url)}: a file: URL of another machine; write file:///path")
    return unquote(parts.path)


def _text(part: Mapping[str, Any], field: str, where: str) -> str:
    return _string(part.get(field), f"{where}.{field}")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(
            f"{where}: {'missing' if value is None else f'a {type(value).__name__}, not text'}"
        )
    return value
