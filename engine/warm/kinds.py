"""What a file is, by its name, and by its first bytes where the name doesn't tell."""

from __future__ import annotations

import mimetypes
from pathlib import PurePosixPath
from typing import Literal, TypeAlias

Container: TypeAlias = Literal["tar", "zip", "parquet", "arrow", "jsonl"]

# Formats that can be read, and HEIC: a photograph that can't be is a failure, and not passed over.
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff", "avif"),
        *("jp2", "j2k", "j2c", "jpx", "jpf", "ppm", "pgm", "pbm", "pnm", "qoi", "heic", "heif"),
    )
)
_CONTAINERS: tuple[tuple[str, Container], ...] = (
    *((suffix, "tar") for suffix in (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")),
    (".zip", "zip"),
    (".parquet", "parquet"),
    *((suffix, "arrow") for suffix in (".arrow", ".feather", ".ipc")),
    *((suffix, "jsonl") for suffix in (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")),
)
HEAD_BYTES = 32

_TYPES = mimetypes.MimeTypes(filenames=())  # Python's own table: the same on every machine


def container_of(name: str) -> Container | None:
    lower = name.lower()
    return next((kind for suffix, kind in _CONTAINERS if lower.endswith(suffix)), None)


def has_image_suffix(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_junk(name: str) -> bool:
    """Files that systems leave behind: ".DS_Store", and "._photo.jpg", which is no JPEG."""
    return name.rpartition("/")[2].startswith(".") or "__MACOSX/" in name


def other_type(name: str) -> str | None:
    """What a file is that by its name can't be an image ("text/plain"); None if the name doesn't tell."""
    return _TYPES.guess_type(name)[0]


def begins_image(head: bytes) -> bool:
    """Whether a file of at least HEAD_BYTES, or all of it, begins as one of the formats that can be read."""
    if head.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"qoif")):
        return True
    if head.startswith((b"II*\x00", b"MM\x00*", b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51")):
        return True
    if head[:4] == b"RIFF":
        return head[8:12] == b"WEBP"
    if head[4:8] == b"ftyp":
        return head[8:12] in (b"avif", b"avis")
    if head[:2] == b"BM":  # its header says how long it is: 12, 40 or more bytes
        return len(head) >= 18 and head[15:18] == b"\0\0\0" and head[14] in (12, 40, 52, 56, 64, 108, 124)
    return len(head) > 2 and head[:1] == b"P" and head[1:2] in b"123456" and head[2:3] in b" \t\r\n#"
