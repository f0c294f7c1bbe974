"""`Generation`: a running answer, as its caller holds it; and `Reply`, when it is whole."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from featcache.engine.sampling import TokenLogprobs
from featcache.errors import FeatcacheError

log = logging.getLogger("featcache")

FinishReason = Literal["stop", "length", "cancelled", "error"]
ImageTier = Literal["device", "host", "disk", "encoded", "prefix"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens: of the prompt, of the answer, of the prompt's images, and those whose KV was held already."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    image_tokens: int


@dataclass(frozen=True, slots=True)
class ImageUse:
    """Where an image of the prompt came from.

    tier: "device", "host" or "disk" if its features were held; "encoded" if they were made for this request;
        "prefix" if its KV was held, so that its features weren't even looked up.
    """

    key: str
    tier: ImageTier
    tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: waiting to begin, for the features of images, from the first prefill to the first token, from
    submission to the first token, and in all."""

    queue_s: float
    encode_s: float
    prefill_s: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step adds to an answer. finish_reason: only of the last."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. token_ids: all that were generated, the one that ended it included."""

    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    usage: Usage
    images: tuple[ImageUse, ...]
    timings: Timings
    logprobs: tuple[TokenLogprobs, ...] = ()


Listener = Callable[[TokenDelta], None]


class Generation:
    """A running answer. Iterate over its deltas, or `listen`, or wait for `result()`. Thread-safe."""

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._changed = threading.Condition()  # guards all below; the listener is called under it, in order
        self._deltas: deque[TokenDelta] = deque()
        self._listener: Listener | None = None
        self._reply: Reply | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[TokenDelta]:
        """Deltas as they come. Raises what the answer failed with."""
        while True:
            with self._changed:
                while not self._deltas and not self._is_over:
                    self._changed.wait()
                if not self._deltas:
                    break
                delta = self._deltas.popleft()
            if delta.finish_reason != "error":
                yield delta
        if self._error is not None:
            raise self._error

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every delta, those so far first; quickly, for it is the engine's thread."""
        with self._changed:
            self._listener = listener
            while self._deltas:
                listener(self._deltas.popleft())

    def result(self, timeout_s: float | None = None) -> Reply:
        """The whole answer, waited for. Raises what it failed with, and TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over, timeout_s):
                raise TimeoutError(f"no whole answer after {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    def cancel(self) -> None:
        """End it within one step of the engine; what was generated so far is its reply."""
        self._on_cancel()

    @property
    def _is_over(self) -> bool:
        return self._reply is not None or self._error is not None

    # For the engine

    def emit(self, delta: TokenDelta) -> None:
        with self._changed:
            self._pass_on(delta)

    def finish(self, delta: TokenDelta, reply: Reply) -> None:
        with self._changed:
            self._reply = reply
            self._pass_on(delta)

    def fail(self, error: FeatcacheError) -> None:
        with self._changed:
            self._error = error
            self._pass_on(TokenDelta("", (), finish_reason="error"))

    def _pass_on(self, delta: TokenDelta) -> None:
        self._changed.notify_all()
        if self._listener is None:
            self._deltas.append(delta)
            return
        try:
            self._listener(delta)
        except Exception:  # its event loop is closed, say: nobody wants the rest
            log.warning("a listener failed, and its answer is cancelled", exc_info=True)
            self._listener = None
            self._on_cancel()
