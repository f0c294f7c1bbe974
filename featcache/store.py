"""`FeatureStore`: one object over all tiers.

    get       device tier, host tier, disk tier; what is found further down moves up
    put       device tier at once ─▶ host tier, copied beside the computing ─▶ writer's thread ─▶ disk tier
    outcomes  get what there is, compute what there isn't: once for all threads that want it

Nothing waits for a copy out or a disk write but `flush`, `delete`, `close`, and a `put` that is told to.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import torch

from featcache.aliases import Aliases
from featcache.backlog import Backlog
from featcache.copies import CudaCopies, Event, open_copies
from featcache.errors import (
    CancelledError,
    ConfigError,
    FeatcacheError,
    RecordError,
    SchemaError,
    StoreClosedError,
    StoreError,
)
from featcache.features import DIGEST_BYTES, Features, Header, Layout, bytes_of, tensors_of
from featcache.flight import Flights
from featcache.keys import EncoderFingerprint, FeatureKey
from featcache.lease import Lease, Origin, TierName
from featcache.settings import PolicyName
from featcache.sizes import parse_size
from featcache.stats import COUNTERS, StoreStats
from featcache.tiers.device import DeviceTier
from featcache.tiers.disk import DiskTier
from featcache.tiers.host import HostTier
from featcache.tiers.memory import Entry
from featcache.tiers.writer import DiskWriter

if TYPE_CHECKING:
    from featcache.tiers.verify import Progress, VerifyReport

log = logging.getLogger("featcache")

_LOADERS = 64

Compute: TypeAlias = Callable[[list[FeatureKey]], Mapping[FeatureKey, "Features | Exception"]]


class _Made(NamedTuple):
    """Freshly computed features, as those who waited for them get them: whole after `event`."""

    features: Features
    event: Event


class FeatureStore:
    """Features under their keys, in up to three tiers. Thread-safe; a context manager. Made by `open`."""

    def __init__(
        self,
        *,
        device: torch.device | None,
        device_tier: DeviceTier | None,
        host: HostTier,
        disk: DiskTier | None,
        queue_bytes: int,
        disk_error: str | None = None,
    ) -> None:
        self._device = device_tier
        self._host = host
        self._disk = disk
        self._disk_error = disk_error
        self._copies = open_copies(device)
        self._writer = None
        if disk is not None and not disk.readonly:
            self._writer = DiskWriter(disk, max_bytes=queue_bytes)
        self._backlog = Backlog(queue_bytes)
        self._flights: Flights[_Made] = Flights()
        self._aliases = Aliases()
        self._loading = [threading.Lock() for _ in range(_LOADERS)]  # by key: one thread reads it from disk
        self._counting = threading.Lock()  # guards _counts
        self._counts: Counter[str] = Counter()
        self._pid = os.getpid()
        self._closing = threading.Lock()  # guards the step to _closed
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        host_bytes: int | str = "1GiB",
        disk_bytes: int | str = "20GiB",
        device: str | torch.device | None = None,
        device_bytes: int | str = 0,
        readonly: bool = False,
        policy: PolicyName = "s3fifo",
        queue_bytes: int | str = "256MiB",
        sync: bool = True,
    ) -> FeatureStore:
        """Open a store.

        path: the disk tier's folder, made if it isn't there; None is no disk tier.
        host_bytes, disk_bytes, device_bytes: budgets, as bytes or "4GiB"; 0 is no such tier.
        device: a CUDA device, on which leases have their features; None is the host.
        readonly: never write to the disk tier.
        policy: which features leave memory first, "s3fifo" or "lru".
        queue_bytes: features that may wait for the disk.
        sync: whether a commit is on the disk when it returns, see DiskTier.open.

        A path that can't be written is opened for reading, and one that can't be opened at all is done
        without: a warning says so, and `stats().disk_error`.

        Raises ConfigError for a setting that can't be, SchemaError for a store of another version, StoreError
        for a readonly one that isn't there.
        """
        place = _cuda_device(device)
        host_size, disk_size = parse_size(host_bytes, "host_bytes"), parse_size(disk_bytes, "disk_bytes")
        device_size, queue_size = (
            parse_size(device_bytes, "device_bytes"),
            parse_size(queue_bytes, "queue_bytes"),
        )
        if policy not in ("s3fifo", "lru"):
            raise ConfigError(f"policy: {policy!r}; there are s3fifo, lru")
        if place is not None and path is not None and disk_size and not host_size:
            raise ConfigError("host_bytes: 0, but features pass from the device to the disk by the host tier")
        host = HostTier(host_size, policy=policy, pinned=place is not None)
        disk, error = None, None
        if path is not None and disk_size:
            disk, error = _open_disk(Path(path).expanduser(), disk_size, readonly=readonly, sync=sync)
        return cls(
            device=place,
            device_tier=DeviceTier(device_size, policy=policy) if place is not None and device_size else None,
            host=host,
            disk=disk,
            queue_bytes=queue_size,
            disk_error=error,
        )

    # Finding

    def get(self, key: bytes) -> Lease | None:
        """A lease on the features of `key`, to be released; None if no tier has them.

        Blocks only for a read from the disk tier. On CUDA the features are ready for the current stream.
        """
        self._require_open()
        lease = self._find(key)
        self._count("misses" if lease is None else f"hits_{lease.tier}")
        return lease

    def get_many(self, keys: Iterable[bytes]) -> list[Lease | None]:
        """As `get`, for several keys, in order."""
        return [self.get(key) for key in keys]

    def _find(self, key: bytes) -> Lease | None:
        """The path of a hit: each tier in order."""
        if self._device is not None and (entry := self._device.acquire(key)) is not None:
            self._host.touch(key)
            self._touch_disk(key)
            return self._lease_on_device(self._device, entry, "device")
        if (entry := self._host.acquire(key)) is not None:
            self._touch_disk(key)
            return self._lease_on_host(entry, "host")
        if self._disk is None:
            return None
        with self._loading[key[0] % _LOADERS]:
            if (entry := self._host.acquire(key)) is not None:  # read by another thread meanwhile
                return self._lease_on_host(entry, "host")
            return self._load(self._disk, key)

    def _touch_disk(self, key: bytes) -> None:
        """What is hot in memory is hot on disk too, for the day it has left memory."""
        if self._disk is not None:
            self._disk.touch(key)

    def _lease_on_device(self, tier: DeviceTier, entry: Entry, origin: Origin) -> Lease:
        features = entry.features
        assert features is not None, "a device entry has its features from the start"
        self._copies.order(features, entry.event)
        return Lease(entry.key, features, origin, (tier, entry))

    def _lease_on_host(self, entry: Entry, origin: Origin) -> Lease:
        """A lease on a held host entry; with a device, on a copy of it there."""
        features, event = entry.features, entry.event
        assert features is not None, "what is acquired can be shown"
        if isinstance(self._copies, CudaCopies) and not _is_cuda(features):
            return self._promote(self._copies, entry, origin)
        self._copies.order(features, event)  # still being copied out: shown where it was computed
        return Lease(entry.key, features, origin, (self._host, entry))

    def _promote(self, copies: CudaCopies, entry: Entry, origin: Origin) -> Lease:
        """Copy a held host entry to the device; its hold ends with the copy."""
        try:
            arrival = copies.to_device(self._host.data(entry), lambda error: self._host.release(entry))
        except BaseException:
            self._host.release(entry)
            raise
        header = entry.header
        features = Features(tensors_of(header, arrival.data), header.layout, header.fingerprint)
        return self._admit_to_device(header, features, arrival.event, origin)

    def _admit_to_device(self, header: Header, features: Features, event: Event, origin: Origin) -> Lease:
        """A lease on features that are on the device, which its tier keeps if it has room."""
        admission = None if self._device is None else self._device.admit(header, features, event)
        if self._device is None or admission is None:
            self._copies.order(features, event)
            return Lease(header.key, features, origin)
        if admission.is_new:
            self._device.settle(admission.entry)
        return self._lease_on_device(self._device, admission.entry, origin)

    def _load(self, disk: DiskTier, key: bytes) -> Lease | None:
        """Read a record from disk into the host tier, or beside it where that has no room."""
        entry: Entry | None = None
        beside = torch.empty(0, dtype=torch.uint8)

        def into(header: Header) -> memoryview:
            nonlocal entry, beside
            admission = self._host.admit(header)
            if admission is not None and admission.is_new:
                entry = admission.entry
                return self._host.memory(entry)
            if admission is not None:  # put by another thread since we looked
                self._host.release(admission.entry)
            beside = torch.empty(header.data_bytes, dtype=torch.uint8)
            return beside.numpy().data

        header, features = None, None
        try:
            header = disk.read(key, into)
            if header is not None and entry is not None:
                self._host.settle(entry)
            elif header is not None:
                features = Features(tensors_of(header, beside), header.layout, header.fingerprint)
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._note_disk_error(exc)
            header = None
        except RecordError as exc:
            self._count("rejected")
            log.warning("disk tier: record %s is not used: %s", key.hex()[:12], exc)
            header = None
        finally:
            if entry is not None and header is None:
                self._host.abandon(entry)
        if header is None:
            return None
        if entry is not None:
            return self._lease_on_host(entry, "disk")
        assert features is not None
        return self._lease_beside(header, features)

    def _lease_beside(self, header: Header, features: Features) -> Lease:
        features = self._copies.own(features)
        if isinstance(self._copies, CudaCopies):
            return self._admit_to_device(header, features, self._copies.mark(), "disk")
        return Lease(header.key, features, "disk")

    def layout(self, key: bytes) -> Layout | None:
        """The layout of held features; touches no tensor data, and is no use of them."""
        self._require_open()
        for tier in (self._device, self._host):
            if tier is not None and (header := tier.header(key)) is not None:
                return header.layout
        if self._disk is None:
            return None
        try:
            header = self._disk.header(key)
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._note_disk_error(exc)
            return None
        return None if header is None else header.layout

    def tier_of(self, key: bytes) -> TierName | None:
        """The nearest tier that has the key; no use of it."""
        self._require_open()
        if self._device is not None and key in self._device:
            return "device"
        if key in self._host:
            return "host"
        return "disk" if self._is_on_disk(key) else None

    def _is_on_disk(self, key: bytes) -> bool:
        try:
            return self._disk is not None and self._disk.contains(key)
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._note_disk_error(exc)
            return False

    # Keeping

    def put(self, key: bytes, features: Features, *, wait: bool = False) -> None:
        """Keep features in all tiers. Returns before any byte has moved.

        features: become the store's; their tensors must not be changed afterwards. On CUDA they are complete
            once the work is done that the current stream has been given so far.
        wait: wait for room on the way to the disk, rather than keep them in memory only.

        Raises StoreClosedError, and ConfigError for a key of another length.
        """
        self._require_open()
        self._keep(key, features, wait=wait)[0].release()

    def _keep(self, key: bytes, features: Features, *, wait: bool) -> tuple[Lease, _Made]:
        """The path of a new record: device, host, and by callbacks disk. A lease on it, and what it is."""
        if len(key) != DIGEST_BYTES:
            raise ConfigError(f"key: {len(key)} bytes; a feature key has {DIGEST_BYTES}")
        self._count("puts")
        features = self._copies.own(features)
        event = self._copies.mark()
        header = features.header(key)
        lease = self._admit_to_device(header, features, event, "encoded")
        self._send_to_host(header, features, event, wait=wait)
        return lease, _Made(features, event)

    def _send_to_host(self, header: Header, features: Features, event: Event, *, wait: bool) -> None:
        if header.key in self._host:
            return  # it went, or goes, to the disk from there
        is_for_disk = self._writer is not None and self._backlog.enter(header.data_bytes, wait=wait)
        if self._writer is not None and not is_for_disk:
            self._count("unwritten")
        admission = self._host.admit(header, features, event)
        if admission is None:
            self._count("no_room")
            if is_for_disk:
                self._send_past_host(header, features, event)
            return
        entry = admission.entry
        if not admission.is_new:
            self._host.release(entry)
            if is_for_disk:
                self._backlog.leave(header.data_bytes)
            return

        def done(error: Exception | None) -> None:
            self._arrived(entry, error, is_for_disk=is_for_disk)

        try:
            self._copies.to_host(features, header, self._host.data(entry), event, done)
        except BaseException:  # closed meanwhile
            done(StoreClosedError("the store is closed"))
            raise

    def _arrived(self, entry: Entry, error: Exception | None, *, is_for_disk: bool) -> None:
        """On the copies' thread: the bytes are in the host tier, and go on to the writer from there."""
        if error is not None:
            self._count("failed_copies")
            self._host.abandon(entry)
            if is_for_disk:
                self._backlog.leave(entry.header.data_bytes)
            return
        self._host.settle(entry)
        if is_for_disk:
            self._submit(entry, [self._host.memory(entry)], self._host.release)
        else:
            self._host.release(entry)

    def _send_past_host(self, header: Header, features: Features, event: Event) -> None:
        """To the writer from where they were computed: the host tier has no room for them now."""
        entry = None if _is_cuda(features) else self._host.lend(header, features, event)
        if entry is None:
            self._backlog.leave(header.data_bytes)
            return
        pieces = [bytes_of(features.tensors[name].contiguous()) for name in header.specs]
        self._submit(entry, pieces, self._host.abandon)

    def _submit(self, entry: Entry, pieces: Sequence[memoryview], let_go: Callable[[Entry], None]) -> None:
        """Hand a held entry to the writer, which lets go of it when it is committed or dropped."""
        nbytes = entry.header.data_bytes

        def on_done(stored: bool) -> None:
            let_go(entry)
            self._backlog.leave(nbytes)

        assert self._writer is not None
        try:
            is_taken = not self._is_on_disk(entry.key) and self._writer.submit(entry.header, pieces, on_done)
        except StoreClosedError:
            is_taken = False
        if not is_taken:
            on_done(False)

    # Computing what is missing

    def get_or_compute(self, keys: Sequence[bytes], compute: Compute, *, wait: bool = False) -> list[Lease]:
        """Leases for all keys, in order; what no tier has is computed, once over all threads.

        compute: gets the missing keys, each once, and returns their features by key, or an Exception in place
            of features, which fails that key alone. What it raises fails all keys that it was given, for
            every thread that waits for them. Failures leave no trace.
        wait: as for `put`.

        Raises the first failed key's exception, after all leases are released.
        """
        outcomes = self._outcomes(keys, compute, wait=wait)
        failed = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
        leases = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
        if failed is None:
            return leases
        for lease in leases:
            lease.release()
        raise failed

    def outcomes(
        self, keys: Sequence[bytes], compute: Compute, *, wait: bool = False
    ) -> list[Lease | FeatcacheError]:
        """As `get_or_compute`, but each key has an outcome of its own: a lease, or its error.

        An exception that is no FeatcacheError comes as a StoreError that it is the cause of.
        """
        outcomes = self._outcomes(keys, compute, wait=wait)
        return [_as_ours(key, outcome) for key, outcome in zip(keys, outcomes, strict=True)]

    def _outcomes(self, keys: Sequence[bytes], compute: Compute, *, wait: bool) -> list[Lease | Exception]:
        self._require_open()
        found: dict[bytes, Lease | Exception] = {}
        wanted = [FeatureKey(key) for key in dict.fromkeys(keys)]
        try:
            for key in wanted:
                if (lease := self.get(key)) is not None:
                    found[key] = lease
            while missing := [key for key in wanted if key not in found]:
                boarding = self._flights.board(missing)
                self._fly([FeatureKey(key) for key in boarding.own], compute, found, wait=wait)
                for other, flight in boarding.others.items():
                    if (made := flight.wait()) is not None:
                        self._count("joined")
                        found[other] = made if isinstance(made, Exception) else self._lease_made(other, made)
            return _in_order(keys, found)
        except BaseException:
            for outcome in found.values():
                if isinstance(outcome, Lease) and not outcome.is_released:
                    outcome.release()
            raise

    def _fly(
        self,
        keys: Sequence[FeatureKey],
        compute: Compute,
        found: dict[bytes, Lease | Exception],
        *,
        wait: bool,
    ) -> None:
        """Compute what this thread has boarded, and land all of it whatever happens."""
        flying = dict.fromkeys(keys)

        def land(key: FeatureKey, outcome: _Made | Exception | None) -> None:
            del flying[key]
            self._flights.land(key, outcome)

        try:
            for key in keys:  # another flight may have landed between our look and our boarding
                if (lease := self._find(key)) is not None:
                    found[key] = lease
                    land(key, None)
            missing = list(flying)
            computed = compute(missing) if missing else {}
            self._count("computed", len(missing))
            for key in missing:
                outcome = computed.get(key)
                if isinstance(outcome, Features):
                    try:
                        found[key], made = self._keep(key, outcome, wait=wait)
                        land(key, made)
                        continue
                    except Exception as exc:
                        outcome = exc
                outcome = outcome or StoreError(f"compute returned nothing for {key.hex()[:12]}")
                found[key] = outcome
                land(key, outcome)
        except CancelledError:
            raise  # this caller was cancelled, and those who wait for it are not: they compute themselves
        except Exception as exc:
            for key in list(flying):
                found[key] = exc
                land(key, exc)
        finally:
            for key in list(flying):
                land(key, None)

    def _lease_made(self, key: bytes, made: _Made) -> Lease:
        """Of what another thread has computed: its tensors are no part of a tier that could reuse them."""
        self._copies.order(made.features, made.event)
        return Lease(key, made.features, "encoded")

    # Other names of images, and of encoders

    def alias(self, alias_key: bytes) -> bytes | None:
        """What `put_alias` has kept under `alias_key`."""
        self._require_open()
        value = self._aliases.get(alias_key)
        if value is not None or self._disk is None:
            return value
        try:
            value = self._disk.alias(alias_key)
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._note_disk_error(exc)
            return None
        if value is not None:
            self._aliases.put(alias_key, value)
        return value

    def put_alias(self, alias_key: bytes, value: bytes) -> None:
        """Keep a short value under `alias_key`, in memory and, by and by, on disk."""
        self._require_open()
        if self._aliases.put(alias_key, value) and self._writer is not None:
            self._writer.submit_alias(alias_key, value)

    def put_encoder(self, fingerprint: EncoderFingerprint, description: Mapping[str, Any]) -> None:
        """Remember on disk what a fingerprint stands for."""
        self._require_open()
        if self._writer is None or self._disk is None:
            return
        try:
            self._disk.put_encoder(fingerprint, description)
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._note_disk_error(exc)

    # Upkeep

    def delete(self, key: bytes) -> bool:
        """Forget a key in all tiers (on disk only if that is writable); whether any had it.

        What is leased stays intact until its release. Blocks until the disk has forgotten it. Raises
        StoreError if it can't be deleted there.
        """
        self._require_open()
        self._copies.drain()
        with self._loading[key[0] % _LOADERS]:
            had = [tier.delete(key) for tier in (self._device, self._host) if tier is not None]
            if self._disk is not None and self._writer is not None:
                self._writer.flush()
                had.append(self._disk.delete([key]) > 0)
        return any(had)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that was put before is committed and synced. StoreError if that takes longer."""
        self._require_open()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._copies.drain(timeout_s):
            raise StoreError(f"copies to the host were not done after {timeout_s} s")
        if self._writer is not None:
            self._writer.flush(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def verify(self, *, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read every record on disk and check it, see DiskTier.verify. StoreError without a disk tier."""
        self._require_open()
        if self._disk is None:
            raise StoreError("this store has no disk tier to verify")
        return self._disk.verify(repair=repair, progress=progress)

    def stats(self) -> StoreStats:
        self._require_open()
        with self._counting:
            counts = {name: self._counts[name] for name in COUNTERS}
        disk = None
        try:
            disk = None if self._disk is None else self._disk.stats()
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._note_disk_error(exc)
        return StoreStats(
            device=None if self._device is None else self._device.stats(),
            host=self._host.stats() if self._host.max_bytes else None,
            disk=disk,
            writer=None if self._writer is None else self._writer.stats(),
            counts=counts,
            backlog_bytes=self._backlog.used_bytes,
            num_aliases=len(self._aliases),
            num_computing=len(self._flights),
            disk_error=self._disk_error,
        )

    def check(self) -> list[str]:
        """Recount all tiers while nothing else uses the store; what doesn't add up."""
        self._require_open()
        self._copies.drain()
        problems = [
            problem for tier in (self._device, self._host) if tier is not None for problem in tier.check()
        ]
        return problems + ([] if self._disk is None else self._disk.check())

    def _count(self, name: str, number: int = 1) -> None:
        with self._counting:
            self._counts[name] += number

    def _note_disk_error(self, exc: StoreError) -> None:
        """The disk tier can't be read just now: a miss, and one warning."""
        if self._disk_error is None:
            log.warning("disk tier: can't read (%s); going on without it", exc)
        self._disk_error = str(exc)

    def _require_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosedError(
                "this store was opened before the process forked; open it again in the child"
            )
        if self._closed:
            raise StoreClosedError("the store is closed")

    def close(self) -> None:
        """Finish copies and writes under way, and close; again does nothing. Leased tensors stay valid."""
        with self._closing:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
        self._backlog.close()
        self._copies.close()
        if self._writer is not None:
            self._writer.close()
        if self._disk is not None:
            self._disk.close()
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cuda_device(device: str | torch.device | None) -> torch.device | None:
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


