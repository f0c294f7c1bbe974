"""One chat request on its way: images, prompt, generations; and its answer, whole or as events."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from featcache.engine.engine import Generation, Reply, TokenDelta
from featcache.engine.prompt import Prompt
from featcache.errors import CancelledError, RequestError
from featcache.server.answers.grammar import Grammar
from featcache.server.answers.tools import ToolCallReader
from featcache.server.auth import Caller
from featcache.server.errors import ApiError, api_error
from featcache.server.logs import REQUEST_ID
from featcache.server.media.images import options_of
from featcache.server.protocol import (
    AnswerMessage,
    CacheReport,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    Choice,
    ChunkChoice,
    Delta,
    FinishReason,
    Logprobs,
    Message,
    NamedToolChoice,
    PromptTokensDetails,
    ServedImage,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from featcache.server.service import Service

_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages"
}
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _Choice:
    """One of the n answers. text and calls: so far."""

    index: int
    generation: Generation
    reader: ToolCallReader | None  # if the request has tools
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reply: Reply | None = None
    has_role: bool = False  # the first event of a choice tells the role

    def take(self, delta: TokenDelta, logprobs: list[TokenLogprob]) -> Delta | None:
        """What a delta adds to the answer; None if nothing (a part of a character, or of a tool call)."""
        text, calls = delta.text, list[ToolCall]()
        if self.reader is not None:
            text, calls = self.reader.feed(text)
            if delta.finish_reason is not None:
                rest, late = self.reader.finish()
                text, calls = text + rest, calls + late
        self.text += text
        self.calls += calls
        self.logprobs += logprobs
        if not (text or calls or logprobs):
            return None
        return Delta(content=text if text or not calls else None, tool_calls=calls or None)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.reply is not None
        if self.calls and self.reply.finish_reason == "stop":
            return "tool_calls"
        return "length" if self.reply.finish_reason == "length" else "stop"


class Answer:
    """The work for one chat request. Lives on the event loop; `cancel` frees what it holds in the engine."""

    def __init__(self, service: Service, asked: ChatRequest, caller: Caller, received: float) -> None:
        self._service = service
        self._asked = asked
        self._caller = caller
        self._received = received
        self._deadline = asyncio.get_running_loop().time() + service.settings.request_timeout
        self._id = f"chatcmpl-{REQUEST_ID.get()}"
        self._created = int(time.time())
        self._choices: list[_Choice] = []
        self._first: tuple[_Choice, TokenDelta] | None = None
        self._prompt: Prompt | None = None
        self._queue: asyncio.Queue[tuple[int, TokenDelta]] = asyncio.Queue()
        self._timings: dict[str, float] = {}
        self._last_token: dict[int, float] = {}
        self._log: dict[str, Any] = {}

    # Beginning

    async def begin(self) -> None:
        """Read the images, build the prompt, start generating, and wait for the first token.

        Raises what is wrong with the request, while it can still be told by the status.
        """
        service = self._service
        async with self._in_time():
            options = options_of(self._asked.mm_processor_kwargs)
            messages, _ = await service.images.read_messages(
                [_template_message(m, i, service.has_tools) for i, m in enumerate(self._asked.messages)],
                options,
                self._caller,
            )
            self._timings["images"] = time.perf_counter() - self._received
            tools = self._tools()
            grammar = await service.run(self._grammar) if self._wants_grammar() else None
            if self._asked.logprobs:
                await service.run(service.grammars)
            self._prompt = await service.run(
                service.build_prompt,
                messages,
                options,
                json.dumps([self._caller.features, self._asked.cache_salt]),
                tools,
                _template_kwargs(self._asked.chat_template_kwargs),
            )
            self._timings["prompt"] = time.perf_counter() - self._received - self._timings["images"]
            self._start(grammar)
            self._first = await self._next()

    def _tools(self) -> list[dict[str, Any]] | None:
        choice = self._asked.tool_choice
        if not self._asked.tools:
            if choice not in (None, "none", "auto"):
                raise RequestError("tool_choice: there are no tools to choose from")
            return None
        if not self._service.has_tools:
            raise RequestError("tools: this model's chat template has no place for tools")
        names = [tool.function.name for tool in self._asked.tools]
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise RequestError(f"tool_choice: {choice.function.name!r} is not among the tools")
        return None if choice == "none" else [t.model_dump(exclude_none=True) for t in self._asked.tools]

    def _must_call(self) -> bool:
        return self._asked.tool_choice == "required" or isinstance(self._asked.tool_choice, NamedToolChoice)

    def _max_calls(self) -> int | None:
        return 1 if self._asked.parallel_tool_calls is False or self._must_call() else None

    def _wants_grammar(self) -> bool:
        wanted = self._asked.response_format
        return self._must_call() or (wanted is not None and wanted.type != "text")

    def _grammar(self) -> Grammar:
        """Compiled off the event loop."""
        grammars, wanted = self._service.grammars(), self._asked.response_format
        if self._must_call():
            if wanted is not None and wanted.type != "text":
                raise RequestError("response_format: the answer can't be a tool call and obey a format too")
            choice = self._asked.tool_choice
            only = choice.function.name if isinstance(choice, NamedToolChoice) else None
            tools = [t.function for t in self._asked.tools or [] if only in (None, t.function.name)]
            return grammars.tool_call(tools)
        if wanted is not None and wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
            return grammars.json_schema(wanted.json_schema.schema_, "response_format.json_schema.schema")
        return grammars.json_object()

    def _start(self, grammar: Grammar | None) -> None:
        assert self._prompt is not None
        loop = asyncio.get_running_loop()
        reads_tools = bool(self._asked.tools) and self._asked.tool_choice != "none"
        for index in range(self._asked.n or 1):
            hook = grammar if index == 0 or grammar is None else grammar.copy()
            generation = self._service.submit(self._prompt, self._sampling(index, hook))
            reader = ToolCallReader(self._max_calls()) if reads_tools else None
            self._choices.append(_Choice(index, generation, reader))

            def emit(delta: TokenDelta, index: int = index) -> None:
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, delta))

            generation.listen(emit)

    def _sampling(self, index: int, hook: Grammar | None) -> dict[str, Any]:
        asked = self._asked
        names = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"]
        names += ["repetition_penalty", "ignore_eos"]
        sampling = {name: getattr(asked, name) for name in names}
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        room = self._service.max_model_len - len(self._prompt.ids) if self._prompt else 0
        limit = asked.max_completion_tokens or asked.max_tokens
        return {
            **sampling,
            "max_tokens": limit or max(1, room),
            "seed": None if asked.seed is None else asked.seed + index,
            "stop": stop,
            "stop_token_ids": asked.stop_token_ids,
            "logit_bias": asked.logit_bias and {int(token): bias for token, bias in asked.logit_bias.items()},
            "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
            "logits_hook": hook,
        }

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError as exc:
            reason = f"not answered within {self._service.settings.request_timeout:g} s"
            raise ApiError(504, reason, kind="server_error", code="timeout") from exc

    # Going on

    async def _next(self) -> tuple[_Choice, TokenDelta]:
        """The next delta of any choice. Raises what a generation failed with."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        index, delta = await self._queue.get()
        now, choice = time.perf_counter(), self._choices[index]
        if delta.token_ids:
            metrics, last = self._service.metrics, self._last_token.get(index)
            if last is not None:
                metrics.inter_token.observe(now - last)
            elif not self._last_token:
                metrics.ttft.observe(now - self._received)
            self._last_token[index] = now
        if delta.finish_reason is not None:
            choice.reply = choice.generation.result()
            if choice.reply.finish_reason == "cancelled":
                raise CancelledError("the server is shutting down; try again")
        return choice, delta

    def _take(self, choice: _Choice, delta: TokenDelta) -> tuple[Delta | None, list[TokenLogprob]]:
        logprobs = _logprobs(delta, self._service.grammars().token_bytes) if self._asked.logprobs else []
        return choice.take(delta, logprobs), logprobs

    async def whole(self) -> ChatResponse:
        """The whole answer."""
        async with self._in_time():
            while any(choice.reply is None for choice in self._choices):
                self._take(*await self._next())
        usage, report = self._account()
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._service.name,
            choices=[self._choice(choice) for choice in self._choices],
            usage=usage,
            system_fingerprint=self._service.fingerprint,
            featcache=report,
        )

    def _choice(self, choice: _Choice) -> Choice:
        calls = choice.calls
        return Choice(
            index=choice.index,
            message=AnswerMessage(content=choice.text or (None if calls else ""), tool_calls=calls or None),
            logprobs=Logprobs(content=choice.logprobs) if self._asked.logprobs else None,
            finish_reason=choice.finish_reason,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, to the last."""
        try:
            async with self._in_time():
                while any(choice.reply is None for choice in self._choices):
                    choice, delta = await self._next()
                    added, logprobs = self._take(choice, delta)
                    if added is not None:
                        yield self._event(choice, added, logprobs)
                    if choice.reply is not None:
                        yield self._last_event(choice)
            if self._asked.wants_usage:
                yield self._chunk([], *self._account())
        except Exception as exc:
            error = api_error(exc, REQUEST_ID.get())
            yield b"data: " + json.dumps(error.to_json()).encode() + b"\n\n"
        yield DONE

    def _event(self, choice: _Choice, delta: Delta, logprobs: list[TokenLogprob]) -> bytes:
        if not choice.has_role:
            delta.role, choice.has_role = "assistant", True
        held = Logprobs(content=logprobs) if logprobs else None
        return self._chunk([ChunkChoice(index=choice.index, delta=delta, logprobs=held)])

    def _last_event(self, choice: _Choice) -> bytes:
        """The end of a choice; of the last one with the report, unless a chunk with usage follows."""
        delta = Delta() if choice.has_role else Delta(role="assistant", content="")
        ended = [ChunkChoice(index=choice.index, delta=delta, finish_reason=choice.finish_reason)]
        is_last = all(choice.reply is not None for choice in self._choices)
        if is_last and not self._asked.wants_usage:
            return self._chunk(ended, None, self._account()[1])
        return self._chunk(ended)

    def _chunk(
        self, choices: list[ChunkChoice], usage: Usage | None = None, report: CacheReport | None = None
    ) -> bytes:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._service.name,
            choices=choices,
            system_fingerprint=self._service.fingerprint,
            usage=usage,
            featcache=report,
        )
        return chunk.to_event(usage_asked=self._asked.wants_usage)

    # Ending

    def cancel(self) -> None:
        """Stop what still runs, within one step of the engine. May be called at any time, and again."""
        for choice in self._choices:
            if choice.reply is None:
                choice.generation.cancel()

    def _account(self) -> tuple[Usage, CacheReport]:
        """What was used and where the images came from; called once, when all choices are there."""
        replies = [choice.reply for choice in self._choices if choice.reply is not None]
        first, service = replies[0], self._service
        images = [ServedImage(tier=image.tier, tokens=image.tokens, key=image.key) for image in first.images]
        generated = sum(reply.usage.completion_tokens for reply in replies)
        usage = Usage(
            prompt_tokens=first.usage.prompt_tokens,
            completion_tokens=generated,
            total_tokens=first.usage.prompt_tokens + generated,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=first.usage.cached_tokens, image_tokens=first.usage.image_tokens
            ),
        )
        saved = service.savings.account(
            images,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=first.usage.cached_tokens,
            encode_s=first.timings.encode_s,
            prefill_s=first.timings.prefill_s,
        )
        assert self._prompt is not None
        for ref, layout, image in zip(self._prompt.images, self._prompt.layouts, images, strict=True):
            service.recent.add(self._caller.namespace, image, layout, ref.source)
        self._observe(first, usage, images)
        return usage, CacheReport(images=images, saved_seconds=round(saved, 6))

    def _observe(self, first: Reply, usage: Usage, images: list[ServedImage]) -> None:
        metrics = self._service.metrics
        metrics.queue.observe(first.timings.queue_s)
        if images:
            metrics.encode.observe(first.timings.encode_s)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.completion_tokens.inc(usage.completion_tokens)
        self._log = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            **{f"images_{tier}": count for tier, count in Counter(image.tier for image in images).items()},
        }

    def summary(self) -> dict[str, Any]:
        """For the log: numbers only."""
        return self._log

    def server_timing(self) -> str:
        """The Server-Timing header: what has taken how long so far."""
        spans = dict(self._timings)
        if (reply := self._choices[0].reply) is not None:
            times = reply.timings
            spans |= {"queue": times.queue_s, "encode": times.encode_s, "prefill": times.prefill_s}
            spans |= {"total": time.perf_counter() - self._received}
        return ", ".join(f"{name};dur={seconds * 1e3:.1f}" for name, seconds in spans.items())


def _template_message(message: Message, index: int, has_tools: bool) -> dict[str, Any]:
    """A message as chat templates take it: arguments of tool calls as objects, nothing that says nothing."""
    doc = message.model_dump(exclude_none=True)
    for name in ("annotations", "refusal", "audio", "function_call"):
        doc.pop(name, None)
    if message.content is None and message.refusal is not None:
        doc["content"] = message.refusal
    for at, call in enumerate(doc.get("tool_calls", ())):
        where = f"messages[{index}].tool_calls[{at}]"
        if not has_tools:
            raise RequestError(f"{where}: this model's chat template has no place for tool calls")
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as exc:
            raise RequestError(f"{where}.function.arguments: not JSON: {exc}") from exc
    if message.role == "tool" and not has_tools:
        raise RequestError(
            f"messages[{index}].role: this model's chat template has no place for tool results"
        )
    return doc


def _template_kwargs(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Variables for the chat template. Raises RequestError for one that would mean something else."""
    for name, value in (given or {}).items():
        if name in _RESERVED or not isinstance(value, (str, int, float, bool, type(None))):
            raise RequestError(f"chat_template_kwargs.{name[:50]}: it can't be given to a template")
    return given


def _logprobs(delta: TokenDelta, decode: Callable[[int], bytes]) -> list[TokenLogprob]:
    """A delta's log probabilities as OpenAI's API tells them."""
    told = []
    for token in delta.logprobs:
        top = [_token(other.token_id, other.logprob, decode) for other in token.top]
        own = _token(token.token_id, token.logprob, decode)
        told.append(TokenLogprob(**own.model_dump(), top_logprobs=top))
    return told


def _token(token_id: int, logprob: float, decode: Callable[[int], bytes]) -> TopLogprob:
    data = decode(token_id)
    return TopLogprob(token=data.decode("utf-8", "replace"), logprob=max(logprob, -9999.0), bytes=list(data))
