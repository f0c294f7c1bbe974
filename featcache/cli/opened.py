"""A store's disk tier for one command, and the entries and encoders that a user names in it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featcache.errors import ConfigError, StoreError
from featcache.settings import StoreSettings
from featcache.tiers.disk import DiskTier

SHORTEST_PREFIX = 6  # hex digits; fewer would rather be a slip than a choice
SHOWN_DIGITS = 16
KEY_DIGITS = 64


@contextmanager
def opened(path: Path | None, *, readonly: bool, create: bool = False) -> Iterator[DiskTier]:
    """The disk tier at `path`, or where the settings say. Only with `create` is one made that isn't there."""
    settings = StoreSettings.resolve(path=path)
    if not create and not (settings.path / "data.mdb").is_file():
        raise StoreError(f"no store at {settings.path}; name another with --store or FEATCACHE_STORE")
    logging.getLogger("featcache").addHandler(logging.NullHandler())  # commands say themselves what fails
    tier = DiskTier.open(settings.path, max_bytes=settings.disk_bytes, readonly=readonly, sync=settings.sync)
    try:
        yield tier
    finally:
        tier.close()


def key_of(tier: DiskTier, digits: str) -> bytes:
    """The one key that begins with these hex digits. Raises ConfigError if there are none, or several."""
    digits = digits.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST_PREFIX},{KEY_DIGITS}}}", digits):
        raise ConfigError(
            f"{digits!r} is no key; a key is {KEY_DIGITS} hex digits, or its first {SHORTEST_PREFIX} or more"
        )
    whole_bytes = [digits] if len(digits) % 2 == 0 else [digits + last for last in "0123456789abcdef"]
    found = [key for prefix in whole_bytes for key in tier.keys_with_prefix(bytes.fromhex(prefix))]
    if not found:
        raise ConfigError(f"no entry {digits}; `featcache ls` shows what there is")
    if len(found) > 1:
        raise ConfigError(f"{digits} is the beginning of several keys; give more digits")
    return found[0]


def encoders_named(tier: DiskTier, name: str) -> set[bytes]:
    """The fingerprints that a user means: of a model by its name, or the one with these hex digits.

    Raises ConfigError if there are none, or the digits are those of more than one.
    """
    encoders = tier.encoders()
    of_model = {fp for fp, doc in encoders.items() if doc["description"].get("model") == name}
    if of_model:
        return of_model
    found = {fp for fp in encoders if len(name) >= SHORTEST_PREFIX and fp.hex().startswith(name.lower())}
    if not found:
        raise ConfigError(f"no encoder {name!r}; `featcache stats` shows models and fingerprints")
    if len(found) > 1:
        raise ConfigError(f"{name} is the beginning of several fingerprints; give more digits")
    return found
