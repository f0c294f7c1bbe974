"""The engine on a CUDA device: first whether its answers are right, then what it saves, beside transformers.

PYTHONPATH=. python bench/h200_engine.py [--device cuda|cpu] [--tiny] [--seconds 150] [--only NAME ...] [--json FILE]

`featcache.engine` has to be importable: install the package, or link featcache/engine to engine. With --tiny the
shapes are scaled down; `--tiny --device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from h200_models import (
    SHAPES,
    figure,
    machine,
    median_ms,
    photographs,
    run_sections,
    say,
    seconds_of,
    synchronize,
    write_report,
)
from models import build
from paged_decode_child import check as check_decode
from pictures import patches
from PIL import Image

from featcache.engine import CachedVLM, flash_check
from featcache.engine.encoder import VisionEncoder
from featcache.engine.engine import Engine, EngineSettings
from featcache.engine.families.base import ImageOptions
from featcache.engine.flash import DecodeTables, Layer
from featcache.engine.kv import BLOCK
from featcache.engine.loading import Loaded, load_model
from featcache.features import Features
from featcache.images import open_image
from featcache.store import FeatureStore

FAMILIES = ("qwen2_vl", "internvl", "qwen2_5_vl", "gemma3")
NEW_TOKENS = 10
RUNS = 7
ROUNDS = 50  # calls of one kernel, to be divided by
QUESTION = "what is in the picture and how many red circles are there"
DEVICE = torch.device("cpu")
TINY = False
Message = dict[str, Any]


def main() -> None:
    global DEVICE, TINY
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    DEVICE, TINY = torch.device(options.device), options.tiny
    if DEVICE.type == "cuda":
        DEVICE = torch.device("cuda", DEVICE.index or 0)
        torch.cuda.set_device(DEVICE)
        torch.backends.cudnn.allow_tf32 = False  # fp32 is to be fp32
    say(str(machine(DEVICE)))
    report = functools.partial(write_report, options.json, DEVICE)
    is_right = run_sections(SECTIONS, options.only, options.seconds, report)
    sys.exit(not is_right)


# Whether the kernels are right


def kernels() -> None:
    """The decode kernel and the packed prefill against plain attention."""
    if DEVICE.type != "cuda":
        say("  they need CUDA")
        return
    lengths = (1, 16, 17, 64, 127, 129, 261, 3400)
    shapes = (
        (1, 64, torch.bfloat16, None),
        (2, 128, torch.bfloat16, None),
        (3, 80, torch.bfloat16, 65),
        (8, 128, torch.bfloat16, None),
        (8, 128, torch.float16, 65),
    )
    for seed, shape in enumerate(shapes):
        check_decode(*shape, lengths, seed=seed, device=str(DEVICE))
        say(f"  decode kernel agrees: group, head_dim, dtype, window {shape}; lengths {lengths}")
    for heads, kv_heads, head_dim, window in (
        (16, 2, 128, None),
        (16, 8, 128, flash_check._WINDOW),
        (28, 4, 128, None),
        (8, 4, 256, flash_check._WINDOW),
        (4, 2, 16, None),
        (12, 12, 80, None),
    ):
        error = flash_check._error(_Heads(heads, kv_heads, head_dim), torch.bfloat16, DEVICE, window)
        figure(f"flash against plain, heads {heads}/{kv_heads}x{head_dim}, window {window}", error, most=2e-2)
    decode_speed()


class _Heads:
    """As much of a text config as names the shape of attention."""

    num_hidden_layers = 1

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, head_dim


def decode_speed() -> None:
    """One layer's attention of decoding sequences of 3,400 tokens."""
    from featcache.engine.paged_decode import paged_decode

    total, head_dim = 3400, 128
    for sequences, (heads, kv_heads) in itertools.product((1, 8, 64), ((16, 2), (16, 8))):
        width = -(-total // BLOCK)
        pool = torch.randn(
            (sequences * width, BLOCK, kv_heads, head_dim), device=DEVICE, dtype=torch.bfloat16
        )
        query = torch.randn((1, heads, sequences, head_dim), device=DEVICE, dtype=torch.bfloat16)
        blocks = torch.randperm(sequences * width, device=DEVICE).view(sequences, width)
        totals = torch.full((sequences,), total, device=DEVICE)
        layer = Layer(query, query, query, pool, pool, None, None)
        output = torch.empty((sequences, heads, head_dim), device=DEVICE, dtype=torch.bfloat16)
        tables = DecodeTables(blocks, totals, total)
        paged_decode(layer, tables, output)

        def calls(layer: Layer = layer, tables: DecodeTables = tables, output: torch.Tensor = output) -> None:
            for _ in range(ROUNDS):
                paged_decode(layer, tables, output)

        spent = min(seconds_of(calls) for _ in range(3))
        figure(
            f"decode attention, {sequences} x {total} tokens, heads {heads}/{kv_heads}",
            1e6 * spent / ROUNDS,
            "us",
        )


# Whether answers are right


def families() -> None:
    for name, dtype in itertools.product(FAMILIES, ("float32", "bfloat16")):
        if TINY and dtype == "bfloat16" and name != "qwen2_vl":
            continue
        with tempfile.TemporaryDirectory() as place:
            family(name, dtype, Path(place))


def family(name: str, dtype: str, place: Path) -> None:
    """Tokens of everything off, of cached features, of cached blocks, and of both after a restart."""
    folder = build(name, place)
    conversations = turns(1)
    with plain(folder, dtype) as vlm:
        off, exact = answers(vlm, conversations)
        has_flash = vlm.engine._runner.has_flash
    settings: dict[str, Any] = {"store": place / "store", "dtype": dtype, "device": str(DEVICE)}
    settings |= {"host_bytes": "64MiB", "device_bytes": "64MiB", "disk_bytes": "256MiB"}
    found: dict[str, tuple[list[list[int]], list[torch.Tensor]]] = {}
    with CachedVLM.from_pretrained(folder, settings=small(prefix_cache=False), **settings) as vlm:
        found["features, new"] = answers(vlm, conversations)
        found["features, held"] = answers(vlm, conversations)
        control = wrong_features_change(vlm, conversations[0])
    with CachedVLM.from_pretrained(folder, settings=small(), **settings) as vlm:
        found["restarted, blocks"] = answers(vlm, conversations)
        found["all held"] = answers(vlm, conversations)
        problems = [*vlm.engine.check(), *vlm.store.check()]
        graph_steps = vlm.engine.stats()["graph_steps"]
    where = f"{name}, {dtype}, flash {'yes' if has_flash else 'no'}, {graph_steps} steps by graphs"
    for way, (tokens, logits) in found.items():
        equal = sum(a == b for a, b in zip(off, tokens, strict=True))
        error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(exact, logits, strict=True))
        is_same = equal == len(off)
        most = 1e-4 if dtype == "float32" else 4e-2
        figure(f"{where}: {way}: answers equal of {len(off)}", equal, least=len(off) if is_same else None)
        figure(f"{where}: {way}: first logits off by, of the largest", error, most=most)
    figure(f"{where}: other features under the same key change the answer (0 or 1)", control, least=1)
    if problems:
        raise AssertionError(problems)
    if dtype == "float32":
        theirs = by_transformers(folder, conversations)
        equal = sum(a == b for a, b in zip(off, theirs, strict=True))
        figure(f"{where}: answers equal to transformers.generate, of {len(off)}", equal, least=len(off))


