"""`featcache bench`: one file a question, each answered by a baseline and featcache in one run."""

from __future__ import annotations

from typing import NamedTuple


class Question(NamedTuple):
    """module: in this package; its `measure` yields the rows. asked: the question."""

    module: str
    asked: str


QUESTIONS = {  # no torch here: the command lists them
    "preprocess-once": Question("preprocess_once", "Is an image preprocessed more than once for a request?"),
    "vit-time": Question(
        "vit_time", "Where does the time of a new image go, and is it the copy to the host?"
    ),
    "batch": Question("batch", "Why is a list of requests faster than a loop over them?"),
    "multi-turn": Question(
        "multi_turn", "What do features and KV blocks save over the turns of a conversation?"
    ),
    "internvit": Question("internvit", "Do compiling the tower and splitting its batch gain anything?"),
    "restart": Question("restart", "What is a warm disk worth after a restart?"),
    "capacity": Question("capacity", "How much of what is it worth keeping where?"),
}

# of Qwen2-VL. Text: hidden, intermediate, layers, heads, KV heads; vision: depth, width, heads
SHAPES = {
    "small": ((512, 1536, 6, 8, 4), (6, 512, 8)),
    "2B": ((1536, 8960, 28, 12, 2), (32, 1280, 16)),
    "7B": ((3584, 18944, 28, 28, 4), (32, 1280, 16)),
}
