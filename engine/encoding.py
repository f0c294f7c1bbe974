"""`EncodingThread`: gets the features of images beside the engine's own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from featcache.engine.answer import Answer
from featcache.engine.encoder import VisionEncoder
from featcache.errors import FeatcacheError, RequestError
from featcache.lease import Lease

log = logging.getLogger("featcache")


A = TypeVar("A", bound=Answer)

# Of images, that one call gets features of: the first of many requests don't wait for the last one's images.
MAX_TOKENS = 16384


class Wanted(NamedTuple, Generic[A]):
    """The numbers of those images of a sequence whose features it needs."""

    sequence: A
    images: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.sequence.prompt.layouts[image].num_tokens for image in self.images)


@dataclass(frozen=True, slots=True)
class Encoded(Generic[A]):
    """What became of them. ready: a CUDA event after which the features may be read."""

    sequence: A
    leases: dict[int, Lease]
    error: FeatcacheError | None
    ready: torch.cuda.Event | None
    seconds: float

    def release(self) -> None:
        for lease in self.leases.values():
            lease.release()


class EncodingThread(Generic[A]):
    """Gets features for all sequences that want some, in one call up to MAX_TOKENS; others in the next.

    wake: called when something is done, on this thread.
    """

    def __init__(self, name: str, encoder: VisionEncoder, wake: Callable[[], None]) -> None:
        self._encoder = encoder
        self._wake = wake
        device = encoder.loaded.device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._changed = threading.Condition()  # guards all below
        self._wanted: deque[Wanted[A]] = deque()
        self._done: deque[Encoded[A]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def want(self, wanted: Items[Wanted[A]]) -> None:
        if wanted:
            with self._changed:
                self._wanted.extend(wanted)
                self._changed.notify_all()

    def take(self) -> list[Encoded[A]]:
        """What is done since the last call; the leases are the caller's."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def close(self) -> None:
        """Wait for the call that runs, and give up the rest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for encoded in self.take():
            encoded.release()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                wanted, given_up = self._next()
            with torch.cuda.stream(self._stream):
                done = self._encode(wanted)
            with self._changed:
                self._done.extend([*given_up, *done])
            self._wake()

    def _next(self) -> tuple[list[Wanted[A]], list[Encoded[A]]]:
        """What the next call is for, and those that nobody waits for any more."""
        wanted: list[Wanted[A]] = []
        given_up: list[Encoded[A]] = []
        tokens = 0
        while self._wanted:
            first = self._wanted[0]
            if first.sequence.is_cancelled:
                given_up.append(Encoded(first.sequence, {}, None, None, 0.0))
            elif wanted and tokens + first.num_tokens > MAX_TOKENS:
                break
            else:
                wanted.append(first)
                tokens += first.num_tokens
            self._wanted.popleft()
        return wanted, given_up

    def _encode(self, wanted: Items[Wanted[A]]) -> list[Encoded[A]]:
        began = time.perf_counter()
        refs = [sequence.prompt.images[image] for sequence, images in wanted for image in images]
        try:
            outcomes: list[Lease | FeatcacheError] = list(self._encoder.features(refs))
        except Exception as exc:  # not of one image: of all
            log.exception("engine: encoding failed")
            outcomes = [engine_error(exc)] * len(refs)
        ready = None if self._stream is None else self._stream.record_event()
        seconds = time.perf_counter() - began
        done = []
        left = iter(outcomes)
        for sequence, images in wanted:
            leases: dict[int, Lease] = {}
            error: FeatcacheError | None = None
            for image in images:
                outcome = next(left)
                if isinstance(outcome, Lease):
                    leases[image] = outcome
                else:
                    error = error or outcome
            done.append(Encoded(sequence, leases, error, ready, seconds))
        return done


def engine_error(exc: Exception) -> FeatcacheError:
    """What a request is told that fails with `exc`."""
    if isinstance(exc, FeatcacheError):
        return exc
    if isinstance(exc, torch.OutOfMemoryError):
        return RequestError("not enough memory for this request beside the others; try again later")
    error = FeatcacheError(f"the engine failed on this request: {type(exc).__name__}")
    error.__cause__ = exc
    return error
