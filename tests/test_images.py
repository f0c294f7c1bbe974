"""Canonical pixels and their digests: what is one image, what is two, and what is none."""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from featcache.errors import ConfigError, ImageError
from featcache.images import (
    FORMATS,
    ImageLimits,
    describe,
    digest_pixels,
    open_image,
    pixel_digest,
    read_source,
)

WHITE = (255, 255, 255)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.frombytes("RGB", (width, height), Random(seed).randbytes(3 * width * height))


def encoded(image: Image.Image, fmt: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, trns: bytes = b"") -> bytes:
    """A PNG of any depth and colour type; `rows` without filter bytes. Pillow can't write all of them."""
    stride = len(rows) // height
    raw = b"".join(b"\0" + rows[y * stride : (y + 1) * stride] for y in range(height))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))]
    chunks += [(b"tRNS", trns)] if trns else []
    chunks += [(b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))
        for tag, data in chunks
    )


def pixels(source: object) -> list[tuple[int, int, int]]:
    image = open_image(source)  # type: ignore[arg-type]
    assert image.mode == "RGB"
    return [image.getpixel((x, y)) for y in range(image.height) for x in range(image.width)]  # type: ignore[misc]


# One picture, one digest


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("PNG", {}),
        ("PNG", {"compress_level": 1}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("PPM", {}),
        ("QOI", {}),
        ("JPEG2000", {"irreversible": False}),
    ],
)
def test_same_pixels_share_one_digest(fmt: str, options: dict[str, object], tmp_path: Path) -> None:
    image = noise(37, 23)
    data = encoded(image, fmt, **options)
    path = tmp_path / "picture"  # no suffix: the bytes say what it is
    path.write_bytes(data)
    for source in (data, bytearray(data), memoryview(data), path, str(path), Image.open(path)):
        assert pixel_digest(source) == pixel_digest(image)  # type: ignore[arg-type]


def test_digest_is_of_version_size_mode_and_pixels() -> None:
    """Its exact bytes: a store lives longer than a release."""
    image = Image.frombytes("RGB", (2, 1), bytes([1, 2, 3, 4, 5, 6]))
    assert digest_pixels(image).hex() == "97fa837bcbe031e7b69fe70718f8d790d39d29e27eede6342d1ee895c7a40df9"


def test_equal_bytes_of_another_shape_are_another_image() -> None:
    data = Random(1).randbytes(30 * 150 * 3)
    digests = {pixel_digest(Image.frombytes("RGB", size, data)) for size in [(30, 150), (150, 30), (45, 100)]}
    assert len(digests) == 3


def test_large_images_are_digested_whole() -> None:
    """Strips of rows don't change the digest, and every row counts."""
    image = noise(1200, 700)
    digest = pixel_digest(image)
    for y in (0, 290, 291, 292, 699):
        other = image.copy()
        other.putpixel((1199, y), (1, 2, 3))
        assert pixel_digest(other) != digest


def test_a_path_is_no_identity(tmp_path: Path) -> None:
    path = tmp_path / "frame.png"
    path.write_bytes(encoded(noise(8, 8, 1), "PNG"))
    status, first = path.stat(), pixel_digest(path)
    path.write_bytes(encoded(noise(8, 8, 2), "PNG"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert pixel_digest(path) == pixel_digest(noise(8, 8, 2)) != first


# Transparency


def over_white(rgb: tuple[int, ...], alpha: int) -> tuple[int, ...]:
    return tuple(round((value * alpha + 255 * (255 - alpha)) / 255) for value in rgb)


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "TIFF", None])
def test_alpha_is_laid_over_white(fmt: str | None) -> None:
    rgba = Image.frombytes("RGBA", (40, 30), Random(2).randbytes(40 * 30 * 4))
    source = (
        rgba
        if fmt is None
        else encoded(rgba, fmt, **({"lossless": True, "exact": True} if fmt == "WEBP" else {}))
    )
    expected = [over_white((r, g, b), a) for r, g, b, a in zip(*[iter(rgba.tobytes())] * 4, strict=True)]
    assert np.abs(np.array(pixels(source)) - np.array(expected)).max() <= 1  # rounding of the blend


