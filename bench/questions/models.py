"""Models with random weights: speed doesn't depend on their values, and equality is checked all the same."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw

from featcache.bench import SHAPES
from featcache.bench.setting import Setting
from featcache.bundled.tiny_model import make_tokenizer
from featcache.engine.loading import Loaded, load_model

transformers.utils.logging.disable_progress_bar()


def qwen2_vl(setting: Setting) -> Loaded:
    """Qwen2-VL of the setting's shape, in bfloat16 on CUDA, in float32 on a CPU."""
    folder = setting.folder / "model"
    if not folder.exists():
        _save_qwen2_vl(folder, *SHAPES[setting.shape], setting.device)
    dtype = "bfloat16" if setting.device == "cuda" else "float32"
    return load_model(folder, device=setting.device, dtype=dtype)


def _save_qwen2_vl(folder: Path, text: tuple[int, ...], vision: tuple[int, ...], device: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    hidden, intermediate, layers, heads, kv_heads = text
    eighth = hidden // heads // 8
    depth, width, vision_heads = vision
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 16_384,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [eighth, eighth + eighth // 2, 4 * eighth - 2 * eighth - eighth // 2],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": depth,
            "embed_dim": width,
            "hidden_size": hidden,
            "num_heads": vision_heads,
            "mlp_ratio": 4,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    with torch.device(device):  # billions of random numbers take minutes on a CPU
        model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    if device == "cuda":
        model.to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 4096}),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def page(seed: int, setting: Setting) -> bytes:
    """A page of lines like text, as JPEG: 1,120 by 1,568 pixels for a GPU, 280 by 392 for a CPU."""
    width, height = (1120, 1568) if setting.device == "cuda" else (280, 392)
    generator = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for y in range(10, height - 10, 14):
        x = 10
        while x < width - 40:
            length = int(generator.integers(4, 30))
            draw.rectangle((x, y, x + length, y + 8), fill=tuple(generator.integers(0, 90, 3).tolist()))
            x += length + 6
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90)
    return out.getvalue()


def asks(text: str, *images: bytes) -> list[dict[str, Any]]:
    """One message about some images."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class Transformers:
    """The baseline: the processor and `generate`, as transformers documents them."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def generate(self, messages: list[dict[str, Any]], tokens: int) -> list[int]:
        return self.timed(messages, tokens)[0]

    def timed(self, messages: list[dict[str, Any]], tokens: int) -> tuple[list[int], float]:
        """The answer, and the seconds from the messages to its first token."""
        first = _FirstToken()
        opened = [
            {**message, "content": [_opened(part) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in messages
        ]
        inputs = self._loaded.processor.apply_chat_template(
            opened, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(self._loaded.device)
        output = self._loaded.model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=first
        )
        answer: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return answer, first.seconds


class _FirstToken:
    """A streamer of transformers' that notes when the first token came. It is given the prompt first."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._puts = 0
        self.seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self._began

    def end(self) -> None: ...


def _opened(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image":
        return part
    return {"type": "image", "image": Image.open(io.BytesIO(part["image"])).convert("RGB")}
