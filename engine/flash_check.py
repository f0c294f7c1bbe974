"""Whether the flash kernels say what plain attention says, tried once before they are used.

Which forms of a kernel work depends on the GPU and on the versions of torch and Triton. An engine that finds
them wrong, or missing, goes on with plain attention.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from featcache.engine.attention import PagedStep, Span, paged_attention
from featcache.engine.kv import BLOCK, KVPool, kv_shape
from featcache.engine.parcel import Parcel

_LOG = logging.getLogger("featcache")
_TOLERANCE = 2e-2  # of values around 1: bfloat16 has 8 bits

# a decoding sequence, one that goes on behind its prefix, and a new one
_SPANS = (
    Span(0, 1, 4 * BLOCK + 2, (9, 2, 5, 7, 1)),
    Span(1, 19, 2 * BLOCK, (3, 8, 4, 6)),
    Span(20, 37, 0, (10, 0, 11)),
)
_WINDOW = BLOCK + 3


def flash_agrees(text_config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Compare both on random sequences in the shape of this model's heads; what is off is logged."""
    try:
        # Triton launches on the thread's current device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            error = max(_error(text_config, dtype, device, window) for window in (None, _WINDOW))
    except Exception as exc:  # a kernel that can't be compiled or launched raises nearly anything
        _LOG.warning(
            "flash attention can't be used here, plain attention is: %s: %s", type(exc).__name__, exc
        )
        return False
    if not error <= _TOLERANCE:
        _LOG.warning("flash attention is off by %.2g here, plain attention is used instead", error)
        return False
    return True


def _error(text_config: Any, dtype: torch.dtype, device: torch.device, window: int | None) -> float:
    _, kv_heads, head_dim = kv_shape(text_config)
    heads = int(text_config.num_attention_heads)
    shape = SimpleNamespace(
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    pool = KVPool(shape, 12, dtype, device)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    pool.keys.copy_(random(*pool.keys.shape))
    pool.values.copy_(random(*pool.values.shape))
    tokens = _SPANS[-1].start + _SPANS[-1].new
    query, key, value = (random(1, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads))
    answers = []
    for flash in (False, True):
        parcel = Parcel(device)
        step = PagedStep(pool, _SPANS, parcel, flash=flash)
        parcel.send()
        module: Any = SimpleNamespace(layer_idx=0)
        answers.append(paged_attention(module, query, key, value, None, paged=step, sliding_window=window)[0])
    return float((answers[0].float() - answers[1].float()).abs().max())
