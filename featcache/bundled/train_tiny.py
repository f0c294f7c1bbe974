"""Train the bundled model, in two rounds; `tiny` came of

    python -m featcache.bundled.train_tiny --out ONE --seed 0 --minutes 5.65
    python -m featcache.bundled.train_tiny --out TWO --resume ONE --seed 1 --minutes 7.3 --rate 1e-3

The data are made as it runs and are the same for a seed, whatever the machine; the arithmetic of a GPU isn't.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Qwen2VLForConditionalGeneration

from featcache.bundled.questions import KINDS
from featcache.bundled.tiny_batches import Dialogues, Packer
from featcache.bundled.tiny_model import make_model, make_tokenizer, save
from featcache.bundled.tiny_training import Hints, forward, right_by_kind, to_device

WARMUP_STEPS = 200
FIRST_LOOK = 400  # steps on easy scenes
AVERAGE = 0.998  # decay a step of the averaged weights, which are what is kept
MAX_STEPS = 1_000_000
SECOND_ROUND = (
    *KINDS,
    "position",
    "position",
    "position",
    "compare",
    "compare",
    "count",
)  # what is learned late


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the loader's workers are forked
    tokenizer = make_tokenizer()
    packer = Packer(tokenizer)
    lessons = f"train/{options.seed}"
    if options.resume is None:
        data = Dialogues(packer, lessons, MAX_STEPS, options.batch, FIRST_LOOK)
        model = make_model(tokenizer)
    else:
        data = Dialogues(packer, lessons, MAX_STEPS, options.batch, 0, SECOND_ROUND)
        model = Qwen2VLForConditionalGeneration.from_pretrained(options.resume, dtype=torch.float32)
    model.to(device)
    hints = Hints(model.config.text_config.hidden_size).to(device)
    averaged = make_model(tokenizer).to(device).requires_grad_(False)
    averaged.load_state_dict(model.state_dict())
    _train(model, hints, averaged, _load(data, options), tokenizer, options)
    save(averaged, tokenizer, options.out)
    averaged.float()
    held_out = _load(Dialogues(packer, "held out", options.eval_batches, options.batch, 0), options)
    print(json.dumps({"held out": evaluate(averaged, hints, held_out, device)}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--resume", type=Path, help="folder of a model to give a second round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0, help="time to train for")
    parser.add_argument("--steps", type=int, default=MAX_STEPS, help="stop after so many steps all the same")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128, help="dialogues a step")
    parser.add_argument("--rate", type=float, default=1.2e-3, help="highest learning rate")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes that make data"
    )
    parser.add_argument("--eval-batches", type=int, default=16)
    return parser.parse_args()


def _load(data: Dialogues, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    return DataLoader(
        data,
        batch_size=None,
        num_workers=options.workers,
        pin_memory=options.device.startswith("cuda"),
        prefetch_factor=2 if options.workers else None,
    )


def _train(
    model: Any,
    hints: Hints,
    averaged: Any,
    batches: Iterable[dict[str, Any]],
    tokenizer: Any,
    options: argparse.Namespace,
) -> None:
    device = torch.device(options.device)
    optimizer = _optimizer([model, hints], options.rate, fused=device.type == "cuda")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = list(zip(averaged.parameters(), model.parameters(), strict=True))
    begin = saved = time.monotonic()
    waited = 0.0
    right: dict[str, list[bool]] = defaultdict(list)
    for step, (batch, wait) in enumerate(_timed(batches)):
        now = time.monotonic() - begin
        progress = max(now / (60 * options.minutes), step / options.steps)
        if progress >= 1:
            break
        waited += wait
        rate = options.rate * min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * _cosine(progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        on_device = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            result = forward(model, hints, on_device)
        loss = result.answers + (0.1 + 0.9 * _cosine(progress)) * result.hints
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        share = 1 - min(AVERAGE, (1 + step) / (10 + step))
        torch._foreach_lerp_([a for a, _ in kept], [p.detach() for _, p in kept], share)
        if step % 10 == 0:
            for kind, answers in right_by_kind(result.is_right, batch).items():
                right[kind] += answers
        if step % 200 == 0 or step == 20 or step + 1 == options.steps:
            line = {"step": step, "s": round(now, 1), "waited_s": round(waited, 1), "rate": round(rate, 6)}
            losses = {"loss": result.answers.item(), "hints": result.hints.item(), "norm": norm.item()}
            print(json.dumps({**line, **_rounded(losses), "right": _shares(right)}), flush=True)
            right.clear()
        if now - (saved - begin) > 60:
            saved = time.monotonic()
            copy = make_model(tokenizer)
            copy.load_state_dict(averaged.state_dict())
            save(copy, tokenizer, options.out)


@torch.inference_mode()
def evaluate(
    model: Any, hints: Hints, batches: Iterable[dict[str, Any]], device: torch.device
) -> dict[str, tuple[float, int]]:
    """Share of exact answers by kind, and how many were asked, the right answers before each being given."""
    right: dict[str, list[bool]] = defaultdict(list)
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16):
            result = forward(model, hints, to_device(batch, device))
        for kind, answers in right_by_kind(result.is_right, batch).items():
            right[kind] += answers
    return {kind: (sum(answers) / len(answers), len(answers)) for kind, answers in sorted(right.items())}


def _optimizer(modules: list[nn.Module], rate: float, *, fused: bool) -> torch.optim.Optimizer:
    parameters = [p for module in modules for p in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-8, fused=fused)


def _timed(batches: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """The batches, each with the seconds it was waited for."""
    asked = time.monotonic()
    for batch in batches:
        yield batch, time.monotonic() - asked
        asked = time.monotonic()


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _shares(right: dict[str, list[bool]]) -> dict[str, float]:
    return {kind: round(sum(answers) / len(answers), 3) for kind, answers in sorted(right.items())}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


if __name__ == "__main__":
    main()
