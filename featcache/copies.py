"""Copies between where features are computed and the host, beside the compute stream.

On CUDA there is one stream each way. Copies are ordered by events, tensors that cross streams are recorded on
both or kept until their event has passed, pinned memory comes from the arena alone, and one thread finds out
what is done: neither the host nor the compute stream waits for a copy out. Without CUDA that thread copies.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy
import torch

from featcache.errors import ConfigError, StoreClosedError, StoreError
from featcache.features import Features, Header, bytes_of
from featcache.tiers.device import storage_bytes

log = logging.getLogger("featcache")

# Each look at the events takes the GIL from the thread that launches copies: seldom, if nobody waits for it.
POLL_S, DRAINING_POLL_S = 1e-3, 1e-4

Done: TypeAlias = Callable[[Exception | None], None]
Event: TypeAlias = "torch.cuda.Event | None"


class Copies(Protocol):
    """What the store needs of either machine. All but `drain` and `close` return without waiting."""

    def own(self, features: Features) -> Features:
        """The features where the store's leases have them, in storages that hold nothing else."""

    def mark(self) -> Event:
        """The point that the caller's current stream has reached; None where there are no streams."""

    def order(self, features: Features, event: Event) -> None:
        """Let the caller's current stream read `features`, which hold what they should after `event`."""

    def to_host(
        self, features: Features, header: Header, place: torch.Tensor, after: Event, done: Done
    ) -> None:
        """Copy the tensors, in the header's order, to `place`, (data_bytes,) uint8 on the host.

        features: what `own` has returned; they must not change any more. Returns before a byte has moved.
        `done` is called once, on the copies' thread, with what went wrong or None.
        """

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the copies to the host that were started before are done; False if that takes longer."""

    def close(self) -> None:
        """Finish what was started and end the thread."""


class _Thread(ABC):
    """The copies' thread, its count of jobs, and how both end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below; callbacks are not called under it
        self._running = 0
        self._started_out = self._finished_out = 0
        self._num_draining = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="featcache-copies", daemon=True)

    @abstractmethod
    def _run(self) -> None: ...

    def _start(self, *, out: bool) -> None:
        """Count a job that is about to start, and wake the thread."""
        with self._changed:
            if self._closing:
                raise StoreClosedError("the store is closed")
            self._running += 1
            self._started_out += out
            self._changed.notify_all()

    def _finish(self, landed: Sequence[tuple[Done, Exception | None]], *, out: bool) -> None:
        for done, error in landed:
            if error is not None:
                log.error("a copy failed, its features are not kept: %s", error)
            try:
                done(error)
            except Exception:  # a bug of ours must not end the thread that others wait for
                log.exception("after a copy")
        with self._changed:
            self._running -= len(landed)
            if out:
                self._finished_out += len(landed)
            self._changed.notify_all()

    def _await_work(self) -> bool:
        """Wait for a job. False if there is none and there will be none."""
        with self._changed:
            while not self._running and not self._closing:
                self._changed.wait()
            return self._running > 0

    def drain(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            target = self._started_out  # they finish in the order in which they start
            self._num_draining += 1
            try:
                return self._changed.wait_for(lambda: self._finished_out >= target, timeout_s)
            finally:
                self._num_draining -= 1

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()


class _Task(NamedTuple):
    features: Features
    header: Header
    place: torch.Tensor
    done: Done


class HostCopies(_Thread):
    """Where features are computed on the CPU: plain copies, on the thread."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: deque[_Task] = deque()
        self._thread.start()

    def own(self, features: Features) -> Features:
        return _moved(features, torch.device("cpu"))

    def mark(self) -> Event:
        return None

    def order(self, features: Features, event: Event) -> None:
        pass

    def to_host(
        self, features: Features, header: Header, place: torch.Tensor, after: Event, done: Done
    ) -> None:
        with self._changed:
            self._start(out=True)
            self._tasks.append(_Task(features, header, place, done))

    def _run(self) -> None:
        while self._await_work():
            self._work(self._tasks.popleft())

    def _work(self, task: _Task) -> None:
        error: Exception | None = None
        try:
            place = task.place.numpy()
            for name, _, begin, end in task.header.offsets():
                source = bytes_of(task.features.tensors[name].contiguous())
                numpy.copyto(place[begin:end], numpy.frombuffer(source, numpy.uint8))  # lets go of the GIL
        except Exception as exc:
            error = exc
        self._finish([(task.done, error)], out=True)


class _Flying(NamedTuple):
    event: torch.cuda.Event
    keep: Any  # what the copy reads and writes: it stays until the copy is done
    done: Done


class Arrival(NamedTuple):
    """data: (data_bytes,) uint8 on the device, in a storage of its own; whole after `event`."""

    data: torch.Tensor
    event: torch.cuda.Event


class CudaCopies(_Thread):
    """To and from one CUDA device, for host memory that is pinned."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._out_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out: deque[_Flying] = deque()
        self._in: deque[_Flying] = deque()
        self._launching = threading.Lock()  # guards the order of _out and _in against that of their streams
        self._thread.start()

    def own(self, features: Features) -> Features:
        return _alone(_moved(features, self.device))

    def mark(self) -> Event:
        event: Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def order(self, features: Features, event: Event) -> None:
        stream = torch.cuda.current_stream(self.device)
        if event is not None:
            stream.wait_event(event)
        for tensor in features.tensors.values():
            # If it is evicted while this stream still reads it, its memory isn't reused before that is done.
            tensor.record_stream(stream)

    def to_host(
        self, features: Features, header: Header, place: torch.Tensor, after: Event, done: Done
    ) -> None:
        self._start(out=True)
        try:
            with self._launching, torch.cuda.stream(self._out_stream):
                if after is not None:
                    self._out_stream.wait_event(after)
                for name, _, begin, end in header.offsets():
                    source = features.tensors[name].view(-1).view(torch.uint8)
                    place[begin:end].copy_(source, non_blocking=True)
                event = self._out_stream.record_event()
                self._out.append(_Flying(event, (features, place), done))
        except Exception as exc:
            self._finish([(done, _translated(exc))], out=True)

    def to_device(self, place: torch.Tensor, done: Done) -> Arrival:
        """Copy pinned host bytes, (n,) uint8, to new memory of the device.

        `done` is called once, on the copies' thread, when `place` may be reused. Raises StoreError, and never
        calls `done`, if the device has no memory for it.
        """
        self._start(out=False)
        try:
            with self._launching, torch.cuda.stream(self._in_stream):
                # Allocated for this stream: memory of the compute stream's pool may still be read there, and
                # the copy would have to wait for the computing.
                data = torch.empty(place.numel(), dtype=torch.uint8, device=self.device)
                data.copy_(place, non_blocking=True)
                event = self._in_stream.record_event()
                self._in.append(_Flying(event, (data, place), done))
        except Exception as exc:
            self._finish([(_ignore, None)], out=False)
            raise _translated(exc) from exc
        return Arrival(data, event)

    def _run(self) -> None:
        while self._await_work():
            self._land(self._out, out=True)
            self._land(self._in, out=False)
            time.sleep(DRAINING_POLL_S if self._num_draining else POLL_S)

    def _land(self, queue: deque[_Flying], *, out: bool) -> None:
        """Finish the copies of one stream that are done."""
        landed: list[tuple[Done, Exception | None]] = []
        while queue:
            error: Exception | None = None
            try:
                if not queue[0].event.query():  # type: ignore[no-untyped-call]
                    break
            except RuntimeError as exc:  # the device is lost, or a kernel before it has failed
                error = _translated(exc)
            landed.append((queue.popleft().done, error))
        if landed:
            self._finish(landed, out=out)


def open_copies(device: torch.device | None) -> HostCopies | CudaCopies:
    """For a store whose leases are on `device`; None is the host."""
    return HostCopies() if device is None else CudaCopies(device)


def cuda_device(device: str | torch.device | None) -> torch.device | None:
    """The device with its number, or None for the host. Raises ConfigError if there is no such device."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError as exc:
        raise ConfigError(f"device: {device!r} is none; write cuda, cuda:0 or cpu") from exc
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ConfigError(f"device: {device!r}; features are kept on CUDA devices, or with cpu on the host")
    if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def _moved(features: Features, device: torch.device) -> Features:
    """The features on `device`. Those that come from another one are waited for: it isn't the usual path."""
    if all(tensor.device == device for tensor in features.tensors.values()):
        return features
    return _with(features, {name: tensor.to(device) for name, tensor in features.tensors.items()})


def _alone(features: Features) -> Features:
    """The features in contiguous storages that hold nothing else: a view pins all of its batch's memory."""
    tensors = features.tensors.values()
    if all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors):
        if all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors):
            return features
        if storage_bytes(features) == features.nbytes:  # several tensors that share one storage
            return features
    return _with(
        features,
        {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in features.tensors.items()
        },
    )


def _with(features: Features, tensors: Mapping[str, torch.Tensor]) -> Features:
    return Features(tensors, features.layout, features.fingerprint)


def _translated(exc: Exception) -> StoreError:
    if isinstance(exc, StoreError):
        return exc
    if isinstance(exc, torch.OutOfMemoryError):
        return StoreError("the device has no memory left for cached features; give it a smaller device_bytes")
    return StoreError(f"CUDA: {exc}")


def _ignore(error: Exception | None) -> None:
    pass
