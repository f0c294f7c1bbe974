"""InternVL's tower: eager, compiled, as a CUDA graph, and with its batch split."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import transformers

from featcache.bench.setting import Row, Setting, ms, seconds_of

TOLERANCE = 3e-2  # of the largest value, in bfloat16


def measure(setting: Setting) -> Iterator[Row]:
    on_cuda = setting.device == "cuda"
    width, depth = (1024, 24) if on_cuda else (256, 4)
    config = transformers.InternVLVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    tower = transformers.InternVLVisionModel(config).to(setting.device, dtype).eval()
    name = "InternViT-300M" if on_cuda else f"an InternViT of width {width} and depth {depth}"
    tower.requires_grad_(False)
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
