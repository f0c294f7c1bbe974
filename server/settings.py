"""The server's settings: flags, else `FEATCACHE_*` variables, else a TOML file, else defaults.

Each field of `ServerSettings` is a flag (`max_images`: --max-images), a variable (FEATCACHE_MAX_IMAGES) and a
key of the file (max_images), with one meaning; the command line is made from it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from featcache.errors import ConfigError
from featcache.sizes import format_size, parse_duration, parse_size

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How `featcache serve` runs. Sizes are bytes, durations seconds.

    Of each setting: its type, its help, and how it is written if not plainly ("size": 4096 or "4GiB";
    "duration": 30 or "15m").
    """

    host: Annotated[str, "Address to listen on; 0.0.0.0 for all."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 takes a free one."] = 8000
    served_model_name: Annotated[
        str | None, "The model's name in the API; else the name it was loaded by."
    ] = None
    store: Annotated[Path | None, "The store's folder; else ~/.cache/featcache."] = None
    host_bytes: Annotated[int, "Host memory for features.", "size"] = 1 << 30
    disk_bytes: Annotated[int, "Disk for features.", "size"] = 20 << 30
    device_bytes: Annotated[int, "Device memory for features, on CUDA.", "size"] = 2 << 30
    backend: Annotated[str, 'What generates: "native", or "lmdeploy" on CUDA.'] = "native"
    tp: Annotated[int, "GPUs that share the model; more than 1 with --backend lmdeploy."] = 1
    device: Annotated[str | None, '"cuda" or "cpu"; by default CUDA if there is one.'] = None
    dtype: Annotated[str, '"auto", "bfloat16", "float16" or "float32".'] = "auto"
    compile_tower: Annotated[bool, "Run the vision tower's layers through torch.compile."] = False
    check: Annotated[float, "The share of hits, 0 to 1, that are encoded again and compared."] = 0.0
    max_model_len: Annotated[int | None, "Longest prompt and answer together, in tokens."] = None
    max_waiting: Annotated[int, "Requests that may wait; more get 503 and Retry-After."] = 256
    max_images: Annotated[int, "Images in one request."] = 64
    max_body_bytes: Annotated[int, "Bytes of one request's body.", "size"] = 64 << 20
    request_timeout: Annotated[float, "Longest time for one request.", "duration"] = 600.0
    drain_timeout: Annotated[float, "How long requests under way may go on after SIGTERM.", "duration"] = 30.0
    api_key: Annotated[tuple[str, ...], "KEY or NAME:KEY that may call; several. NAME is its namespace."] = ()
    api_key_file: Annotated[Path | None, "A file of such keys, one a line."] = None
    admin_key: Annotated[str | None, "The key that may delete."] = None
    shared_features: Annotated[bool, "All keys share image features and KV blocks."] = False
    cors_origin: Annotated[tuple[str, ...], "Web origin that may call from a browser, or *; several."] = ()
    media_timeout: Annotated[float, "Longest time to fetch one image.", "duration"] = 10.0
    media_max_bytes: Annotated[int, "Bytes of one fetched image.", "size"] = 64 << 20
    media_ttl: Annotated[
        float, "How long a fetched URL is taken to be unchanged without asking.", "duration"
    ] = 0.0
    allow_private_media: Annotated[bool, "Fetch images from private and loopback addresses too."] = False
    allowed_media_domain: Annotated[tuple[str, ...], "Only fetch from this host, or *.host; several."] = ()
    allowed_local_media_path: Annotated[Path | None, "A folder whose files may be named by file: URLs."] = (
        None
    )
    log_level: Annotated[str, '"debug", "info", "warning" or "error".'] = "info"
    log_json: Annotated[bool, "Log lines as JSON."] = False
    ssl_certfile: Annotated[Path | None, "Certificate for HTTPS."] = None
    ssl_keyfile: Annotated[Path | None, "Its key."] = None

    def __post_init__(self) -> None:
        lowest = {
            "tp": 1,
            "port": 0,
            "max_waiting": 1,
            "max_images": 0,
            "max_body_bytes": 1024,
            "media_max_bytes": 1,
        }
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)}; it is at least {least}")
        if self.port > 65535:
            raise ConfigError(f"port: {self.port}; the last one is 65535")
        if not 0 <= self.check <= 1:
            raise ConfigError(f"check: {self.check}; it is a share of hits, from 0 to 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len: {self.max_model_len}; it is at least 2")
        for name in ("request_timeout", "media_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)}; it is above 0")
        _one_of("backend", self.backend, ("native", "lmdeploy"))
        if self.tp > 1 and self.backend == "native":
            raise ConfigError(f"tp: {self.tp}; the native backend runs on one GPU: use --backend lmdeploy")
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _one_of("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any],
        *,
        config: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> ServerSettings:
        """Settings from `given` (None is not given), the environment, a TOML file, and the defaults.

        Raises ConfigError that names the flag, variable or key at fault.
        """
        env = os.environ if environ is None else environ
        doc = _read(config) if config else {}
        known = settings()
        names = [setting.name for setting in known]
        if unknown := sorted(doc.keys() - set(names)):
            raise ConfigError(f"{config}: unknown setting {unknown[0]!r}; there are {', '.join(names)}")
        values: dict[str, Any] = {}
        for setting in known:
            name, variable = setting.name, setting.variable
            if given.get(name) not in (None, (), []):
                values[name] = setting.parse(given[name], setting.flag)
            elif env.get(variable):
                values[name] = setting.parse(env[variable], variable)
            elif name in doc:
                values[name] = setting.parse(doc[name], f"{config}: {name}")
        return cls(**values)


class Setting(NamedTuple):
    name: str
    type: Any
    help: str
    unit: str
    default: Any

    def parse(self, value: Any, source: str) -> Any:
        """`value`, from a flag, a variable or TOML, as this setting has it. `source` is what errors name."""
        if self.unit == "size":
            return parse_size(value, source)
        if self.unit == "duration":
            return parse_duration(value, source)
        if get_origin(self.type) is tuple:
            items = value.split(",") if isinstance(value, str) else value
            if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
                raise ConfigError(f"{source}: {value!r}; it is a list of texts")
            return tuple(item.strip() for item in items if item.strip())
        return _plain(self.plain_type, value, source)

    def shown_default(self) -> str:
        return (
            format_size(self.default)
            if self.unit == "size"
            else f"{self.default:g}"
            if self.unit
            else str(self.default)
        )

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"FEATCACHE_{self.name.upper()}"

    @property
    def plain_type(self) -> Any:
        """The type without None."""
        if get_origin(self.type) is UnionType:
            return next(part for part in get_args(self.type) if part is not type(None))
        return self.type


def settings() -> list[Setting]:
    """All settings, in order."""
    hints = get_type_hints(ServerSettings, include_extras=True)
    found = []
    for item in fields(ServerSettings):
        kind, text, *unit = get_args(hints[item.name])
        found.append(Setting(item.name, kind, text, unit[0] if unit else "", item.default))
    return found


def _plain(kind: Any, value: Any, source: str) -> Any:
    if kind is bool:
        text = str(value).strip().lower()
        if text not in _TRUE + _FALSE:
            raise ConfigError(f"{source}: {value!r}; write true or false")
        return text in _TRUE
    if kind is Path:
        return Path(value).expanduser()
    if isinstance(value, bool):
        raise ConfigError(f"{source}: {value!r}; it is a {kind.__name__}")
    try:
        return kind(value)
    except (TypeError, ValueError) as exc:
        words = {int: "a whole number", float: "a number", str: "a text"}
        raise ConfigError(f"{source}: {value!r}; it is {words[kind]}") from exc


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r}; there are {', '.join(allowed)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as exc:
        raise ConfigError(f"--config: {path} can't be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--config: {path} is not TOML: {exc}") from exc
