"""What `featcache bench --html` writes: one page that needs nothing else, with its tables and plots."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

Rows = Sequence[Mapping[str, Any]]


def write_html(path: Path, report: Mapping[str, Any], asked: Mapping[str, str]) -> None:
    """report: what --json writes. asked: the questions by their names. Without matplotlib there are no plots."""
    environment = Environment(
        loader=PackageLoader("featcache.bench", "."), autoescape=select_autoescape(), trim_blocks=True
    )
    answers = [
        {"name": name, "asked": asked[name], "plots": plots(answer["rows"]), **answer}
        for name, answer in report["questions"].items()
    ]
    page = environment.get_template("report.html").render(report=report, answers=answers)
    path.write_text(page, encoding="utf-8")


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def plots(rows: Rows) -> list[str]:
    """One SVG for each plot that rows stand in; none without matplotlib."""
    if not can_draw():
        return []
    drawn: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["point"] is not None:
            drawn.setdefault(row["point"][0], []).append(row)
    return [_svg(plot, points) for plot, points in drawn.items()]


def _svg(title: str, rows: Rows) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, MaxNLocator

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    series: dict[str, dict[Any, float]] = {}
    for row in rows:
        _, name, x = row["point"]
        series.setdefault(name, {})[x] = row["value"]
    if all(isinstance(x, str) for values in series.values() for x in values):
        _stack(axes, series)
    else:
        for name, values in series.items():
            axes.plot(list(values), list(values.values()), marker="o", label=name)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # text stays text
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r"#000000\b", "currentColor", svg)  # black is white on a dark page


def _stack(axes: Any, series: Mapping[str, Mapping[str, float]]) -> None:
    names = list(dict.fromkeys(x for values in series.values() for x in values))
    below = [0.0] * len(names)
    for name, values in series.items():
        heights = [values.get(x, 0.0) for x in names]
        axes.barh(names, heights, left=below, label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.invert_yaxis()
