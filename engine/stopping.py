"""From tokens to text as they come, and where an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer makes of a character whose last bytes are still to come


class TextStream:
    """The text of one answer, bit by bit. Holds back what may still become a character or a stop text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._begin = 0  # tokens before this are done with
        self._read = 0  # tokens before this are in the text
        self._held = ""  # decoded, but perhaps the beginning of a stop text
        self.stopped = False

    def add(self, token: int) -> str:
        """Take a token; returns the text that is certain now. Sets `stopped` at a stop text, which is cut."""
        self._ids.append(token)
        return self._pass_on(self._decoded(), is_last=False)

    def finish(self) -> str:
        """The rest, at the end of the answer."""
        return self._pass_on(self._decoded(is_last=True), is_last=True)

    def _decoded(self, *, is_last: bool = False) -> str:
        """Text of tokens not yet read; a few read ones are decoded along, as spaces depend on neighbours."""
        before = self._decode(self._ids[self._begin : self._read])
        now = self._decode(self._ids[self._begin :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not is_last):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _pass_on(self, text: str, *, is_last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        self._held = ""
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        if is_last:
            return text
        keep = _longest_beginning(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
