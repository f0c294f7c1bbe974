"""For the scripts that run on a CUDA machine: models of real shapes with random weights, pictures, sections.

The weights are made on the device itself, in seconds. Their values don't matter to times; what answers are right
is checked on small models whose weights are scaled until they look at the images.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
import transformers as tf
from models import CHATML, CHATML_IMAGE, QWEN, make_tokenizer
from PIL import Image

from featcache.engine.families.registry import load_family
from featcache.engine.loading import Loaded
from featcache.engine.template import ChatTemplate

Row = dict[str, Any]
ROWS: list[Row] = []


# Sections


def run_sections(
    sections: Mapping[str, Callable[[], None]],
    only: Iterable[str],
    seconds: float,
    report: Callable[[], None],
) -> bool:
    """Run them in order until the time is up; those left are named. False if one of them failed.

    report: called after each.
    """
    began, is_right, wanted = time.perf_counter(), True, list(only) or list(sections)
    for name, section in sections.items():
        if name not in wanted:
            continue
        spent = time.perf_counter() - began
        if spent > seconds:
            say(f"SKIPPED {name}: {spent:.0f} s are spent")
            continue
        say(f"== {name} (after {spent:.0f} s)")
        try:
            section()
        except Exception:
            is_right = False
            say(f"FAILED {name}\n{traceback.format_exc()}")
        report()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    say(f"== done after {time.perf_counter() - began:.0f} s")
    return is_right


def say(text: str) -> None:
    print(text, flush=True)


def figure(
    name: str, value: float, unit: str = "", *, most: float | None = None, least: float | None = None
) -> None:
    """Keep and print one row; `most` or `least` is its target."""
    target, verdict = "", ""
    if most is not None:
        target, verdict = f"<= {most}", "ok" if value <= most else "MISSED"
    if least is not None:
        target, verdict = f">= {least}", "ok" if value >= least else "MISSED"
    ROWS.append({"figure": name, "value": round(value, 4), "unit": unit, "target": target, "ok": verdict})
    say(f"  {name:<78} {value:>10.3f} {unit:<9} {target} {verdict}")


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "transformers": tf.__version__, "python": sys.version.split()[0]}
    return {"device": name, "cores": len(os.sched_getaffinity(0)), "date": time.strftime("%F"), **versions}


def write_report(path: Path | None, device: torch.device) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine(device), "rows": ROWS}, indent=2))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of a call, until the device has done its work."""
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def median_ms(call: Callable[[], object], runs: int = 7) -> float:
    """After one call to warm up."""
    call()
    return 1e3 * statistics.median(seconds_of(call) for _ in range(runs))


# Models


def _qwen() -> tuple[Any, str, dict[str, int]]:
    """A tokenizer, its chat template, and the special tokens as Qwen's configurations name them."""
    parts = ("image_pad", "video_pad", "vision_start", "vision_end")
    fields = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    names = {field: f"<|{part}|>" for field, part in zip(fields, parts, strict=True)}
    tokenizer = make_tokenizer(QWEN, names, "<|im_end|>")
    template = CHATML_IMAGE.replace("@IMAGE@", "<|vision_start|><|image_pad|><|vision_end|>")
    return tokenizer, template, {f"{f}_id": tokenizer.convert_tokens_to_ids(t) for f, t in names.items()}


def qwen25_vl(device: torch.device, tiny: bool) -> Loaded:
    """Qwen2.5-VL-3B; an image of 1792 x 1456 is 3,328 tokens."""
    tokenizer, template, ids = _qwen()
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    images = tf.Qwen2VLImageProcessor(size=size)
    video = tf.Qwen2VLVideoProcessor()
    processor = tf.Qwen2_5_VLProcessor(images, tokenizer, video, chat_template=template)
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "initializer_range": 0.03,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    if tiny:
        text |= {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        vision |= {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
        vision |= {"out_hidden_size": 256, "fullatt_block_indexes": [1]}
    config = tf.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        **ids,
        tie_word_embeddings=False,
    )
    return _loaded("Qwen2.5-VL-3B", config, processor, device)


def internvl(device: torch.device, tiny: bool) -> Loaded:
    """InternVL2-2B: InternViT-300M and a language model of 1.8B; an image of 1792 x 1344 is 13 tiles."""
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    special = [*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    tokenizer = make_tokenizer(special, names, "<|im_end|>")
    images = tf.GotOcr2ImageProcessor(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=1 if tiny else 12
    )
    template = CHATML_IMAGE.replace("@IMAGE@", "<IMG_CONTEXT>\n")
    video = tf.InternVLVideoProcessor()
    processor = tf.InternVLProcessor(images, tokenizer, video, image_seq_length=256, chat_template=template)
    text = {
        "model_type": "qwen2",
        "vocab_size": 92553,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "initializer_range": 0.03,
    }
    vision = {
        "model_type": "internvl_vision",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": [448, 448],
        "patch_size": [14, 14],
    }
    if tiny:
        text |= {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 2}
        vision |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 1}
    config = tf.InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=256,
        tie_word_embeddings=False,
    )
    return _loaded("InternVL2-2B", config, processor, device)


