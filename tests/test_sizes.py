"""Sizes, durations and the store's settings as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.errors import ConfigError
from featcache.settings import StoreSettings, store_path
from featcache.sizes import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("4G", 4 << 30),
        ("4GB", 4_000_000_000),
        ("1.5MiB", 3 << 19),
        (".5k", 512),
        ("512 B", 512),
        ("2PiB", 2 << 50),
        ("9007199254740993", 9007199254740993),  # whole numbers never pass through a float
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "4XiB", "-1", "-1GiB", "1e9", "4 4", "4GiBs", "nan", -1, True, None, 1.5]
)
def test_what_is_no_size_is_named(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^FEATCACHE_DISK_BYTES: "):
        parse_size(text, "FEATCACHE_DISK_BYTES")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (20 << 30, "20 GiB"),
        ((1 << 20) - 1, "1 MiB"),
        (123_456_789, "118 MiB"),
        (5 << 50, "5 PiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 1 << 60))
def test_a_printed_size_reads_back_nearly_the_same(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes / 20


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        ("90", 90),
        ("15m", 900),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("30d", 2_592_000),
        ("2W", 1_209_600),
        ("0", 0),
    ],
)
def test_durations(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "d", "5y", "-5d", "1.2.3h", "five", -1, float("nan"), float("inf"), True]
)
def test_what_is_no_duration_is_named(text: float | str) -> None:
    with pytest.raises(ConfigError, match=r"^--older-than: "):
        parse_duration(text, "--older-than")


def test_settings_come_from_arguments_then_environment_then_defaults() -> None:
    environ = {"FEATCACHE_STORE": "/env/store", "FEATCACHE_HOST_BYTES": "2GiB", "FEATCACHE_SYNC": "no"}
    settings = StoreSettings.resolve(environ=environ, host_bytes="3GiB", device=None)
    assert settings.path == Path("/env/store")
    assert settings.host_bytes == 3 << 30
    assert settings.sync is False
    assert settings.disk_bytes == 20 << 30
    assert settings.device is None
    assert StoreSettings.resolve(environ=environ, path="/given").path == Path("/given")
    assert StoreSettings.resolve(environ={}, sync=False, readonly=True, policy="lru").policy == "lru"


def test_the_default_store_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert store_path(environ={}) == Path("/home/someone/.cache/featcache")
    assert store_path(environ={"FEATCACHE_STORE": "~/x"}) == Path("/home/someone/x")
    assert store_path("~/y", {"FEATCACHE_STORE": "~/x"}) == Path("/home/someone/y")
    assert StoreSettings.resolve(environ={}).path == store_path(environ={})


@pytest.mark.parametrize(
    ("environ", "given", "message"),
    [
        ({"FEATCACHE_DISK_BYTES": "lots"}, {}, "FEATCACHE_DISK_BYTES: 'lots' is not a size"),
        ({"FEATCACHE_SYNC": "maybe"}, {}, "FEATCACHE_SYNC: 'maybe'; write true or false"),
        ({"FEATCACHE_POLICY": "fifo"}, {}, "FEATCACHE_POLICY: 'fifo'; there are s3fifo, lru"),
        ({}, {"policy": "arc"}, "policy: 'arc'; there are s3fifo, lru"),
        ({}, {"host_bytes": -1}, "host_bytes: -1 is negative"),
        ({}, {"hots_bytes": 1}, "unknown store setting 'hots_bytes'"),
    ],
)
def test_bad_settings_are_named(environ: dict[str, str], given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreSettings.resolve(environ=environ, **given)