def test_what_is_fully_hidden_does_not_show_and_what_is_opaque_stays() -> None:
    rgba = Image.new("RGBA", (2, 1), (200, 10, 10, 0))
    rgba.putpixel((1, 0), (200, 10, 10, 255))
    assert pixels(encoded(rgba, "PNG")) == [WHITE, (200, 10, 10)]
    hidden = Image.new("RGBA", (2, 1), (0, 99, 0, 0))
    hidden.putpixel((1, 0), (200, 10, 10, 255))
    assert pixel_digest(rgba) == pixel_digest(hidden)  # only what is seen counts


@pytest.mark.parametrize("mode", ["LA", "PA", "La", "RGBa"])
def test_other_alpha_modes_equal_their_rgba_twins(mode: str) -> None:
    la = Image.merge(
        "LA", [noise(20, 10).convert("L"), noise(20, 10, 5).convert("L").point(lambda v: 255 * (v > 99))]
    )
    source = {
        "LA": lambda: la,
        "La": lambda: la.convert("La"),
        "RGBa": lambda: la.convert("RGBA").convert("RGBa"),
        "PA": lambda: Image.merge("PA", [la.getchannel("L"), la.getchannel("A")]),
    }[mode]()
    if mode == "PA":
        source.putpalette([value for gray in range(256) for value in (gray, gray, gray)])
    assert source.mode == mode
    assert pixel_digest(source) == pixel_digest(la.convert("RGBA")) != pixel_digest(la.getchannel("L"))


@pytest.mark.parametrize("alphas", [bytes([0]), bytes([255, 0]), bytes([0, 128, 255])])
def test_palette_with_transparency(alphas: bytes) -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    image = Image.frombytes("P", (3, 1), bytes([0, 1, 2]))
    image.putpalette([value for colour in colours for value in colour])
    data = encoded(image, "PNG", transparency=alphas)
    alpha = [*alphas, 255, 255][:3]
    assert b"tRNS" in data
    assert pixels(data) == [over_white(c, a) for c, a in zip(colours, alpha, strict=True)]
    opened = Image.open(BytesIO(data))
    opened.load()
    assert pixels(opened) == pixels(data)
    opened.apply_transparency()  # moves the alphas into the palette
    assert pixels(opened) == pixels(data)


def test_transparent_colours() -> None:
    """A colour key in every kind of PNG that may have one: its pixels are white, the others as they are."""
    black, red = (0, 0, 0), (255, 0, 0)
    assert pixels(png(2, 1, 8, 0, b"\x00\x33", struct.pack(">H", 0x33))) == [black, WHITE]
    assert pixels(png(2, 1, 1, 0, b"\x40", struct.pack(">H", 0))) == [WHITE, WHITE]
    assert pixels(png(2, 1, 1, 0, b"\x40", struct.pack(">H", 1))) == [black, WHITE]
    assert pixels(png(2, 1, 16, 0, struct.pack(">HH", 0, 0x1234), struct.pack(">H", 0x1234))) == [
        black,
        WHITE,
    ]
    assert pixels(png(2, 1, 16, 0, struct.pack(">HH", 0, 1), struct.pack(">H", 1))) == [black, WHITE]
    rgb = bytes([0, 0, 0, 255, 0, 0])
    assert pixels(png(2, 1, 8, 2, rgb, struct.pack(">HHH", 0, 0, 0))) == [WHITE, red]
    deep = struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 65535, 0, 0)
    assert pixels(png(2, 1, 16, 2, deep, struct.pack(">HHH", 0x1234, 0x5678, 0x9ABC))) == [WHITE, red]
    assert pixels(png(2, 1, 16, 2, deep, struct.pack(">HHH", 0x34, 0x78, 0xBC)))[1] == red


def test_hidden_layer_of_a_gif_stays_hidden() -> None:
    image = Image.frombytes("P", (2, 1), bytes([0, 1]))
    image.putpalette([9, 9, 9, 200, 0, 0])
    assert pixels(encoded(image, "GIF", transparency=0)) == [WHITE, (200, 0, 0)]