def qwen3_vl(device: torch.device, tiny: bool) -> Loaded:
    """Qwen3-VL with DeepStack, of a few layers: to be right on, not to be timed."""
    tokenizer, template, ids = _qwen()
    size = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 1024}
    images = tf.Qwen2VLImageProcessor(size=size, patch_size=16, temporal_patch_size=2, merge_size=2)
    video = tf.Qwen3VLVideoProcessor()
    processor = tf.Qwen3VLProcessor(images, tokenizer, video, chat_template=template)
    text = {
        "vocab_size": 2000,
        "hidden_size": 256 if tiny else 1024,
        "intermediate_size": 512 if tiny else 3072,
        "num_hidden_layers": 4 if tiny else 12,
        "num_attention_heads": 2 if tiny else 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "initializer_range": 0.03,
    }
    vision = {
        "depth": 8,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_heads": 8,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 16,
        "deepstack_visual_indexes": [2, 4, 6],
    }
    config = tf.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        **ids,
        tie_word_embeddings=False,
    )
    return _loaded("Qwen3-VL", config, processor, device)


TEXT_ARCHITECTURES = {
    "InternVL2-2B": "Qwen2ForCausalLM",
    "Qwen2.5-VL-3B": "Qwen2ForCausalLM",
    "Qwen3-VL": "Qwen3ForCausalLM",
}


def save_folder(shape: str, folder: Path, device: torch.device, tiny: bool) -> None:
    """A model in `folder`, for processes that load one: bfloat16, its answers depending on the images."""
    loaded = (SHAPES | {"Qwen3-VL": qwen3_vl})[shape](device, tiny)
    look_at_images(loaded.model)
    loaded.model.save_pretrained(folder)
    loaded.processor.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["architectures"] = [TEXT_ARCHITECTURES[shape]]  # LMDeploy asks for it
    path.write_text(json.dumps(config))


@torch.no_grad()
def look_at_images(model: Any) -> None:
    """Scale random weights: attention that is peaked, and layers that add little, so that every token of the
    prompt may decide the next one. Plain random weights give one answer to all images."""
    language = model.model.language_model
    depth = len(language.layers)
    language.embed_tokens.weight.div_(language.embed_tokens.weight.float().std())
    for layer in language.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.mul_(1.5)
        layer.self_attn.o_proj.weight.mul_(0.5)
        layer.mlp.down_proj.weight.div_((2 * depth) ** 0.5)


SHAPES: dict[str, Callable[[torch.device, bool], Loaded]] = {
    "InternVL2-2B": internvl,
    "Qwen2.5-VL-3B": qwen25_vl,
}


def _loaded(name: str, config: Any, processor: Any, device: torch.device) -> Loaded:
    began = time.perf_counter()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = tf.AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval().requires_grad_(False)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    family = load_family(model, processor)
    placeholder, image = family.placeholder, family.image_token
    template = ChatTemplate(processor.tokenizer, processor.chat_template, placeholder, [image], name)
    synchronize()
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    say(f"  {name}: {billions:.2f} billion parameters in {time.perf_counter() - began:.1f} s")
    return Loaded(model, processor, processor.tokenizer, family, template, name, name)


# Pictures

_MASTERS = 8
_NUMBERS = itertools.count()


def photographs(number: int, width: int, height: int) -> Iterator[bytes]:
    """JPEGs, no two alike: some pictures, each turned round by another number of pixels."""
    masters = _masters(width, height)

    def turned(index: int) -> bytes:
        out = io.BytesIO()
        columns, rows = divmod(index, height)
        pixels = np.roll(masters[index % _MASTERS], (rows, 7 * columns), (0, 1))
        Image.fromarray(pixels).save(out, "JPEG", quality=90)
        return out.getvalue()

    with ThreadPoolExecutor(16) as pool:
        yield from pool.map(turned, [next(_NUMBERS) for _ in range(number)])


@functools.cache
def _masters(width: int, height: int) -> list[Any]:
    with ThreadPoolExecutor(_MASTERS) as pool:
        return list(pool.map(lambda seed: _octaves(seed, width, height), range(_MASTERS)))


def _octaves(seed: int, width: int, height: int) -> Any:
    """(height, width, 3) bytes of noise in octaves: as hard to decode and to scale as a photograph."""
    generator = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(2, 8):
        side = 2**octave
        noise = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
        total += (
            np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)) / octave
        )
    return np.uint8(total * (255 / total.max()))
