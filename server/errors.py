"""Errors as OpenAI's API tells them: {"error": {message, type, param, code}} and the status that fits.

Messages tell nothing of this machine: no path, no address in memory, no stack trace. What isn't the caller's
doing is "internal error" and a request id, under which the log has the rest.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pydantic import ValidationError

from featcache.errors import (
    CancelledError,
    ContextLengthError,
    FeatcacheError,
    ImageError,
    QueueFullError,
    RequestError,
)
from featcache.server.media.fetcher import MediaError

_FIELD = re.compile(r"([a-z_]\w*(?:\[\d+\]|\.\w+)*)(?=[:\s]|$)")
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.+@-]+/)+[\w.+@-]*")
_OBJECT = re.compile(r" at 0x[0-9a-f]+")


class ApiError(Exception):
    """An answer that is an error: raised by routes, turned into a response in one place."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def to_json(self) -> dict[str, Any]:
        doc = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": doc}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


class _Answer(NamedTuple):
    status: int
    kind: str
    code: str | None
    retry_after_s: int | None = None


# The first that fits; what fits none is our own failure.
_ANSWERS: tuple[tuple[type[FeatcacheError], _Answer], ...] = (
    (QueueFullError, _Answer(503, "server_error", "queue_full", 1)),
    (CancelledError, _Answer(503, "server_error", "cancelled", 1)),
    (ContextLengthError, _Answer(400, "invalid_request_error", "context_length_exceeded")),
    (RequestError, _Answer(400, "invalid_request_error", None)),
    (ImageError, _Answer(400, "invalid_request_error", "invalid_image")),
)


def api_error(exc: BaseException, request_id: str) -> ApiError:
    """The answer to a request that ended in `exc`."""
    if isinstance(exc, ApiError):
        return exc
    for kind, answer in _ANSWERS:
        if isinstance(exc, kind):
            message = clean(str(exc))
            code = exc.code if isinstance(exc, MediaError) else answer.code
            return ApiError(
                answer.status,
                message,
                kind=answer.kind,
                param=_param(message),
                code=code,
                retry_after_s=answer.retry_after_s,
            )
    return ApiError(
        500, f"internal error; the server's log has it under request id {request_id}", kind="server_error"
    )


def invalid_body(exc: ValidationError) -> ApiError:
    """The first thing that is wrong with a request's JSON, named by its path."""
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    # What is wrong with a value of several forms is told for each of them: the deepest is meant.
    first = max(errors, key=lambda error: len(error["loc"])) if len(errors) < 50 else errors[0]
    if first["type"] in ("json_invalid", "json_type"):
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    param = path_of(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{param}: this server doesn't know the field", param=param, code="unknown_field"
        )
    reason = "is required" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
    return ApiError(400, clean(f"{param}: {reason}"), param=param)


def path_of(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") as messages[0].role; without the names pydantic gives to alternatives."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _TYPE_NAMES:
            path += f".{part}" if path else part
    return path or "body"


_TYPE_NAMES = {"str", "int", "float", "bool", "NamedToolChoice", "dict", "list"}


def clean(message: str) -> str:
    """A message without this machine's paths and addresses in memory."""
    return _OBJECT.sub("", _PATH.sub("<path>", " ".join(message.split())))


def _param(message: str) -> str | None:
    """The field that a message begins with, as ours do."""
    match = _FIELD.match(message)
    return match[1] if match and (match.end() < len(message) and message[match.end()] == ":") else None