def _open_disk(
    path: Path, max_bytes: int, *, readonly: bool, sync: bool
) -> tuple[DiskTier | None, str | None]:
    """The disk tier as far as it can be had, and why it isn't what was asked for."""
    try:
        return DiskTier.open(path, max_bytes=max_bytes, readonly=readonly, sync=sync), None
    except SchemaError:
        raise
    except StoreError as exc:
        if readonly:
            raise
        error = str(exc)
    try:
        tier = DiskTier.open(path, max_bytes=max_bytes, readonly=True, sync=sync)
    except StoreError:
        log.warning("disk tier: can't be opened (%s); going on without it", error)
        return None, error
    log.warning("disk tier: can't be written (%s); it is used for reading only", error)
    return tier, error


def _is_cuda(features: Features) -> bool:
    return any(tensor.is_cuda for tensor in features.tensors.values())


def _in_order(keys: Sequence[bytes], found: Mapping[bytes, Lease | Exception]) -> list[Lease | Exception]:
    """The outcome of each key; where a key comes again, another lease on the same features."""
    seen: set[bytes] = set()
    outcomes: list[Lease | Exception] = []
    for key in keys:
        outcome = found[key]
        outcomes.append(outcome.again() if key in seen and isinstance(outcome, Lease) else outcome)
        seen.add(key)
    return outcomes


def _as_ours(key: bytes, outcome: Lease | Exception) -> Lease | FeatcacheError:
    if isinstance(outcome, (Lease, FeatcacheError)):
        return outcome
    error = StoreError(f"computing {key.hex()[:12]} failed: {outcome!r}")
    error.__cause__ = outcome
    return error
