"""The vision tower and projector of a model, without its language model: what encoding images needs."""

from __future__ import annotations

from typing import Any


def without_language_model(model_class: type[Any]) -> type[Any]:
    """A class like `model_class` whose language model has no weights: `from_pretrained` doesn't read them.

    The modules stay, so that everything that looks at the model finds what it expects.
    """

    class TowerOnly(model_class):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = frozenset({".*"})  # no warning of what is left out

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            language = getattr(self.model, "language_model", None) or self.model.text_model
            for module in (*language.modules(), *self.lm_head.modules()):
                if module._parameters:
                    module._parameters = dict.fromkeys(module._parameters)
                    module._is_hf_initialized = True  # there is nothing to be initialized
            self.all_tied_weights_keys: dict[str, str] = {}  # embeddings and output layer, which aren't there

        def tie_weights(self, *args: Any, **kwargs: Any) -> None:
            """There is nothing to tie."""

    TowerOnly.__name__ = model_class.__name__
    TowerOnly.__qualname__ = model_class.__qualname__
    return TowerOnly