# Orientation

UPRIGHT = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(
    ("fmt", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("JPEG", {"quality": 90})]
)
def test_orientations_equal_their_upright_twins(
    orientation: int, fmt: str, options: dict[str, object]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = encoded(noise(12, 7), fmt, exif=exif, **options)
    stored = open_image(encoded(noise(12, 7), fmt, **options))
    method = UPRIGHT[orientation]
    upright = stored if method is None else stored.transpose(method)
    assert pixel_digest(turned) == pixel_digest(Image.open(BytesIO(turned))) == digest_pixels(upright)
    assert open_image(turned).size == ((7, 12) if orientation >= 5 else (12, 7))
    assert pixel_digest(open_image(turned)) == digest_pixels(upright)  # not turned a second time


def test_the_corners_of_a_phone_picture() -> None:
    """Orientation 6: the camera was held upright, and the first stored row is the right edge."""
    image = Image.new("RGB", (3, 2), WHITE)
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(encoded(image, "PNG", exif=exif)).getpixel((1, 0)) == (255, 0, 0)


MALFORMED_EXIF = {
    "noise": b"Exif\0\0" + b"\xff" * 40,
    "cut short": b"Exif\0\0MM\0*",
    "another header": b"hello",
    "pointer to itself": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x87\x69\0\x04\0\0\0\x01\0\0\0\x08\0\0\0\x08",
    "orientation as text": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x02x\0\0\0\0\0\0\0",
    "orientation 0/0": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x05\0\0\0\x01\0\0\0\x1a\0\0\0\0" + bytes(8),
    "orientation 99": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x63\0\0\0\0\0\0",
}


@pytest.mark.parametrize("what", MALFORMED_EXIF)
@pytest.mark.parametrize(("fmt", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {})])
def test_malformed_exif_counts_as_none(what: str, fmt: str, options: dict[str, object]) -> None:
    data = encoded(noise(12, 7), fmt, exif=MALFORMED_EXIF[what], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of some
        assert pixel_digest(data) == pixel_digest(encoded(noise(12, 7), fmt, **options))


# Modes


def test_cmyk_jpeg_keeps_its_colours() -> None:
    """As Adobe writes them, with inverted channels: no cyan, all magenta and yellow is red."""
    data = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert b"Adobe" in data
    red, green, blue = open_image(data).getpixel((8, 8))  # type: ignore[misc]
    assert red > 245
    assert green < 10
    assert blue < 10


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L"])
def test_16_bit_gray_is_scaled_not_clipped(mode: str) -> None:
    values = np.arange(256, dtype=np.uint16) * 257
    image = Image.frombytes(mode, (256, 1), values.astype(">u2" if mode == "I;16B" else "<u2").tobytes())
    assert [r for r, _, _ in pixels(image)] == list(range(256))


def test_16_bit_files_keep_their_levels() -> None:
    values = [level * 257 for level in range(256)]
    ramp = png(256, 1, 16, 0, struct.pack(">256H", *values))
    assert [p[0] for p in pixels(ramp)] == list(range(256))
    assert [p[0] for p in pixels(b"P5 256 1 65535\n" + struct.pack(">256H", *values))] == list(range(256))
    tiff = encoded(Image.open(BytesIO(ramp)), "TIFF")
    assert pixel_digest(tiff) == pixel_digest(ramp)
    dark = b"P5 2 1 65535\n" + struct.pack(">HH", 0, 200)
    assert pixels(dark) == [(0, 0, 0), (1, 1, 1)]  # a dark file stays dark
    deep = png(2, 1, 16, 2, struct.pack(">6H", 65535, 0x8080, 0, 257, 514, 771))
    assert pixels(deep) == [(255, 128, 0), (1, 2, 3)]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([0, 1, 255], [0, 1, 255]),
        ([0, 257, 65535], [0, 1, 255]),
        ([-100, 0, 100], [0, 128, 255]),
        ([0, 1 << 30, 1 << 31 - 1], [0, 255, 255]),
    ],
)
def test_32_bit_gray(levels: list[int], expected: list[int]) -> None:
    image = Image.fromarray(np.array([levels], dtype=np.int32))
    assert image.mode == "I"
    assert [r for r, _, _ in pixels(image)] == expected


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 1.6, 255.0], [0, 2, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([np.nan, -np.inf, np.inf], [0, 0, 255]),
        ([np.nan, 0.25, np.inf], [0, 64, 255]),
    ],
)
def test_float_gray(levels: list[float], expected: list[int]) -> None:
    image = Image.fromarray(np.array([levels], dtype=np.float32))
    assert [r for r, _, _ in pixels(image)] == expected
    assert pixel_digest(encoded(image, "TIFF")) == pixel_digest(image)


