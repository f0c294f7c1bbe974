"""Every error that featcache raises on purpose.

FeatcacheError
├── ConfigError            a setting, path or option that can't be used
├── ImageError             one input that can't be an image: names it and says why
├── RecordError            bytes that aren't the record they should be
├── StoreError             the store as a whole
│   ├── StoreClosedError   used after close(), or after fork()
│   └── SchemaError        made by another version of featcache
├── LeaseError             released twice, or used after release
├── ModelError             a model that can't be loaded, or not be cached exactly
└── RequestError           a request that can't be served as it stands
    ├── ContextLengthError longer than the model or the engine allows
    ├── QueueFullError     too many requests are waiting
    └── CancelledError     the caller, or close(), ended it
"""

from __future__ import annotations


class FeatcacheError(Exception):
    """Base of all errors that featcache raises on purpose."""


class ConfigError(FeatcacheError, ValueError):
    """A setting, path or option that can't be used; the message says what is allowed."""


class ImageError(FeatcacheError, ValueError):
    """One input that can't be an image. `source` names it; `reason` says why."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        return (type(self), (self.source, self.reason))


class RecordError(FeatcacheError):
    """Bytes that aren't the record they should be: damaged, foreign, or of another key."""


class StoreError(FeatcacheError):
    """The store as a whole can't do what was asked."""


class StoreClosedError(StoreError):
    """The store was closed, or is used in a forked child of the process that opened it."""


class SchemaError(StoreError):
    """The store on disk was made by another version of featcache."""


class LeaseError(FeatcacheError):
    """A lease was released twice, or its features used after the release."""


class ModelError(FeatcacheError):
    """A model that can't be loaded, or whose images can't be cached exactly."""


class RequestError(FeatcacheError, ValueError):
    """A request that can't be served as it stands; the message names the field."""


class ContextLengthError(RequestError):
    """A prompt longer than the model or the engine allows."""


class QueueFullError(RequestError):
    """Too many requests are waiting; try again later."""


class CancelledError(RequestError):
    """The request was cancelled, by its caller or because the engine closes."""
