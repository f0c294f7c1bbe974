"""Images as users give them: a path, encoded bytes or a PIL image; read, opened and digested within limits.

Nothing is decoded before its size is known to be within the limits, and whatever can't be an image ends in an
`ImageError` that names the input and says why.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, Union

from blake3 import blake3

from featcache.errors import ConfigError, ImageError
from featcache.keys import PixelDigest, pixel_header
from featcache.sizes import format_size

if TYPE_CHECKING:
    from PIL import Image

ImageSource: TypeAlias = Union[str, "os.PathLike[str]", bytes, "Image.Image"]

# Formats whose decoders are memory-safe enough to be fed by strangers and tell their size before decoding.
# Not among them: EPS, WMF and the like, which run other programs, and ICO, whose size may be a lie. MPO is
# a kind of JPEG to Pillow.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000", "PPM", "QOI")


class _WholeFiles:
    """Inside, Pillow refuses truncated files: half an image must not be kept as the whole one.

    Its LOAD_TRUNCATED_IMAGES is one switch for the process, and libraries turn it on (LMDeploy, by being
    imported). It is turned back on when the last thread has left.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()  # guards both below
        self._inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        from PIL import ImageFile

        with self._changing:
            self._inside += 1
            self._was_on |= ImageFile.LOAD_TRUNCATED_IMAGES
            if self._was_on:
                ImageFile.LOAD_TRUNCATED_IMAGES = False

    def __exit__(self, *_: object) -> None:
        from PIL import ImageFile

        with self._changing:
            self._inside -= 1
            if self._was_on and self._inside == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES, self._was_on = True, False


_WHOLE_FILES = _WholeFiles()

