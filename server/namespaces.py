"""Forgetting a namespace: it gets a new number, and nothing that was made before is found any more.

What it had isn't read again and leaves the tiers as others need the room. The numbers are kept in a file of
the store's folder, so that a restart doesn't bring anything back.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

from featcache.errors import StoreError
from featcache.server.auth import Caller


class Namespaces:
    """The number of each namespace that was ever forgotten. Thread-safe.

    folder: where they are kept; None is in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / "namespaces.json"
        self._lock = threading.Lock()  # guards the numbers and the file
        self._numbers: dict[str, int] = self._read()

    def _read(self) -> dict[str, int]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            doc = json.loads(self._file.read_text("utf-8"))
            return {str(name): int(number) for name, number in doc.items()}
        except (OSError, ValueError, AttributeError, TypeError) as exc:
            raise StoreError(
                f"{self._file}: can't be read ({exc}); without it, forgotten images would return"
            ) from exc

    def forget(self, name: str) -> None:
        """Raises StoreError if it can't be written down; then nothing is forgotten."""
        with self._lock:
            numbers = {**self._numbers, name: self._numbers.get(name, 0) + 1}
            if self._file is not None:
                self._write(numbers)
            self._numbers = numbers

    def _write(self, numbers: dict[str, int]) -> None:
        assert self._file is not None
        draft = self._file.with_suffix(f".{os.getpid()}.tmp")
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump(numbers, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._file)
        except OSError as exc:
            raise StoreError(f"the namespace can't be forgotten: {exc.strerror}") from exc

    def current(self, caller: Caller) -> Caller:
        """The caller, with its namespaces as they are numbered now."""
        return replace(
            caller, namespace=self._numbered(caller.namespace), features=self._numbered(caller.features)
        )

    def _numbered(self, name: str) -> str:
        number = self._numbers.get(name, 0)
        return f"{name}#{number}" if number else name