def turns(seed: int) -> list[list[Message]]:
    """Three turns of one conversation about two images; what the assistant said is given."""
    first, second = patches(100, 60, seed), patches(70, 90, seed + 1000)
    one = [user(first, "what is it")]
    two = [*one, assistant("a cat sitting on the mat"), user(second, "compare")]
    three = [
        *two,
        assistant("the left one is larger"),
        user(None, "which of both is red and how many are there"),
    ]
    return [one, two, three]


def user(image: Any, text: str) -> Message:
    images = [] if image is None else [{"type": "image", "image": image}]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def plain(folder: Path, dtype: str) -> CachedVLM:
    """The engine with everything off: no tier keeps anything, no block is used again."""
    loaded = load_model(folder, dtype=dtype, device=str(DEVICE))
    store = FeatureStore.open(None, host_bytes=0)
    encoder = VisionEncoder(loaded, store, max_batch_cost=1)
    engine = Engine(loaded, encoder, small(prefix_cache=False, cuda_graphs=False))
    return CachedVLM(loaded, store, encoder, engine, owns_store=True)


def small(**more: Any) -> EngineSettings:
    return EngineSettings(kv_bytes="64MiB", **more)


def answers(vlm: CachedVLM, conversations: list[list[Message]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens, and the logits of each first one in fp32."""
    tokens, first = [], []
    run = vlm.engine._runner.run
    for messages in conversations:
        seen: list[torch.Tensor] = []

        def spy(parts: Any, seen: list[torch.Tensor] = seen) -> Any:
            sequences, logits = run(parts)
            if sequences:
                seen.append(logits[0].float().cpu())
            return sequences, logits

        vlm.engine._runner.run = spy  # type: ignore[method-assign]
        tokens.append(list(vlm.chat(messages, max_tokens=NEW_TOKENS).token_ids))
        first.append(seen[0])
    vlm.engine._runner.run = run  # type: ignore[method-assign]
    return tokens, first


def wrong_features_change(vlm: CachedVLM, messages: list[Message]) -> int:
    """The control: 1 if, of some other images' features under the same key, one changes the answer."""
    right = vlm.chat(messages, max_tokens=NEW_TOKENS).token_ids
    ref = vlm.encoder.identify(
        messages[0]["content"][0]["image"], vlm.loaded.family.options_for(ImageOptions(), 1)
    )
    for seed in range(100, 106):
        wrong = vlm.encode([patches(100, 60, seed)])[0]
        vlm.store.delete(ref.key)
        vlm.store.put(ref.key, Features(wrong.tensors, wrong.layout, ref.fingerprint))
        changed = vlm.chat(messages, max_tokens=NEW_TOKENS).token_ids != right
        vlm.store.delete(ref.key)
        if changed:
            return 1
    return 0


def by_transformers(folder: Path, conversations: list[list[Message]]) -> list[list[int]]:
    loaded = load_model(folder, dtype="float32", device=str(DEVICE))
    return [generate(loaded, messages, NEW_TOKENS) for messages in conversations]


def generate(loaded: Loaded, messages: list[Message], tokens: int, **more: Any) -> list[int]:
    """As transformers' documentation shows it."""
    inputs = loaded.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    ).to(DEVICE, loaded.dtype)
    output = loaded.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **more)
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())


