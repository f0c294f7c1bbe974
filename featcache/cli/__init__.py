"""The command line. Each command is in a file of its own, imported only when it is called.

So `featcache --help` and the store's commands start without torch. To add a command: a function with Typer's
annotations in `featcache/cli/<file>.py` that imports what is heavy inside itself, and a line in `COMMANDS`.

Exit status: 0 well, 1 failed, 2 wrong usage, 3 done, but some inputs failed, 130 interrupted.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from featcache.errors import FeatcacheError

EXIT_FAILED = 1
EXIT_SOME_FAILED = 3


class Entry(NamedTuple):
    """Where a command is, and its line in `featcache --help`."""

    module: str
    function: str
    summary: str


COMMANDS = {  # in the order in which --help shows them
    "demo": Entry("demo", "demo", "Ask the bundled model about pictures it has never seen."),
    "chat": Entry("chat", "chat", "Talk with a model about images."),
    "serve": Entry("serve", "serve", "Serve a model with an OpenAI-compatible API."),
    "warm": Entry("warm", "warm", "Encode images ahead of their use."),
    "bench": Entry("bench", "bench", "Measure what the cache saves on this machine."),
    "stats": Entry("inspect", "stats", "Show what a store holds and how it is used."),
    "ls": Entry("inspect", "ls", "List the entries of a store."),
    "show": Entry("inspect", "show", "Show one entry: its layout, tensors and encoder."),
    "verify": Entry("upkeep", "verify", "Check every entry against its checksum."),
    "prune": Entry("upkeep", "prune", "Remove entries by size, age or encoder."),
    "export": Entry("transfer", "export", "Write entries as safetensors files."),
    "import": Entry("transfer", "import_", "Take in entries that `export` wrote."),
    "version": Entry("version", "version", "Show the versions of featcache and of what it stands on."),
}


class Commands(TyperGroup):
    """The group of all commands: knows them by their summaries, and imports the one that is called."""

    def __init__(self, **settings: Any) -> None:
        present = {name: e for name, e in COMMANDS.items() if find_spec(f"featcache.cli.{e.module}")}
        known = {name: TyperCommand(name, help=entry.summary) for name, entry in present.items()}
        super().__init__(**{**settings, "commands": known})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and _imported(known.name or ""), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FeatcacheError as exc:
            typer.echo(f"featcache: {' '.join(str(exc).split())}", err=True)
            raise typer.Exit(EXIT_FAILED) from exc


def _imported(name: str) -> Any:
    entry = COMMANDS[name]
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(getattr(import_module(f"featcache.cli.{entry.module}"), entry.function))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich would double the time to start
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _about() -> None:
    """featcache: never encode the same image twice."""


def main() -> None:
    """The `featcache` command."""
    app(prog_name="featcache")
