"""`FeatureStore`: one object over all tiers, each missing key computed once.

Nothing here waits for a copy out or a disk write but `flush`, `delete`, `close`, and a `put` that is told to.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

from featcache.aliases import Aliases
from featcache.copies import cuda_device
from featcache.errors import (
    CancelledError,
    ConfigError,
    FeatcacheError,
    SchemaError,
    StoreClosedError,
    StoreError,
)
from featcache.features import DIGEST_BYTES, Features, Layout
from featcache.flight import Flights
from featcache.keys import EncoderFingerprint, FeatureKey
from featcache.lease import Lease, TierName
from featcache.outcomes import as_ours, in_order
from featcache.settings import PolicyName
from featcache.sizes import parse_size
from featcache.stack import Made, Stack
from featcache.stats import Counts, StoreStats
from featcache.tiers.device import DeviceTier
from featcache.tiers.disk import DiskTier
from featcache.tiers.host import HostTier

if TYPE_CHECKING:
    from featcache.tiers.verify import Progress, VerifyReport

log = logging.getLogger("featcache")

Compute: TypeAlias = Callable[[list[FeatureKey]], Mapping[FeatureKey, "Features | Exception"]]


class FeatureStore:
    """Features under their keys, in up to three tiers. Thread-safe; a context manager. Made by `open`."""

    def __init__(self, stack: Stack, counts: Counts) -> None:
        self._stack = stack
        self._counts = counts
        self._flights: Flights[Made] = Flights()
        self._aliases = Aliases()
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
        policy: which features leave first, "s3fifo" or "lru".
        queue_bytes: features that may wait for the disk.
        sync: whether a commit is on the disk when it returns, see DiskTier.open.

        A path that can't be written is opened for reading, and one that can't be opened at all is done
        without: a warning says so, and `stats().disk_error`.

        Raises ConfigError for a setting that can't be, SchemaError for a store of another version, StoreError
        for a readonly one that isn't there.
        """
        if path is not None and not os.fspath(path):
            raise ConfigError("path: empty; name a folder, or None for no disk tier")
        place = cuda_device(device)
        host_size, device_size = (
            parse_size(host_bytes, "host_bytes"),
            parse_size(device_bytes, "device_bytes"),
        )
        disk_size, queue_size = parse_size(disk_bytes, "disk_bytes"), parse_size(queue_bytes, "queue_bytes")
        if policy not in ("s3fifo", "lru"):
            raise ConfigError(f"policy: {policy!r}; there are s3fifo, lru")
        if place is not None and path is not None and disk_size and not host_size:
            raise ConfigError("host_bytes: 0, but features pass from the device to the disk by the host tier")
        disk, disk_error = None, None
        if path is not None and disk_size:
            folder = Path(path).expanduser()
            disk, disk_error = _open_disk(folder, disk_size, readonly=readonly, policy=policy, sync=sync)
        counts = Counts()
        try:
            stack = Stack(
                device=place,
                device_tier=DeviceTier(device_size, policy=policy) if place and device_size else None,
                host=HostTier(host_size, policy=policy, pinned=place is not None),
                disk=disk,
                queue_bytes=queue_size,
                disk_error=disk_error,
                counts=counts,
            )
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        return cls(stack, counts)

    # Finding

    @property
    def path(self) -> Path | None:
        """The folder of a disk tier that can be written; None if there is none."""
        disk = self._stack.disk
        return None if disk is None or disk.readonly else disk.path

    def get(self, key: bytes) -> Lease | None:
        """A lease on the features of `key`, to be released; None if no tier has them.

        Blocks only for a read from the disk tier. On CUDA the features are ready for the current stream.
        """
        self._require_open()
        lease = self._stack.find(key)
        self._counts.add("misses" if lease is None else f"hits_{lease.tier}")
        return lease

    def get_many(self, keys: Iterable[bytes]) -> list[Lease | None]:
        """As `get`, for several keys, in order. If one raises, no lease is left."""
        leases: list[Lease | None] = []
        try:
            leases.extend(map(self.get, keys))
        except BaseException:
            for lease in leases:
                if lease is not None:
                    lease.release()
            raise
        return leases

    def layout(self, key: bytes) -> Layout | None:
        """The layout of held features; touches no tensor data, and is no use of them."""
        self._require_open()
        return self._stack.layout(key)

    def tier_of(self, key: bytes) -> TierName | None:
        """The nearest tier that has the key; no use of it."""
        self._require_open()
        return self._stack.tier_of(key)

    # Keeping

    def put(self, key: bytes, features: Features, *, wait: bool = False) -> None:
        """Keep features in all tiers. Returns before any byte has moved.

        features: become the store's; their tensors must not be changed afterwards. On CUDA they are complete
            once the work is done that the current stream has been given so far.
        wait: wait for room on the way to the disk, rather than keep them in memory only.

        Raises StoreClosedError, and ConfigError for a key of another length.
        """
        self._require_open()
        if len(key) != DIGEST_BYTES:
            raise ConfigError(f"key: {len(key)} bytes; a feature key has {DIGEST_BYTES}")
        self._counts.add("puts")
        self._stack.let_go(self._stack.keep(key, features, wait=wait))

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
        return [as_ours(key, outcome) for key, outcome in zip(keys, outcomes, strict=True)]

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
                        self._counts.add("joined")
                        found[other] = (
                            made if isinstance(made, Exception) else self._stack.lease_made(other, made)
                        )
            return in_order(keys, found)
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

        def land(key: FeatureKey, outcome: Made | Exception | None) -> None:
            del flying[key]
            self._flights.land(key, outcome)

        try:
            for key in keys:  # another flight may have landed between our look and our boarding
                if (lease := self._stack.find(key)) is not None:
                    found[key] = lease
                    land(key, None)
            missing = list(flying)
            computed = compute(missing) if missing else {}
            self._counts.add("computed", len(missing))
            for key in missing:
                outcome = computed.get(key)
                if isinstance(outcome, Features):
                    try:
                        kept = self._stack.keep(key, outcome, wait=wait)
                        found[key] = self._stack.lease_kept(key, kept)
                        land(key, kept.made)
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

    # Other names of images, and of encoders

    def alias(self, alias_key: bytes) -> bytes | None:
        """What `put_alias` has kept under `alias_key`."""
        self._require_open()
        value = self._aliases.get(alias_key)
        if value is None and (value := self._stack.alias_on_disk(alias_key)) is not None:
            self._aliases.put(alias_key, value)
        return value

    def put_alias(self, alias_key: bytes, value: bytes) -> None:
        """Keep a short value under `alias_key`, in memory and, by and by, on disk."""
        self._require_open()
        if self._aliases.put(alias_key, value) and self._stack.writer is not None:
            self._stack.writer.submit_alias(alias_key, value)

    def put_encoder(self, fingerprint: EncoderFingerprint, description: Mapping[str, Any]) -> None:
        """Remember on disk what a fingerprint stands for."""
        self._require_open()
        self._stack.put_encoder(fingerprint, description)

    # Upkeep

    def delete(self, key: bytes) -> bool:
        """Forget a key in all tiers (on disk only if that is writable); whether any had it.

        What is leased stays intact until its release. Blocks until the disk has forgotten it. Raises
        StoreError if it can't be deleted there.
        """
        self._require_open()
        return self._stack.delete(key)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that was put before is committed and synced.

        Raises StoreError if that takes longer, or if records could not be written since the last flush. What
        a put without `wait` has kept in memory only, because too much waited for the disk, is counted in
        `stats().counts["unwritten"]` instead.
        """
        self._require_open()
        self._stack.flush(timeout_s)

    def verify(self, *, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read every record on disk and check it, see DiskTier.verify. StoreError without a disk tier."""
        self._require_open()
        if self._stack.disk is None:
            raise StoreError("this store has no disk tier to verify")
        return self._stack.disk.verify(repair=repair, progress=progress)

    def stats(self) -> StoreStats:
        self._require_open()
        stack = self._stack
        return StoreStats(
            device=None if stack.device is None else stack.device.stats(),
            host=stack.host.stats() if stack.host.max_bytes else None,
            disk=stack.disk_stats(),
            writer=None if stack.writer is None else stack.writer.stats(),
            counts=self._counts.read(),
            backlog_bytes=stack.backlog.used_bytes,
            num_aliases=len(self._aliases),
            num_computing=len(self._flights),
            disk_error=stack.disk_error,
        )

    def check(self) -> list[str]:
        """Recount all tiers while nothing else uses the store; what doesn't add up."""
        self._require_open()
        return self._stack.check()

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
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_disk(
    path: Path, max_bytes: int, *, readonly: bool, policy: PolicyName, sync: bool
) -> tuple[DiskTier | None, str | None]:
    """The disk tier as far as it can be had, and why it isn't what was asked for."""
    try:
        tier = DiskTier.open(path, max_bytes=max_bytes, readonly=readonly, policy=policy, sync=sync)
        return tier, None
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