# Time to the first token


def size_of(name: str) -> tuple[int, int]:
    """Width and height of an image of 3,328 tokens (13 tiles)."""
    if TINY:
        return 448, 448
    return (1792, 1456) if name.startswith("Qwen") else (1792, 1344)


def fresh(name: str, number: int) -> list[bytes]:
    return list(photographs(number, *size_of(name)))


def first_token(name: str) -> None:
    loaded = SHAPES[name](DEVICE, TINY)
    with FeatureStore.open(None, host_bytes="1GiB", **device_tier("1GiB")) as store:
        ours(name, loaded, store)
    theirs(name, loaded)


def device_tier(size: str) -> dict[str, Any]:
    return {"device": str(DEVICE), "device_bytes": size} if DEVICE.type == "cuda" else {}


def ours(name: str, loaded: Loaded, store: FeatureStore) -> None:
    size = "8GiB" if DEVICE.type == "cuda" else "256MiB"
    images = fresh(name, RUNS + 2)
    tokens = 64 if not TINY else 4
    settings = EngineSettings(kv_bytes=size, max_batch_tokens=8192)
    with CachedVLM.from_pretrained(loaded, store=store, settings=settings) as vlm:
        say(f"  {name}: flash {vlm.engine._runner.has_flash}")
        new = [first(vlm, [user(image, QUESTION)]) for image in images]
        held = vlm.encoder.store.layout(vlm.encoder.identify(images[0]).key)
        figure(f"{name}: image tokens", 0 if held is None else held.num_tokens)
        known = [first(vlm, [user(images[1], f"{n} {QUESTION}")]) for n in range(RUNS + 2)]
        text = [first(vlm, [user(None, f"{n} please")]) for n in range(RUNS + 2)]
        figure(f"{name}: TTFT, new image", middle(new), "ms")
        figure(
            f"{name}: TTFT, known image and a new question (vLLM 0.26 took 40.4 of 144.5)",
            middle(known),
            "ms",
        )
        figure(f"{name}: TTFT, text alone", middle(text), "ms")
        decode(name, vlm, images, tokens)
        say(f"  {name}: {vlm.engine.stats()['graph_steps']} steps by graphs")
        stages(name, vlm)
    no_blocks = EngineSettings(kv_bytes=size, max_batch_tokens=8192, prefix_cache=False)
    no_graphs = EngineSettings(kv_bytes=size, max_batch_tokens=8192, cuda_graphs=False)
    with CachedVLM.from_pretrained(loaded, store=store, settings=no_graphs) as vlm:
        decode(f"{name}, without graphs", vlm, images, tokens)
    with CachedVLM.from_pretrained(loaded, store=store, settings=no_blocks) as vlm:
        hits = [first(vlm, [user(images[2], f"{n} {QUESTION}")]) for n in range(RUNS + 2)]
        figure(f"{name}: TTFT, features held, no prefix", middle(hits), "ms")


