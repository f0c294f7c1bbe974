"""Canonical pixels: any opened picture as 8-bit RGB, upright, over white. What every model sees.

The rules, each of which somebody's cache got wrong:
- EXIF orientation (also from XMP, and TIFF's own) is applied; a malformed block counts as none.
- Transparency of every kind (alpha band, palette alphas, a transparent colour) is laid over white, so that
  what an author hid stays hidden.
- More than 8 bits are scaled, not clipped: 16-bit gray by 255/65535.
- CMYK, YCbCr, LAB, HSV and palettes are converted as Pillow does; colour profiles are not applied, as in
  every model's training pipeline.
Raise `keys.PIXELS_VERSION` when one of them changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ORIENTATION_TAG = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def canonical(image: Image.Image, *, owned: bool = False) -> Image.Image:
    """An RGB image, upright and without metadata. Raises what Pillow raises.

    owned: nobody else holds `image`, so that it may be returned itself where nothing has to change (a copy of
        12 megapixels takes a third of the time of their decoding). Otherwise it is loaded but not changed.
    """
    deep_colour = any("16" in str(tile[-1]) for tile in getattr(image, "tile", ()))
    image.load()
    rgb = _rgb(image, deep_colour)
    if rgb is image and not owned:
        rgb = image.copy()
    method = _TRANSPOSE.get(_orientation(image))
    upright = rgb if method is None else rgb.transpose(method)
    upright.info.clear()  # of EXIF above all: nobody downstream may turn it a second time
    return upright


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # Pillow raises nearly anything on a malformed block (Pillow #8605): the image is good
        return 1


def _rgb(image: Image.Image, deep_colour: bool) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _gray16(image)
    if image.mode in ("I", "F"):
        return _wide_gray(image)
    if image.mode == "La":  # Pillow has no way from here to RGBA, and would drop the alpha
        return _over_white(image.convert("LA"))
    if image.has_transparency_data:
        return _over_white(_without_deep_key(image) if deep_colour else image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba)
    return white


def _without_deep_key(image: Image.Image) -> Image.Image:
    """Pillow reduces 16-bit colour to 8 bits but leaves the transparent colour at 16: reduce it too."""
    key = image.info.get("transparency")
    if not isinstance(key, tuple):
        return image
    shallow = image.copy()
    shallow.info["transparency"] = tuple(value >> 8 for value in key)
    return shallow


def _gray16(image: Image.Image) -> Image.Image:
    import numpy as np

    levels = np.asarray(image)
    gray = _scaled(levels, 0.0, 65535.0)
    key = image.info.get("transparency")
    if isinstance(key, int):
        gray[levels == key] = 255
    return Image.fromarray(gray).convert("RGB")


def _wide_gray(image: Image.Image) -> Image.Image:
    """32-bit integers and floats, which don't say their range.

    A 16-bit file (PNG, PGM) is one of 0..65535. Otherwise the first of 0..1 (floats), 0..255 and 0..65535
    that holds all values, else the values' own range. Of floats, NaN is black, and infinities are the ends.
    """
    import numpy as np

    levels = np.asarray(image)
    finite = levels[np.isfinite(levels)] if image.mode == "F" else levels
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if image.mode == "I" and image.format in ("PNG", "PPM"):
        low, high = 0.0, 65535.0
    else:
        for top in (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0):
            if low >= 0 and high <= top:
                low, high = 0.0, top
                break
    return Image.fromarray(_scaled(levels, low, high)).convert("RGB")


def _scaled(levels: NDArray[np.generic], low: float, high: float) -> NDArray[np.uint8]:
    """low..high to 0..255, rounded, by strips of rows so that the doubles stay few."""
    import numpy as np

    out = np.empty(levels.shape, np.uint8)
    rows = max(1, (1 << 20) // levels.shape[1])
    for top in range(0, levels.shape[0], rows):
        strip = levels[top : top + rows].astype(np.float64)
        strip = (np.nan_to_num(strip, nan=low, posinf=high, neginf=low) - low) * 255.0 / (high - low)
        out[top : top + rows] = np.clip(np.rint(strip), 0, 255)
    return out
