"""What the engine saves, against plain transformers with the same weights, in one run on this machine's CPU.

    python bench/engine.py [--json FILE]

The model has random weights and a middle size (6 layers, hidden 512; a Qwen2-VL tower of depth 6), so that
times are of real work; answers are compared all the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from PIL import Image

from featcache import FeatureStore
from featcache.bundled.tiny_model import make_tokenizer
from featcache.engine import CachedVLM
from featcache.engine.engine import EngineSettings
from featcache.engine.loading import load_model

TURNS = 10
RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as scratch:
        folder = make_model(Path(scratch) / "model")
        rows = first_turn(folder) + turns(folder, Path(scratch)) + together(folder)
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "figures": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))
    show(report)


def make_model(folder: Path) -> Path:
    """A Qwen2-VL of middle size with random weights, as an ordinary folder."""
    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={"depth": 6, "embed_dim": 512, "hidden_size": 512, "num_heads": 8, "mlp_ratio": 4},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    bounds = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 400}
    transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(size=bounds),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    """392x392 pixels, which are 196 tokens."""
    pixels = np.random.default_rng(seed).integers(0, 256, (392, 392, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def conversation(turn: int, seed: int = 0) -> list[dict[str, Any]]:
    """The messages up to the question of `turn`: two images in the first, then text."""
    messages: list[dict[str, Any]] = []
    for number in range(turn + 1):
        images = [{"type": "image", "image": picture(seed + i)} for i in range(2)] if number == 0 else []
        text = f"question {number}: what is in the pictures and where do you see it"
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": text}]})
        if number < turn:
            answer = [{"type": "text", "text": f"answer {number}: a red circle and a blue square"}]
            messages.append({"role": "assistant", "content": answer})
    return messages


class Transformers:
    """The baseline: the processor and `generate`, as its documentation shows."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load_model(folder, dtype="float32", device="cpu")

    def prepare(self, messages: list[dict[str, Any]]) -> Any:
        return self.loaded.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

    def generate(self, messages: list[dict[str, Any]], tokens: int) -> list[int]:
        inputs = self.prepare(messages)
        output = self.loaded.model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        return list(output[0, inputs["input_ids"].shape[1] :].tolist())

    def language_model_seconds(self, messages: list[dict[str, Any]]) -> float:
        """The prefill of these tokens by the language model alone, the image's rows being there."""
        inputs = self.prepare(messages)
        inputs.pop("pixel_values")
        inputs.pop("image_grid_thw")
        with torch.no_grad():
            return timed(lambda: self.loaded.model(**inputs, logits_to_keep=1))


def timed(call: Callable[[], Any]) -> float:
    """Median of RUNS. Warm up before."""
    return statistics.median(_once(call) for _ in range(RUNS))


