"""`featcache chat`: the real command on the bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image, ImageDraw

from featcache.cli import app
from featcache.engine import CachedVLM
from featcache.store import FeatureStore
from featcache.tiers.disk import DiskTier


def chat(*arguments: object, said: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", "tiny", "--device", "cpu", *map(str, arguments)], input=said)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    image = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(image).ellipse((60, 60, 160, 160), fill=(200, 30, 30))
    image.save(tmp_path / "red circle.png")
    return tmp_path / "red circle.png"


def test_a_conversation_in_the_terminal(picture: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    lines = [
        "how many figures are there",
        f"/image {picture}",
        "is there any text",
        "/stats",
        "/nonsense",
        "/quit",
    ]
    result = chat("--store", store, "--image", picture, said="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    with CachedVLM.from_pretrained("tiny", store=None, device="cpu") as vlm:
        first = {
            "role": "user",
            "content": [{"type": "image", "image": picture}, {"type": "text", "text": lines[0]}],
        }
        answer = vlm.chat([first], max_tokens=512).text
    assert answer and answer in result.stdout
    assert "image 1: encoded" in result.stderr and "image 2: " in result.stderr
    assert (
        json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])["encoder"][
            "tower_calls"
        ]
        == 1
    )
    assert "/nonsense: unknown" in result.stderr
    again = chat("--store", store, "--image", picture, said=lines[0])
    assert "image 1: disk" in again.stderr and answer in again.stdout


def test_an_image_that_is_none_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "page.jpg").write_text("<html></html>")
    for path, reason in ((tmp_path / "missing.png", "no such file"), (tmp_path / "page.jpg", "HTML page")):
        result = chat("--store", tmp_path / "store", "--image", path)
        assert result.exit_code == 1 and reason in result.stderr and path.name in result.stderr


def test_one_that_comes_later_does_not(picture: Path, tmp_path: Path) -> None:
    said = f"/image {tmp_path / 'missing.png'}\n/image {picture}\nhow many figures are there\n"
    result = chat("--store", tmp_path / "store", said=said)
    assert result.exit_code == 0
    assert "missing.png: no such file" in result.stderr and "image 1: encoded" in result.stderr


def test_the_store_says_whose_features_they_are(picture: Path, tmp_path: Path) -> None:
    with CachedVLM.from_pretrained("tiny", store=tmp_path / "store", device="cpu") as vlm:
        vlm.encode([picture])
        fingerprint = vlm.encoder.fingerprint
    tier = DiskTier.open(tmp_path / "store", max_bytes=0, readonly=True)
    description = tier.encoders()[fingerprint]["description"]
    tier.close()
    assert (description["model"], description["family"], description["dtype"]) == (
        "tiny",
        "qwen2_vl",
        "bfloat16",
    )
    removed = CliRunner().invoke(app, ["prune", "--store", str(tmp_path / "store"), "--encoder", "tiny"])
    assert removed.exit_code == 0, removed.stderr
    with FeatureStore.open(tmp_path / "store") as store:
        stats = store.stats()
        assert stats.disk is not None and stats.disk.entries == 0


def test_the_demo_answers_over_a_restart(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "featcache", "demo", "--seed", "7", "--store", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = re.search(
        r"(\d) of (\d) answers are right; (\d) of (\d) are the same, token by token", done.stdout
    )
    assert told is not None
    right, asked, same, compared = map(int, told.groups())
    assert same == compared == asked == 5 and right >= 4
    before, _, after = done.stdout.partition("A new one opens the same store")
    assert "image 1 encoded" in before and "image 1 prefix" in before
    assert "image 1 disk" in after and "image 1 encoded" not in after
