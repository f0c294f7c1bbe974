"""Outcomes of computing what is missing: for each key a lease, or the exception that it failed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from featcache.errors import FeatcacheError, StoreError
from featcache.lease import Lease


def in_order(keys: Sequence[bytes], found: Mapping[bytes, Lease | Exception]) -> list[Lease | Exception]:
    """The outcome of each key; where a key comes again, another lease on the same features."""
    seen: set[bytes] = set()
    outcomes: list[Lease | Exception] = []
    for key in keys:
        outcome = found[key]
        outcomes.append(outcome.again() if key in seen and isinstance(outcome, Lease) else outcome)
        seen.add(key)
    return outcomes


def as_ours(key: bytes, outcome: Lease | Exception) -> Lease | FeatcacheError:
    """The outcome; an exception that is no FeatcacheError as the cause of one."""
    if isinstance(outcome, (Lease, FeatcacheError)):
        return outcome
    error = StoreError(f"computing {key.hex()[:12]} failed: {outcome!r}")
    error.__cause__ = outcome
    return error
