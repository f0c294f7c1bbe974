"""InternVL's tower: eager, compiled, as a CUDA graph, and with its batch split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import transformers

from featcache.bench.setting import Row, Setting, ms, seconds_of

TOLERANCE = 3e-2  # of the largest value, in bfloat16


class Shape(NamedTuple):
    name: str
    width: int
    depth: int
    heads: int
    intermediate: int


SMALL = [Shape("an InternViT of width 256 and depth 4", 256, 4, 4, 1024)]
REAL = [
    Shape("InternViT-300M", 1024, 24, 16, 4096),
    Shape("InternViT-6B", 3200, 45, 25, 12800),
]


def measure(setting: Setting) -> Iterator[Row]:
    for shape in REAL if setting.device == "cuda" else SMALL:
        yield from _measure(setting, shape)


def _measure(setting: Setting, shape: Shape) -> Iterator[Row]:
    tower, name = _tower(setting, shape), shape.name
    dtype = tower.dtype
    for tiles in (1, 4) if setting.quick else (1, 13, 64):
        pixels = torch.randn(tiles, 3, 448, 448, device=setting.device, dtype=dtype)
        eager = tower(pixels).last_hidden_state
        for way, run in _ways(setting, tower, pixels):
            off = float((run() - eager).abs().max() / eager.abs().max())
            rounds = setting.rounds(3, 10)
            row = ms(
                f"{name}, {tiles} tiles: {way}", [seconds_of(run, setting.device) for _ in range(rounds)]
            )
            yield Row(
                row.figure,
                row.value,
                row.unit,
                off <= TOLERANCE,
                f"{row.note}; off by {off:.1e} of the largest",
            )


def _tower(setting: Setting, shape: Shape) -> transformers.InternVLVisionModel:
    is_6b = shape.width == 3200  # it has RMS norms, and norms of queries and keys
    config = transformers.InternVLVisionConfig(
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        norm_type="rms_norm" if is_6b else "layer_norm",
        use_qk_norm=is_6b,
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        tower = transformers.InternVLVisionModel(config)
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    return tower.to(dtype).eval().requires_grad_(False)


def _ways(
    setting: Setting, tower: torch.nn.Module, pixels: torch.Tensor
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    def eager() -> torch.Tensor:
        out: torch.Tensor = tower(pixels).last_hidden_state
        return out

    yield "eager", eager
    if len(pixels) > 1:
        halves = pixels.chunk(2)
        yield "its batch split in two", lambda: torch.cat([tower(half).last_hidden_state for half in halves])
    if not setting.quick:
        compiled = torch.compile(tower)
        compiled(pixels)
        yield "compiled", lambda: compiled(pixels).last_hidden_state
    if setting.device == "cuda":
        yield "CUDA graph", _graph(eager)


def _graph(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay
