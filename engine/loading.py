"""Loading a vision-language model: the bundled one, a folder, or a name on the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from featcache.engine.families.base import Family
from featcache.engine.families.registry import family_of, load_family
from featcache.engine.template import ChatTemplate
from featcache.engine.tower import without_language_model
from featcache.errors import ModelError

BUNDLED = ("tiny",)
DTYPES: Mapping[str, str | torch.dtype] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, with all that belongs to it.

    model, processor, tokenizer: transformers objects. template: how messages become token ids.
    name: as the user gave it. path: the folder, or the name on the hub.
    """

    model: Any
    processor: Any
    tokenizer: Any
    family: Family
    template: ChatTemplate
    name: str
    path: str

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype


def load_model(
    model: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    attention: str = "sdpa",
    chat_template: str | None = None,
    tower_only: bool = False,
    compile_tower: bool = False,
) -> Loaded:
    """Load a model and its processor, ready to run.

    model: "tiny" (bundled), a local folder, or a hub name.
    device: by default CUDA if there is one. dtype: "auto" is the checkpoint's own.
    attention: of the vision tower, and of the language model until the engine sets its own.
    chat_template: Jinja text to use instead of the model's own.
    tower_only: leave the language model's weights out; what is loaded can encode images, and nothing else.
    compile_tower: by torch.compile, at the first image of each kind of shape; see Family.compile_tower.

    Raises ModelError if there is no such model, its architecture isn't known, or its files can't be read.
    """
    from transformers import AutoProcessor

    name, path = os.fspath(model), locate(model)
    config = read_config(name, path)
    family_of(config)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        with _no_progress_bars():
            processor = AutoProcessor.from_pretrained(path)
            loaded = _model_class(config, tower_only).from_pretrained(
                path, dtype=_dtype(dtype), attn_implementation=attention
            )
        loaded = loaded.to(target).eval().requires_grad_(False)
    except Exception as exc:  # from files of any make: transformers raises nearly anything
        raise ModelError(f"{name}: can't be loaded: {_first_line(exc)}") from exc
    bound = bind(loaded, processor, name, path, chat_template)
    if compile_tower:
        bound.family.compile_tower()
    return bound


def bind(model: Any, processor: Any, name: str, path: str, chat_template: str | None = None) -> Loaded:
    """A model and its processor with their family's adapter and the chat template."""
    family, tokenizer = load_family(model, processor), processor.tokenizer
    source = chat_template or getattr(processor, "chat_template", None) or tokenizer.chat_template
    template = ChatTemplate(tokenizer, source, family.placeholder, [family.image_token], name)
    return Loaded(model, processor, tokenizer, family, template, name, path)


def _model_class(config: Any, tower_only: bool) -> Any:
    from transformers import AutoModelForImageTextToText

    if not tower_only:
        return AutoModelForImageTextToText
    return without_language_model(AutoModelForImageTextToText._model_mapping[type(config)])


def locate(model: str | os.PathLike[str]) -> str:
    """The folder of a model, or its name on the hub. Raises ModelError for a folder that holds none."""
    name = os.fspath(model)
    if name in BUNDLED:
        from featcache.bundled import bundled_model

        return str(bundled_model(name))
    folder = Path(name).expanduser()
    if not folder.exists():
        if isinstance(model, os.PathLike) or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ModelError(f"{name}: no such folder")
        return name
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: holds no config.json, so it isn't the folder of a transformers model")
    return str(folder)


def read_config(name: str, path: str) -> Any:
    """Raises ModelError if there is none, or it can't be used."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except Exception as exc:
        if Path(path).exists():
            raise ModelError(f"{name}: its config.json can't be used: {_first_line(exc)}") from exc
        raise ModelError(
            f"{name}: neither the bundled model ({', '.join(BUNDLED)}), nor a local folder, nor to be had "
            f"from the Hugging Face hub: {_first_line(exc)}"
        ) from exc


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}; there are {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _first_line(exc: Exception) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
