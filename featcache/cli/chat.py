"""`featcache chat`: a conversation in the terminal, with each image's tier beside the answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from featcache.engine.engine import Reply
    from featcache.engine.vlm import CachedVLM

HELP = "/image PATH adds a picture to your next message · /stats · /quit"


def chat(
    model: Annotated[str, typer.Argument(help='"tiny", a local folder, or a hub name.')] = "tiny",
    image: Annotated[
        list[Path] | None, typer.Option("--image", "-i", help="A picture for the first message.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="The store's folder.", envvar="FEATCACHE_STORE")] = None,
    device: Annotated[str | None, typer.Option(help='"cuda" or "cpu".')] = None,
    dtype: Annotated[str, typer.Option(help='"auto", "bfloat16", "float16" or "float32".')] = "auto",
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.", min=1)] = 512,
) -> None:
    """Talk with a model about pictures; what it has seen once is not encoded again."""
    from featcache.images import open_image
    from featcache.settings import store_path

    for path in image or []:
        open_image(path)  # one that can't be shown ends the command before the model is loaded
    from featcache.engine import CachedVLM

    with CachedVLM.from_pretrained(model, store=store_path(store), device=device, dtype=dtype) as vlm:
        typer.echo(HELP)
        Conversation(vlm, max_tokens).run(list(image or []))


class Conversation:
    """The messages so far, and the pictures that wait for the next one."""

    def __init__(self, vlm: CachedVLM, max_tokens: int) -> None:
        self.vlm = vlm
        self.max_tokens = max_tokens
        self.messages: list[dict[str, Any]] = []
        self.waiting: list[Path] = []

    def run(self, images: list[Path]) -> None:
        for path in images:
            self._add_image(path)
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                typer.echo()
                return
            if line == "/quit":
                return
            self._obey(line)

    def _obey(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if command == "/image":
            self._add_image(Path(argument.strip()).expanduser())
        elif command == "/stats":
            import json

            typer.echo(json.dumps(self.vlm.stats(), indent=2))
        elif command.startswith("/"):
            typer.echo(f"{command}: unknown. {HELP}", err=True)
        elif line:
            self._ask(line)

    def _add_image(self, path: Path) -> None:
        from featcache.errors import ImageError
        from featcache.images import open_image

        try:
            width, height = open_image(path).size
        except ImageError as exc:
            typer.echo(f"error: {exc}", err=True)
            return
        self.waiting.append(path)
        typer.echo(f"{path.name}: {width}x{height}, goes with your next message", err=True)

    def _ask(self, text: str) -> None:
        """One turn; one that fails leaves the conversation as it was."""
        from featcache.errors import FeatcacheError

        parts = [{"type": "image", "image": path} for path in self.waiting]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        try:
            generation = self.vlm.submit([*self.messages, turn], max_tokens=self.max_tokens)
            try:
                for delta in generation:
                    typer.echo(delta.text, nl=False)
            except KeyboardInterrupt:
                generation.cancel()
            reply = generation.result()
        except FeatcacheError as exc:
            typer.echo(f"error: {exc}", err=True)
            return
        self.messages += [turn, {"role": "assistant", "content": reply.text}]
        self.waiting = []
        typer.echo()
        typer.echo(typer.style(f"  {account(reply)}", dim=True), err=True)


def account(reply: Reply) -> str:
    """Where the images came from and what was reused, in one line."""
    images = ", ".join(f"image {n}: {image.tier}" for n, image in enumerate(reply.images, start=1))
    usage = reply.usage
    reused = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused"
    first = f"first token {reply.timings.ttft_s * 1e3:.0f} ms"
    return " · ".join(part for part in (images, reused, first) if part)
