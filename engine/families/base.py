"""`Family`: what the models of one architecture share, as the encoder and the engine see it.

An adapter says how one image becomes pixels, how a batch of pixels becomes rows, which text stands for an
image in a prompt, which positions its tokens have, and how the language model runs on embeddings. It keeps
no state of a request, and its methods may be called from several threads.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from PIL import Image

from featcache.errors import ImageError, ModelError, RequestError
from featcache.features import Layout

# Layers whose keys and values belong to one token each, so that a block of them can be used again.
_PAGED_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """What a request asks of the image processor; part of the image's key.

    min_pixels, max_pixels: the area that an image is scaled to lie between.
    max_tiles: tiles that an image is cut into at most, not counting the overview.
    companions: "several" if the model treats an image among others otherwise than one alone
        (LLaVA-OneVision). Set by `Family.options_for`, not by users.

    None leaves it to the model's own processor.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_tiles: int | None = None
    companions: Literal["several"] | None = None

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels", "max_tiles"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise RequestError(f"{name}: {value!r}; it is a whole number of at least 1")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise RequestError(f"min_pixels: {self.min_pixels} is above max_pixels, {self.max_pixels}")

    def to_json(self) -> dict[str, int | str | None]:
        return asdict(self)

    def given(self) -> list[str]:
        """The names that a user has set."""
        return [f.name for f in fields(self) if f.name != "companions" and getattr(self, f.name) is not None]


