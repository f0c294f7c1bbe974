"""Questions about scenes that have one right answer, of nine kinds, in several phrasings each.

A question is only made when the scene leaves no doubt: a figure near the border between two parts of the
picture has no position, two stars of different colours have no one colour.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from featcache.bundled.scenes import COLOURS, SHAPES, Figure, Scene
from featcache.errors import ConfigError

KINDS = ("colour", "shape", "count", "position", "word", "number", "compare", "presence", "describe")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
ORDINALS = ("first", "second", "third")
MAX_LISTED = 3  # a description lists up to so many figures, and only counts more

_HOW_MANY = (
    "how many {things} are there",
    "how many {things} are there",
    "how many {things} do you see",
    "how many {things} can you see",
    "count the {things}",
    "what is the number of {things}",
    "how many {things}",
)
_IS_THERE = ("is there {a thing}", "do you see {a thing}", "can you see {a thing}", "are there any {things}")
_HAS_MORE = (
    "which of the two has more {things}",
    "which picture has more {things}",
    "which image shows more {things}",
    "where are there more {things}, first or second picture",
)
_HAS_MOST = (
    "which picture has the most {things}",
    "which of them has the most {things}",
    "which image shows the most {things}",
)
_HAS_ONE = (
    "which picture has {a thing}",
    "which of them has {a thing}",
    "in which picture is there {a thing}",
    "which image shows {a thing}",
)


@dataclass(frozen=True, slots=True)
class Question:
    """`ask` as a user types it and the one right `answer`."""

    kind: str
    ask: str
    answer: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing to ask, in several phrasings, and its answer.

    A phrasing may hold `{pic}`, the picture's name, and `{a thing}` and `{things}`, made of `noun`.
    """

    phrasings: tuple[str, ...]
    answer: str
    noun: str = ""

    @property
    def denies(self) -> bool:
        return self.answer.startswith("there is no ") or self.answer == NUMBERS[0]


def facts(scene: Scene, kind: str) -> tuple[Fact, ...]:
    """All that can be asked about `scene` in questions of `kind` (all of `KINDS` but "compare")."""
    if kind not in _FACTS:
        raise ConfigError(f"no kind of question about one scene: {kind!r}; there are {', '.join(_FACTS)}")
    return _cached_facts(scene, kind)


def questions(scene: Scene, kind: str, rng: random.Random, *, picture: str | None = None) -> list[Question]:
    """Every question of `kind` that `scene` answers; `rng` draws the phrasings.

    `picture` names the picture in the question, as in "the second picture"; None where there is but one.
    """
    return [phrase(kind, fact, rng, picture) for fact in facts(scene, kind)]


def choose(candidates: Sequence[Fact], rng: random.Random, *, deny: bool) -> Fact | None:
    """One of those that deny something ("there is no star", "zero"), or one of the others; None of none.

    Every answer is as likely as any other.
    """
    fitting = [fact for fact in candidates if fact.denies == deny]
    if not fitting:
        return None
    answer = rng.choice(sorted({fact.answer for fact in fitting}))
    return rng.choice([fact for fact in fitting if fact.answer == answer])


def picture_name(index: int, rng: random.Random) -> str:
    """A name of the picture number `index` (from 0): "the second picture", "image 2"."""
    noun = rng.choice(("picture", "image"))
    return rng.choice(
        (f"the {ORDINALS[index]} {noun}", f"the {ORDINALS[index]} {noun}", f"{noun} {index + 1}")
    )


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def phrase(kind: str, fact: Fact, rng: random.Random, picture: str | None = None) -> Question:
    """One of the ways to ask for `fact`, with the picture's name if it has one."""
    template = rng.choice(fact.phrasings)
    if fact.noun:
        template = template.replace("{things}", plural(fact.noun))
        template = template.replace("{a thing}", with_article(fact.noun))
    if "{pic}" in template:
        ask = template.replace("{pic}", picture or rng.choice(("the picture", "the image", "this picture")))
    elif picture is None:
        ask = template + rng.choice(("", "", "", "", " in the picture", " here")) * (kind != "compare")
    else:
        ask = f"in {picture}, {template}" if rng.random() < 0.25 else f"{template} in {picture}"
    return Question(kind, _typed(ask, rng), fact.answer)