def first(vlm: CachedVLM, messages: list[Message]) -> float:
    """Milliseconds from the request to its first token."""
    began = time.perf_counter()
    vlm.chat(messages, max_tokens=1, ignore_eos=True)
    return 1e3 * (time.perf_counter() - began)


def middle(times: list[float]) -> float:
    """Median, the first two being for warming up."""
    return statistics.median(times[2:])


def decode(name: str, vlm: CachedVLM, images: list[bytes], tokens: int) -> None:
    """Milliseconds a token, behind one image and a question."""
    for number in (1, 8):
        talks = [[user(images[n % len(images)], QUESTION)] for n in range(number)]

        def run(count: int, talks: list[list[Message]] = talks) -> float:
            return seconds_of(lambda: vlm.chat_batch(talks, max_tokens=count, ignore_eos=True))

        run(tokens)
        each = (min(run(tokens), run(tokens)) - min(run(1), run(1))) / (tokens - 1)
        figure(f"{name}: a decoding step of {number}", 1e3 * each, "ms")


def stages(name: str, vlm: CachedVLM) -> None:
    """What each stage of a new image takes, alone."""
    encoder, family = vlm.encoder, vlm.loaded.family
    options = family.options_for(ImageOptions(), 1)
    [data] = fresh(name, 1)
    image = open_image(data)
    pixels = family.preprocess(image, options)
    encoder.identify(data, options)
    [out] = family.encode([pixels])
    host = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=DEVICE.type == "cuda") for n, t in out.items()}
    inputs = family.collate([pixels])
    model = vlm.loaded.model

    def tower() -> None:
        with torch.no_grad():
            model.get_image_features(**inputs, return_dict=True)

    def back() -> None:
        for n, tensor in out.items():
            host[n].copy_(tensor, non_blocking=True)

    prompt = [user(data, QUESTION)]
    vlm.chat(prompt, max_tokens=1)
    table = {
        "hash of a known image": lambda: encoder.identify(data, options),
        "decode": lambda: open_image(data),
        "preprocess": lambda: family.preprocess(image, options),
        "pixels to the device": lambda: family.collate([pixels]),
        "tower": tower,
        "features to pinned memory": back,
    }
    for stage, call in table.items():
        figure(f"{name}: stage: {stage}", median_ms(call), "ms")
    figure(f"{name}: stage: tower, by events", device_ms(tower), "ms")
    prefill(name, vlm)


