"""What `tiny` learns from: one forward pass over a packed batch, with hints for the eye beside the answers.

The tower and the language model are transformers' own modules. Only the walk over images differs: there each
image attends alone, one call an image and layer; here they attend in a few padded groups. The results are equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from featcache.bundled.scenes import COLOURS, SHAPES
from featcache.bundled.tiny_batches import GLYPHS, MERGE, PATCH

Chunk = tuple[Tensor, Tensor]  # as `tiny_batches` lays images out
NUM_LABELS = (len(COLOURS) + 1, len(SHAPES) + 1, len(GLYPHS) + 1)


class Hints(nn.Module):
    """A head for training only: reads colour, shape and glyph of each patch, and its place, off a token.

    A small model that hears of a picture through answers alone stays blind for long; this opens its eye.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.labels = nn.Linear(hidden, MERGE * MERGE * sum(NUM_LABELS))
        self.share = nn.Linear(hidden, 2)

    def forward(self, seen: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        scores = self.labels(seen).view(-1, sum(NUM_LABELS)).float().split(NUM_LABELS, dim=1)
        right = labels.long()
        losses = [F.cross_entropy(score, right[:, i]) for i, score in enumerate(scores)]
        place = F.mse_loss(self.share(seen).float(), shares)
        return losses[0] + losses[1] + 3 * losses[2] + 3 * place


class Step(NamedTuple):
    """Losses of a batch and, for each supervised token, whether the model would have said it."""

    answers: Tensor
    hints: Tensor
    is_right: Tensor


def forward(model: Any, hints: Hints, batch: dict[str, Any]) -> Step:
    """Losses of a batch as `tiny_batches.pack` makes it."""
    seen = see(model.model.visual, batch)
    ids = batch["ids"]
    embeds = model.get_input_embeddings()(ids).float()
    flat = embeds.reshape(-1, embeds.shape[-1]).index_copy(0, batch["slots"], seen.float())
    read = model.model.language_model(
        inputs_embeds=flat.view_as(embeds), position_ids=batch["positions"], use_cache=False
    ).last_hidden_state
    where, token = batch["targets"][:, 0], batch["targets"][:, 1]
    logits = model.lm_head(read.reshape(-1, read.shape[-1]).index_select(0, where)).float()
    hint = hints(seen, batch["labels"], batch["shares"])
    return Step(F.cross_entropy(logits, token), hint, logits.argmax(-1) == token)


def see(visual: Any, batch: dict[str, Any]) -> Tensor:
    """Features (merged tokens, hidden) of all images of a batch."""
    x = embed_patches(visual.patch_embed, batch["pixels"])
    turn = visual.rotary_pos_emb(x, batch["places"].long())
    for block in visual.blocks:
        x = x + _attend(block.attn, block.norm1(x), turn, batch["chunks"])
        x = x + block.mlp(block.norm2(x))
    features: Tensor = visual.merger(x)
    return features


def embed_patches(patch_embed: Any, pixels: Tensor) -> Tensor:
    """uint8 patches (P, 588), scaled as the image processor does, through the patch convolution.

    An image stands for two equal frames: the kernel's two time slices are summed, the image isn't doubled.
    """
    mean = torch.tensor(OPENAI_CLIP_MEAN, device=pixels.device).repeat_interleave(PATCH * PATCH)
    std = torch.tensor(OPENAI_CLIP_STD, device=pixels.device).repeat_interleave(PATCH * PATCH)
    return F.linear((pixels.float() / 255 - mean) / std, patch_embed.proj.weight.sum(2).flatten(1))


def _attend(attn: Any, x: Tensor, turn: tuple[Tensor, Tensor], chunks: Sequence[Chunk]) -> Tensor:
    query, key, value = attn.qkv(x).view(len(x), 3, attn.num_heads, -1).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *turn)
    qkv = torch.stack((query, key, value), dim=1)
    outputs = []
    for part, (mask, places) in zip(
        torch.split(qkv, [len(places) for _, places in chunks]), chunks, strict=True
    ):
        # index_copy and index_select, not indexing: the gradient of an indexed read sorts, ten times as slow.
        padded = part.new_zeros(mask.numel(), *part.shape[1:]).index_copy(0, places, part)
        q, k, v = padded.view(*mask.shape, *part.shape[1:]).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, places).flatten(1))
    projected: Tensor = attn.proj(torch.cat(outputs))
    return projected


def right_by_kind(is_right: Tensor, batch: dict[str, Any]) -> dict[str, list[bool]]:
    """For every answer of a batch, by kind: would greedy decoding have given exactly it, and stopped?"""
    answer = batch["targets"][:, 2].cpu()
    wrong = torch.zeros(len(batch["kinds"]), dtype=torch.int64).index_add_(
        0, answer, (~is_right.cpu()).long()
    )
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for kind, mistakes in zip(batch["kinds"], wrong.tolist(), strict=True):
        by_kind[kind].append(mistakes == 0)
    return by_kind


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on `device`, copied without waiting."""
    moved = {k: v.to(device, non_blocking=True) for k, v in batch.items() if isinstance(v, Tensor)}
    chunks = [tuple(t.to(device, non_blocking=True) for t in chunk) for chunk in batch["chunks"]]
    return {**moved, "chunks": chunks, "kinds": batch["kinds"]}
