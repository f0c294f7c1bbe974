"""What only the admin key may do: delete."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.requests import Request

from featcache.server.errors import ApiError
from featcache.server.http import service_of
from featcache.server.protocol import Deleted, ErrorResponse
from featcache.server.service import Service

router = APIRouter()

_KEY = re.compile(r"[0-9a-f]{64}")
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 403, 404, 500, 503)
}


def _admin_of(request: Request) -> Service:
    service = service_of(request)
    service.keys.admin(request.headers.get("authorization"))
    return service


@router.delete("/v1/features/{key}", response_model=Deleted, responses=_ERRORS)
async def delete_features(request: Request, key: str) -> JSONResponse:
    """Take the features of a key out of all tiers."""
    service = _admin_of(request)
    if not _KEY.fullmatch(key):
        raise ApiError(400, "key: it is 64 hexadecimal digits", param="key")
    deleted = await service.run_warm(service.vlm.store.delete, bytes.fromhex(key))
    return JSONResponse(Deleted(deleted=int(deleted)).model_dump())


@router.delete("/v1/namespaces/{name}", response_model=Deleted, responses=_ERRORS)
async def forget_namespace(request: Request, name: str) -> JSONResponse:
    """Forget a namespace: nothing that its callers have sent is found any more; KV blocks are dropped too."""
    service = _admin_of(request)
    if not service.keys.has_namespace(name):
        raise ApiError(404, "name: no API key has this namespace", param="name")
    await service.run(service.namespaces.forget, name)
    await service.run(service.vlm.engine.clear_prefix_cache)
    return JSONResponse(Deleted(deleted=1).model_dump())


@router.delete("/v1/prefix-cache", response_model=Deleted, responses=_ERRORS)
async def clear_prefix_cache(request: Request) -> JSONResponse:
    """Drop all KV blocks that no running request uses."""
    service = _admin_of(request)
    deleted = await service.run(service.vlm.engine.clear_prefix_cache)
    return JSONResponse(Deleted(deleted=int(deleted or 0)).model_dump())
