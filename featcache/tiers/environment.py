"""The one LMDB environment per path and process, and the translation of its errors.

LMDB's rules that are kept here: an environment is opened once a process (closing one would drop the locks of
another); never used after a fork; its map is far larger than what it will hold and never resized; a read
transaction is short, since an old one keeps every page alive that was freed after it.
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
from featcache.tiers.schema import SCHEMA_VERSION, TABLES, check_schema

MAP_BYTES = 1 << 40  # address space, not disk: the file is as large as its pages
MAX_READERS = 4096

_open: dict[tuple[str, bool], Environment] = {}
_lock = threading.Lock()  # guards _open and the counts of its environments


class Environment:
    """An open LMDB environment with its tables. Made by `open_environment`, given back by `close`."""

    def __init__(self, path: Path, *, max_bytes: int, readonly: bool, sync: bool) -> None:
        self.path = path
        self.readonly = readonly
        self._pid = os.getpid()
        self._users = 1
        self._closed = False
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
        self._check()
        with translated(self.path):
            try:
                txn = self._env.begin(buffers=True)
            except lmdb.ReadersFullError:
                self._env.reader_check()  # slots of killed processes
                txn = self._env.begin(buffers=True)
            with txn:
                yield txn

    @contextmanager
    def write(self) -> Iterator[lmdb.Transaction]:
        """A write transaction, committed at the end, undone by an exception. Waits for other writers."""
        self._check()
        with translated(self.path), self._env.begin(write=True, buffers=True) as txn:
            yield txn

    def sync(self) -> None:
        self._check()
        with translated(self.path):
            self._env.sync(True)

    def reader_check(self) -> int:
        self._check()
        return int(self._env.reader_check())

    def map_used_bytes(self) -> int:
        self._check()
        return (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosedError(
                f"{self.path}: opened before this process was forked; open the store again in the child"
            )
        if self._closed:
            raise StoreClosedError(f"{self.path}: the store is closed")

    def close(self) -> None:
        """Give it back; the last user closes it. In a forked child it only forgets it."""
        with _lock:
            if self._closed or self._pid != os.getpid():
                return
            self._users -= 1
            if self._users == 0:
                self._closed = True
                _open.pop(_identity(self.path, self.readonly), None)
                self._env.close()


def open_environment(path: Path, *, max_bytes: int, readonly: bool, sync: bool) -> Environment:
    """Open the store at `path`, or share the environment that this process has of it.

    Raises ConfigError for a path that can't be a store, StoreError if it can't be opened, SchemaError if
    another version made it.
    """
    if readonly and not (path / "data.mdb").is_file():
        raise StoreError(f"{path}: there is no store here")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: the store is a folder, and this is a file")
    with translated(path), _lock:
        if not readonly:
            path.mkdir(parents=True, exist_ok=True)
        _forget_inherited()
        for mode in {readonly, False}:  # who may write can read as well
            if (shared := _open.get(_identity(path, mode))) is not None:
                shared._users += 1
                return shared
        if _identity(path, True) in _open:
            raise StoreError(f"{path}: open for reading in this process; close that before writing")
        environment = Environment(path, max_bytes=max_bytes, readonly=readonly, sync=sync)
        _open[_identity(path, readonly)] = environment
        return environment


def _forget_inherited() -> None:
    """In a forked child: close what the parent had open, which py-lmdb counts as open here too.

    LMDB compares process ids when it closes, so the parent's locks and readers stay as they are.
    """
    for identity, environment in list(_open.items()):
        if environment._pid != os.getpid():
            del _open[identity]
            environment._env.close()


def _identity(path: Path, readonly: bool) -> tuple[str, bool]:
    return str(path.resolve()), readonly


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """LMDB's and the system's errors as StoreError, once, here."""
    try:
        yield
    except lmdb.Error as exc:
        raise StoreError(f"{path}: {exc}") from exc
    except OSError as exc:
        raise StoreError(f"{path}: {exc.strerror or exc}") from exc
