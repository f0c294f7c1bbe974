"""What every request passes: a request id, a limit on its body, one log line; and what routes share."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from featcache.server.auth import Caller
from featcache.server.errors import ApiError, api_error, invalid_body
from featcache.server.logs import REQUEST_ID
from featcache.server.protocol import UnsupportedFieldError
from featcache.server.service import Service

LOG = logging.getLogger("featcache.server")

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
CHAT_ROUTE = "/v1/chat/completions"
_BODIES = 16  # of the largest size, held at once
_QUIET = ("/health", "/ready", "/metrics", "/cache/stats")  # asked all the time; logged at debug


class ClientGoneError(Exception):
    """The client went away; nobody waits for an answer."""


@dataclass(slots=True)
class _Body:
    size: int = 0  # bytes received so far


class Envelope:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._held_bytes = 0  # of the bodies of all requests under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        token, started, status = REQUEST_ID.set(request_id), time.perf_counter(), 499
        scope.setdefault("state", {})["request_id"] = request_id
        body = _Body()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check_length(scope)
            await self._app(scope, self._limited(receive, body), send_marked)
        except ClientGoneError:
            status = 499
        except Exception as exc:
            if status != 499:
                raise
            await error_response(exc)(scope, receive, send_marked)
        finally:
            self._held_bytes -= body.size
            self._finish(scope, status, time.perf_counter() - started)
            REQUEST_ID.reset(token)

    def _check_length(self, scope: Scope) -> None:
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdecimal() and int(length[:20]) > self._max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        reason = f"body: more than {self._max_body_bytes} bytes, the limit of this server"
        return ApiError(413, reason, code="request_too_large")

    def _limited(self, receive: Receive, body: _Body) -> Receive:
        async def limited() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            body.size += size
            self._held_bytes += size
            if body.size > self._max_body_bytes:
                raise self._too_large()
            if self._held_bytes > _BODIES * self._max_body_bytes:
                raise ApiError(503, "too many large requests at once", code="busy", retry_after_s=1)
            return message

        return limited

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        service = scope["app"].state.service if "app" in scope else None
        if service is not None:
            service.metrics.requests.labels(route, str(status)).inc()
            if route == CHAT_ROUTE:
                service.metrics.latency.observe(seconds)
        level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
        detail = scope["state"].get("log", {})
        extra = {"method": scope["method"], "route": route, "status": status, "ms": round(seconds * 1e3, 1)}
        LOG.log(level, "request", extra={**extra, **detail})


def error_response(exc: BaseException) -> JSONResponse:
    """The answer to a request that ended in `exc`; what is our own failure is logged."""
    error = api_error(exc, REQUEST_ID.get())
    if error.status == 500:
        LOG.error("internal error", exc_info=exc)
    return JSONResponse(error.to_json(), error.status, error.headers())


def service_of(request: Request) -> Service:
    """Raises ApiError 503 while the model is being loaded, or the server ends."""
    state = request.app.state
    if state.service is None or state.draining:
        reason = "the server is shutting down" if state.draining else "the model is being loaded"
        raise ApiError(503, reason, kind="server_error", code="not_ready", retry_after_s=2)
    service: Service = state.service
    return service


def caller_of(request: Request) -> Caller:
    return service_of(request).caller(request.headers.get("authorization"))


async def read_body(request: Request, model: type[_Model]) -> _Model:
    """The body as `model`. Raises ApiError that names the field at fault."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", ""):
        raise ApiError(415, f"content-type: {kind[:100]}; it is application/json", param="content-type")
    body = await request.body()
    return await service_of(request).run(_parsed, body, model)


def _parsed(body: bytes, model: type[_Model]) -> _Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        raise invalid_body(exc) from exc
    except UnsupportedFieldError as exc:
        raise ApiError(400, str(exc), param=exc.name, code="unsupported_field") from exc


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client goes away (ClientGoneError)."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The request's description for OpenAPI, as routes that read their own body need it."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
