"""Single flight: what several threads want at the same time is computed once."""

from __future__ import annotations

import threading

import pytest

from featcache.errors import StoreError
from featcache.flight import Flights


def test_first_gets_the_key_and_the_others_its_outcome() -> None:
    flights: Flights[str] = Flights()
    assert list(flights.board([b"a", b"b", b"a"]).own) == [b"a", b"b"]
    outcomes: list[str | Exception | None] = []
    boarded = threading.Barrier(9)

    def want() -> None:
        boarding = flights.board([b"a", b"c"])
        assert b"a" in boarding.others
        boarded.wait(60)
        outcomes.append(boarding.others[b"a"].wait())

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    boarded.wait(60)
    assert outcomes == []
    flights.land(b"a", "features")
    for thread in threads:
        thread.join(60)
    assert outcomes == ["features"] * 8


def test_landed_flight_leaves_no_trace() -> None:
    flights: Flights[str] = Flights()
    flights.board([b"a"])
    flights.land(b"a", ValueError("no"))
    assert len(flights) == 0
    assert list(flights.board([b"a"]).own) == [b"a"]


def test_given_up_is_none_to_those_who_wait() -> None:
    flights: Flights[str] = Flights()
    own = flights.board([b"a"]).own
    flights.land(b"a", None)
    assert own[b"a"].wait() is None


def test_wanting_what_one_computes_oneself_is_an_error_not_a_deadlock() -> None:
    flights: Flights[str] = Flights()
    flights.board([b"a"])
    with pytest.raises(StoreError, match="computing itself"):
        flights.board([b"b", b"a"])
    assert len(flights) == 1  # and b"b" was not taken on


def test_other_keys_may_be_wanted_while_computing() -> None:
    flights: Flights[str] = Flights()
    flights.board([b"a"])
    assert list(flights.board([b"b"]).own) == [b"b"]
