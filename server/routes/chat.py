"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from featcache.server.answers.answer import Answer
from featcache.server.http import CHAT_ROUTE, body_of, caller_of, read_body, service_of, while_connected
from featcache.server.protocol import ChatRequest, ChatResponse, ErrorResponse

router = APIRouter()

_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 404, 413, 415, 500, 503, 504)
}


@router.post(
    CHAT_ROUTE,
    response_model=ChatResponse,
    responses={
        **_ERRORS,
        200: {
            "content": {"text/event-stream": {}},
            "description": "The answer, or its events with `stream`.",
        },
    },
    openapi_extra=body_of(ChatRequest),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    received = time.perf_counter()
    caller, service = caller_of(request), service_of(request)
    asked = await read_body(request, ChatRequest)
    service.check_model(asked.model)
    answer = Answer(service, asked, caller, received)
    try:
        await while_connected(request, answer.begin())
        if asked.stream:
            return _EventStream(request, answer)
        whole = await while_connected(request, answer.whole())
    except BaseException:
        answer.cancel()
        raise
    request.state.log = answer.summary()
    return JSONResponse(whole.to_json(), headers={"Server-Timing": answer.server_timing()})


class _EventStream(Response):
    """Server-sent events, until the answer ends or the client goes away. Owns the answer."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, answer: Answer) -> None:
        headers = {
            "Server-Timing": answer.server_timing(),
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._request = request
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(self._request, self._send_all(send))
        finally:
            self._answer.cancel()
            self._request.state.log = self._answer.summary()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._answer.events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
