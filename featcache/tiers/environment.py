"""The one LMDB environment per path and process, and the translation of its errors.

LMDB's rules that are kept here: an environment is opened once a process (closing one would drop the locks of
another); never used after a fork; never closed under a reader; its map is far larger than what it will hold
and never resized; a read transaction is short, since an old one keeps every page alive that was freed after
it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from featcache.errors import ConfigError, StoreClosedError, StoreError
from featcache.tiers.overflow import map_base
from featcache.tiers.schema import SCHEMA_VERSION, TABLES, check_schema

MAP_BYTES = 1 << 40  # address space, not disk: the file is as large as its pages
MAX_READERS = 4096
DATA_FILE = "data.mdb"

_open: dict[tuple[str, bool], Environment] = {}
_lock = threading.Lock()  # guards _open and the counts of its environments


class Environment:
    """An open LMDB environment with its tables. Made by `open_environment`, given back by `close`."""

    def __init__(self, path: Path, *, max_bytes: int, readonly: bool, sync: bool) -> None:
        self.path = path
        self.readonly = readonly
        self._pid = os.getpid()
        self._users = 1
        self._idle = threading.Condition()  # guards _active and _is_closed
        self._active = 0  # transactions open now
        self._is_closed = False
        self._env = lmdb.open(
            str(path),
            map_size=max(MAP_BYTES, 4 * max_bytes),
            max_dbs=len(TABLES),
            max_readers=MAX_READERS,
            readonly=readonly,
            create=not readonly,
            sync=sync,
            metasync=False,  # a power cut may undo the last commits, but leaves a whole database
            writemap=False,  # a writable map turns a full disk into SIGBUS
            readahead=False,
            meminit=False,
        )
        try:
            self._env.reader_check()
            self._mount = _mount_of(path)
            self._file = _file_at(path)
            self.map_base = map_base(path / DATA_FILE)
            self.tables = self._tables()
        except BaseException:
            self._env.close()
            raise

    def _tables(self) -> dict[str, Any]:
        if not self.readonly:
            with self._env.begin(write=True) as txn:
                info = self._env.open_db(b"info", txn=txn)
                check_schema(txn.get(b"schema", db=info), str(self.path))
                tables = {name: self._env.open_db(name.encode(), txn=txn) for name in TABLES}
                txn.put(b"schema", str(SCHEMA_VERSION).encode(), db=info, overwrite=False)
            return tables
        try:
            info = self._env.open_db(b"info", create=False)
        except lmdb.NotFoundError:
            raise StoreError(f"{self.path}: not a featcache store") from None
        with self._env.begin() as txn:
            check_schema(txn.get(b"schema", db=info), str(self.path))
        # each in a transaction of its own: py-lmdb forgets what was opened in a reading one that it is given
        return {name: self._env.open_db(name.encode(), create=False) for name in TABLES}

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction]:
        """A short read transaction; its buffers end with it."""
        self._enter()
        try:
            with self._begin_reading() as txn:
                yield txn
        except lmdb.Error as exc:
            raise StoreError(f"{self.path}: {exc}") from exc
        finally:
            self._leave()

    def _begin_reading(self) -> lmdb.Transaction:
        try:
            return self._env.begin(buffers=True)
        except lmdb.ReadersFullError:
            self._env.reader_check()  # frees the slots of killed processes
            return self._env.begin(buffers=True)

    @contextmanager
    def write(self) -> Iterator[lmdb.Transaction]:
        """A write transaction, committed at the end, undone by an exception. Waits for other writers."""
        self._enter()
        try:
            with translated(self.path), self._env.begin(write=True, buffers=True) as txn:
                yield txn
        finally:
            self._leave()

    def _enter(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosedError(
                f"{self.path}: opened before this process was forked; open the store again in the child"
            )
        with self._idle:
            if self._is_closed:
                raise StoreClosedError(f"{self.path}: the store is closed")
            self._active += 1

    def _leave(self) -> None:
        with self._idle:
            self._active -= 1
            if not self._active:
                self._idle.notify_all()

    @contextmanager
    def _in_use(self) -> Iterator[lmdb.Environment]:
        self._enter()
        try:
            with translated(self.path):
                yield self._env
        finally:
            self._leave()

    def sync(self) -> None:
        with self._in_use() as env:
            env.sync(True)

    def used_bytes(self) -> int:
        """Of the file: every page that was ever used, free again or not."""
        with self._in_use() as env:
            return (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])

    def stalled_transactions(self) -> int:
        """How many transactions have been committed since the oldest reader began; 0 without one.

        What they freed can't be used again until that reader ends. Readers that were killed don't count.
        """
        with self._in_use() as env:
            env.reader_check()
            rows = [line.split() for line in env.readers().splitlines()[1:]]
            began = [int(row[2]) for row in rows if len(row) == 3 and row[2].isdigit()]
            return int(env.info()["last_txnid"]) - min(began) if began else 0

    def is_in_place(self) -> bool:
        """Whether the files that are open are those at the path, not deleted, replaced or unmounted ones."""
        return _file_at(self.path) == self._file

    def is_mounted(self) -> bool:
        """Whether the file system that the path was on when it was opened is still, or again, there."""
        return self._mount.is_mount()

    def close(self) -> None:
        """Give it back; the last user closes it, when no transaction is open. A forked child only forgets."""
        if self._pid != os.getpid():
            return
        with _lock:
            self._users -= 1
            if self._users:
                return
            identity = _identity(self.path, self.readonly)
            if _open.get(identity) is self:
                del _open[identity]
        with self._idle:
            self._is_closed = True
            self._idle.wait_for(lambda: not self._active)
        self._env.close()

    def close_inherited(self) -> None:
        """In a forked child, where py-lmdb counts the parent's environment as open too.

        LMDB compares process ids when it closes, so the parent's locks and readers stay as they are.
        """
        self._env.close()

    @property
    def is_inherited(self) -> bool:
        return self._pid != os.getpid()


def open_environment(path: Path, *, max_bytes: int, readonly: bool, sync: bool) -> Environment:
    """Open the store at `path`, or share the environment that this process has of it.

    Raises ConfigError for a path that can't be a store, StoreError if it can't be opened, SchemaError if
    another version made it.
    """
    if readonly and not (path / DATA_FILE).is_file():
        raise StoreError(f"{path}: there is no store here")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: the store is a folder, and this is a file")
    with translated(path), _lock:
        if not readonly:
            path.mkdir(parents=True, exist_ok=True)
        for identity, environment in list(_open.items()):
            if environment.is_inherited:
                del _open[identity]
                environment.close_inherited()
        for mode in {readonly, False}:  # who may write can read as well
            shared = _open.get(_identity(path, mode))
            if shared is not None and shared.is_in_place():
                shared._users += 1
                return shared
        if (reader := _open.get(_identity(path, True))) is not None and reader.is_in_place():
            raise StoreError(f"{path}: open for reading in this process; close that before writing")
        environment = Environment(path, max_bytes=max_bytes, readonly=readonly, sync=sync)
        _open[_identity(path, readonly)] = environment
        return environment


def _new_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _identity(path: Path, readonly: bool) -> tuple[str, bool]:
    return str(path.resolve()), readonly


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        status = (path / DATA_FILE).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _mount_of(path: Path) -> Path:
    """The nearest folder above that something is mounted on."""
    folder = path.resolve()
    while not folder.is_mount():
        folder = folder.parent
    return folder


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """LMDB's and the system's errors as StoreError, once, here."""
    try:
        yield
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as exc:
        raise StoreError(
            f"{path}: {exc}. Its {DATA_FILE} is damaged as a whole, or not featcache's: use another --store, "
            "or delete the folder: it is a cache"
        ) from exc
    except lmdb.Error as exc:
        raise StoreError(f"{path}: {exc}") from exc
    except OSError as exc:
        raise StoreError(f"{path}: {exc.strerror or exc}") from exc