def device_ms(call: Callable[[], object]) -> float:
    """Median of what the device takes, by events."""
    if DEVICE.type != "cuda":
        return median_ms(call, 3)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def prefill(name: str, vlm: CachedVLM) -> None:
    """Forwards of the language model, by events on the engine's own stream."""
    run = vlm.engine._runner.run
    times: list[tuple[int, float]] = []

    def timed(parts: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        result = run(parts)
        called = time.perf_counter() - began
        synchronize()
        times.append((sum(p.new for p in parts), 1e3 * (time.perf_counter() - began)))
        launches.append(1e3 * called)
        return result

    launches: list[float] = []
    vlm.engine._runner.run = timed  # type: ignore[method-assign]
    try:
        for image in fresh(name, 4):
            vlm.chat([user(image, QUESTION)], max_tokens=8, ignore_eos=True)
    finally:
        vlm.engine._runner.run = run  # type: ignore[method-assign]
    whole = [(ms, launch) for (new, ms), launch in zip(times, launches, strict=True) if new > 16][1:]
    steps = [(ms, launch) for (new, ms), launch in zip(times, launches, strict=True) if new == 1][1:]
    for stage, measured in (("prefill", whole), ("decoding step", steps)):
        figure(f"{name}: stage: {stage}", statistics.median(ms for ms, _ in measured), "ms")
        figure(
            f"{name}: stage: {stage}, until launched",
            statistics.median(launch for _, launch in measured),
            "ms",
        )


def theirs(name: str, loaded: Loaded) -> None:
    """transformers.generate on the same weights."""
    loaded.model.set_attn_implementation({"text_config": "sdpa"})

    def opened(data: bytes) -> Image.Image:
        return Image.open(io.BytesIO(data)).convert("RGB")

    images, tokens = fresh(name, RUNS + 2), 64 if not TINY else 4
    times = [1e3 * seconds_of(lambda d=d: generate(loaded, [user(opened(d), QUESTION)], 1)) for d in images]
    figure(f"{name}: TTFT, transformers.generate", middle(times), "ms")
    talk = [user(opened(images[0]), QUESTION)]
    one, many = (seconds_of(lambda n=n: generate(loaded, talk, n, min_new_tokens=n)) for n in (1, tokens))
    figure(f"{name}: a decoding step, transformers.generate", 1e3 * (many - one) / (tokens - 1), "ms")


# The path of misses and of hits


def paths(name: str) -> None:
    with encoder_of(SHAPES[name](DEVICE, TINY)) as encoder:
        misses(name, encoder)
        hits(name, encoder)


@contextmanager
def encoder_of(loaded: Loaded) -> Iterator[VisionEncoder]:
    with FeatureStore.open(None, host_bytes="1GiB", **device_tier("1GiB")) as store:
        encoder = VisionEncoder(loaded, store, workers=None if TINY else 16, max_batch_cost=32_768)
        yield encoder
        encoder.close()


def misses(name: str, encoder: VisionEncoder) -> None:
    """Images a second through the tower on pixels that are ready: without a cache, with `.cpu()`, with ours."""
    family, number = encoder.family, 4 if TINY else 24
    options = family.options_for(ImageOptions(), 1)
    images = fresh(name, number)
    refs = [encoder.identify(data, options) for data in images]
    pixels = [encoder.prepare(ref) for ref in refs]
    groups: list[list[Any]] = [[]]
    for one in pixels:
        if groups[-1] and sum(p.cost for p in groups[-1]) + one.cost > encoder.max_batch_cost:
            groups.append([])
        groups[-1].append(one)

    def uncached() -> None:
        for group in groups:
            family.encode(group)

    def synchronous() -> None:
        for group in groups:
            for tensors in family.encode(group):
                for tensor in tensors.values():
                    tensor.cpu()

    def cached() -> None:
        leases = encoder.features(refs)
        synchronize()
        for lease in leases:
            lease.release()  # type: ignore[union-attr]

    times: dict[str, list[float]] = {"none": [], "cpu": [], "ours": []}
    for _ in range(2 if TINY else 6):
        times["none"].append(seconds_of(uncached))
        times["cpu"].append(seconds_of(synchronous))
        for ref in refs:
            encoder.store.delete(ref.key)
        refs = [encoder.identify(data, options) for data in images]
        for ref, one in zip(refs, pixels, strict=True):
            ref.prepared.pixels(lambda one=one: one)
        times["ours"].append(seconds_of(cached))
        encoder.store.flush()
    rates = {way: number / statistics.median(spent[1:]) for way, spent in times.items()}
    for way, said in (("none", "no cache"), ("cpu", ".cpu() after each batch"), ("ours", "ours")):
        figure(f"{name}: misses, {said} ({len(groups)} batches)", rates[way], "images/s")
    figure(f"{name}: misses, ours / no cache", rates["ours"] / rates["none"], least=0.98)
    figure(f"{name}: misses, ours / .cpu()", rates["ours"] / rates["cpu"])


def hits(name: str, encoder: VisionEncoder) -> None:
    """From the bytes of a request to features on the device."""
    family, store = encoder.family, encoder.store
    options = family.options_for(ImageOptions(), 1)
    images = fresh(name, 6)
    for lease in encoder.features([encoder.identify(data, options) for data in images]):
        lease.release()  # type: ignore[union-attr]
    store.flush()
    turn = itertools.cycle(images)

    def uncached() -> None:
        family.encode([family.preprocess(open_image(next(turn)), options)])

    def hit() -> None:
        [lease] = encoder.features([encoder.identify(next(turn), options)])
        tiers.add(lease.tier)  # type: ignore[union-attr]
        synchronize()
        lease.release()  # type: ignore[union-attr]

    def from_host() -> float:
        if store._stack.device is not None:
            store._stack.device.clear()
        return seconds_of(hit)

    tiers: set[str] = set()
    slow = median_ms(uncached)
    from_host()
    host = 1e3 * statistics.median(from_host() for _ in range(2 * RUNS))
    assert tiers == {"host"}, tiers
    device = median_ms(hit, 4 * RUNS)
    figure(f"{name}: bytes to features, uncached", slow, "ms")
    figure(f"{name}: bytes to features, held on the host", host, "ms")
    figure(f"{name}: bytes to features, held on the device", device, "ms")
    figure(f"{name}: bytes to features, host / uncached", host / slow, most=0.05)


SECTIONS: dict[str, Callable[[], None]] = {"kernels": kernels, "families": families}
for _name in SHAPES:
    SECTIONS[f"first_token {_name}"] = functools.partial(first_token, _name)
    SECTIONS[f"paths {_name}"] = functools.partial(paths, _name)

if __name__ == "__main__":
    main()
