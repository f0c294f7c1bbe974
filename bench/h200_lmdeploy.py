"""Ours on LMDeploy beside LMDeploy as it is: first whether the answers are right, then what is saved.

PYTHONPATH=. python bench/h200_lmdeploy.py [--shape InternVL2-2B] [--seconds 250] [--only NAME ...] [--json FILE]

`featcache.engine` has to be importable: install the package, or link featcache/engine to engine. Both engines run
on one GPU in a process each and are asked in turn. With --tiny the shapes are scaled down and LMDeploy's engine is
stood in for, on the CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import base64
import functools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from h200_models import figure, machine, photographs, run_sections, save_folder, say, write_report
from lmdeploy_workers import Got, Message, Request, Run, Worker

ROUNDS = 7
TOGETHER = 32
EQUAL_IMAGES = 8
WORDS = "the left red circle one in picture how many is which larger and both describe what"
TINY = False
SHAPE = "InternVL2-2B"
SIZE = (1344, 1792)
ANSWER = 32


class Bench:
    """Both workers, and what they are asked."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self.folder, self.tiny = folder, tiny
        self.random = random.Random(0)
        self.pictures = photographs(4 if tiny else 400, *((112, 84) if tiny else SIZE))
        self.stock = Worker("stock", folder / "model", 0.25, tiny)
        self.ours = self.open_ours()
        say(f"  started: stock {self.stock.started_s:.1f} s, ours {self.ours.started_s:.1f} s")

    def open_ours(self) -> Worker:
        return Worker("ours", self.folder / "model", 0.35, self.tiny, self.folder / "store")

    def picture(self) -> str:
        """A data URL of a picture that nobody has seen."""
        jpeg = next(self.pictures, None)
        if jpeg is None:
            self.pictures = photographs(4 if self.tiny else 100, *((112, 84) if self.tiny else SIZE))
            jpeg = next(self.pictures)
        return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()

    def words(self, number: int = 12) -> str:
        return " ".join(self.random.choices(WORDS.split(), k=number))

    def both(self, requests: Sequence[Request], **how: Any) -> tuple[Run, Run]:
        return self.stock.run(requests, **how), self.ours.run(requests, **how)


BENCH: Bench


def ask(url: str | None, question: str, system: str = "") -> list[Message]:
    parts: list[Message] = [{"type": "image_url", "image_url": {"url": url}}] if url else []
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


# Whether it is right


def equality() -> None:
    """Greedy tokens and log-probabilities, one request at a time where shapes have to match."""
    conversations = [ask(BENCH.picture(), BENCH.words(6)) for _ in range(2 if TINY else EQUAL_IMAGES)]
    requests = [Request(messages, 4 if TINY else ANSWER, True) for messages in conversations]
    stock = one_by_one(BENCH.stock, requests)
    again = one_by_one(BENCH.stock, requests)
    miss = one_by_one(BENCH.ours, requests)
    say(f"  prompt tokens: stock {stock[0].prompt_tokens}, ours {miss[0].prompt_tokens}")
    say(f"  stock's first answers: {[got.tokens[:6] for got in stock[:3]]}")
    total = len(requests)
    figure(
        "distinct answers of stock", len({tuple(got.tokens) for got in stock}), f"of {total}", least=total - 1
    )
    compare("stock, asked again", stock, again, exact=True)
    compare("ours, every image a miss", stock, miss, exact=True)
    tiers("encoded", miss)
    BENCH.ours.forget_prefixes()
    hits = one_by_one(BENCH.ours, requests)
    compare("ours, every image a hit", stock, hits, exact=True)
    prefix = one_by_one(BENCH.ours, requests)
    figure("prompt tokens reused when asked again", statistics.median(got.cached for got in prefix), "tokens")
    compare("ours, prefix reused", stock, prefix)
    BENCH.ours.forget_prefixes()
    compare("ours, all at once", stock, BENCH.ours.run(requests).got)
    compare("stock, all at once", stock, BENCH.stock.run(requests).got)
    BENCH.ours.flush()
    BENCH.ours.end()
    BENCH.ours = BENCH.open_ours()
    restarted = one_by_one(BENCH.ours, requests)
    compare("ours, restarted, features from disk", stock, restarted, exact=True)
    tiers("disk", restarted)
    tower = BENCH.ours.tower_difference(BENCH.folder / "model", conversations[:2])
    figure("this tower's rows against transformers', of the largest", tower)
    for messages, other in zip(conversations, conversations[1:] + conversations[:1], strict=True):
        BENCH.ours.swap_features(messages, other)
    BENCH.ours.forget_prefixes()
    wrong = one_by_one(BENCH.ours, requests)
    figure("control: answers from wrong features that are equal", equal(stock, wrong), f"of {total}", most=1)
    figure("control: their largest difference of log-probability", difference(stock, wrong), least=0.1)


