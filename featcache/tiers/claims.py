"""Claims: which process works on which key, so that several of them share the work through the store.

A claim holds while its owner lives. That is seen at once where owner and asker can see each other's
processes, and by a time limit otherwise, which a thread of the owner keeps pushing on. Nothing depends on
claims but speed: whoever finds one outdated computes the same features again.

They lie in an LMDB environment of their own beside the records: claims change for every image, and need not
outlive a power cut, so their commits wait for no disk and hold up no writer of records.
"""

from __future__ import annotations

import enum
import os
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import lmdb

from featcache.errors import StoreClosedError
from featcache.tiers.environment import translated

FOLDER = "claims"
TTL_S = 30.0

_MAP_BYTES = 64 << 30  # address space: a claim takes about 100 bytes while its owner runs
_WHERE_BYTES = 32
_OWNER = struct.Struct(
    f"<dQQ{_WHERE_BYTES}s"
)  # good until, pid, start of the process, machine and process namespace

_open: dict[str, _Shared] = {}
_opening = threading.Lock()  # guards _open: LMDB wants one environment per path and process


class Claim(enum.Enum):
    """The answer to `take`. NEW: yours from now on. OWN: you took it before. TAKEN: by somebody alive."""

    NEW = enum.auto()
    OWN = enum.auto()
    TAKEN = enum.auto()


class _Shared:
    """One environment, for all claimants of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.env = lmdb.open(
            str(folder),
            map_size=_MAP_BYTES,
            max_dbs=2,
            max_readers=1024,
            sync=False,
            metasync=False,
            readahead=False,
        )
        self.env.reader_check()
        self.owners = self.env.open_db(b"owners")
        self.claims = self.env.open_db(b"claims")
        self.users = 0


class _Owner(NamedTuple):
    good_until: float
    pid: int
    started: int
    where: bytes

    @classmethod
    def this_process(cls, good_until: float) -> _Owner:
        return cls(good_until, os.getpid(), _start_of(os.getpid()) or 0, _where())

    def is_alive(self) -> bool:
        if time.time() > self.good_until:
            return False
        return self.where != _where() or not self.started or _start_of(self.pid) == self.started


class Claims:
    """The claims of one run. Thread-safe; a context manager. Made by `open`.

    A run's claims stay until it closes, also for what it has stored, so that it knows what it has done.
    """

    def __init__(self, folder: Path, ttl_s: float) -> None:
        self._folder = folder
        self._ttl_s = ttl_s
        self._id = os.urandom(16)
        self._closed = threading.Event()
        self._shared = _acquire(folder)
        try:
            self._sweep()
            self._renew()
        except BaseException:
            _give_back(folder)
            raise
        self._thread = threading.Thread(target=self._keep_renewing, name="featcache-claims", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, store: Path, *, ttl_s: float = TTL_S) -> Claims:
        """Claims on the keys of the store in folder `store`. Raises StoreError if they can't be written."""
        folder = store / FOLDER
        with translated(folder):
            return cls(folder, ttl_s)

    def take(self, key: bytes) -> Claim:
        """Claim a key, unless somebody who is alive has it."""
        self._check_open()
        with translated(self._folder), self._shared.env.begin(write=True) as txn:
            owner = txn.get(key, db=self._shared.claims)
            if owner == self._id:
                return Claim.OWN
            if owner is not None and self._is_alive(txn, owner):
                return Claim.TAKEN
            txn.put(key, self._id, db=self._shared.claims)
            return Claim.NEW

    def is_own(self, key: bytes) -> bool:
        self._check_open()
        with translated(self._folder), self._shared.env.begin() as txn:
            return txn.get(key, db=self._shared.claims) == self._id

    def is_taken(self, key: bytes) -> bool:
        """Whether somebody else, who is alive, has it."""
        self._check_open()
        with translated(self._folder), self._shared.env.begin() as txn:
            owner = txn.get(key, db=self._shared.claims)
            return owner is not None and owner != self._id and self._is_alive(txn, owner)

    def give_back(self, keys: Iterable[bytes]) -> None:
        """Let others have what this run took and won't do."""
        self._check_open()
        with translated(self._folder), self._shared.env.begin(write=True) as txn:
            for key in keys:
                if txn.get(key, db=self._shared.claims) == self._id:
                    txn.delete(key, db=self._shared.claims)

    def _is_alive(self, txn: lmdb.Transaction, owner: bytes) -> bool:
        row = txn.get(owner, db=self._shared.owners)
        return row is not None and _Owner(*_OWNER.unpack(row)).is_alive()

    def _sweep(self) -> None:
        """Forget owners that are gone, and all claims if nobody is left."""
        with self._shared.env.begin(write=True) as txn:
            with txn.cursor(db=self._shared.owners) as cursor:
                owners = [bytes(owner) for owner, _ in cursor]
            gone = [owner for owner in owners if not self._is_alive(txn, owner)]
            for owner in gone:
                txn.delete(owner, db=self._shared.owners)
            if len(gone) == len(owners):
                txn.drop(self._shared.claims, delete=False)

    def _renew(self) -> None:
        row = _OWNER.pack(*_Owner.this_process(time.time() + self._ttl_s))
        with self._shared.env.begin(write=True) as txn:
            txn.put(self._id, row, db=self._shared.owners)

    def _keep_renewing(self) -> None:
        while not self._closed.wait(self._ttl_s / 3):
            try:
                self._renew()
            except lmdb.Error:  # a full disk: the claims lapse, and at worst an image is encoded twice
                continue

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreClosedError(f"{self._folder}: these claims were given up")

    def close(self) -> None:
        """Give up all claims of this run."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        try:
            with translated(self._folder), self._shared.env.begin(write=True) as txn:
                txn.delete(self._id, db=self._shared.owners)
            with translated(self._folder):
                self._sweep()
        finally:
            _give_back(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _acquire(folder: Path) -> _Shared:
    with _opening:
        name = str(folder.resolve())
        if name not in _open:
            _open[name] = _Shared(folder)
        _open[name].users += 1
        return _open[name]


def _give_back(folder: Path) -> None:
    with _opening:
        name = str(folder.resolve())
        _open[name].users -= 1
        if not _open[name].users:
            _open.pop(name).env.close()


def _start_of(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None if it isn't there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def _where() -> bytes:
    """The machine and its process namespace: only within one are process ids the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip().replace(b"-", b"")
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        where = bytes.fromhex(boot.decode()) + struct.pack("<Q", namespace)
    except (OSError, ValueError):
        where = os.uname().nodename.encode()[:_WHERE_BYTES]
    return where.ljust(_WHERE_BYTES, b"\0")
