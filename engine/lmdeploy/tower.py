"""`TowerModel`: the vision tower of a model that LMDeploy has loaded, as a family adapter sees a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class TowerModel:
    """What `Family` and `VisionEncoder` ask of a transformers model, answered from LMDeploy's.

    The tower runs in the caller's thread, on its current stream, beside LMDeploy's own forwards.

    model: one of our classes in `models.py`. config: transformers' config of the whole model.
    """

    def __init__(self, model: Any, config: Any, generation_config: Any, version: str) -> None:
        self._model = model
        self.config = config
        self.generation_config = generation_config
        self.runtime = f"lmdeploy {version}"
        language = getattr(model, "language_model", None)
        self.language_model = model.model if language is None else language
        self.model = self
        self.lm_head = model.lm_head
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype

    def get_image_features(self, *, return_dict: bool = True, **inputs: torch.Tensor) -> Any:
        """As transformers': `pooler_output`, and `deepstack_features` where there are some."""
        with torch.inference_mode():
            return self._model.get_tower_output(**inputs)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """All modules, but for those that hold the language model and nothing else."""
        yield from self._model.named_modules()

    def modules(self) -> Iterator[torch.nn.Module]:
        yield from self._model.modules()
