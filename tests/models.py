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

torch.set_num_threads(1)  # models this small are slower on two

CORPUS = (
    "the quick brown fox describe this image please what is in the picture a cat sitting on the mat and how "
    "many red circles are there in the left one compare both which is larger yes no two three\n"
) * 20 + "You are a helpful assistant. system user assistant\n" * 30

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = [*CHATML, "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]

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
    tokenizer = make_tokenizer(QWEN, names, "<|im_end|>")
    template = CHATML_IMAGE.replace("@IMAGE@", "<|vision_start|><|image_pad|><|vision_end|>")
    patch = 16 if kind == "qwen3_vl" else 14
    size = {"shortest_edge": (2 * patch) ** 2 * 4, "longest_edge": (2 * patch) ** 2 * 40}
    pixels = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    cls = {
        "qwen2_vl": tf.Qwen2VLProcessor,
        "qwen2_5_vl": tf.Qwen2_5_VLProcessor,
        "qwen3_vl": tf.Qwen3VLProcessor,
    }
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
    vision = {
        "depth": 3,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return processor, tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(vision_config=vision, **common))
    vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    if kind == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [2], "window_size": 56}
        return processor, tf.Qwen2_5_VLForConditionalGeneration(
            tf.Qwen2_5_VLConfig(vision_config=vision, **common)
        )
    vision |= {"depth": 4, "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 2]}
    common["text_config"]["head_dim"] = 16
    return processor, tf.Qwen3VLForConditionalGeneration(tf.Qwen3VLConfig(vision_config=vision, **common))


SQUARE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
SQUARE |= {"image_size": 56, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **SQUARE}


def _internvl() -> tuple[Any, Any]:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    names |= {"video_token": "<video>"}
    special = [*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    tokenizer = make_tokenizer(special, names, "<|im_end|>")
    images = tf.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=6)
    template = CHATML_IMAGE.replace("@IMAGE@", "<IMG_CONTEXT>\n")
    video = tf.InternVLVideoProcessor()
    processor = tf.InternVLProcessor(images, tokenizer, video, image_seq_length=4, chat_template=template)
    vision = {**SQUARE, "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]}
    config = tf.InternVLConfig(
        vision_config=vision,
        text_config=text_config(tokenizer, model_type="qwen2"),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    return processor, tf.InternVLForConditionalGeneration(config)


def _llava() -> tuple[Any, Any]:
    special = ["<pad>", "<s>", "</s>", "<image>"]
    tokenizer = make_tokenizer(special, {"image_token": "<image>"}, "</s>", bos_token="<s>")
    template = (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for c in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
        "{% endfor %}"
        "{% for c in message['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}"
        "{% endfor %}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    side = {"height": 56, "width": 56}
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=side),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    config = tf.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **SQUARE},
        text_config=text_config(tokenizer, model_type="llama", bos_token_id=tokenizer.bos_token_id),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    return processor, tf.LlavaForConditionalGeneration(config)


PINPOINTS = [[56, 56], [56, 112], [112, 56], [112, 112], [56, 168], [168, 56]]


def _onevision() -> tuple[Any, Any]:
    names = {"image_token": "<image>", "video_token": "<video>"}
    special = [*CHATML, "<image>", "<video>"]
    tokenizer = make_tokenizer(special, names, "<|im_end|>")
    processor = tf.LlavaOnevisionProcessor(
        tf.LlavaOnevisionImageProcessor(size={"height": 56, "width": 56}, image_grid_pinpoints=PINPOINTS),
        tokenizer,
        tf.LlavaOnevisionVideoProcessor(size={"height": 56, "width": 56}),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=CHATML_IMAGE.replace("@IMAGE@", "<image>\n"),
    )
    ids = tokenizer.convert_tokens_to_ids
    config = tf.LlavaOnevisionConfig(
        vision_config=SIGLIP,
        text_config=text_config(tokenizer, model_type="qwen2"),
        image_token_index=ids("<image>"),
        video_token_index=ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
    )
    return processor, tf.LlavaOnevisionForConditionalGeneration(config)


def _idefics(kind: str) -> tuple[Any, Any]:
    cells = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]
    special = [
        "<pad>",
        "<|im_start|>",
        "<end_of_utterance>",
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
    ]
    tokenizer = make_tokenizer([*special, *cells], {}, "<end_of_utterance>", bos_token="<|im_start|>")
    template = (
        "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
        "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    sizes = {"size": {"longest_edge": 4 * 56}, "max_image_size": {"longest_edge": 56}}
    if kind == "smolvlm":
        images, video = tf.SmolVLMImageProcessor(**sizes), tf.SmolVLMVideoProcessor(**sizes)
        processor = tf.SmolVLMProcessor(images, tokenizer, video, image_seq_len=4, chat_template=template)
        config_class, model_class = tf.SmolVLMConfig, tf.SmolVLMForConditionalGeneration
    else:
        images = tf.Idefics3ImageProcessor(**sizes)
        processor = tf.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
        config_class, model_class = tf.Idefics3Config, tf.Idefics3ForConditionalGeneration
    tokenizer = processor.tokenizer
    config = config_class(
        vision_config=SQUARE,
        text_config=text_config(tokenizer, model_type="llama", bos_token_id=tokenizer.bos_token_id),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
    )
    return processor, model_class(config)


def _gemma3() -> tuple[Any, Any]:
    names = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    special = ["<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", *names.values()]
    tokenizer = make_tokenizer(special, names, "<end_of_turn>", bos_token="<bos>")
    template = (
        "{{ bos_token }}{%- for m in messages -%}"
        "{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}"
        "{{ '<start_of_turn>' + role + '\n' }}{%- if m['content'] is string -%}{{ m['content'] | trim }}"
        "{%- else -%}{%- for c in m['content'] -%}{%- if c['type'] == 'image' -%}{{ '<start_of_image>' }}"
        "{%- elif c['type'] == 'text' -%}{{ c['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{ '<end_of_turn>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
    )
    images = tf.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = tf.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    ids = tokenizer.convert_tokens_to_ids
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    text = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "layer_types": layers}
    config = tf.Gemma3Config(
        vision_config=SIGLIP,
        text_config=text_config(tokenizer, bos_token_id=tokenizer.bos_token_id, **text),
        mm_tokens_per_image=4,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
    )
    return processor, tf.Gemma3ForConditionalGeneration(config)


BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "internvl": _internvl,
    "llava": _llava,
    "llava_onevision": _onevision,
    "idefics3": lambda: _idefics("idefics3"),
    "smolvlm": lambda: _idefics("smolvlm"),
    "gemma3": _gemma3,
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
