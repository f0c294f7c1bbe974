"""The store's settings: what is given, else `FEATCACHE_*` variables, else defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from featcache.errors import ConfigError
from featcache.sizes import parse_size

DEFAULT_STORE = "~/.cache/featcache"

PolicyName = Literal["s3fifo", "lru"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_VARIABLES = {
    "path": "FEATCACHE_STORE",
    "host_bytes": "FEATCACHE_HOST_BYTES",
    "disk_bytes": "FEATCACHE_DISK_BYTES",
    "device": "FEATCACHE_DEVICE",
    "device_bytes": "FEATCACHE_DEVICE_BYTES",
    "queue_bytes": "FEATCACHE_QUEUE_BYTES",
    "policy": "FEATCACHE_POLICY",
    "sync": "FEATCACHE_SYNC",
    "readonly": "FEATCACHE_READONLY",
}


def store_path(path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The store's folder: `path`, else FEATCACHE_STORE, else ~/.cache/featcache; `~` expanded."""
    env = os.environ if environ is None else environ
    return Path(path or env.get("FEATCACHE_STORE") or DEFAULT_STORE).expanduser()


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a FeatureStore is opened. Sizes are bytes.

    path: the disk tier's folder.
    host_bytes, disk_bytes, device_bytes: what each tier may take; 0 is no such tier.
    device: of the device tier, as torch writes it ("cuda:0"); None is no such tier.
    queue_bytes: features that may wait for the disk writer.
    policy: which entries leave first.
    sync: whether a commit is on the disk when it returns (against a power cut; a crash never harms).
    readonly: open the disk tier for reading only.
    """

    path: Path = Path(DEFAULT_STORE)
    host_bytes: int = 1 << 30
    disk_bytes: int = 20 << 30
    device: str | None = None
    device_bytes: int = 0
    queue_bytes: int = 256 << 20
    policy: PolicyName = "s3fifo"
    sync: bool = True
    readonly: bool = False

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "device_bytes", "queue_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is negative")
        if self.policy not in get_args(PolicyName):
            raise ConfigError(f"policy: {self.policy!r}; there are {', '.join(get_args(PolicyName))}")

    @classmethod
    def resolve(cls, *, environ: Mapping[str, str] | None = None, **given: Any) -> StoreSettings:
        """Settings from `given` (by field name; None is not given), the environment, and the defaults.

        Raises ConfigError that names the argument or variable at fault.
        """
        env = os.environ if environ is None else environ
        if unknown := sorted(given.keys() - _VARIABLES.keys()):
            raise ConfigError(f"unknown store setting {unknown[0]!r}; there are {', '.join(_VARIABLES)}")
        values: dict[str, Any] = {"path": store_path(given.get("path"), env)}
        for name, variable in _VARIABLES.items():
            if name == "path":
                continue
            if given.get(name) is not None:
                values[name] = _parse(name, given[name], name)
            elif env.get(variable):
                values[name] = _parse(name, env[variable], variable)
        return cls(**values)


def _parse(name: str, value: Any, source: str) -> Any:
    """`value` as field `name` has it; `source` is what an error names."""
    if name.endswith("_bytes"):
        return parse_size(value, source)
    if name in ("sync", "readonly"):
        text = str(value).strip().lower()
        if text not in _TRUE + _FALSE:
            raise ConfigError(f"{source}: {value!r}; write true or false")
        return text in _TRUE
    if name == "policy" and value not in get_args(PolicyName):
        raise ConfigError(f"{source}: {value!r}; there are {', '.join(get_args(PolicyName))}")
    return str(value)