def _once(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def first_token(vlm: CachedVLM, messages: list[dict[str, Any]]) -> tuple[float, list[int]]:
    began = time.perf_counter()
    reply = vlm.chat(messages, max_tokens=1, ignore_eos=True)
    return time.perf_counter() - began, list(reply.token_ids)


def first_turn(folder: Path, rounds: int = 9) -> list[dict[str, Any]]:
    """Time to the first token about two new images, in turns with transformers."""
    plain = Transformers(folder)
    ours: list[float] = []
    theirs: list[float] = []
    with CachedVLM.from_pretrained(folder, store=None, dtype="float32", device="cpu") as vlm:
        for number in range(rounds + 3):
            messages = conversation(0, seed=1000 + 10 * number)
            seconds, tokens = first_token(vlm, messages)
            began = time.perf_counter()
            assert tokens == plain.generate(messages, 1), "an answer differs from transformers'"
            if number >= 3:  # after the warm-up
                ours.append(seconds)
                theirs.append(time.perf_counter() - began)
    ratio = statistics.median(ours) / statistics.median(theirs)
    return [
        figure("first turn, nothing cached / transformers", ratio, 1.05),
        {
            "figure": "ms: first turn, ours and transformers",
            "value": [_ms(statistics.median(ours)), _ms(statistics.median(theirs))],
        },
    ]


def turns(folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """Time to the first token of a ten-turn conversation about two images."""
    plain = Transformers(folder)
    conversations = [conversation(turn) for turn in range(TURNS)]
    expected = [plain.generate(messages, 1) for messages in conversations]
    uncached = [timed(functools.partial(plain.generate, messages, 1)) for messages in conversations]
    alone: list[float] = []
    cached: list[list[float]] = []
    restarted: list[float] = []
    warm_up = [{"role": "user", "content": "hello"}]
    for run in range(RUNS):
        store = scratch / f"store{run}"
        with CachedVLM.from_pretrained(folder, store=store, dtype="float32", device="cpu") as vlm:
            vlm.chat(warm_up, max_tokens=1)
            vlm.chat(conversation(0, seed=900), max_tokens=1)
            times, tokens = zip(*(first_token(vlm, messages) for messages in conversations), strict=True)
            assert list(tokens) == expected, "an answer differs from transformers'"
            cached.append(list(times))
        with CachedVLM.from_pretrained(folder, store=store, dtype="float32", device="cpu") as vlm:
            vlm.chat(warm_up, max_tokens=1)
            restarted.append(first_token(vlm, conversation(0))[0])
            alone.append(plain.language_model_seconds(conversations[0]))  # right beside: rates drift
    later = [statistics.median(run[turn] for run in cached) for turn in range(1, TURNS)]
    ratios = [seconds / uncached[turn] for turn, seconds in enumerate(later, start=1)]
    return [
        figure("turns 2-10 / transformers, worst", max(ratios), 0.15),
        figure("turn 10 / turn 2", later[-1] / later[0], 1.5),
        figure(
            "first turn after a restart / language model's prefill alone",
            statistics.median(restarted) / statistics.median(alone),
            1.1,
        ),
        {"figure": "ms: transformers turn 1, turn 10", "value": [_ms(uncached[0]), _ms(uncached[-1])]},
        {
            "figure": "ms: ours turn 1, 2, 10",
            "value": [_ms(statistics.median(run[0] for run in cached)), _ms(later[0]), _ms(later[-1])],
        },
        {
            "figure": "ms: restart; language model alone",
            "value": [_ms(statistics.median(restarted)), _ms(statistics.median(alone))],
        },
    ]


def together(folder: Path) -> list[dict[str, Any]]:
    """Eight conversations at once, against one after another on the same engine and on transformers."""
    conversations = [conversation(0, seed=100 + 2 * n) for n in range(8)]
    store = FeatureStore.open(None)
    settings = EngineSettings()
    tokens = 32
    plain = Transformers(folder)
    plain.generate(conversations[0], tokens)
    baseline = _once(lambda: [plain.generate(c, tokens) for c in conversations])
    with CachedVLM.from_pretrained(
        folder, store=store, dtype="float32", device="cpu", settings=settings
    ) as vlm:
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        vlm.chat_batch(conversations, **sampling)
        one_by_one = timed(lambda: [vlm.chat(c, **sampling) for c in conversations])
        at_once = timed(lambda: vlm.chat_batch(conversations, **sampling))
    store.close()
    rate = 8 * tokens
    return [
        figure(
            "8 at once / transformers one after another, tokens/s", baseline / at_once, 2.5, at_least=True
        ),
        {"figure": "8 at once / ours one after another, tokens/s", "value": round(one_by_one / at_once, 2)},
        {
            "figure": "tokens/s: transformers, ours one by one, at once",
            "value": [round(rate / seconds) for seconds in (baseline, one_by_one, at_once)],
        },
    ]


def figure(name: str, value: float, target: float, *, at_least: bool = False) -> dict[str, Any]:
    reached = value >= target if at_least else value <= target
    return {
        "figure": name,
        "value": round(value, 3),
        "target": f"{'>=' if at_least else '<='} {target}",
        "ok": reached,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['machine']}, {report['date']}, {report['versions']}")
    for column in ("figure", "value", "target", "reached"):
        table.add_column(column)
    for row in report["figures"]:
        reached = {True: "yes", False: "no", None: ""}[row.get("ok")]
        table.add_row(row["figure"], str(row["value"]), row.get("target", ""), reached)
    Console(file=sys.stdout, width=120).print(table)


if __name__ == "__main__":
    main()
