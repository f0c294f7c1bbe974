"""The command line. Each command is in a file of its own, imported only when it is called.

So `featcache --help` and the store's commands start without torch. To add a command: a function with Typer's
annotations in `featcache/cli/<file>.py` that imports what is heavy inside itself, and a line in `COMMANDS`.
The store's own commands are click commands instead: Typer brings pydantic with it, which alone takes half of
the 0.3 s that a command has to start.

Exit status: 0 well, 1 failed, 2 wrong usage, 3 done, but some inputs failed, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import click

from featcache.errors import FeatcacheError

EXIT_FAILED = 1
EXIT_SOME_FAILED = 3

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class Entry(NamedTuple):
    """Where a command is, and its line in `featcache --help`."""

    module: str
    name: str
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


class Commands(click.Group):
    """The group of all commands: knows them by their summaries, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in their own order, not the alphabet's

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, summary, rest = super().resolve_command(ctx, args)
        return name, summary and _imported(name or ""), rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FeatcacheError as exc:
            click.echo(f"featcache: {' '.join(str(exc).split())}", err=True)
            raise click.exceptions.Exit(EXIT_FAILED) from exc
        except KeyboardInterrupt as exc:
            raise click.exceptions.Exit(130) from exc


def _imported(name: str) -> click.Command:
    entry = COMMANDS[name]
    command = getattr(import_module(f"featcache.cli.{entry.module}"), entry.name)
    return command if isinstance(command, click.Command) else _from_typer(name, command)


def _from_typer(name: str, function: Callable[..., object]) -> click.Command:
    """A command that hands all of its arguments to Typer."""
    import typer

    single = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=HELP_OPTIONS,
    )
    single.command(name)(function)

    def run(arguments: tuple[str, ...]) -> None:
        single(args=list(arguments), prog_name=f"featcache {name}")

    rest = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    as_they_are = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
    return click.Command(name, params=[rest], callback=run, context_settings=as_they_are)


def _summaries() -> dict[str, click.Command]:
    return {
        name: click.Command(name, help=entry.summary)
        for name, entry in COMMANDS.items()
        if find_spec(f"featcache.cli.{entry.module}")
    }


app = Commands(
    "featcache",
    commands=_summaries(),
    help="featcache: never encode the same image twice.",
    context_settings=HELP_OPTIONS,
)


def main() -> None:
    """The `featcache` command."""
    app(prog_name="featcache")
