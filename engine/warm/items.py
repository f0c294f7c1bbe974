"""What sources are made of: images to be read, what is passed over, and what can't be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, Union

from featcache.errors import FeatcacheError
from featcache.images import describe

if TYPE_CHECKING:
    from PIL import Image

Content: TypeAlias = Union[bytes, "Image.Image"]


def full_name(source: str, member: str) -> str:
    """What messages call it: "photos.tar, cats/1.jpg", without line breaks."""
    return f"{describe(source)}, {describe(member)}" if member else describe(source)


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One image of a source.

    source: the file, archive, table or URL, as it was named. member: which part of it ("cats/1.jpg",
        "line 7, images[0]"), empty for a file that is the image itself.
    read: its encoded bytes, or a PIL image. Called once or more, from any thread. Raises FeatcacheError.
    held_bytes: what the item itself keeps in memory until it is dropped; 0 if `read` goes to the disk or net.
    options: fields of ImageOptions that the image's own request asks for.
    num_images: images in the request that it stands in, 1 if it stands alone.
    """

    source: str
    member: str
    read: Callable[[], Content]
    held_bytes: int = 0
    options: Mapping[str, int] = field(default_factory=dict)
    num_images: int = 1

    @property
    def name(self) -> str:
        return full_name(self.source, self.member)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Something in a source that isn't meant to be an image."""

    source: str
    member: str
    reason: str

    @property
    def name(self) -> str:
        return full_name(self.source, self.member)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A source, or a part of one, from which images were expected and can't be had."""

    source: str
    member: str
    error: FeatcacheError

    @property
    def name(self) -> str:
        return full_name(self.source, self.member)


Found: TypeAlias = SourceItem | PassedOver | Unreadable


def held(source: str, member: str, content: Content, **rest: object) -> SourceItem:
    """An image that is in memory already."""
    size = len(content) if isinstance(content, bytes) else content.width * content.height * 3
    return SourceItem(source, member, lambda: content, size, **rest)  # type: ignore[arg-type]