# Pillow's lazy load of one image isn't thread-safe, and a conversation may hold the same PIL image twice.
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an image may have at most; checked before it is decoded.

    max_encoded_bytes: of a file or of the bytes given.
    max_pixels: width x height. Pillow refuses more than twice its own `Image.MAX_IMAGE_PIXELS` (178,956,970)
        whatever is said here.
    max_side: width or height, in pixels.
    """

    max_encoded_bytes: int = 256 << 20
    max_pixels: int = 178_000_000
    max_side: int = 65_535

    def __post_init__(self) -> None:
        for name in ("max_encoded_bytes", "max_pixels", "max_side"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; an image limit is at least 1")

    def check_encoded(self, name: str, nbytes: int) -> None:
        if nbytes > self.max_encoded_bytes:
            most = f"{format_size(self.max_encoded_bytes)} ({self.max_encoded_bytes} bytes)"
            raise ImageError(name, f"{nbytes} bytes; the limit is {most}")

    def check_size(self, name: str, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise ImageError(name, f"is {width}x{height}: it has no pixels")
        if max(width, height) > self.max_side:
            raise ImageError(name, f"is {width}x{height}; the limit is {self.max_side} pixels a side")
        if width * height > self.max_pixels:
            raise ImageError(name, f"is {width}x{height}; the limit is {self.max_pixels} pixels")


DEFAULT_LIMITS = ImageLimits()


def open_image(
    source: ImageSource, limits: ImageLimits = DEFAULT_LIMITS, name: str | None = None
) -> Image.Image:
    """The image as every model sees it: a new PIL image, RGB, upright, transparency over white.

    source: a path, encoded bytes, or a PIL image (the frame that it stands at; of files the first).
    name: what an error calls the input; a short description of `source` if None.

    Raises ImageError if it can't be read or decoded, or is over a limit.
    """
    name = name or describe(source)
    content = read_source(source, limits, name)
    if isinstance(content, bytes):
        with _WHOLE_FILES:
            return _decoded(content, limits, name)
    with _LOADING, _WHOLE_FILES:
        return _canonical(content, name, owned=False)


def pixel_digest(
    source: ImageSource, limits: ImageLimits = DEFAULT_LIMITS, name: str | None = None
) -> PixelDigest:
    """The digest of the canonical pixels: one for PNG, WebP and BMP of a picture. Raises ImageError."""
    return digest_pixels(open_image(source, limits, name))


def digest_pixels(image: Image.Image) -> PixelDigest:
    """The PixelDigest of what `open_image` returned."""
    assert image.mode == "RGB", image.mode
    width, height = image.size
    hasher = blake3(pixel_header(width, height, image.mode))
    rows = max(1, (1 << 20) // (3 * width))  # in strips that stay in the processor's cache
    for top in range(0, height, rows):
        hasher.update(image.crop((0, top, width, min(top + rows, height))).tobytes())
    return PixelDigest(hasher.digest())


def describe(source: object) -> str:
    """A short name for messages: the path, "image bytes (1234 bytes)", "PIL image 30x40"."""
    if isinstance(source, (str, os.PathLike)):
        path = os.fsdecode(source)
        return repr(path if len(path) <= 200 else f"{path[:120]}...{path[-60:]}")[1:-1] or "the empty path"
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"image bytes ({memoryview(source).nbytes} bytes)"
    if _is_pil(source):
        return f"PIL image {source.size[0]}x{source.size[1]}"
    return f"{type(source).__name__} object"


def _is_pil(source: object) -> TypeGuard[Image.Image]:
    from PIL import Image

    return isinstance(source, Image.Image)


def read_source(
    source: ImageSource, limits: ImageLimits = DEFAULT_LIMITS, name: str | None = None
) -> bytes | Image.Image:
    """The encoded bytes of a path or of bytes, or the PIL image itself; nothing is decoded.

    Raises ImageError if it can't be read, is empty, or is over a limit.
    """
    name = name or describe(source)
    if isinstance(source, (str, os.PathLike)):
        return _read_file(source, limits, name)
    if isinstance(source, (bytes, bytearray, memoryview)):
        limits.check_encoded(name, memoryview(source).nbytes)
        return _not_empty(bytes(source), name)
    if _is_pil(source):
        limits.check_size(name, *source.size)
        return source
    raise ImageError(name, "is neither a path, nor bytes, nor a PIL image")


def _read_file(path: str | os.PathLike[str], limits: ImageLimits, name: str) -> bytes:
    try:
        # O_NONBLOCK, so that a pipe without a writer is refused instead of waited for
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(name, "is not a regular file, but a pipe, socket or device")
            limits.check_encoded(name, status.st_size)
            data = file.read(status.st_size + 1)  # not the limit: read() sets aside what it is asked for
            if len(data) > status.st_size:  # it has grown since
                data += file.read(limits.max_encoded_bytes + 1 - len(data))
    except ImageError:  # a ValueError too
        raise
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise ImageError(name, _why_unread(os.fsdecode(path), exc)) from exc
    limits.check_encoded(name, len(data))
    return _not_empty(data, name)


def _why_unread(path: str, exc: OSError | ValueError) -> str:
    if isinstance(exc, IsADirectoryError):
        return "is a directory"
    if scheme := re.match(r"(https?|data|file|s3|gs):", path, re.IGNORECASE):
        return f"is a {scheme[1].lower()}: address, not a path; give the bytes it leads to"
    if isinstance(exc, FileNotFoundError):
        return "no such file"
    return f"can't be read: {getattr(exc, 'strerror', None) or exc}"


def _not_empty(data: bytes, name: str) -> bytes:
    if not data:
        raise ImageError(name, "is empty (0 bytes)")
    return data


def _decoded(data: bytes, limits: ImageLimits, name: str) -> Image.Image:
    if size := _webp_size(data):  # Pillow makes the canvas as it opens the file
        limits.check_size(name, *size)
    image = _opened(data, name)
    limits.check_size(name, *image.size)
    if image.format == "JPEG2000" and data.rfind(b"\xff\xd9") < 0:  # OpenJPEG takes a bare header for gray
        raise ImageError(name, "can't be decoded: image file is truncated")
    return _canonical(image, name, owned=True)


def _opened(data: bytes, name: str) -> Image.Image:
    """The header read, no pixels decoded."""
    from PIL import Image, UnidentifiedImageError

    _register_formats()
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as exc:
        raise ImageError(name, _what_else(data)) from exc
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise ImageError(name, f"over PIL.Image.MAX_IMAGE_PIXELS: {exc}") from exc
    except Exception as exc:  # plugins let nearly anything through on a malformed header
        raise ImageError(name, f"its header can't be read: {_reason(exc)}") from exc


def _canonical(image: Image.Image, name: str, owned: bool) -> Image.Image:
    from featcache.pixels import canonical

    try:
        return canonical(image, owned=owned)
    except Exception as exc:  # OSError for truncated files; of malformed ones Pillow raises nearly anything
        raise ImageError(name, f"can't be decoded: {_reason(exc)}") from exc


def _reason(exc: Exception) -> str:
    if isinstance(exc, MemoryError):
        return "not enough memory"
    return str(exc) or type(exc).__name__


def _register_formats() -> None:
    """Import the plugins of FORMATS; left to itself, Pillow imports all forty that it has."""
    from PIL import (  # noqa: F401
        AvifImagePlugin,
        BmpImagePlugin,
        GifImagePlugin,
        Jpeg2KImagePlugin,
        JpegImagePlugin,
        MpoImagePlugin,
        PngImagePlugin,
        PpmImagePlugin,
        QoiImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) from the header of a WebP file; None if it isn't one."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = (value & 0x3FFF for value in struct.unpack_from("<HH", data, 26))
        case _:
            return None
    return width, height


def _what_else(data: bytes) -> str:
    """Why these bytes aren't an image, in words that help: what they look like instead."""
    known = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000, PPM or QOI"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return f"is an SVG drawing; render it to {known} first"
    if head.startswith((b"<!doctype html", b"<html")) or b"<html" in head:
        return "is an HTML page, not an image"
    if head.startswith(b"%pdf"):
        return "is a PDF document; render its pages to images first"
    if data[4:8] == b"ftyp" and data[8:12] in (b"heic", b"heix", b"mif1", b"heim", b"heis", b"hevc", b"msf1"):
        return f"is a HEIC image, which isn't supported; convert it to {known}"
    return f"is no image that can be read ({known}), or its header is damaged"
