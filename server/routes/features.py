"""Features over HTTP: look images up, warm them, take their features away as safetensors."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from featcache.engine.imageref import ImageRef
from featcache.features import Features, pack
from featcache.lease import Lease
from featcache.server.auth import Caller
from featcache.server.errors import ApiError, api_error
from featcache.server.http import body_of, caller_of, read_body, service_of, while_connected
from featcache.server.logs import REQUEST_ID
from featcache.server.media.images import options_of
from featcache.server.protocol import ErrorResponse, FeatureInfo, FeaturesRequest, FeaturesResponse
from featcache.server.service import Service

router = APIRouter()

_KEY = re.compile(r"[0-9a-f]{64}")
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 404, 413, 415, 500, 503)
}


@router.post(
    "/v1/features",
    response_model=FeaturesResponse,
    responses=_ERRORS,
    openapi_extra=body_of(FeaturesRequest),
)
async def post_features(request: Request) -> JSONResponse:
    """Look up images, or warm them: encode what no tier has. Each image has its own outcome."""
    caller = caller_of(request)
    service = service_of(request)
    asked = await read_body(request, FeaturesRequest)
    found = await while_connected(request, _look_up(service, asked, caller))
    return JSONResponse(FeaturesResponse(data=found).model_dump())


async def _look_up(service: Service, asked: FeaturesRequest, caller: Caller) -> list[FeatureInfo]:
    options = options_of(asked.mm_processor_kwargs)
    parts = [{"image_url": image} if isinstance(image, str) else image for image in asked.images]
    refs = await service.images.read_each(parts, options, caller)
    good = [ref for ref in refs if isinstance(ref, ImageRef)]
    outcomes = (
        await service.run_warm(_warm, service, good)
        if asked.warm
        else await service.run(_held, service, good)
    )
    by_key = dict(zip([ref.key for ref in good], outcomes, strict=True))
    for ref in good:
        service.recent.tell(caller.namespace, ref.key.hex())
    return [_failed(ref) if isinstance(ref, Exception) else by_key[ref.key] for ref in refs]


def _warm(service: Service, refs: list[ImageRef]) -> list[FeatureInfo]:
    outcomes = service.vlm.encoder.features(refs)
    found = []
    for ref, outcome in zip(refs, outcomes, strict=True):
        if isinstance(outcome, Lease):
            with outcome:
                found.append(
                    FeatureInfo(key=ref.key.hex(), tier=outcome.tier, layout=outcome.layout.to_json())
                )
        else:
            found.append(_failed(outcome, ref))
    return found


def _held(service: Service, refs: list[ImageRef]) -> list[FeatureInfo]:
    store = service.vlm.store
    return [
        FeatureInfo(
            key=ref.key.hex(),
            tier=store.tier_of(ref.key),
            layout=layout.to_json() if (layout := store.layout(ref.key)) else None,
        )
        for ref in refs
    ]


def _failed(exc: Exception, ref: ImageRef | None = None) -> FeatureInfo:
    message = api_error(exc, REQUEST_ID.get()).message
    return FeatureInfo(key=None if ref is None else ref.key.hex(), tier=None, layout=None, error=message)


@router.get(
    "/v1/features/{key}",
    response_class=Response,
    responses={**_ERRORS, 200: {"content": {"application/octet-stream": {}}}},
)
async def get_features(request: Request, key: str) -> Response:
    """The features of a key, as the bytes of a safetensors file.

    Where keys have namespaces of their own, a caller gets the features of images it has sent to this server.
    """
    caller = caller_of(request)
    service = service_of(request)
    known = service.keys.is_open or caller.is_admin or service.recent.knows(caller.namespace, key)
    record = await service.run(_record, service, key) if known and _KEY.fullmatch(key) else None
    if record is None:
        raise ApiError(404, "key: no features are held under it, or they aren't yours", param="key")
    return Response(record, media_type="application/octet-stream")


def _record(service: Service, key: str) -> bytes | None:
    lease = service.vlm.store.get(bytes.fromhex(key))
    if lease is None:
        return None
    with lease:
        tensors = {name: tensor.cpu() for name, tensor in lease.features.tensors.items()}
        return pack(lease.key, Features(tensors, lease.layout, lease.features.fingerprint))