@pytest.mark.parametrize("mode", ["1", "L", "P", "YCbCr", "HSV", "LAB", "RGBX", "CMYK"])
def test_every_other_mode_is_what_pillow_makes_of_it(mode: str) -> None:
    image = noise(20, 10).convert(mode)
    assert pixel_digest(image) == digest_pixels(image.convert("RGB"))


def test_gray_with_alpha_and_one_bit_files() -> None:
    assert pixels(png(2, 1, 8, 4, bytes([77, 255, 77, 0]))) == [(77, 77, 77), WHITE]
    assert pixels(png(8, 1, 1, 0, b"\xa0")) == [WHITE, (0, 0, 0), WHITE, *[(0, 0, 0)] * 5]
    assert pixels(png(1, 1, 16, 4, struct.pack(">HH", 0x8080, 65535))) == [(128, 128, 128)]


@pytest.mark.parametrize(
    ("fmt", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})]
)
def test_of_an_animation_the_first_frame_counts(fmt: str, options: dict[str, object]) -> None:
    frames = [Image.new("RGB", (9, 5), colour) for colour in [(255, 0, 0), (0, 255, 0), (0, 0, 255)]]
    data = encoded(frames[0], fmt, save_all=True, append_images=frames[1:], **options)
    assert set(pixels(data)) == {(255, 0, 0)}
    opened = Image.open(BytesIO(data))
    assert opened.n_frames == 3
    opened.seek(1)  # somebody chose this frame
    assert set(pixels(opened)) == {(0, 255, 0)}


def test_mpo_is_its_first_picture() -> None:
    left, right = Image.new("RGB", (16, 16), (200, 40, 40)), Image.new("RGB", (16, 16), (40, 40, 200))
    data = encoded(left, "MPO", save_all=True, append_images=[right])
    assert Image.open(BytesIO(data)).format == "MPO"
    assert pixel_digest(data) == pixel_digest(encoded(left, "JPEG"))


def test_the_result_is_new_and_bare() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    source = Image.open(BytesIO(encoded(noise(6, 4), "PNG", exif=exif)))
    result = open_image(source)
    assert result.info == {}
    assert dict(result.getexif()) == {}
    plain = noise(6, 4)
    result = open_image(plain)
    plain.putpixel((0, 0), (1, 2, 3))
    assert pixel_digest(result) == pixel_digest(noise(6, 4))


# What is no image


def refusal(source: object, limits: ImageLimits | None = None) -> ImageError:
    with pytest.raises(ImageError) as caught:
        pixel_digest(source, limits or ImageLimits())  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty (0 bytes)"),
        (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "HTML page"),
        (b"\n <HTML><head></head></HTML>", "HTML page"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b'{"error": "forbidden"}', "no image that can be read (JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that can be read"),
        (b"\x89PNG\r\n\x1a\n", ""),
        (b"\xff\xd8\xff", ""),
        (b"GIF89a", ""),
        (b"RIFF\x10\0\0\0WEBPVP8 ", ""),
    ],
)
def test_what_is_no_image_is_named_with_a_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "page.jpg"
    path.write_bytes(content)
    error = refusal(path)
    assert error.source == str(path)
    assert reason in error.reason
    assert str(error) == f"{path}: {error.reason}"
    assert refusal(content).source == f"image bytes ({len(content)} bytes)"


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "directory" in refusal(tmp_path).reason
    assert "no such file" in refusal(tmp_path / "missing.png").reason
    assert "not a regular file" in refusal(tmp_path / "pipe").reason  # and doesn't wait for a writer
    assert "not a regular file" in refusal("/dev/zero").reason
    assert "null byte" in refusal("a\0b").reason
    assert "too long" in refusal("a" * 5000).reason
    assert "http: address" in refusal("http://example.com/a.png").reason
    data_uri = refusal("data:image/png;base64," + "A" * 100_000)
    assert "data: address" in data_uri.reason
    assert len(str(data_uri)) < 400
    assert refusal("").source == "the empty path"


