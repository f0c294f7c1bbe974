"""`featcache bench`: the questions behind featcache, each answered by a measurement on this machine."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from featcache.bench import QUESTIONS, SHAPES
from featcache.cli.output import complain, print_table
from featcache.errors import ConfigError


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[QUESTION]...")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--quick", is_flag=True, help="Few rounds: minutes for all of them on two cores.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="And there, as a page with plots.")
@click.option("--shape", help="Of Qwen2-VL: small, 2B or 7B; by default small on a CPU and 2B on CUDA.")
def bench(
    names: tuple[str, ...],
    device: str,
    quick: bool,
    json_file: Path | None,
    html_file: Path | None,
    shape: str | None,
) -> None:
    """Measure what the cache saves on this machine.

    QUESTION is one of those that `featcache bench` lists, or `all`. Models have random weights. Each run checks
    that answers and counts are what they must be; the exit status is 1 if one isn't. Plots need matplotlib:
    pip install 'featcache[bench]'.
    """
    if not names:
        print_table(["question", "what it asks"], [(name, q.asked) for name, q in QUESTIONS.items()])
        return
    if unknown := [name for name in names if name not in QUESTIONS and name != "all"]:
        raise ConfigError(f"{unknown[0]}: no such question; there are all, {', '.join(QUESTIONS)}")
    shape = shape or ("2B" if device == "cuda" else "small")
    if shape not in SHAPES:
        raise ConfigError(f"--shape: {shape!r}; there are {', '.join(SHAPES)}")
    if html_file is not None:
        from featcache.bench.report import can_draw, write_html

        if not can_draw():
            complain("matplotlib isn't installed: the page has no plots")
    chosen = list(QUESTIONS) if "all" in names else list(dict.fromkeys(names))
    report = {**_machine(device, quick, shape), "quick": quick, "questions": {}}
    for name in chosen:
        report["questions"][name] = _answer(name, device, quick, shape)
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=2))
        if html_file is not None:
            write_html(html_file, report, {name: question.asked for name, question in QUESTIONS.items()})
    click.echo("\nnot measured: " + "; ".join(report["not_measured"]))
    if not all(answer["is_right"] for answer in report["questions"].values()):
        raise click.exceptions.Exit(1)


def _answer(name: str, device: str, quick: bool, shape: str) -> dict[str, Any]:
    from featcache.bench.setting import Row, Setting

    click.echo(f"\n{name}: {QUESTIONS[name].asked}")
    began = time.perf_counter()
    rows: list[Row] = []
    error = None
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as folder:
        setting = Setting(device, quick, Path(folder), shape)
        try:
            rows.extend(import_module(f"featcache.bench.{QUESTIONS[name].module}").measure(setting))
        except Exception as exc:  # the other questions are still asked
            error = f"{type(exc).__name__}: {exc}"
            complain(f"{name}: {error}")
    marks = {True: "ok", False: "WRONG", None: ""}
    print_table(
        ["figure", "value>", "unit", "", "beside"],
        [(row.figure, f"{row.value:,.4g}", row.unit, marks[row.is_right], row.note) for row in rows],
    )
    is_right = error is None and all(row.is_right is not False for row in rows)
    seconds = round(time.perf_counter() - began, 1)
    return {"is_right": is_right, "error": error, "seconds": seconds, "rows": [row.to_json() for row in rows]}


def _machine(device: str, quick: bool, shape: str) -> dict[str, Any]:
    import torch
    import transformers

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    machine = {
        "device": name,
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        **versions,
        "shape": shape,
    }
    click.echo(", ".join(f"{key} {value}" for key, value in machine.items()))
    return {
        "machine": machine,
        "not_measured": [
            "beside LMDeploy and vLLM: bench/h200_lmdeploy.py is a run of its own, on CUDA",
            *([] if device == "cuda" else ["real shapes, CUDA graphs and copies: they need --device cuda"]),
            *(["compiled towers: leave --quick out"] if quick else []),
        ],
    }
