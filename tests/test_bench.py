"""`featcache bench`: that it finds what it should, and says so when something isn't right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from featcache.bench import QUESTIONS
from featcache.bench.setting import Point, Row, Setting, checked, ms
from featcache.cli import app


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_questions_are_listed_and_others_refused() -> None:
    listed = run()
    assert listed.exit_code == 0
    assert [line.split("\t")[0] for line in listed.stdout.splitlines()[1:]] == list(QUESTIONS)
    unknown = run("speed")
    assert (
        unknown.exit_code == 1 and "speed: no such question; there are all, preprocess-once" in unknown.stderr
    )


def test_one_decode_and_one_encoding_on_a_miss_and_none_on_a_hit(tmp_path: Path) -> None:
    result = run("preprocess-once", "--quick", "--json", str(tmp_path / "figures.json"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "figures.json").read_text())
    answer = report["questions"]["preprocess-once"]
    counts = {row["figure"]: row["value"] for row in answer["rows"] if row["is_right"] is not None}
    assert counts == {
        **{f"on a miss: {work}": 1 for work in ("decoded", "preprocessed", "tower_images")},
        **{f"on a hit: {work}": 0 for work in ("decoded", "preprocessed", "tower_images")},
        "on a miss: answers that differ from transformers'": 0,
        "on a hit: answers that differ from transformers'": 0,
    }
    assert answer["is_right"] and report["not_measured"]


def test_a_wrong_count_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from featcache.bench import capacity

    def measure(setting: Setting) -> list[Row]:
        assert setting.device == "cpu" and list(setting.folder.iterdir()) == []
        return [checked("features that are not their key's", 1, 0)]

    monkeypatch.setattr(capacity, "measure", measure)
    result = run("capacity")
    assert result.exit_code == 1 and "WRONG" in result.stdout and "expected 0" in result.stdout


def test_figures_are_medians_with_their_spread() -> None:
    row = ms("x", [0.001, 0.002, 0.009])
    assert (row.value, row.unit, row.is_right) == (2.0, "ms", None) and row.note == "p10 1.20, p90 7.60"
    assert checked("x", 3, 3).is_right is True and checked("x", 3, 4).is_right is False


def test_the_page_holds_the_figures_and_their_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from featcache.bench import capacity

    def measure(setting: Setting) -> list[Row]:
        lines = [Row(f"turn {n}", 10.0 * n, "ms", point=Point("by turn", "a <b>", n)) for n in (1, 2)]
        bars = [Row(f"stage {x}", 7.0, "ms", point=Point("stages", "decode", x)) for x in ("new", "known")]
        return [*lines, *bars, checked("features & more", 1, 0)]

    monkeypatch.setattr(capacity, "measure", measure)
    path = tmp_path / "report.html"
    result = run("capacity", "--html", str(path))
    assert result.exit_code == 1
    page = path.read_text()
    assert page.count("<svg") == 2 and "by turn</text>" in page and "a &lt;b&gt;</text>" in page
    assert ">WRONG<" in page and "features &amp; more" in page and ">expected 0<" in page
    assert "#000000" not in page  # it would vanish on a dark page
    monkeypatch.setattr("featcache.bench.report.find_spec", lambda name: None)
    without = run("capacity", "--html", str(path))
    assert "matplotlib isn't installed: the page has no plots" in without.stderr
    assert "<svg" not in path.read_text() and ">WRONG<" in path.read_text()


def test_a_shape_that_is_not_there_is_refused() -> None:
    result = run("capacity", "--shape", "72B")
    assert result.exit_code == 1 and "--shape: '72B'; there are small, 2B, 7B" in result.stderr


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_all_questions_quickly(tmp_path: Path) -> None:
    result = run("all", "--quick", "--json", str(tmp_path / "figures.json"))
    assert result.exit_code == 0, result.output
    answers = json.loads((tmp_path / "figures.json").read_text())["questions"]
    assert list(answers) == list(QUESTIONS) and all(answer["is_right"] for answer in answers.values())