@pytest.mark.parametrize("source", [None, 3, np.zeros((4, 4, 3), np.uint8), ["a.png"]])
def test_other_objects_are_refused_by_type(source: object) -> None:
    assert "neither a path, nor bytes, nor a PIL image" in refusal(source).reason


@pytest.mark.parametrize("source", [Image.new("RGB", (0, 5)), Image.new("L", (5, 0))])
def test_images_without_pixels(source: Image.Image) -> None:
    assert "no pixels" in refusal(source).reason


TRUNCATABLE = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {}),
    ("GIF", {}),
    ("BMP", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("PPM", {}),
    ("QOI", {}),
    ("JPEG2000", {}),
    ("AVIF", {}),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of cut TIFF directories
@pytest.mark.parametrize(("fmt", "options"), TRUNCATABLE)
def test_truncated_at_any_length_it_is_refused_or_whole(fmt: str, options: dict[str, object]) -> None:
    data = encoded(noise(19, 11), fmt, **options)
    whole, refused = pixel_digest(data), 0
    for length in range(len(data)):
        try:
            assert pixel_digest(data[:length]) == whole  # only what comes after the pixels is missing
        except ImageError:
            refused += 1
    assert refused > 0.95 * len(data)


def header_only(fmt: str, width: int, height: int) -> bytes:
    """The beginning of a file that claims this size, and no pixels at all."""
    match fmt:
        case "PNG":
            return png(width, height, 8, 2, b"")[:-12] if height else b""
        case "GIF":
            descriptor = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02"
            return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + descriptor
        case "BMP":
            return (
                b"BM"
                + struct.pack("<IHHI", 54, 0, 0, 54)
                + struct.pack("<IiiHH", 40, width, height, 1, 24)
                + bytes(24)
            )
        case "JPEG":
            frame = struct.pack(">HBHHB", 17, 8, height, width, 3) + b"\x01\x11\0\x02\x11\0\x03\x11\0"
            return b"\xff\xd8\xff\xc0" + frame + b"\xff\xda\0\x0c\x03\x01\0\x02\0\x03\0\0\x3f\0"
        case "WEBP":
            bits = (width - 1) | (height - 1) << 14
            return (
                b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8L" + struct.pack("<IBI", 10, 0x2F, bits) + bytes(5)
            )
        case "PPM":
            return b"P6 %d %d 255\n" % (width, height)
        case "QOI":
            return b"qoif" + struct.pack(">IIBB", width, height, 3, 0)
    raise AssertionError(fmt)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("fmt", ["PNG", "GIF", "BMP", "JPEG", "WEBP", "PPM", "QOI"])
def test_limits_are_checked_before_decoding(fmt: str) -> None:
    """There are no pixels to decode: had it been tried, the reason would be another."""
    small = ImageLimits(max_pixels=1_000_000)
    assert (
        "12000x12000; the limit is 1000000 pixels" in refusal(header_only(fmt, 12_000, 12_000), small).reason
    )
    sides = ImageLimits(max_side=10_000)
    assert "the limit is 10000 pixels a side" in refusal(header_only(fmt, 12_000, 12), sides).reason
    assert "limit" not in refusal(header_only(fmt, 12, 12)).reason


@pytest.mark.parametrize("fmt", ["PNG", "GIF", "BMP", "JPEG", "PPM", "QOI"])
def test_bombs_are_refused_whatever_pillow_is_set_to(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = header_only(fmt, 60_000, 60_000)
    assert "MAX_IMAGE_PIXELS" in refusal(bomb).reason
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert "60000x60000; the limit is 178000000 pixels" in refusal(bomb).reason


def test_pil_images_and_encoded_bytes_have_limits_too(tmp_path: Path) -> None:
    image = noise(100, 50)
    assert "100x50; the limit is 4999 pixels" in refusal(image, ImageLimits(max_pixels=4999)).reason
    assert "the limit is 99 pixels a side" in refusal(image, ImageLimits(max_side=99)).reason
    data = encoded(image, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    limits = ImageLimits(max_encoded_bytes=len(data) - 1)
    for source in (data, path):
        assert f"{len(data)} bytes; the limit is" in refusal(source, limits).reason
    assert pixel_digest(path, ImageLimits(max_encoded_bytes=len(data))) == pixel_digest(image)
    with pytest.raises(ConfigError, match="max_pixels"):
        ImageLimits(max_pixels=0)


def test_pillows_own_settings_stay_as_they_are() -> None:
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    pixel_digest(encoded(noise(8, 8), "JPEG"))
    refusal(header_only("PNG", 60_000, 60_000))
    refusal(encoded(noise(8, 8), "JPEG")[:-20])
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    assert before[0] == 89_478_485


def test_truncated_files_are_refused_where_the_process_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    whole = encoded(noise(60, 60), "JPEG")
    Image.open(BytesIO(whole[:-200])).load()  # which Pillow lets pass
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(lambda _: pixel_digest(whole), range(20)))
        reasons = list(pool.map(lambda _: refusal(whole[:-200]).reason, range(20)))
    assert len(set(digests)) == 1 and all("truncated" in reason for reason in reasons)
    lazy = Image.open(BytesIO(whole[:-200]))
    assert "truncated" in refusal(lazy).reason
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TRUNCATABLE) - 1), st.randoms(use_true_random=False), st.integers(1, 8))
def test_damaged_files_are_refused_or_decoded_but_nothing_else_comes_out(
    kind: int, rng: Random, times: int
) -> None:
    fmt, options = TRUNCATABLE[kind]
    data = bytearray(encoded(noise(9, 6), fmt, **options))
    for _ in range(times):
        data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert open_image(bytes(data), ImageLimits(max_pixels=1_000_000)).mode == "RGB"
        except ImageError as error:
            assert error.reason