def one_by_one(worker: Worker, requests: Sequence[Request]) -> list[Got]:
    return [worker.run([request]).got[0] for request in requests]


def tiers(name: str, answers: Sequence[Got]) -> None:
    held = sum(got.tiers == [name] for got in answers)
    figure(f"  of these, images that were {name}", held, f"of {len(answers)}", least=len(answers))


def compare(name: str, right: Sequence[Got], answers: Sequence[Got], exact: bool = False) -> None:
    """Exact: bit for bit. Else: log-probabilities within 0.1, up to where the tokens part."""
    total, bitwise = len(right), sum(a.logprobs == b.logprobs for a, b in zip(right, answers, strict=True))
    least = total if exact else None
    figure(f"{name}: equal tokens", equal(right, answers), f"of {total}", least=least)
    if exact:
        figure(f"{name}: log-probabilities equal bit for bit", bitwise, f"of {total}", least=total)
    else:
        figure(f"{name}: largest difference of log-probability", difference(right, answers), most=0.1)


def equal(right: Sequence[Got], answers: Sequence[Got]) -> int:
    return sum(a.tokens == b.tokens for a, b in zip(right, answers, strict=True))


def difference(right: Sequence[Got], answers: Sequence[Got]) -> float:
    worst = 0.0
    for a, b in zip(right, answers, strict=True):
        for i, (x, y) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
            if a.tokens[:i] != b.tokens[:i]:
                break
            if a.tokens[i] == b.tokens[i]:
                worst = max(worst, abs(x - y))
            elif i == 0:
                worst = max(worst, abs(x - y), 0.1 + 1e-6)
    return worst


# How fast it is


def first_token() -> None:
    """One request at a time, both engines in turn, from the messages to the first token."""
    cases: dict[str, list[tuple[Got, Got]]] = {}

    def note(name: str, request: Request) -> None:
        stock, ours = BENCH.both([request])
        cases.setdefault(name, []).append((stock.got[0], ours.got[0]))

    for _ in range(2 if TINY else ROUNDS + 2):
        note("text of the question alone", Request(ask(None, BENCH.words())))
        picture = BENCH.picture()
        note("new image", Request(ask(picture, BENCH.words())))
        note("known image, new question", Request(ask(picture, BENCH.words())))
        note("known image, other system prompt", Request(ask(picture, BENCH.words(), BENCH.words(3))))
    floor = median(ours.ttft_ms for _, ours in cases["text of the question alone"][0 if TINY else 2 :])
    for name, pairs in cases.items():
        kept = pairs[2:] if not TINY else pairs
        pair(name, kept)
        if name == "known image, new question":
            ours = median(got.ttft_ms for _, got in kept)
            figure("  of the text's alone", ours / floor, "x", most=1.3)
            figure("  of stock's", ours / median(got.ttft_ms for got, _ in kept), "x", most=0.35)


def pair(name: str, pairs: Sequence[tuple[Got, Got]]) -> None:
    for who, answers in zip(("stock", "ours"), zip(*pairs, strict=True), strict=True):
        figure(f"{name}, {who}: first token", median(got.ttft_ms for got in answers), "ms")
        figure("  of which preparing the request", median(got.prepare_ms for got in answers), "ms")
    ours = [got for _, got in pairs]
    where = sorted({tier for got in ours for tier in got.tiers})
    say(
        f"    ours: {median(got.cached for got in ours):.0f} of {ours[0].prompt_tokens} reused; images: {where}"
    )


def turns() -> None:
    """A conversation about one image: the first token of turns 1 to 8."""
    stock: list[list[float]] = [[] for _ in range(8)]
    ours: list[list[float]] = [[] for _ in range(8)]
    for number in range(1 if TINY else 5):
        messages = ask(BENCH.picture(), BENCH.words())
        for turn in range(8):
            both = BENCH.both([Request(messages)])
            if number or TINY:  # the first conversation warms up
                stock[turn].append(both[0].got[0].ttft_ms)
                ours[turn].append(both[1].got[0].ttft_ms)
            messages = [
                *messages,
                {"role": "assistant", "content": BENCH.words(10)},
                *ask(None, BENCH.words()),
            ]
    for turn in range(8):
        say(f"    turn {turn + 1}: stock {median(stock[turn]):.1f} ms, ours {median(ours[turn]):.1f} ms")
    later = sum(map(median, ours[1:])) / sum(map(median, stock[1:]))
    figure("turns 2 to 8, ours of stock's", later, "x")


