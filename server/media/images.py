"""The images of a request: from URLs, data: URIs and uuids to `ImageRef`s, in the caller's namespace.

What goes on to the engine holds no string that could name a file or an address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from featcache.engine.encoder import VisionEncoder
from featcache.engine.families.base import ImageOptions
from featcache.engine.imageref import ImageRef
from featcache.engine.messages import SourceRules, read_image
from featcache.errors import FeatcacheError, RequestError
from featcache.keys import PixelDigest, SourceDigest, alias_key
from featcache.server.auth import Caller
from featcache.server.media.fetcher import MediaFetcher
from featcache.server.protocol import ImageKwargs

_T = TypeVar("_T")

_IMAGE_TYPES = ("image", "image_url", "input_image")
_IMAGE_FIELDS = ("image", "image_url", "url")
_SOURCE_FIELDS = (*_IMAGE_FIELDS, "source", "base64")
_DETAILS = ("auto", "low", "high", "original")
_LOW_DETAIL_PIXELS = 512 * 512
_MAX_UUID = 256
_NO_FILES = SourceRules(fetch=None, paths=False)


@dataclass(frozen=True, slots=True)
class RequestImage:
    """One image part.

    where: as "messages[0].content[1]". address: the http(s) or file: URL to fetch, if any.
    number: of images that stand together in one prompt.
    """

    part: Mapping[str, Any]
    where: str
    address: str | None
    uuid: str | None
    options: ImageOptions
    number: int


class ImageReader:
    """Turns image parts into refs. Lives on one event loop; hashing and decoding are done by `executor`."""

    def __init__(
        self, encoder: VisionEncoder, media: MediaFetcher, executor: Executor, max_images: int
    ) -> None:
        self._encoder = encoder
        self._media = media
        self._executor = executor
        self._max_images = max_images

    async def read_messages(
        self, messages: Sequence[Mapping[str, Any]], options: ImageOptions, caller: Caller
    ) -> tuple[list[dict[str, Any]], list[ImageRef]]:
        """The messages with a ref in each image part, and all refs in order.

        Raises RequestError, MediaError or ImageError for the first image that can't be read.
        """
        found = self._find(messages, options)
        async with _FirstError() as group:
            tasks = [group.create_task(self.read(image, caller)) for image in found.values()]
        refs = dict(zip(found, [task.result() for task in tasks], strict=True))
        read = [_with_refs(message, i, refs, found) for i, message in enumerate(messages)]
        return read, list(refs.values())

    async def read_each(
        self, parts: Sequence[Mapping[str, Any]], options: ImageOptions, caller: Caller
    ) -> list[ImageRef | FeatcacheError]:
        """The refs of image parts, each with its own outcome."""

        async def one(part: Mapping[str, Any], where: str) -> ImageRef | FeatcacheError:
            try:
                return await self.read(self.describe(part, where, options), caller)
            except FeatcacheError as exc:
                return exc

        return await asyncio.gather(*(one(part, f"images[{i}]") for i, part in enumerate(parts)))

    def _find(
        self, messages: Sequence[Mapping[str, Any]], options: ImageOptions
    ) -> dict[tuple[int, int], RequestImage]:
        parts = {
            (i, j): part
            for i, message in enumerate(messages)
            if isinstance(message.get("content"), list)
            for j, part in enumerate(message["content"])
            if is_image(part)
        }
        number = len(parts)
        if number > self._max_images:
            raise RequestError(
                f"messages: {number} images; this server takes {self._max_images} in a request"
            )
        return {
            (i, j): self.describe(part, f"messages[{i}].content[{j}]", options, number)
            for (i, j), part in parts.items()
        }

    def describe(
        self, part: Mapping[str, Any], where: str, options: ImageOptions, number: int = 1
    ) -> RequestImage:
        """What an image part asks for. Raises RequestError that names the field at fault."""
        uuid = part.get("uuid")
        if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= _MAX_UUID):
            raise RequestError(f"{where}.uuid: it is a text of 1 to {_MAX_UUID} characters")
        given = [name for name in (*_IMAGE_FIELDS, "source") if part.get(name) is not None]
        value = part[given[0]] if given else None
        url = value.get("url") if isinstance(value, Mapping) else value
        address = url.strip() if isinstance(url, str) and _scheme(url) in ("http", "https", "file") else None
        if isinstance(value, Mapping) and given != ["source"]:
            extra = sorted(str(name) for name in value if name not in ("url", "detail"))
            if extra:
                raise RequestError(f"{where}.{given[0]}.{extra[0]}: this server doesn't know the field")
        detail = value.get("detail") if isinstance(value, Mapping) else part.get("detail")
        try:
            options = replace(options, **_limits(part))
        except RequestError as exc:
            raise RequestError(f"{where}.{exc}") from exc
        return RequestImage(part, where, address, uuid, self._detailed(detail, options, where), number)

    def _detailed(self, detail: Any, options: ImageOptions, where: str) -> ImageOptions:
        """`options` with `detail` in the words of the model's own image processor."""
        if detail is not None and detail not in _DETAILS:
            raise RequestError(f"{where}.detail: {detail!r}; there are {', '.join(_DETAILS)}")
        if detail != "low":
            return options
        family = self._encoder.family
        if "max_pixels" in family.options and options.max_pixels is None:
            if int(family.image_processor.size["longest_edge"]) <= _LOW_DETAIL_PIXELS:
                return options  # the model itself takes no more
            return replace(options, max_pixels=max(_LOW_DETAIL_PIXELS, options.min_pixels or 0))
        if "max_tiles" in family.options and options.max_tiles is None:
            return replace(options, max_tiles=1)
        return options  # a family whose images all cost the same

    async def read(self, image: RequestImage, caller: Caller) -> ImageRef:
        """The ref of one image: fetched if need be, hashed, and decoded only if nobody has seen it yet."""
        if image.address is None:
            return await self._run(self._identify, image, caller)
        fetched = await self._media.fetch(
            image.address,
            name=image.where,
            namespace=caller.namespace,
            is_known=lambda digest: self._held(digest, image, caller) is not None,
        )
        if fetched.data is None:
            ref = await self._run(self._held, fetched.digest, image, caller)
            if ref is not None:
                return self._named(ref, image, caller)
            fetched = await self._media.fetch(image.address, name=image.where, namespace=caller.namespace)
        return await self._run(self._identify, image, caller, fetched.data)

    def _identify(self, image: RequestImage, caller: Caller, data: bytes | None = None) -> ImageRef:
        part = {name: value for name, value in image.part.items() if name not in ("uuid", "detail")}
        has_image = any(part.get(name) is not None for name in _SOURCE_FIELDS)
        if image.uuid is not None and not has_image:
            return self._by_uuid(image, caller)
        if data is not None:
            others = {name: value for name, value in part.items() if name not in _SOURCE_FIELDS}
            part = {**others, "type": "image", "image": data}
        read = read_image(part, image.options, _NO_FILES, image.where)
        options = self._understood(read.options, image)
        ref = self._encoder.identify(read.source, options, image.where, caller.features)
        return self._named(ref, image, caller)

    def _named(self, ref: ImageRef, image: RequestImage, caller: Caller) -> ImageRef:
        if image.uuid is not None:
            alias = alias_key("uuid", caller.namespace, image.uuid.encode("utf-8", "surrogatepass"))
            self._encoder.store.put_alias(alias, ref.pixel_digest)
        return ref

    def _by_uuid(self, image: RequestImage, caller: Caller) -> ImageRef:
        assert image.uuid is not None
        alias = alias_key("uuid", caller.namespace, image.uuid.encode("utf-8", "surrogatepass"))
        digest = self._encoder.store.alias(alias)
        ref = digest and self._ref(PixelDigest(digest), image, caller)
        if not ref:
            raise RequestError(
                f"{image.where}.uuid: {image.uuid[:64]!r} isn't known here any more; send the image"
            )
        return ref

    def _held(self, digest: SourceDigest, image: RequestImage, caller: Caller) -> ImageRef | None:
        """The ref of bytes that are known by their digest alone, if their features are held."""
        pixels = self._encoder.store.alias(alias_key("source", caller.features, digest))
        return self._ref(PixelDigest(pixels), image, caller) if pixels else None

    def _ref(self, digest: PixelDigest, image: RequestImage, caller: Caller) -> ImageRef | None:
        options = self._understood(image.options, image)
        ref = self._encoder.identify_digest(digest, options, image.where, caller.features)
        ref.layout = self._encoder.store.layout(ref.key)
        return None if ref.layout is None else ref

    def _understood(self, options: ImageOptions, image: RequestImage) -> ImageOptions:
        try:
            return self._encoder.family.options_for(options, image.number)
        except RequestError as exc:
            raise RequestError(f"{image.where}: {exc}") from exc

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)


class _FirstError(asyncio.TaskGroup):
    """A TaskGroup whose first error is raised by itself, the others having been cancelled."""

    async def __aexit__(self, *args: Any) -> None:
        try:
            await super().__aexit__(*args)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group


def options_of(kwargs: ImageKwargs | None) -> ImageOptions:
    return ImageOptions() if kwargs is None else ImageOptions(**kwargs.model_dump())


def is_image(part: object) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in _IMAGE_TYPES or (kind is None and any(name in part for name in _IMAGE_FIELDS))


def _with_refs(
    message: Mapping[str, Any],
    i: int,
    refs: Mapping[tuple[int, int], ImageRef],
    found: Mapping[tuple[int, int], RequestImage],
) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": "image", "image": refs[i, j], **_given(refs[i, j].options)} if (i, j) in found else part
        for j, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _given(options: ImageOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.given()}


def _limits(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: part[name] for name in ("min_pixels", "max_pixels", "max_tiles") if part.get(name) is not None
    }


def _scheme(url: str) -> str:
    return url[:16].lstrip().partition(":")[0].lower()
