"""Dialogues about fresh scenes: several turns, one to three pictures, shown at once or one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from featcache.bundled.questions import KINDS, Question, choose, comparisons, facts, phrase, picture_name
from featcache.bundled.scenes import DEFAULT_FONT, MAX_FIGURES, Scene, make_scene

MAX_PICTURES = 3
Message = dict[
    str, Any
]  # {"role": ..., "content": [{"type": "image", "image": PIL}, {"type": "text", "text": ...}]}

_SYSTEM = (
    "You are a helpful assistant.",
    "You answer questions about pictures.",
    "Be brief.",
    "You are a careful observer. Answer in as few words as you can.",
)
_GREETINGS = ("hello", "hi", "Hello", "Hi", "hello there", "Good morning", "hey")
_THANKS = ("thanks", "thank you", "Thank you", "Thanks a lot")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """`messages` in the form that chat templates and OpenAI clients take, the right answers among them.

    `answers[i]` and `kinds[i]` belong to the i-th turn; `scenes` are the pictures in order.
    """

    messages: list[Message]
    answers: tuple[str, ...]
    kinds: tuple[str, ...]
    scenes: tuple[Scene, ...]

    def prompt(self, turn: int) -> list[Message]:
        """The messages up to and including the question of `turn` (from 0)."""
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        return self.messages[: asked[turn] + 1]


@dataclass(slots=True)
class _Talk:
    """A dialogue in the making."""

    messages: list[Message]
    answers: list[str]
    kinds: list[str]
    shown: list[Scene]
    last_shown: int = 0  # how many pictures the last message with pictures held

    def add(self, new: Sequence[Scene], question: Question, rng: random.Random) -> None:
        pictures = [{"type": "image", "image": scene.draw()} for scene in new]
        text = [{"type": "text", "text": question.ask}]
        content = text + pictures if rng.random() < 0.2 else pictures + text
        self.messages.append({"role": "user", "content": content})
        self.messages.append({"role": "assistant", "content": [{"type": "text", "text": question.answer}]})
        self.answers.append(question.answer)
        self.kinds.append(question.kind)


def make_dialogue(
    rng: random.Random,
    *,
    pictures: int | None = None,
    turns: int | None = None,
    last_kind: str | None = None,
    max_figures: int = MAX_FIGURES,
    fonts: Sequence[str] = (DEFAULT_FONT,),
    kinds: Sequence[str] = KINDS,
) -> Dialogue:
    """A fresh dialogue. Without `pictures` and `turns`, one to three pictures and two to five turns.

    `last_kind` is the kind of the last question; the questions before it are of any of `kinds`.
    """
    while True:
        number = pictures or rng.choices((1, 2, MAX_PICTURES), (42, 40, 18))[0]
        if last_kind == "compare":
            number = max(2, number)
        length = turns or rng.randint(2, 5)
        scenes = [make_scene(rng, max_figures=max_figures, fonts=fonts) for _ in range(number)]
        dialogue = _talk_about(scenes, length, last_kind, kinds, rng)
        if dialogue is not None:
            return dialogue


def _talk_about(
    scenes: list[Scene], turns: int, last_kind: str | None, kinds: Sequence[str], rng: random.Random
) -> Dialogue | None:
    """None when the scenes can't be asked about in the kind that was wished for."""
    talk = _Talk([], [], [], [])
    if rng.random() < 0.15:
        talk.messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    waiting = list(scenes)
    while len(talk.answers) < turns:
        left = turns - len(talk.answers)
        if not talk.answers and left > 1 and rng.random() < 0.04:
            talk.add([], _small_talk(rng), rng)
            continue
        new = _now_shown(waiting, talk, left, rng)
        talk.shown += new
        talk.last_shown = len(new) or talk.last_shown
        question = _ask(talk, last_kind if left == 1 else None, kinds, rng)
        if question is None:
            return None
        talk.add(new, question, rng)
    if last_kind is None and rng.random() < 0.03:
        talk.add([], Question("talk", rng.choice(_THANKS), "you are welcome"), rng)
    return Dialogue(talk.messages, tuple(talk.answers), tuple(talk.kinds), tuple(scenes))


def _now_shown(waiting: list[Scene], talk: _Talk, left: int, rng: random.Random) -> list[Scene]:
    """Take from `waiting` what the next message shows: something at first, all by the last turn."""
    if left == 1:
        number = len(waiting)
    elif not talk.shown:
        number = rng.choice((1, 1, len(waiting)))
    else:
        number = min(len(waiting), 1) if rng.random() < 0.4 else 0
    new = waiting[:number]
    del waiting[:number]
    return new


def _ask(talk: _Talk, kind: str | None, kinds: Sequence[str], rng: random.Random) -> Question | None:
    """A question of `kind` (of a kind drawn from `kinds` when None) about the pictures shown so far."""
    deny = rng.random() < 0.12
    for _ in range(20):
        wanted = kind or rng.choice(kinds)
        name: str | None = None
        if wanted == "compare":
            known = list(comparisons(talk.shown)) if len(talk.shown) > 1 else []
        else:
            index, name = _picture_asked_about(talk, rng)
            known = list(facts(talk.shown[index], wanted))
        fact = choose(known, rng, deny=deny)
        if fact is not None:
            return phrase(wanted, fact, rng, name)
        deny = False
    return None


def _picture_asked_about(talk: _Talk, rng: random.Random) -> tuple[int, str | None]:
    """A picture and how it is named; without a name the one just shown is meant, or the only one."""
    if len(talk.shown) == 1 or (talk.last_shown == 1 and rng.random() < 0.3):
        return len(talk.shown) - 1, None
    index = rng.randrange(len(talk.shown))
    return index, picture_name(index, rng)


def _small_talk(rng: random.Random) -> Question:
    if rng.random() < 0.5:
        return Question("talk", rng.choice(_GREETINGS), "hello, please show me a picture")
    kind = rng.choice(("colour", "shape", "count", "word", "number", "presence", "describe"))
    known = facts(make_scene(rng), kind)
    return Question("talk", phrase("talk", rng.choice(known), rng).ask, "there is no picture")
