"""Whether the server is well, what it serves, and what the cache does: for balancers, Prometheus, people."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.requests import Request

from featcache.server.auth import Caller
from featcache.server.http import caller_of, service_of
from featcache.server.metrics import tiers
from featcache.server.protocol import ErrorResponse, Model, ModelList
from featcache.server.service import Service

router = APIRouter()

_ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorResponse} for code in (401, 404, 503)}


@router.get("/health", response_model=dict[str, str])
async def health() -> JSONResponse:
    """The process is alive."""
    return JSONResponse({"status": "ok"})


@router.get("/ready", response_model=dict[str, str], responses={503: {"model": ErrorResponse}})
async def ready(request: Request) -> JSONResponse:
    """The model is loaded, and requests are taken."""
    return JSONResponse({"status": "ready", "model": service_of(request).name})


@router.get("/version", response_model=dict[str, str])
async def version(request: Request) -> JSONResponse:
    """The version of featcache."""
    return JSONResponse({"version": request.app.version})


@router.get("/v1/models", response_model=ModelList, responses=_ERRORS)
async def models(request: Request) -> JSONResponse:
    """The one model that is served."""
    caller_of(request)
    return JSONResponse(ModelList(data=[_model(service_of(request))]).model_dump())


@router.get("/v1/models/{name:path}", response_model=Model, responses=_ERRORS)
async def model(request: Request, name: str) -> JSONResponse:
    """One model by its name."""
    caller_of(request)
    service = service_of(request)
    service.check_model(name)
    return JSONResponse(_model(service).model_dump())


def _model(service: Service) -> Model:
    return Model(
        id=service.name,
        created=int(service.started),
        root=service.name,
        max_model_len=service.max_model_len,
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 503: {"model": ErrorResponse}},
)
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    service = service_of(request)
    text = await service.run(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/cache/stats", response_model=dict[str, Any], responses=_ERRORS)
async def cache_stats(request: Request, recent: bool = False) -> JSONResponse:
    """What the tiers hold and what hits have saved; with `recent`, the caller's last images too."""
    caller = caller_of(request)
    service = service_of(request)
    return JSONResponse(await service.run(_stats, service, caller, recent))


def _stats(service: Service, caller: Caller, recent: bool) -> dict[str, Any]:
    stats = service.vlm.stats()
    savings = service.savings
    engine = stats["engine"]
    doc = {
        "model": service.name,
        "uptime_s": round(time.time() - service.started, 1),
        "tiers": tiers(stats["store"]),
        "images": {name: savings.images[name] for name in ("prefix", "device", "host", "disk", "encoded")},
        "prompt_tokens": {"total": savings.prompt_tokens, "cached": savings.cached_tokens},
        "saved_seconds": round(savings.total_s, 3),
        "requests": {"running": engine["running"], "waiting": engine["waiting"]},
        "media": dict(service.media.counts),
        **stats,
    }
    if recent:
        doc["recent"] = service.recent.show(None if caller.is_admin else caller.namespace)
    return doc


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """The status page."""
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The page, and the policy that lets its own script run and nothing else."""
    html = files("featcache.server").joinpath("page.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = [
        "default-src 'none'",
        f"script-src 'sha256-{digest}'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return html, "; ".join(policy)
