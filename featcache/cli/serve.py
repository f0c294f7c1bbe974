"""`featcache serve`: the OpenAI-compatible server. Its options are the fields of `ServerSettings`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_origin

import click

from featcache.server.settings import ServerSettings, Setting, settings


def _option(setting: Setting) -> click.Option:
    """A setting as an option; its value stays as written, for the settings to read."""
    shown = "" if setting.default in (None, (), False) else f" [{setting.shown_default()}]"
    text = f"{setting.help}{shown}"
    if setting.type is bool:
        return click.Option([f"{setting.flag}/--no-{setting.flag[2:]}"], default=None, help=text)
    metavar = setting.unit.upper() or getattr(setting.plain_type, "__name__", "text").upper()
    many = get_origin(setting.type) is tuple
    return click.Option(
        [setting.flag], default=None, multiple=many, metavar="TEXT" if many else metavar, help=text
    )


def _serve(model: str, config: str | None, **given: Any) -> None:
    resolved = ServerSettings.resolve(given, config=Path(config).expanduser() if config else None)
    from featcache.server.process import run_server

    raise SystemExit(run_server(model, resolved))


serve = click.Command(
    "serve",
    params=[
        click.Argument(["model"], metavar="MODEL"),
        click.Option(["--config"], metavar="FILE", help="A TOML file of these settings."),
        *map(_option, settings()),
    ],
    callback=_serve,
    help="""Serve MODEL ("tiny", a local folder, or a hub name) with an OpenAI-compatible API.

    Every option may also be a FEATCACHE_* variable (--max-images: FEATCACHE_MAX_IMAGES) or stand in the
    --config file (max_images = 16); options win over variables, variables over the file.
    """,
)