def together() -> None:
    """All at once: new images, the same with new questions, half and half; from the messages, and prepared."""
    rates: dict[str, list[tuple[float, float]]] = {}
    ttft: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, requests: Sequence[Request], **how: Any) -> None:
        runs = BENCH.both(requests, **how)
        rates.setdefault(name, []).append(tuple(len(requests) / run.seconds for run in runs))  # type: ignore[arg-type]
        ttft.setdefault(name, []).append(tuple(median(g.ttft_ms for g in run.got) for run in runs))  # type: ignore[arg-type]

    number = 4 if TINY else TOGETHER
    for passes in range(2 if TINY else 4):
        pictures = [BENCH.picture() for _ in range(number)]

        def all_of(pictures: Sequence[str] = pictures) -> list[Request]:
            return [Request(ask(picture, BENCH.words()), ANSWER) for picture in pictures]

        note("all new", all_of())
        note("all known", all_of())
        note("half known", all_of([*pictures[: number // 2], *(BENCH.picture() for _ in range(number // 2))]))
        if passes:  # what is prepared needs no pass to warm up: the others did it
            note("all new, prepared", all_of([BENCH.picture() for _ in range(number)]), prepared=True)
            note("all known, prepared", all_of(), prepared=True)
    for name, pairs in rates.items():
        stock, ours = (median(p[i] for p in pairs["prepared" not in name :]) for i in (0, 1))
        least = {"all new": 0.97, "all known": 4.0, "all new, prepared": 0.97}.get(name)
        figure(f"{number} at once, {name}: stock", stock, "req/s")
        figure(f"{number} at once, {name}: ours", ours, "req/s")
        figure("  ours of stock's", ours / stock, "x", least=least)
        first = [median(p[i] for p in ttft[name]) for i in (0, 1)]
        say(f"    median first token: stock {first[0]:.0f} ms, ours {first[1]:.0f} ms")


def copies() -> None:
    """New images at once, prepared: the store's asynchronous copies, and with `.cpu()` beside them."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(1 if TINY else 3):
        for synchronous in (True, False):
            BENCH.ours.copy_synchronously(synchronous)
            requests = [Request(ask(BENCH.picture(), BENCH.words())) for _ in range(2 if TINY else 16)]
            rates[synchronous].append(len(requests) / BENCH.ours.run(requests, prepared=True).seconds)
    BENCH.ours.copy_synchronously(False)
    figure("16 new at once, prepared, with .cpu()", median(rates[True]), "req/s")
    figure("16 new at once, prepared, asynchronous", median(rates[False]), "req/s")
    figure("  asynchronous of .cpu()", median(rates[False]) / median(rates[True]), "x")


def decode() -> None:
    """Tokens a second behind the first one, text alone, both engines in turn."""
    for number in (1, 2) if TINY else (1, TOGETHER):
        speeds: list[tuple[float, float]] = []
        for _ in range(1 if TINY else 5):
            requests = [Request(ask(None, BENCH.words()), 8 if TINY else 257) for _ in range(number)]
            speeds.append(tuple(map(decoded, BENCH.both(requests))))  # type: ignore[arg-type]
        stock, ours = (median(pair[i] for pair in speeds[1:] or speeds) for i in (0, 1))
        figure(f"decode, {number} at once: stock", stock, "tokens/s")
        figure(f"decode, {number} at once: ours", ours, "tokens/s")
        figure("  ours of stock's", ours / stock, "x", least=0.98)


def decoded(run: Run) -> float:
    first = min(got.ttft_ms for got in run.got) / 1e3
    return sum(len(got.tokens) - 1 for got in run.got) / (run.seconds - first)


def median(values: Any) -> float:
    return statistics.median(values)


SECTIONS: dict[str, Callable[[], None]] = {
    "equality": equality,
    "first_token": first_token,
    "turns": turns,
    "together": together,
    "decode": decode,
    "copies": copies,
}


def main() -> None:
    global BENCH, TINY, SHAPE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=SHAPE, help="InternVL2-2B, Qwen2.5-VL-3B, Qwen3-VL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=250)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    TINY, SHAPE = given.tiny, given.shape
    device = torch.device("cpu" if TINY else "cuda")
    say(f"{SHAPE}: {machine(device)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = Path(scratch), time.perf_counter()
        save_folder(SHAPE, folder / "model", device, TINY)
        torch.cuda.empty_cache()
        say(f"  saved after {time.perf_counter() - began:.1f} s")
        BENCH = Bench(folder, TINY)
        report = functools.partial(write_report, given.json, device)
        is_right = run_sections(SECTIONS, given.only, given.seconds, report)
        BENCH.ours.end()
        BENCH.stock.end()
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