def test_only_allowed_formats_are_tried() -> None:
    for image, fmt in [
        (noise(8, 8), "ICO"),
        (noise(8, 8), "TGA"),
        (noise(8, 8), "EPS"),
        (noise(8, 8), "PCX"),
    ]:
        assert fmt not in FORMATS
        assert "no image that can be read" in refusal(encoded(image, fmt)).reason


# Use from threads


def test_one_lazily_opened_image_in_many_threads() -> None:
    data = encoded(noise(300, 200), "PNG")
    expected = pixel_digest(data)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            shared = Image.open(BytesIO(data))  # not loaded yet
            assert set(pool.map(pixel_digest, [shared] * 8)) == {expected}


def test_many_formats_in_many_threads() -> None:
    sources = [
        encoded(noise(60, 40, seed), fmt, **options) for seed, (fmt, options) in enumerate(TRUNCATABLE)
    ]
    alone = [pixel_digest(source) for source in sources]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pixel_digest, sources * 4)) == alone * 4


# Names


def test_descriptions_are_short_and_on_one_line(tmp_path: Path) -> None:
    assert describe("a/b.png") == "a/b.png"
    assert describe(Path("a/b.png")) == "a/b.png"
    assert describe(b"1234") == "image bytes (4 bytes)"
    assert describe(noise(30, 40)) == "PIL image 30x40"
    assert describe("a\nb") == r"a\nb"
    assert len(describe("x" * 9999)) < 200


def test_the_callers_name_is_used() -> None:
    with pytest.raises(ImageError) as caught:
        open_image(b"", name="messages[2].content[1]")
    assert str(caught.value) == "messages[2].content[1]: is empty (0 bytes)"


def test_read_source_decodes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"not an image at all")
    assert read_source(path) == read_source(b"not an image at all") == b"not an image at all"
    image = noise(4, 4)
    assert read_source(image) is image
