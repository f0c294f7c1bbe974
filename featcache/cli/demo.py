"""`featcache demo`: the bundled model answers questions about pictures it has never seen, over a restart."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from featcache.engine.engine import Reply
    from featcache.engine.vlm import CachedVLM

TURNS = 5
MAX_TOKENS = 48
QUESTIONS = ("describe the picture", "how many figures are there", "is there any text", "what is written")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. images: files that are shown with it. truth: the right answer, if that is known."""

    images: tuple[str, ...]
    question: str
    truth: str | None


@dataclass(slots=True)
class Sums:
    """What all turns together did."""

    asked: int = 0
    right: int = 0
    known: int = 0
    same: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    encoded: int = 0
    reused: int = 0
    seconds: float = 0.0
    seconds_without: float = 0.0


def demo(
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="Ask about this picture instead of fresh scenes."),
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option("--question", "-q", help="What to ask about it; may be repeated.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Keep the features here; else in a temporary folder.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the same scenes again.")] = None,
    go_on: Annotated[Path | None, typer.Option("--go-on", hidden=True)] = None,
) -> None:
    """Ask the bundled model about pictures it has never seen, with a restart in between.

    Beside each answer: where the pictures' features came from, how much of the prompt was reused, and how
    long the first token took with the cache and without it.
    """
    if go_on is not None:
        _second_half(go_on)
        return
    with tempfile.TemporaryDirectory(prefix="featcache-demo-") as folder:
        turns = _own(image, question) if image else _fresh(Path(folder), seed)
        where = store or Path(folder) / "store"
        half = max(1, len(turns) // 2)
        state = Path(folder) / "conversation.json"
        messages, sums = _ask_all(turns[:half], [], where, Sums())
        typer.echo("\nThat process has ended. A new one opens the same store and goes on:")
        rest = [asdict(turn) for turn in turns[half:]] or [asdict(turns[-1])]
        doc = {"messages": messages, "turns": rest, "store": str(where), "sums": asdict(sums)}
        state.write_text(json.dumps(doc))
        ended = subprocess.run(
            [sys.executable, "-m", "featcache", "demo", "--go-on", str(state)], check=False
        )
        if ended.returncode != 0:
            raise typer.Exit(ended.returncode)


def _second_half(state: Path) -> None:
    doc = json.loads(state.read_text())
    turns = [Turn(tuple(turn["images"]), turn["question"], turn["truth"]) for turn in doc["turns"]]
    _, sums = _ask_all(turns, doc["messages"], Path(doc["store"]), Sums(**doc["sums"]))
    _report(sums)


def _fresh(folder: Path, seed: int | None) -> list[Turn]:
    """A conversation about scenes that nobody has seen, drawn now; what is right is known."""
    from featcache.bundled.dialogues import make_dialogue

    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    typer.echo(f"Drawing fresh pictures (seed {seed}; --seed {seed} draws them again).")
    dialogue = make_dialogue(random.Random(f"demo/{seed}"), pictures=2, turns=TURNS)
    turns, number = [], 0
    for index, answer in enumerate(dialogue.answers):
        content = dialogue.prompt(index)[-1]["content"]
        files = []
        for part in content:
            if part["type"] == "image":
                number += 1
                path = folder / f"picture-{number}.png"
                part["image"].save(path)
                files.append(str(path))
        (text,) = (part["text"] for part in content if part["type"] == "text")
        turns.append(Turn(tuple(files), text, answer))
    return turns


def _own(images: list[Path], questions: list[str] | None) -> list[Turn]:
    """The user's pictures, shown with the first question."""
    from featcache.images import open_image

    for path in images:
        width, height = open_image(path).size
        typer.echo(f"{path}: {width}x{height}")
    typer.echo("tiny knows figures, colours, counts, positions and short printed words; no photographs.")
    files = tuple(str(path.resolve()) for path in images)
    asked = questions or list(QUESTIONS)
    return [Turn(files if n == 0 else (), text, None) for n, text in enumerate(asked)]


def _ask_all(
    turns: list[Turn], messages: list[dict[str, Any]], store: Path, sums: Sums
) -> tuple[list[dict[str, Any]], Sums]:
    """Ask the questions one after another, each with the cache and without it."""
    with _models(store) as (cached, plain):
        for turn in turns:
            parts = [{"type": "image", "image": path} for path in turn.images]
            asked = [
                *messages,
                {"role": "user", "content": [*parts, {"type": "text", "text": turn.question}]},
            ]
            without, seconds_without = _timed(plain, asked)
            reply, seconds = _timed(cached, asked)
            _print(turn, reply, seconds, seconds_without)
            _add(sums, turn, reply, without, seconds, seconds_without)
            messages = [*asked, {"role": "assistant", "content": reply.text}]
    return messages, sums


@contextmanager
def _models(store: Path) -> Iterator[tuple[CachedVLM, CachedVLM]]:
    """The model with its cache, and the same without any."""
    from featcache.engine import CachedVLM
    from featcache.engine.engine import EngineSettings
    from featcache.store import FeatureStore

    began = time.perf_counter()
    import torch

    nothing = EngineSettings(prefix_cache=False)
    dtype = "auto" if torch.cuda.is_available() else "float32"  # bf16 on a CPU is slower, and less exact
    with (
        CachedVLM.from_pretrained("tiny", store=store, dtype=dtype) as cached,
        FeatureStore.open(None, host_bytes=0) as no_store,
        CachedVLM.from_pretrained(cached.loaded, store=no_store, settings=nothing) as plain,
    ):
        size = sum(p.numel() for p in cached.loaded.model.parameters()) / 1e6
        seconds = time.perf_counter() - began
        typer.echo(
            f"tiny ({size:.1f} million parameters) loaded on {cached.loaded.device} in {seconds:.1f} s"
        )
        warm_up = [{"role": "user", "content": "hello"}]
        plain.chat(warm_up, max_tokens=2)
        cached.chat(warm_up, max_tokens=2)
        yield cached, plain


def _timed(vlm: CachedVLM, messages: list[dict[str, Any]]) -> tuple[Reply, float]:
    """A greedy answer, and the seconds from the call to its first token."""
    began = time.perf_counter()
    generation = vlm.submit(messages, max_tokens=MAX_TOKENS)
    next(iter(generation))
    seconds = time.perf_counter() - began
    return generation.result(), seconds


def _print(turn: Turn, reply: Reply, seconds: float, seconds_without: float) -> None:
    shown = "".join(f" [{Path(path).name}]" for path in turn.images)
    verdict = ""
    if turn.truth is not None:
        verdict = "   ✓" if reply.text == turn.truth else f"   ✗ (right would be: {turn.truth})"
    tiers = ", ".join(f"image {n} {image.tier}" for n, image in enumerate(reply.images, start=1))
    usage = reply.usage
    typer.echo(f"\n  Q{shown} {turn.question}")
    typer.echo(f"  A {typer.style(reply.text, bold=True)}{verdict}")
    typer.echo(
        typer.style(
            f"    {tiers} · {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused · "
            f"first token {seconds * 1e3:.0f} ms, without the cache {seconds_without * 1e3:.0f} ms",
            dim=True,
        )
    )


def _add(
    sums: Sums, turn: Turn, reply: Reply, without: Reply, seconds: float, seconds_without: float
) -> None:
    sums.asked += 1
    sums.known += turn.truth is not None
    sums.right += turn.truth is not None and reply.text == turn.truth
    sums.same += reply.token_ids == without.token_ids
    sums.prompt_tokens += reply.usage.prompt_tokens
    sums.cached_tokens += reply.usage.cached_tokens
    sums.encoded += sum(image.tier == "encoded" for image in reply.images)
    sums.reused += sum(image.tier != "encoded" for image in reply.images)
    sums.seconds += seconds
    sums.seconds_without += seconds_without


def _report(sums: Sums) -> None:
    right = f"{sums.right} of {sums.known} answers are right; " if sums.known else ""
    typer.echo(f"\n{right}{sums.same} of {sums.asked} are the same, token by token, without the cache.")
    typer.echo(
        f"Images were encoded {sums.encoded} times and reused {sums.reused} times; "
        f"{sums.cached_tokens} of {sums.prompt_tokens} prompt tokens were reused."
    )
    saved = sums.seconds_without - sums.seconds
    typer.echo(
        f"Waiting for first tokens took {sums.seconds * 1e3:.0f} ms instead of "
        f"{sums.seconds_without * 1e3:.0f} ms: {saved * 1e3:.0f} ms saved."
    )
