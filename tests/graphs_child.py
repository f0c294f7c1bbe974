"""What test_graphs runs with TRITON_INTERPRET=1: each decoding step of a small model, once more as a StaticStep.

A graph replays what `StaticStep.forward` launches. Here that is called itself, as there is no GPU, on the engine's
own pool and behind the engine's own step, whose logits it has to repeat.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from models import build
from pictures import noise

from featcache.engine import CachedVLM
from featcache.engine.attention import Span
from featcache.engine.engine import EngineSettings
from featcache.engine.graphs import SIZES, StaticStep, width_for
from featcache.engine.parcel import Integers


class Repeated:
    """In the place of `DecodeGraphs`: notes what it is asked, and leaves the step to the runner."""

    def __init__(self) -> None:
        self.replays = 0
        self.asked: tuple[Sequence[int], Integers, Sequence[Span]] | None = None

    def run(self, ids: Sequence[int], positions: Integers, spans: Sequence[Span]) -> None:
        self.replays += 1
        self.asked = ids, positions, spans


def main(family: str, place: Path) -> None:
    settings = EngineSettings(kv_bytes="8MiB")
    with CachedVLM.from_pretrained(build(family, place), store=None, device="cpu", settings=settings) as vlm:
        runner = vlm.engine._runner
        repeated = Repeated()
        runner.graphs = repeated  # type: ignore[assignment]
        run, spare = runner.run, runner.pool.keys.shape[1] - 1
        steps: dict[tuple[int, int], StaticStep] = {}
        errors: list[float] = []
        sizes: set[tuple[int, int]] = set()

        def both(parts):  # type: ignore[no-untyped-def]
            repeated.asked = None
            sequences, logits = run(parts)
            if repeated.asked is not None:
                ids, positions, spans = repeated.asked
                size = next(size for size in SIZES if size >= len(spans))
                width = width_for(max(span.total for span in spans))
                held = runner.pool.keys[:, :spare].clone()
                if (size, width) not in steps:
                    axes = vlm.loaded.family.num_axes
                    steps[size, width] = StaticStep(runner.pool, axes, size, width, spare)
                step = steps[size, width]
                step.fill(ids, positions, spans)
                again = step.forward(vlm.loaded.family)[: len(spans)]
                errors.append(float((again - logits).abs().max() / logits.abs().max()))
                moved = (runner.pool.keys[:, :spare] - held).abs().max()
                assert moved <= 1e-5 * held.abs().max(), f"a row wrote where it shouldn't: {moved}"
                sizes.add((size, len(spans)))
            return sequences, logits

        runner.run = both  # type: ignore[method-assign]
        for number, tokens in ((1, 4), (3, 1), (3, 6)):  # at last all prefixes are held: they decode together
            talks = [[user(noise(80, 60, n), "is " * (n * 9 + 1))] for n in range(number)]
            vlm.chat_batch(talks, max_tokens=tokens, ignore_eos=True)
        assert vlm.engine.stats()["graph_steps"] == len(errors) >= 8, errors
        assert max(errors) <= 1e-5, errors
        assert {(1, 1), (4, 3)} <= sizes, sizes


def user(image: object, text: str) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
