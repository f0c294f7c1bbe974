"""Single flight: what several threads want at the same time is computed by one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from featcache.errors import StoreError

T = TypeVar("T")


class Flight(Generic[T]):
    """One key that one thread is computing. Made by `Flights.board`."""

    __slots__ = ("_landed", "_outcome", "pilot")

    def __init__(self) -> None:
        self.pilot = threading.get_ident()
        self._landed = threading.Event()
        self._outcome: T | Exception | None = None

    def land(self, outcome: T | Exception | None) -> None:
        self._outcome = outcome
        self._landed.set()

    def wait(self) -> T | Exception | None:
        """Wait for the outcome; None if the computing was given up, so that the next may try.

        To be interrupted here harms nobody else.
        """
        self._landed.wait()
        return self._outcome


class Boarding(NamedTuple, Generic[T]):
    """own: keys that the caller computes and must land. others: keys that other threads are computing."""

    own: dict[bytes, Flight[T]]
    others: dict[bytes, Flight[T]]


class Flights(Generic[T]):
    """The keys being computed now. Thread-safe; nothing is computed or waited for under its lock.

    Who boards computes and lands its own flights before it waits for those of others, so that two threads
    never wait for each other. A landed flight leaves no trace.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _flights
        self._flights: dict[bytes, Flight[T]] = {}

    def board(self, keys: Iterable[bytes]) -> Boarding[T]:
        """Take on those of `keys` that nobody computes. Does not block.

        Raises StoreError if the calling thread is computing one of them already: it would wait for itself.
        """
        boarding = Boarding[T]({}, {})
        with self._lock:
            wanted = list(dict.fromkeys(keys))
            for key in wanted:
                flight = self._flights.get(key)
                if flight is not None and flight.pilot == threading.get_ident():
                    raise StoreError(f"compute asked for {key.hex()[:12]}, which it is computing itself")
            for key in wanted:
                if (flight := self._flights.get(key)) is not None:
                    boarding.others[key] = flight
                else:
                    boarding.own[key] = self._flights[key] = Flight()
        return boarding

    def land(self, key: bytes, outcome: T | Exception | None) -> None:
        """End the flight of `key`: everybody who waits for it gets `outcome`."""
        with self._lock:
            flight = self._flights.pop(key)
        flight.land(outcome)

    def __len__(self) -> int:
        with self._lock:
            return len(self._flights)