@dataclass(frozen=True, slots=True)
class Pixels:
    """One preprocessed image, on the CPU.

    tensors: what the tower takes of it; "pixel_values" always, in the model's dtype.
    cost: vision patches, the measure of a micro-batch.
    """

    tensors: Mapping[str, torch.Tensor]
    layout: Layout
    cost: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Family(ABC):
    """The adapter of one architecture, bound to one loaded model and its processor."""

    name: ClassVar[str]
    layout_version: ClassVar[int] = 1  # raise it when preprocess, encode or replacement changes its result
    options: ClassVar[frozenset[str]] = frozenset()  # of ImageOptions, those that this family understands
    image_kwargs: ClassVar[Mapping[str, Any]] = {}  # what the model's processor tells its image processor
    bidirectional_images: ClassVar[bool] = False  # tokens in one run of an image see also those after them
    num_axes: ClassVar[int] = 1  # of a position: 3 with M-RoPE

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.processor = processor
        self.image_processor = processor.image_processor
        self.config = model.config
        self.text_config = model.config.get_text_config()
        self.text_model: Any = getattr(model.model, "language_model", None) or model.model.text_model
        self.image_token_id = int(model.config.image_token_id)
        self.image_token: str = processor.tokenizer.convert_ids_to_tokens(self.image_token_id)
        names = inspect.signature(type(self.text_model).forward).parameters
        self.is_compiled = False
        self._cache_argument = "cache" if "cache" in names else "past_key_values"  # renamed in 5.24
        if not set(getattr(self.text_config, "layer_types", None) or ()) <= _PAGED_LAYERS:
            self._refuse_layers()

    def _refuse_layers(self) -> None:
        others = ", ".join(sorted(set(self.text_config.layer_types) - _PAGED_LAYERS))
        raise ModelError(
            f"{self.text_config.model_type} has layers of type {others}, whose state isn't kept per token: "
            "its prefixes can't be reused block by block, and the native engine can't run it"
        )

    # What an image is

    def options_for(self, options: ImageOptions, num_images: int) -> ImageOptions:
        """`options` as they hold in a prompt of `num_images`. Raises RequestError for one not understood."""
        if unknown := sorted(set(options.given()) - self.options):
            has = f"understands {', '.join(sorted(self.options))}" if self.options else "has no image options"
            raise RequestError(f"image option {unknown[0]}: {self.name} {has}")
        return options

    def preprocess(self, image: Image.Image, options: ImageOptions, name: str = "image") -> Pixels:
        """One upright RGB image as the tower takes it. Thread-safe.

        name: what an error calls it. Raises ImageError if the model's processor can't take it.
        """
        kwargs = {**self.image_kwargs, **self.processor_options(options), "return_tensors": "pt"}
        try:
            with torch.no_grad():
                inputs = self.image_processor(self.structure(image, options), **kwargs)
                return self.pixels(inputs, image, options)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError, IndexError, OverflowError) as exc:
            width, height = image.size
            raise ImageError(name, f"{width}x{height} can't be prepared for {self.name}: {exc}") from exc

    def structure(self, image: Image.Image, options: ImageOptions) -> Any:
        """The image, nested as the image processor wants it."""
        return [image]

    def processor_options(self, options: ImageOptions) -> dict[str, Any]:
        """`options` in the words of the model's image processor."""
        return {}

    @abstractmethod
    def pixels(self, inputs: Any, image: Image.Image, options: ImageOptions) -> Pixels:
        """What the image processor gave for one image, as Pixels."""

    def tower_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pixel values in the model's dtype: what the tower does first anyway, at half the bytes to move."""
        return tensor.to(self.model.dtype)

    # What the tower makes of it

    def encode(self, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        """The features of a batch in one call of tower and projector.

        Returns per image {"rows": (num_tokens, hidden), ...} on the model's device, possibly views of one
        output. Raises torch.OutOfMemoryError, and ModelError if the token counts don't come out.
        """
        with torch.no_grad():
            output = self.model.get_image_features(**self.collate(batch), return_dict=True)
            images = self.split(output, batch)
        for pixels, tensors in zip(batch, images, strict=True):
            for name, tensor in tensors.items():
                if tensor.shape[0] != pixels.layout.num_tokens:
                    raise ModelError(
                        f"{self.name}: the tower made {tensor.shape[0]} rows ({name}) of an image whose "
                        f"layout has {pixels.layout.num_tokens} tokens"
                    )
        return images

    def compile_tower(self) -> None:
        """Let torch.compile make the kernels of the tower's layers, at their first call.

        Last bits of features differ from then on, so that they are another encoder's.
        """
        language = {id(module) for module in self.text_model.modules()}
        for module in self.model.modules():
            if isinstance(module, torch.nn.ModuleList) and id(module) not in language:
                for layer in module:
                    layer.compile(dynamic=True)
        self.is_compiled = True

    @abstractmethod
    def collate(self, batch: Sequence[Pixels]) -> dict[str, Any]:
        """The keyword arguments of `get_image_features` for a batch, on the model's device."""

    @abstractmethod
    def split(self, output: Any, batch: Sequence[Pixels]) -> list[dict[str, torch.Tensor]]:
        """The output of `get_image_features`, cut into images."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.model.device, non_blocking=True)

    # How it stands in a prompt

    @property
    def placeholder(self) -> str:
        """What the chat template leaves for one image."""
        return self.image_token

    def replacement(self, layout: Layout) -> str:
        """The text that takes the placeholder's place; it holds `layout.num_tokens` image tokens."""
        return self.image_token * layout.num_tokens

    def positions(self, ids: torch.Tensor, layouts: Sequence[Layout]) -> tuple[torch.Tensor, int]:
        """Positions of a prompt.

        ids: (L,) int64, on the CPU. layouts: of its images, in order.
        Returns ((num_axes, L) int64, delta); the token at index k >= L has position k + delta on every axis.
        """
        return torch.arange(ids.shape[0])[None], 0

    @property
    def max_positions(self) -> int:
        """The longest context for which a token's key doesn't depend on how long the sequence gets."""
        limit = int(self.text_config.max_position_embeddings)
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # beyond it the frequencies of all tokens change
            return int(rope.get("original_max_position_embeddings") or limit)
        return limit  # for "dynamic" too: it is where the frequencies begin to change

    # How the language model runs

    def language_model_forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        image_index: torch.Tensor,
        rows: Mapping[str, torch.Tensor] | None,
        cache: Any,
        logits_at: torch.Tensor,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        """One forward of the language model over packed tokens, without a device sync.

        ids: (1, T) int64. positions: (num_axes, T) int64.
        image_index: (M,) int64, where in T the image tokens stand; rows: their features, each (M, hidden), by
            name; None if there are none.
        cache: a transformers cache, or whatever the registered attention reads.
        logits_at: (K,) int64, the tokens whose logits are wanted.
        attention_kwargs: reach the model's forward, and from there every attention call.

        Returns logits (K, vocabulary) in the model's dtype.
        """
        with torch.no_grad():
            embeds = self.embed(ids)
            extra: dict[str, Any] = {}
            if rows is not None:
                embeds[0].index_copy_(0, image_index, rows["rows"].to(embeds.dtype))
                extra = self.level_inputs(embeds, image_index, rows)
            output = self.text_model(
                inputs_embeds=embeds,
                position_ids=self.position_ids(positions),
                use_cache=cache is not None,
                **{self._cache_argument: cache},
                **extra,
                **attention_kwargs,
            )
            hidden: torch.Tensor = output.last_hidden_state[0].index_select(0, logits_at)
            logits: torch.Tensor = self.model.lm_head(hidden)
            return logits

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(1, T) ids to fresh embeddings (1, T, hidden); what stands at image tokens is overwritten later."""
        table = self.model.get_input_embeddings()
        if self.image_token_id >= table.num_embeddings:
            ids = ids.clamp(max=table.num_embeddings - 1)
        embeds: torch.Tensor = table(ids)
        return embeds

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """(num_axes, T) as the language model takes it."""
        return positions

    def level_inputs(
        self, embeds: torch.Tensor, image_index: torch.Tensor, rows: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Arguments of the language model for features that enter above the embeddings (DeepStack)."""
        return {}

    # Who the encoder is

    def encoder_configs(self) -> dict[str, dict[str, Any]]:
        """All settings that change features, as plain data by name."""
        model = self.config.to_dict()
        model.pop("text_config", None)
        for config in [model, *(value for value in model.values() if isinstance(value, dict))]:
            for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
                config.pop(name, None)
        tower = {
            "dtype": str(self.model.dtype),
            "attention": getattr(self.config.vision_config, "_attn_implementation", None),
        }
        if self.is_compiled:
            tower["compiled"] = torch.__version__
        if runtime := getattr(self.model, "runtime", None):  # of a tower that isn't transformers' own
            tower["runtime"] = runtime
        return {"model": model, "tower": tower, "processor": self.processor_config()}

    def processor_config(self) -> dict[str, Any]:
        """The image processor's settings, and the code that carries them out: pixels differ by backend."""
        import PIL
        import torchvision
        import transformers

        settings = self.image_processor.to_dict()
        backend = getattr(self.image_processor, "backend", "pil")
        version = torchvision.__version__ if backend == "torchvision" else PIL.__version__
        return {
            "settings": {name: value for name, value in settings.items() if not name.startswith("_")},
            "arguments": dict(self.image_kwargs),
            "class": type(self.image_processor).__name__,
            "backend": f"{backend} {_minor(version)}, transformers {_minor(transformers.__version__)}",
        }

    def encoder_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of tower and projector, by name, in the model's own order."""
        language = {id(module) for module in self.text_model.modules()} | {id(self.model.lm_head)}
        for prefix, module in self.model.named_modules():
            if id(module) in language:
                continue
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", tensor.detach()


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
