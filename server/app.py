"""`create_app`: the server's routes around one `Service`, which is there once the model is loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from featcache import __version__
from featcache.engine.vlm import CachedVLM
from featcache.errors import FeatcacheError
from featcache.server.errors import ApiError, path_of
from featcache.server.http import Envelope, error_response
from featcache.server.protocol import ChatRequest, FeaturesRequest
from featcache.server.routes import admin, chat, features, status
from featcache.server.service import Service, keys_of
from featcache.server.settings import ServerSettings

LOG = logging.getLogger("featcache.server")


def create_app(
    open_vlm: Callable[[], CachedVLM],
    settings: ServerSettings,
    *,
    on_failure: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """The server as an ASGI application.

    open_vlm: loads the model, in a thread, while the server already answers /health; closed with the app.
    on_failure: called if that fails.

    Raises ConfigError for settings that can't be used.
    """
    keys_of(settings)  # a bad key file is told before the model is loaded

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_load(app, open_vlm, settings, on_failure))]
        tasks.append(asyncio.create_task(_watch_loop(app)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if (service := app.state.service) is not None:
                app.state.service = None
                await service.close()

    app = FastAPI(title="featcache", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = None
    app.state.draining = False
    for routes in (chat, features, status, admin):
        app.include_router(routes.router)
    for kind in (ApiError, FeatcacheError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Server-Timing"],
        )
    app.add_middleware(Envelope, max_body_bytes=settings.max_body_bytes)
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


async def _load(
    app: FastAPI,
    open_vlm: Callable[[], CachedVLM],
    settings: ServerSettings,
    on_failure: Callable[[BaseException], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, open_vlm)
    try:
        vlm = await asyncio.shield(opening)
        app.state.service = Service(vlm, settings)
    except asyncio.CancelledError:
        vlm = await opening  # it can't be stopped half-way; what it opened is closed
        await loop.run_in_executor(None, vlm.close)
        raise
    except Exception as exc:
        LOG.error(
            "the model can't be served: %s", exc, exc_info=not isinstance(exc, (ApiError, FeatcacheError))
        )
        if on_failure is not None:
            on_failure(exc)
        return
    LOG.info("ready: %s", app.state.service.name)


async def _watch_loop(app: FastAPI) -> None:
    """Measures how late the event loop is: nothing may block it."""
    while True:
        due = time.perf_counter() + 0.25
        await asyncio.sleep(0.25)
        if (service := app.state.service) is not None:
            service.metrics.loop_lag.observe(max(0.0, time.perf_counter() - due))


async def _answer_error(request: Request, exc: Exception) -> JSONResponse:
    if isinstance(exc, HTTPException):
        error = ApiError(exc.status_code, f"{request.method} {request.url.path[:200]}: {exc.detail}")
        return JSONResponse(error.to_json(), exc.status_code, {**(exc.headers or {}), **error.headers()})
    if isinstance(exc, RequestValidationError):
        first = exc.errors()[0]
        param = path_of(tuple(first["loc"])[1:])
        exc = ApiError(400, f"{param}: {first['msg']}", param=param)
    return error_response(exc)


def _description(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the bodies of the routes that read their own."""
    if app.openapi_schema is None:
        doc = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = doc["components"]["schemas"]
        for model in (ChatRequest, FeaturesRequest):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[model.__name__] = schema
        app.openapi_schema = doc
    return app.openapi_schema
