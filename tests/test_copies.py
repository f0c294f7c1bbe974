"""Copies to the host, without a device. bench/h200_store.py has the same for CUDA."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from tier_contract import features_of, is_intact

from featcache.copies import HostCopies, cuda_device, open_copies
from featcache.errors import ConfigError, StoreClosedError
from featcache.features import Features, Header, Layout, tensors_of


class Landing:
    """What `done` was called with, and on which thread."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.errors: list[Exception | None] = []
        self.threads: list[str] = []
        self._gate = gate

    def __call__(self, error: Exception | None) -> None:
        if self._gate is not None:
            assert self._gate.wait(60)
        self.errors.append(error)
        self.threads.append(threading.current_thread().name)


def start(copies: HostCopies, features: Features, done: Callable[[Exception | None], None]) -> torch.Tensor:
    header = features.header(bytes(32))
    place = torch.zeros(header.data_bytes, dtype=torch.uint8)
    copies.to_host(features, header, place, copies.mark(), done)
    return place


def read_back(place: torch.Tensor, like: Features) -> Features:
    header = like.header(bytes(32))
    return Features(tensors_of(header, place), header.layout, header.fingerprint)


def test_bytes_arrive_on_the_copies_thread() -> None:
    copies, landing = HostCopies(), Landing()
    places = [start(copies, features_of(n), landing) for n in range(20)]
    assert copies.drain(60)
    assert landing.errors == [None] * 20
    assert set(landing.threads) == {"featcache-copies"}
    assert all(is_intact(read_back(place, features_of(n)), n) for n, place in enumerate(places))
    copies.close()


def test_returns_before_a_byte_has_moved() -> None:
    """With the thread kept busy by another copy, a later one has returned with its place still empty."""
    gate = threading.Event()
    copies = HostCopies()
    start(copies, features_of(1), Landing(gate))
    landing = Landing()
    place = start(copies, features_of(2), landing)
    assert not place.any() and landing.errors == []
    assert not copies.drain(0.01)
    gate.set()
    assert copies.drain(60)
    assert is_intact(read_back(place, features_of(2)), 2)
    copies.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_every_dtype_and_strides(dtype: torch.dtype) -> None:
    rows = torch.arange(-12, 12).reshape(6, 4).to(dtype).t()  # not contiguous
    features = Features({"rows": rows, "deepstack.0": torch.full((4, 3), 2.5)}, Layout(4, 1, 1))
    copies, landing = HostCopies(), Landing()
    place = start(copies, features, landing)
    copies.close()
    got = read_back(place, features)
    assert torch.equal(got.rows.float(), rows.float()) and torch.equal(
        got.tensors["deepstack.0"], features.tensors["deepstack.0"]
    )


def test_tensors_made_in_inference_mode_are_copied() -> None:
    with torch.inference_mode():
        features = Features({"rows": torch.ones(4, 4) * 3}, Layout(4, 1, 1))
    copies, landing = HostCopies(), Landing()
    place = start(copies, features, landing)
    copies.close()
    assert landing.errors == [None]
    assert read_back(place, features).rows.unique().tolist() == [3.0]


def test_failed_copy_is_told_and_the_next_one_works() -> None:
    copies, bad, good = HostCopies(), Landing(), Landing()
    features = features_of(1)
    header = features.header(bytes(32))
    missing = Header.of(
        header.key, header.fingerprint, header.layout, {**header.specs, "deepstack.0": header.specs["rows"]}
    )
    copies.to_host(features, missing, torch.zeros(2 * header.data_bytes, dtype=torch.uint8), None, bad)
    place = start(copies, features, good)
    assert copies.drain(60)
    assert isinstance(bad.errors[0], KeyError) and good.errors == [None]
    assert is_intact(read_back(place, features), 1)
    copies.close()


def test_callback_that_raises_does_not_end_the_thread() -> None:
    def raises(error: Exception | None) -> None:
        raise RuntimeError("on purpose")

    copies, landing = HostCopies(), Landing()
    start(copies, features_of(1), raises)
    start(copies, features_of(2), landing)
    assert copies.drain(60)
    assert landing.errors == [None]
    copies.close()


def test_close_finishes_what_was_started_and_refuses_more() -> None:
    gate = threading.Event()
    copies, landing = HostCopies(), Landing()
    start(copies, features_of(1), Landing(gate))
    places = [start(copies, features_of(n), landing) for n in range(5)]
    closer = threading.Thread(target=copies.close)
    closer.start()
    gate.set()
    closer.join(60)
    assert landing.errors == [None] * 5
    assert is_intact(read_back(places[4], features_of(4)), 4)
    with pytest.raises(StoreClosedError):
        start(copies, features_of(1), landing)
    assert not [thread for thread in threading.enumerate() if thread.name == "featcache-copies"]


def test_source_is_let_go_when_its_copy_is_done() -> None:
    copies, landing = HostCopies(), Landing()
    rows = torch.ones(4, 4)
    gone = weakref.ref(rows)
    start(copies, Features({"rows": rows}, Layout(4, 1, 1)), landing)
    assert copies.drain(60)
    del rows
    deadline = time.monotonic() + 60
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None  # though the thread waits for the next one
    copies.close()


def test_device_names() -> None:
    assert cuda_device(None) is None
    assert cuda_device("cpu") is None
    with pytest.raises(ConfigError, match="device: 'gpu'"):
        cuda_device("gpu")
    with pytest.raises(ConfigError, match="device: 'meta'"):
        cuda_device("meta")
    with pytest.raises(ConfigError, match="CUDA devices"):
        cuda_device("cuda:99")
    copies = open_copies(None)
    assert isinstance(copies, HostCopies)
    copies.close()