def _typed(ask: str, rng: random.Random) -> str:
    """As people type: with or without a capital, a mark at the end, a courtesy, the other spelling."""
    if rng.random() < 0.35:
        ask = ask.replace("colour", "color")
    is_order = ask.startswith(("describe", "read", "name", "count"))
    if rng.random() < 0.06:
        ask = rng.choice(("please tell me: ", "can you tell me: ", "tell me, ")) + ask
    if rng.random() < 0.6:
        ask = ask[0].upper() + ask[1:]
    elif rng.random() < 0.06:
        ask = ask.upper()
    mark = "." if is_order else "?"
    return ask + mark * (rng.random() < 0.75)


def _naming(scene: Scene) -> Iterator[tuple[str, Figure]]:
    """The names that fit one figure only: "red star"; "star", "red figure", "figure" where they suffice."""
    for figure in scene.figures:
        if len(scene.find(figure.shape, figure.colour)) == 1:
            yield f"{figure.colour} {figure.shape}", figure
        if len(scene.find(figure.shape)) == 1:
            yield figure.shape, figure
        if len(scene.find(colour=figure.colour)) == 1:
            yield f"{figure.colour} figure", figure
        if len(scene.figures) == 1:
            yield "figure", figure


def _colour(scene: Scene) -> Iterator[Fact]:
    for shape in SHAPES:
        found = scene.find(shape)
        colours = {f.colour for f in found}
        if len(colours) > 1:
            continue
        answer = colours.pop() if found else f"there is no {shape}"
        if len(found) > 1:
            yield Fact(
                (f"what colour are the {plural(shape)}", f"which colour do the {plural(shape)} have"), answer
            )
        else:
            yield Fact(
                (
                    f"what colour is the {shape}",
                    f"what colour is the {shape}",
                    f"which colour has the {shape}",
                    f"which colour does the {shape} have",
                    f"what is the colour of the {shape}",
                    f"name the colour of the {shape}",
                ),
                answer,
            )
    if len(scene.figures) == 1:
        asks = ("what colour is the figure", "what colour is the shape", "which colour is it")
        yield Fact(asks, scene.figures[0].colour)


def _shape(scene: Scene) -> Iterator[Fact]:
    for colour in COLOURS:
        found = scene.find(colour=colour)
        shapes = {f.shape for f in found}
        if len(shapes) > 1:
            continue
        answer = shapes.pop() if found else f"there is no {colour} figure"
        if len(found) > 1:
            yield Fact((f"what shape are the {colour} figures", f"what are the {colour} figures"), answer)
        else:
            yield Fact(
                (
                    f"what shape is the {colour} figure",
                    f"what shape is the {colour} one",
                    f"which shape is {colour}",
                    f"which figure is {colour}",
                    f"what is {colour}",
                    f"what is the shape of the {colour} figure",
                ),
                answer,
            )
    if len(scene.figures) == 1:
        yield Fact(
            ("what shape is the figure", "what shape is it", "which figure is it"), scene.figures[0].shape
        )


def _nouns() -> Iterator[tuple[str, str | None, str | None]]:
    yield "figure", None, None
    for shape in SHAPES:
        yield shape, shape, None
    for colour in COLOURS:
        yield f"{colour} figure", None, colour
        for shape in SHAPES:
            yield f"{colour} {shape}", shape, colour


_NOUNS = tuple(_nouns())


def _counted(scene: Scene) -> dict[tuple[str | None, str | None], int]:
    """How many figures there are of a shape and colour; None stands for any. Of what is missing, none."""
    return Counter(
        key
        for f in scene.figures
        for key in ((f.shape, f.colour), (f.shape, None), (None, f.colour), (None, None))
    )


def _worth_asking(scene: Scene) -> Iterator[tuple[str, str | None, int]]:
    """Noun, attribute and number of what may be asked for: what shares shape or colour with a figure."""
    counted = _counted(scene)
    for noun, shape, colour in _NOUNS:
        number = counted.get((shape, colour), 0)
        if number or not (shape and colour) or (shape, None) in counted or (None, colour) in counted:
            yield noun, shape or colour, number


def _count(scene: Scene) -> Iterator[Fact]:
    for noun, _, number in _worth_asking(scene):
        yield Fact(_HOW_MANY, NUMBERS[number], noun)


def _position(scene: Scene) -> Iterator[Fact]:
    places = [(name, figure.box) for name, figure in _naming(scene)]
    places += [("number" if t.is_number else "word", t.box) for t in scene.texts]
    if len(scene.texts) == 1:
        places.append(("text", scene.texts[0].box))
    for name, box in places:
        where = scene.position(box)
        if where is not None:
            asks = (f"where is the {name}", f"where is the {name}", f"what is the position of the {name}")
            yield Fact(
                (*asks, f"in which part of the picture is the {name}", f"where can i see the {name}"), where
            )


