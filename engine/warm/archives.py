"""Images in .tar (WebDataset shards, compressed ones too; read as a stream) and .zip archives."""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, Self

from featcache.engine.warm.items import Found, PassedOver, Unreadable, held
from featcache.engine.warm.kinds import (
    HEAD_BYTES,
    begins_image,
    container_of,
    has_image_suffix,
    is_junk,
    other_type,
)
from featcache.errors import FeatcacheError, ImageError
from featcache.images import ImageLimits

_DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError)


class _Member(tarfile.TarInfo):
    """tarfile takes a damaged header, or none, for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as exc:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"damaged or cut off: {exc}") from exc
        except tarfile.EmptyHeaderError as exc:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it ends without an end mark: it is cut off") from exc


def tar_items(source: str, stream: IO[bytes], limits: ImageLimits) -> Iterator[Found]:
    """The images of a tar archive, one after another; nothing but the current one is in memory."""
    last = ""
    try:
        with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would remember them all
                last = member.name
                if not member.isdir():
                    yield _tar_item(source, archive, member, limits)
    except _DAMAGE as exc:
        where = f"after {last!r}" if last else "at its start"
        yield Unreadable(source, "", ImageError(source, f"the tar archive can't be read on {where}: {exc}"))


def _tar_item(source: str, archive: tarfile.TarFile, member: tarfile.TarInfo, limits: ImageLimits) -> Found:
    if not member.isreg():
        return PassedOver(source, member.name, "is a link or device")
    if reason := _passed_over(member.name):
        return PassedOver(source, member.name, reason)
    try:
        limits.check_encoded(member.name, member.size)
    except FeatcacheError as exc:
        return Unreadable(source, member.name, exc)
    file = archive.extractfile(member)
    assert file is not None  # a regular member
    data = file.read()
    if len(data) < member.size:
        raise tarfile.ReadError(f"it is cut off within {member.name!r}")
    return _item(source, member.name, data)


def zip_items(source: str, path: str, limits: ImageLimits) -> Iterator[Found]:
    """The images of a zip archive; a damaged member harms no other."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as exc:
        yield Unreadable(source, "", ImageError(source, f"the zip archive can't be read: {exc}"))
        return
    with archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            if reason := _passed_over(member.filename):
                yield PassedOver(source, member.filename, reason)
                continue
            try:
                limits.check_encoded(member.filename, member.file_size)
                with archive.open(member) as file:
                    data = file.read(limits.max_encoded_bytes + 1)  # file_size is only what the archive says
                limits.check_encoded(member.filename, len(data))
            except FeatcacheError as exc:
                yield Unreadable(source, member.filename, exc)
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError, *_DAMAGE) as exc:
                error = ImageError(member.filename, f"can't be unpacked: {exc}")
                yield Unreadable(source, member.filename, error)
            else:
                yield _item(source, member.filename, data)


def _passed_over(name: str) -> str | None:
    """Why a member can't be an image, if its name says so."""
    if has_image_suffix(name) and not is_junk(name):
        return None
    if is_junk(name):
        return "is hidden"
    if container_of(name):
        return "is an archive within an archive"
    if kind := other_type(name):
        return f"is {kind}"
    return None


def _item(source: str, name: str, data: bytes, **rest: Any) -> Found:
    if has_image_suffix(name) or begins_image(data[:HEAD_BYTES]):
        return held(source, name, data, **rest)
    return PassedOver(source, name, "is no image")
