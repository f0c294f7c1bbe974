"""Tiny random models of every family, made in code as ordinary transformers folders.

    folder = build("qwen2_vl", tmp_path)            # AutoProcessor and AutoModelForImageTextToText load it

The weights are large enough that different images give different answers. The tokenizer is a byte-level BPE
trained here; real chat templates' shapes are kept, with fewer words.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as tf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = (
    "the quick brown fox describe this image please what is in the picture a cat sitting on the mat and how "
    "many red circles are there in the left one compare both which is larger yes no two three\n"
) * 20 + "You are a helpful assistant. system user assistant\n" * 30

SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    + ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"],
}

CHATML_IMAGE = (
    "{%- for m in messages -%}"
    "{%- if loop.first and m.role != 'system' -%}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image' in c or 'image_url' in c %}@IMAGE@"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@functools.cache
def _trained_bpe() -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    return state["vocab"], tuple((a, b) for a, b in state["merges"])


def make_tokenizer(special: list[str], named: dict[str, str], eos: str, **kwargs: Any) -> Any:
    """A byte-level BPE tokenizer with `special` tokens; `named` are attributes such as image_token."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    vocab, merges = _trained_bpe()
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        pad_token=special[0],
        model_max_length=4096,
        extra_special_tokens=named,
        **kwargs,
    )


def scale_weights(model: Any, seed: int) -> Any:
    """Random weights large enough that attention attends and different images give different answers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08, generator=generator)
            elif "norm" not in name:
                parameter.normal_(0, 0.02, generator=generator)
    return model.eval()


def text_config(tokenizer: Any, **extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **extra,
    }


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def _qwen(kind: str) -> tuple[Any, Any]:
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    names |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    tokenizer = make_tokenizer(SPECIAL["qwen"], names, "<|im_end|>")
    template = CHATML_IMAGE.replace("@IMAGE@", "<|vision_start|><|image_pad|><|vision_end|>")
    patch = 16 if kind == "qwen3_vl" else 14
    size = {"shortest_edge": (2 * patch) ** 2 * 4, "longest_edge": (2 * patch) ** 2 * 40}
    pixels = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    cls = {"qwen2_vl": tf.Qwen2VLProcessor, "qwen2_5_vl": tf.Qwen2_5_VLProcessor, "qwen3_vl": tf.Qwen3VLProcessor}
    video = tf.Qwen3VLVideoProcessor if kind == "qwen3_vl" else tf.Qwen2VLVideoProcessor
    processor = cls[kind](tf.Qwen2VLImageProcessor(**pixels), tokenizer, video(), chat_template=template)
    ids = tokenizer.convert_tokens_to_ids
    common = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "text_config": text_config(tokenizer, rope_parameters=MROPE),
    }
    vision = {"depth": 3, "num_heads": 2, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return processor, tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(vision_config=vision, **common))
    vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    if kind == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [2], "window_size": 56}
        return processor, tf.Qwen2_5_VLForConditionalGeneration(tf.Qwen2_5_VLConfig(vision_config=vision, **common))
    vision |= {"depth": 4, "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 2]}
    common["text_config"]["head_dim"] = 16
    return processor, tf.Qwen3VLForConditionalGeneration(tf.Qwen3VLConfig(vision_config=vision, **common))


BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
}


def build(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Make the model of `family` in `folder`/`family` (once), and return that folder."""
    target = folder / f"{family}-{seed}-{str(dtype).removeprefix('torch.')}"
    if (target / "model.safetensors").exists():
        return target
    processor, model = BUILDERS[family]()
    scale_weights(model, seed).to(dtype).save_pretrained(target)
    processor.save_pretrained(target)
    return target