def _word(scene: Scene) -> Iterator[Fact]:
    answer = scene.words[0] if scene.words else "there is no word"
    asks = ("what word is printed", "which word is printed", "what is the word", "which word do you see")
    yield Fact((*asks, "what word is written", "read the word"), answer)
    yield from _whole_text(scene, scene.words)


def _number(scene: Scene) -> Iterator[Fact]:
    answer = scene.numbers[0] if scene.numbers else "there is no number"
    asks = (
        "what number is printed",
        "which number is printed",
        "what is the number",
        "which number do you see",
    )
    yield Fact((*asks, "what number is written", "read the number"), answer)
    yield from _whole_text(scene, scene.numbers)


def _whole_text(scene: Scene, wanted: tuple[str, ...]) -> Iterator[Fact]:
    if len(scene.texts) == 1 and wanted:
        yield Fact(
            ("what does the text say", "read the text", "what is written", "what is printed"), wanted[0]
        )


def _presence(scene: Scene) -> Iterator[Fact]:
    for noun, attribute, number in _worth_asking(scene):
        if attribute is not None:
            yield Fact(_IS_THERE, "yes" if number else "no", noun)
    for noun, there in (("word", scene.words), ("number", scene.numbers)):
        yield Fact(_IS_THERE[:3], "yes" if there else "no", noun)
    yield Fact(
        ("is there any text", "do you see any text", "can you see text"), "yes" if scene.texts else "no"
    )


def describe(scene: Scene) -> str:
    """The scene in one line: figures by colour and shape (only their number if many), then texts."""
    parts: list[str] = []
    if len(scene.figures) > MAX_LISTED:
        parts.append(f"{NUMBERS[len(scene.figures)]} figures")
    else:
        for colour in COLOURS:
            for shape in SHAPES:
                number = len(scene.find(shape, colour))
                if number == 1:
                    parts.append(with_article(f"{colour} {shape}"))
                elif number > 1:
                    parts.append(f"{NUMBERS[number]} {colour} {plural(shape)}")
    parts += ["a number" if text.is_number else "a word" for text in scene.texts]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _describe(scene: Scene) -> Iterator[Fact]:
    asks = ("describe {pic}", "describe {pic}", "what is in {pic}", "what do you see in {pic}")
    yield Fact((*asks, "what does {pic} show", "what can you see in {pic}"), describe(scene))


def comparisons(scenes: Sequence[Scene]) -> Iterator[Fact]:
    """All that can be asked to compare two or three pictures, told apart by their order."""
    counted = [_counted(scene) for scene in scenes]
    for noun, shape, colour in _NOUNS:
        counts = [of_scene.get((shape, colour), 0) for of_scene in counted]
        if max(counts) == 0:
            continue
        best = [i for i, n in enumerate(counts) if n == max(counts)]
        if len(scenes) == 2:
            yield Fact(_HAS_MORE, f"the {ORDINALS[best[0]]}" if len(best) == 1 else "the same", noun)
        elif len(best) == 1:
            yield Fact(_HAS_MOST, f"the {ORDINALS[best[0]]}", noun)
        having = [i for i, n in enumerate(counts) if n]
        if len(having) == 1:
            yield Fact(_HAS_ONE, f"the {ORDINALS[having[0]]}", noun)
    if len(scenes) == 2:
        yield from _same_colour(scenes[0], scenes[1])


def _same_colour(one: Scene, other: Scene) -> Iterator[Fact]:
    for shape in SHAPES:
        here, there = one.find(shape), other.find(shape)
        if len(here) == len(there) == 1:
            asks = (
                f"is the {shape} the same colour in both pictures",
                f"do both {plural(shape)} have the same colour",
            )
            yield Fact(asks, "yes" if here[0].colour == there[0].colour else "no")


_FACTS: dict[str, Callable[[Scene], Iterator[Fact]]] = {
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "position": _position,
    "word": _word,
    "number": _number,
    "presence": _presence,
    "describe": _describe,
}


@lru_cache(maxsize=64)
def _cached_facts(scene: Scene, kind: str) -> tuple[Fact, ...]:
    return tuple(_FACTS[kind](scene))
