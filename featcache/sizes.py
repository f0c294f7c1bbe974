"""Sizes ("4GiB") and durations ("30d") as people write them."""

from __future__ import annotations

import math
import re

from featcache.errors import ConfigError

_STEPS = "KMGTP"
_UNITS: dict[str, int] = {"": 1, "B": 1}
_UNITS |= {step: 1024**n for n, step in enumerate(_STEPS, 1)}  # a bare K, M, G is meant as du and ls mean it
_UNITS |= {f"{step}IB": 1024**n for n, step in enumerate(_STEPS, 1)}
_UNITS |= {f"{step}B": 1000**n for n, step in enumerate(_STEPS, 1)}

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])\s*", re.ASCII)


def parse_size(size: int | str, name: str = "size") -> int:
    """Bytes: 4096, "4096", "1.5GiB", "20 GB", "512M" (MiB). Raises ConfigError that begins with `name`."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"{name}: {size} is negative")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name}: {size!r} is not a size; write bytes, or a number with KiB, MiB, GiB, GB")
    return int(match[1]) * unit if match[1].isdecimal() else int(float(match[1]) * unit)


def format_size(nbytes: int) -> str:
    """A size for people, as "512 B", "1.5 MiB" or "20 GiB"."""
    value, unit = float(nbytes), "B"
    for step in _STEPS:
        if abs(value) < 1023.5:
            break
        value, unit = value / 1024, f"{step}iB"
    if abs(value) >= 99.95 or round(value, 1).is_integer():
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}"


def parse_duration(duration: float | str, name: str = "duration") -> float:
    """Seconds: 90, "90", "15m", "1h30m", "30d", "2w". Raises ConfigError that begins with `name`."""
    if isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = float(duration)
    else:
        seconds = _seconds(str(duration).strip().lower())
    if not (0 <= seconds < math.inf):
        raise ConfigError(f"{name}: {duration!r} is not a duration; write seconds, or 15m, 12h, 30d, 1h30m")
    return seconds


def _seconds(text: str) -> float:
    """NaN if it isn't a duration."""
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        return float(text)
    if not text or _PART.sub("", text):
        return math.nan
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
