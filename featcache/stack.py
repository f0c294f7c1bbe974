"""`Stack`: the tiers one over the other, and the two paths through them.

find   device tier, host tier, disk tier; what is found further down moves up
keep   device tier at once ─▶ host tier, copied beside the computing ─▶ writer's thread ─▶ disk tier
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from featcache.backlog import Backlog
from featcache.copies import CudaCopies, Event, open_copies
from featcache.errors import RecordError, StoreClosedError, StoreError
from featcache.features import Features, Header, Layout, bytes_of, tensors_of
from featcache.lease import Lease, Origin, TierName
from featcache.stats import Counts
from featcache.tiers.device import DeviceTier
from featcache.tiers.disk import DiskStats, DiskTier
from featcache.tiers.host import HostTier
from featcache.tiers.memory import Entry
from featcache.tiers.writer import DiskWriter

log = logging.getLogger("featcache")

_LOADERS = 64

T = TypeVar("T")


class Made(NamedTuple):
    """Freshly computed features, as those who waited for them get them: whole after `event`."""

    features: Features
    event: Event


class Kept(NamedTuple):
    """What `keep` has taken in. entry: of the device tier, held for the caller; None if it has no room."""

    made: Made
    entry: Entry | None


class Stack:
    """All tiers of a store, the copies between them and the way to the disk. Thread-safe.

    disk_error: why there is no disk tier, or only one to read, although one was asked for; or its last error.
    """

    def __init__(
        self,
        *,
        device: torch.device | None,
        device_tier: DeviceTier | None,
        host: HostTier,
        disk: DiskTier | None,
        queue_bytes: int,
        disk_error: str | None,
        counts: Counts,
    ) -> None:
        self.device = device_tier
        self.host = host
        self.disk = disk
        self.disk_error = disk_error
        self.writer = None
        if disk is not None and not disk.readonly:
            self.writer = DiskWriter(disk, max_bytes=queue_bytes)
        # A device's features reach the disk by way of the host tier: those that wait must leave room there.
        self.backlog = Backlog(queue_bytes if device is None else min(queue_bytes, host.max_bytes // 2))
        self._copies = open_copies(device)
        self._counts = counts
        self._count = counts.add
        self._told_failed_writes = 0
        self._loading = [threading.Lock() for _ in range(_LOADERS)]  # by key: one thread reads it from disk

    # The path of a hit

    def find(self, key: bytes) -> Lease | None:
        """A lease on what any tier has, to be released. Blocks only to read from disk; counts nothing."""
        if self.device is not None and (entry := self.device.acquire(key)) is not None:
            self.host.touch(key)
            self._touch_disk(key)
            return self._lease_on_device(self.device, entry, "device")
        if (entry := self.host.acquire(key)) is not None:
            self._touch_disk(key)
            return self._lease_on_host(entry, "host")
        if self.disk is None:
            return None
        with self._loading[key[0] % _LOADERS]:
            if (entry := self.host.acquire(key)) is not None:  # read by another thread meanwhile
                return self._lease_on_host(entry, "host")
            return self._load(self.disk, key)

    def _touch_disk(self, key: bytes) -> None:
        """What is hot in memory is hot on disk too, for the day it has left memory."""
        if self.disk is not None:
            self.disk.touch(key)

    def _lease_on_device(self, tier: DeviceTier, entry: Entry, origin: Origin) -> Lease:
        features = tier.features(entry)
        self._copies.order(features, entry.event)
        return Lease(entry.key, features, origin, (tier, entry))

    def _lease_on_host(self, entry: Entry, origin: Origin) -> Lease:
        """A lease on a held host entry; with a device, on a copy of it there."""
        made, event = entry.features, entry.event
        if isinstance(self._copies, CudaCopies) and (made is None or not _is_cuda(made)):
            return self._promote(self._copies, entry, origin)
        features = self.host.features(entry) if made is None else made
        self._copies.order(features, event)  # if it is still being copied out, it is shown where it was made
        return Lease(entry.key, features, origin, (self.host, entry))

    def _promote(self, copies: CudaCopies, entry: Entry, origin: Origin) -> Lease:
        """Copy a held host entry to the device; its hold ends with the copy."""
        try:
            arrival = copies.to_device(self.host.data(entry), lambda error: self.host.release(entry))
        except BaseException:
            self.host.release(entry)
            raise
        header = entry.header
        features = Features(tensors_of(header, arrival.data), header.layout, header.fingerprint)
        return self._admit_to_device(header, features, arrival.event, origin)

    def _admit_to_device(self, header: Header, features: Features, event: Event, origin: Origin) -> Lease:
        """A lease on features that are on the device, which its tier keeps if it has room."""
        admission = (
            None if self.device is None else self.device.admit(header, features, event, is_settled=True)
        )
        if self.device is None or admission is None:
            self._copies.order(features, event)
            return Lease(header.key, features, origin)
        return self._lease_on_device(self.device, admission.entry, origin)

    def _load(self, disk: DiskTier, key: bytes) -> Lease | None:
        """Read a record from disk into the host tier, or beside it where that has no room."""
        entry: Entry | None = None
        beside = torch.empty(0, dtype=torch.uint8)

        def into(header: Header) -> memoryview:
            nonlocal entry, beside
            admission = self.host.admit(header)
            if admission is not None and admission.is_new:
                entry = admission.entry
                return self.host.memory(entry)
            if admission is not None:  # put by another thread since we looked
                self.host.release(admission.entry)
            beside = torch.empty(header.data_bytes, dtype=torch.uint8)
            return beside.numpy().data

        header, features = None, None
        try:
            header = disk.read(key, into)
            if header is not None and entry is not None:
                self.host.settle(entry)
                self.host.features(entry)  # RecordError if it isn't what its layout says
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
                self.host.abandon(entry)
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
        for tier in (self.device, self.host):
            if tier is not None and (header := tier.header(key)) is not None:
                return header.layout
        header = self._ask_disk(lambda disk: disk.header(key))
        return None if header is None else header.layout

    def tier_of(self, key: bytes) -> TierName | None:
        """The nearest tier that has the key; no use of it."""
        if self.device is not None and key in self.device:
            return "device"
        if key in self.host:
            return "host"
        return "disk" if self._is_on_disk(key) else None

    def _is_on_disk(self, key: bytes) -> bool:
        return bool(self._ask_disk(lambda disk: disk.contains(key)))

    def _ask_disk(self, question: Callable[[DiskTier], T]) -> T | None:
        """The disk tier's answer; None without one, or if it can't be asked just now."""
        if self.disk is None:
            return None
        try:
            return question(self.disk)
        except StoreClosedError:
            raise
        except StoreError as exc:
            self._note_disk_error(exc)
            return None

    def _note_disk_error(self, exc: StoreError) -> None:
        """One warning; requests go on without the disk tier."""
        if self.disk_error is None:
            log.warning("disk tier: can't be used (%s); going on without it", exc)
        self.disk_error = str(exc)

    # The path of a new record

    def keep(self, key: bytes, features: Features, *, wait: bool) -> Kept:
        """Take features into all tiers. Returns before a byte has moved; `let_go` or `lease_kept` is next.

        wait: wait for room on the way to the disk, rather than keep them in memory only.
        """
        features = self._copies.own(features)
        event = self._copies.mark()
        header = features.header(key)
        admission = (
            None if self.device is None else self.device.admit(header, features, event, is_settled=True)
        )
        kept = Kept(Made(features, event), None if admission is None else admission.entry)
        try:
            self._send_to_host(header, features, event, wait=wait)
        except BaseException:
            self.let_go(kept)
            raise
        return kept

    def let_go(self, kept: Kept) -> None:
        if self.device is not None and kept.entry is not None:
            self.device.release(kept.entry)

    def lease_kept(self, key: bytes, kept: Kept) -> Lease:
        """For the thread that has computed them."""
        if self.device is None or kept.entry is None:
            return self.lease_made(key, kept.made)
        return self._lease_on_device(self.device, kept.entry, "encoded")

    def lease_made(self, key: bytes, made: Made) -> Lease:
        """For a thread that waited while another has computed them.

        The tensors are those that were computed, no part of a tier that could use their memory again.
        """
        self._copies.order(made.features, made.event)
        return Lease(key, made.features, "encoded")

    def _send_to_host(self, header: Header, features: Features, event: Event, *, wait: bool) -> None:
        if header.key in self.host:
            return  # it went, or goes, to the disk from there
        is_for_disk = self.writer is not None and self.backlog.enter(header.data_bytes, wait=wait)
        if self.writer is not None and not is_for_disk:
            self._count("unwritten")
        admission = self.host.admit(header, features, event)
        if admission is None:
            self._count("no_room")
            if is_for_disk:
                self._send_past_host(header, features, event)
            return
        entry = admission.entry
        if not admission.is_new:
            self.host.release(entry)
            if is_for_disk:
                self.backlog.leave(header.data_bytes)
            return

        def done(error: Exception | None) -> None:
            self._arrived(entry, error, is_for_disk=is_for_disk)

        try:
            self._copies.to_host(features, header, self.host.data(entry), event, done)
        except BaseException:  # closed meanwhile
            done(StoreClosedError("the store is closed"))
            raise

    def _arrived(self, entry: Entry, error: Exception | None, *, is_for_disk: bool) -> None:
        """On the copies' thread: the bytes are in the host tier, and go on to the writer from there."""
        if error is not None:
            self._count("failed_copies")
            self.host.abandon(entry)
            if is_for_disk:
                self.backlog.leave(entry.header.data_bytes)
            return
        self.host.settle(entry)
        if is_for_disk:
            self._submit(entry, [self.host.memory(entry)], self.host.release)
        else:
            self.host.release(entry)

    def _send_past_host(self, header: Header, features: Features, event: Event) -> None:
        """To the writer from where they were computed: the host tier has no room for them now."""
        entry = None if _is_cuda(features) else self.host.lend(header, features, event)
        if entry is None:
            self.backlog.leave(header.data_bytes)
            return
        pieces = [bytes_of(features.tensors[name].contiguous()) for name in header.specs]
        self._submit(entry, pieces, self.host.abandon)

    def _submit(self, entry: Entry, pieces: Sequence[memoryview], let_go: Callable[[Entry], None]) -> None:
        """Hand a held entry to the writer, which lets go of it when it is committed or dropped."""
        nbytes = entry.header.data_bytes

        def on_done(stored: bool) -> None:
            if not stored:
                self._count("failed_writes")
            let_go(entry)
            self.backlog.leave(nbytes)

        assert self.writer is not None
        if self._is_on_disk(entry.key):
            on_done(True)
            return
        try:
            is_taken = self.writer.submit(entry.header, pieces, on_done)
        except StoreClosedError:
            is_taken = False
        if not is_taken:
            on_done(False)

    # Aliases and encoders on disk

    def alias_on_disk(self, alias_key: bytes) -> bytes | None:
        return self._ask_disk(lambda disk: disk.alias(alias_key))

    def put_encoder(self, fingerprint: bytes, description: Mapping[str, Any]) -> None:
        if self.writer is not None:
            self._ask_disk(lambda disk: disk.put_encoder(fingerprint, description))

    # Upkeep

    def delete(self, key: bytes) -> bool:
        """See FeatureStore.delete."""
        self._copies.drain()
        with self._loading[key[0] % _LOADERS]:
            had = [tier.delete(key) for tier in (self.device, self.host) if tier is not None]
            if self.disk is not None and self.writer is not None:
                self.writer.flush()
                had.append(self.disk.delete([key]) > 0)
        return any(had)

    def flush(self, timeout_s: float | None = None) -> None:
        """See FeatureStore.flush."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._copies.drain(timeout_s):
            raise StoreError(f"copies to the host were not done after {timeout_s} s")
        if self.writer is not None:
            self.writer.flush(None if deadline is None else max(0.0, deadline - time.monotonic()))
        failed = self._counts.read()["failed_writes"]
        told, self._told_failed_writes = self._told_failed_writes, failed
        if failed > told:
            raise StoreError(f"{failed - told} records could not be written to disk; they are in memory only")

    def disk_stats(self) -> DiskStats | None:
        return self._ask_disk(lambda disk: disk.stats())

    def check(self) -> list[str]:
        """Recount all tiers; what doesn't add up."""
        self._copies.drain()
        tiers = [tier for tier in (self.device, self.host) if tier is not None]
        problems = [problem for tier in tiers for problem in tier.check()]
        return problems + ([] if self.disk is None else self.disk.check())

    def close(self) -> None:
        """Finish copies and writes under way, and close every tier."""
        self.backlog.close()
        self._copies.close()
        is_idle = self.writer is None or self.writer.close()
        if self.disk is not None and is_idle:
            self.disk.close()
        self.host.close()


def _is_cuda(features: Features) -> bool:
    return any(tensor.is_cuda for tensor in features.tensors.values())
