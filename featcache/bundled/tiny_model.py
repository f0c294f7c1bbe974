"""The bundled model's own shape: configuration, tokenizer and processor, all made in code."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from featcache.bundled.questions import KINDS, comparisons, facts, phrase, picture_name
from featcache.bundled.scenes import COLOURS, SHAPES, make_scene

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL_TOKENS = (END, TURN, TURN_END, VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO)
MIN_PIXELS, MAX_PIXELS = 112 * 112, 336 * 336  # the areas it was trained for: 16 to 144 tokens a picture
CONTEXT = 4096
VOCABULARY = 1024  # tokens at most, the 256 bytes and the special tokens among them

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part is string -%}
{{- part -}}
{%- elif part.type == 'text' or 'text' in part -%}
{{- part.text -}}
{%- elif part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of the words that questions and answers are made of. Always the same one."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = VOCABULARY - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=20, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_corpus(), trainer)
    learned = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=TURN_END,
        pad_token=END,
        unk_token=END,
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def make_processor(tokenizer: Any) -> Any:
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        video_processor=Qwen2VLVideoProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def make_config(tokenizer: Any) -> Any:
    token = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    return Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            # A low base and a wide share for the columns: with the usual ones, neighbouring columns would
            # turn by less than a hundredth of a radian.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 12, 16]},
            "rms_norm_eps": 1e-6,
            "bos_token_id": token[END],
            "eos_token_id": token[TURN_END],
            "pad_token_id": token[END],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 5,
            "embed_dim": 192,
            "hidden_size": 256,
            "num_heads": 6,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=token[IMAGE],
        video_token_id=token[VIDEO],
        vision_start_token_id=token[VISION_START],
        vision_end_token_id=token[VISION_END],
        tie_word_embeddings=True,
    )


def make_model(tokenizer: Any) -> Any:
    """The untrained model, float32. The caller seeds torch."""
    model = Qwen2VLForConditionalGeneration(make_config(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=64,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the ordinary folder: weights as bfloat16, configuration, tokenizer, processor."""
    folder.mkdir(parents=True, exist_ok=True)
    make_processor(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


def _corpus() -> list[str]:
    """Questions and answers of 1,500 scenes, without what is printed there: that is to be spelled."""
    rng = random.Random("tokenizer of tiny")
    texts = [*COLOURS, *SHAPES, "You are a helpful assistant.", "user", "assistant", "system"] * 50
    for _ in range(1500):
        scenes = [make_scene(rng), make_scene(rng)]
        for kind in KINDS:
            known = list(comparisons(scenes)) if kind == "compare" else facts(scenes[0], kind)
            if not known:
                continue
            fact = rng.choice(known)
            name = None if kind == "compare" or rng.random() < 0.6 else picture_name(rng.randrange(3), rng)
            texts.append(phrase(kind, fact, rng, name).ask)
            if kind not in ("word", "number", "describe"):
                texts += [fact.answer, f" {fact.answer}"]
    return texts
