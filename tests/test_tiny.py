"""The bundled model `tiny`: its scenes, its folder, and that it is right about scenes it has never seen."""

from __future__ import annotations

import random
import string
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from featcache.bundled import bundled_model
from featcache.bundled.dialogues import Dialogue, make_dialogue
from featcache.bundled.questions import KINDS, describe, facts, questions
from featcache.bundled.scenes import COLOURS, DEFAULT_FONT, SHAPES, Figure, Ground, Scene, Text, make_scene
from featcache.errors import ConfigError

HELD_OUT = "tests of tiny"  # no training seed is called so: those are "train/0" and the like
NEEDED = 0.95


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(bundled_model("tiny"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(bundled_model("tiny"), dtype=torch.float32).eval()


def answers(model: Any, processor: Any, prompts: list[list[dict[str, Any]]]) -> list[str]:
    """Greedy answers of plain transformers to prompts in the OpenAI form, as one batch."""
    inputs = processor.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=40)
    said: list[str] = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def figure(shape: str, colour: str, x: int, y: int, size: int = 40) -> Figure:
    return Figure(shape, colour, COLOURS[colour], x, y, size)


def scene(*figures: Figure, texts: tuple[Text, ...] = ()) -> Scene:
    return Scene(224, 224, Ground((240, 240, 250), (250, 245, 230), False), figures, texts)


def test_a_seed_makes_one_dialogue_and_another_seed_another() -> None:
    one, again, other = (make_dialogue(random.Random(seed)) for seed in ("a", "a", "b"))
    assert one.answers == again.answers
    assert one.scenes == again.scenes
    assert [s.draw().tobytes() for s in one.scenes] == [s.draw().tobytes() for s in again.scenes]
    assert one.scenes != other.scenes


def test_scenes_and_questions_import_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys, featcache.bundled.dialogues; print({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_a_scene_is_drawn_where_it_says() -> None:
    drawn = scene(figure("circle", "red", 60, 60), figure("square", "blue", 160, 170)).draw()
    assert drawn.getpixel((60, 60)) == COLOURS["red"]
    assert drawn.getpixel((160, 170)) == COLOURS["blue"]
    assert min(drawn.getpixel((42, 42))) > 200  # the circle's box has empty corners
    assert drawn.getpixel((142, 152)) == COLOURS["blue"]  # a square's has none


def test_things_of_a_scene_never_touch_and_lie_inside() -> None:
    rng = random.Random("touch")
    for _ in range(200):
        fresh = make_scene(rng)
        boxes = [f.box for f in fresh.figures] + [t.box for t in fresh.texts]
        assert boxes
        assert all(b[0] >= 0 and b[1] >= 0 and b[2] <= fresh.width and b[3] <= fresh.height for b in boxes)
        for i, a in enumerate(boxes):
            for b in boxes[:i]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_glyph_boxes_follow_each_other_over_the_printed_word() -> None:
    word = Text("River", 30, 40, DEFAULT_FONT, 32, (20, 20, 20))
    glyphs = word.glyphs()
    assert "".join(g for g, _ in glyphs) == "River"
    assert all(a[2] == b[0] for (_, a), (_, b) in pairwise(glyphs))
    left, top, right, bottom = word.box
    drawn = scene(texts=(word,)).draw().convert("L").point(lambda value: 255 * (value < 100))
    ink = drawn.getbbox()
    assert ink is not None
    assert left <= ink[0] <= left + 4
    assert top <= ink[1] <= top + 4
    assert right - 4 <= ink[2] <= right
    assert bottom - 4 <= ink[3] <= bottom


def test_answers_are_true_of_a_scene_worked_out_by_hand() -> None:
    stars = scene(
        figure("star", "red", 40, 40),
        figure("star", "red", 112, 112),
        figure("heart", "orange", 190, 190),
        texts=(Text("STOP", 20, 150, DEFAULT_FONT, 30, (20, 20, 20)),),
    )
    assert describe(stars) == "two red stars, an orange heart and a word"
    told = {(f.noun or f.phrasings[0]): f.answer for f in facts(stars, "count")}
    assert told["figure"] == "three"
    assert told["star"] == "two"
    assert told["red heart"] == "zero"
    colours = {f.phrasings[0]: f.answer for f in facts(stars, "colour")}
    assert colours["what colour is the heart"] == "orange"
    assert colours["what colour are the stars"] == "red"
    assert colours["what colour is the cross"] == "there is no cross"
    places = {f.phrasings[0]: f.answer for f in facts(stars, "position")}
    assert places["where is the orange heart"] == "bottom right"
    assert "where is the star" not in places  # there are two
    assert {f.answer for f in facts(stars, "word")} == {"STOP"}
    assert {f.answer for f in facts(stars, "number")} == {"there is no number"}
    assert {f.answer for f in facts(stars, "presence") if f.noun == "red heart"} == {"no"}


def test_a_question_open_to_doubt_is_not_asked() -> None:
    at_the_border = scene(figure("circle", "red", 224 // 3, 112), figure("star", "blue", 180, 112))
    asked = [f.phrasings[0] for f in facts(at_the_border, "position")]
    assert not [ask for ask in asked if "circle" in ask or "red" in ask]
    two_colours = scene(figure("star", "red", 40, 40), figure("star", "blue", 180, 180))
    assert not [f for f in facts(two_colours, "colour") if "star" in f.phrasings[0]]


def test_dialogues_hold_every_kind_of_question_and_pictures_in_later_turns() -> None:
    rng = random.Random("variety")
    talks = [make_dialogue(rng) for _ in range(300)]
    kinds = Counter(kind for talk in talks for kind in talk.kinds)
    assert set(KINDS) <= set(kinds)
    assert min(kinds[kind] for kind in KINDS) >= 20
    assert {len(talk.scenes) for talk in talks} == {1, 2, 3}
    pictures = [[sum(p["type"] == "image" for p in m["content"]) for m in users(talk)] for talk in talks]
    assert sum(any(later) for _, *later in pictures) > 50
    assert sum(max(shown) > 1 for shown in pictures) > 50
    assert all(sum(shown) == len(talk.scenes) for shown, talk in zip(pictures, talks, strict=True))


def users(talk: Dialogue) -> list[dict[str, Any]]:
    return [m for m in talk.messages if m["role"] == "user"]


def test_an_unknown_kind_or_model_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"smell.*colour"):
        questions(scene(figure("star", "red", 40, 40)), "smell", random.Random(0))
    with pytest.raises(ConfigError, match=r"huge.*tiny"):
        bundled_model("huge")


def test_the_folder_is_ordinary_and_small() -> None:
    folder = bundled_model("tiny")
    assert (folder / "model.safetensors").stat().st_size <= 12 * 2**20
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "MODEL_CARD.md",
    } <= names
    assert all(path.stat().st_size for path in folder.iterdir())


def test_every_printable_character_survives_the_tokenizer(processor: Any) -> None:
    text = string.printable + "héllo wörld 你好 🙂 ß ﹏ €"
    for piece in (text, *text):
        assert processor.tokenizer.decode(processor.tokenizer(piece).input_ids) == piece


def test_the_chat_template_takes_strings_parts_and_every_way_to_name_an_image(processor: Any) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "text", "text": "Which?"},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "the first"},
        {"role": "tool", "content": [{"type": "text", "text": "42"}]},
        {"role": "user", "content": "Sure?"},
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    rendered = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{image}{image}Which?<|im_end|>\n"
        "<|im_start|>assistant\nthe first<|im_end|>\n"
        "<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "system" not in processor.apply_chat_template(messages[1:], tokenize=False)


def test_a_large_photo_is_scaled_to_what_the_model_knows(processor: Any) -> None:
    photo = Image.new("RGB", (4000, 3000), "white")
    grid = processor.image_processor(photo, return_tensors="pt")["image_grid_thw"][0].tolist()
    assert grid == [1, 20, 26]  # 280 x 364 pixels


@pytest.fixture(scope="module")
def right_by_kind(model: Any, processor: Any) -> dict[str, list[bool]]:
    """For 160 fresh dialogues of five turns: was each answer right, the right ones standing before it?

    Right is an answer all of whose tokens, and the end of the turn after them, are the likeliest where they
    stand: exactly then does greedy decoding give it. One forward pass so tells of all turns of a dialogue.
    """
    rng = random.Random(HELD_OUT)
    talks = [make_dialogue(rng, turns=5) for _ in range(160)]
    talks += [make_dialogue(rng, turns=2, last_kind="compare") for _ in range(50)]  # else too few of these
    talks.sort(key=lambda talk: sum(s.width * s.height for s in talk.scenes))  # like sizes, little padding
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    head = processor.tokenizer("<|im_start|>assistant\n").input_ids
    end = processor.tokenizer.eos_token_id
    for begin in range(0, len(talks), 16):
        batch = talks[begin : begin + 16]
        inputs = processor.apply_chat_template(
            [talk.messages for talk in batch],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
        with torch.inference_mode():
            likeliest = model(**inputs).logits.argmax(-1).tolist()
        for talk, ids, guesses in zip(batch, inputs["input_ids"].tolist(), likeliest, strict=True):
            starts = [i + len(head) for i in range(len(ids)) if ids[i : i + len(head)] == head]
            assert len(starts) == len(talk.answers)
            for kind, answer, start in zip(talk.kinds, talk.answers, starts, strict=True):
                stop = ids.index(end, start)
                assert processor.tokenizer.decode(ids[start:stop]) == answer
                right.setdefault(kind, []).append(guesses[start - 1 : stop] == ids[start : stop + 1])
    return right


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_scenes_are_told_right(kind: str, right_by_kind: dict[str, list[bool]]) -> None:
    answered = right_by_kind[kind]
    assert len(answered) >= 50
    assert sum(answered) / len(answered) >= NEEDED, f"{answered.count(False)} of {len(answered)} wrong"


def test_it_goes_on_from_its_own_answers(model: Any, processor: Any) -> None:
    """Whole dialogues by `generate`, each turn asked after what the model itself said before."""
    rng = random.Random(f"{HELD_OUT}/whole")
    talks = [make_dialogue(rng, turns=4) for _ in range(12)]
    history: list[list[dict[str, Any]]] = [[m for m in t.messages if m["role"] == "system"] for t in talks]
    right = 0
    for turn in range(4):
        for talk, told in zip(talks, history, strict=True):
            told.append(users(talk)[turn])
        said = answers(model, processor, history)
        right += sum(talk.answers[turn] == answer for talk, answer in zip(talks, said, strict=True))
        for told, answer in zip(history, said, strict=True):
            told.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    assert right >= NEEDED * 4 * len(talks)


def test_another_picture_changes_the_answer(model: Any, processor: Any) -> None:
    ask = {"type": "text", "text": "What colour is the star?"}
    for colour in COLOURS:
        picture = scene(figure("star", colour, 90, 110, 60)).draw()
        message = {"role": "user", "content": [{"type": "image", "image": picture}, ask]}
        assert answers(model, processor, [[message]]) == [colour]


def test_all_shapes_are_known(model: Any, processor: Any) -> None:
    ask = {"type": "text", "text": "What shape is it?"}
    pictures = [scene(figure(shape, "green", 120, 100, 64)).draw() for shape in SHAPES]
    prompts = [[{"role": "user", "content": [{"type": "image", "image": p}, ask]}] for p in pictures]
    assert answers(model, processor, prompts) == list(SHAPES)
