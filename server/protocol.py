"""The chat API's requests and responses.

Requests are strict: a field that this server doesn't know, or can't honour, is an error that names it. What
stands in messages is read by images.py and the engine, which name the part at fault.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Role = Literal["system", "developer", "user", "assistant", "tool"]
Finite = Annotated[float, Field(allow_inf_nan=False)]

# Fields of OpenAI's API that would change the answer and that nothing here can do; with their idle values.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "audio isn't supported"),
    "modalities": ((["text"],), 'only ["text"] is supported'),
    "prediction": ((), "predicted outputs aren't supported"),
    "functions": ((), "deprecated; use tools"),
    "function_call": (("auto", "none"), "deprecated; use tool_choice"),
    "reasoning_effort": ((), "the models served here have no such setting"),
    "verbosity": ((), "the models served here have no such setting"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "completions aren't stored"),
    "web_search_options": ((), "web search isn't supported"),
    "moderation": ((), "moderation isn't supported"),
    "best_of": ((1,), "not supported; use n"),
    "use_beam_search": ((False,), "beam search isn't supported"),
    "echo": ((False,), "not supported"),
    "length_penalty": ((1.0,), "it belongs to beam search, which isn't supported"),
    "prompt_logprobs": ((), "logprobs are of generated tokens only"),
    "chat_template": ((), "templates can't be given in a request"),
    "guided_json": ((), "use response_format"),
    "guided_regex": ((), "use response_format"),
    "guided_choice": ((), "use response_format"),
    "guided_grammar": ((), "use response_format"),
    "structured_outputs": ((), "use response_format"),
    "media_io_kwargs": ((), "images are decoded in one way only"),
}
# Fields of the API that say nothing about the answer.
_IDLE = (
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "priority",
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FunctionCall(_Strict):
    name: str = Field(min_length=1)
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(_Strict):
    """content: text, or parts: {"type": "text"}, {"type": "image_url"}, {"type": "image"} and their kin."""

    role: Role
    content: str | list[dict[str, Any] | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    # What a client may send back of our own answers, which says nothing new.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(_Strict):
    name: str = Field(pattern=r"^[\w.:-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Strict):
    name: str


class NamedToolChoice(_Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Strict):
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with the type "json_schema", and with no other')
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise ValueError("json_schema.schema is required")
        return self


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None

    @field_validator("continuous_usage_stats")
    @classmethod
    def _not_continuous(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("usage comes with the last chunk only")
        return value


class ImageKwargs(_Strict):
    """mm_processor_kwargs: limits on every image of the request; part of each image's key."""

    min_pixels: int | None = Field(default=None, ge=1, le=1 << 40)
    max_pixels: int | None = Field(default=None, ge=1, le=1 << 40)
    max_tiles: int | None = Field(default=None, ge=1, le=1024)


class ChatRequest(_Strict):
    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=4096)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=64)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=(1 << 63) - 64)
    temperature: Finite | None = Field(default=None, ge=0, le=2)
    top_p: Finite | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=1 << 31)
    min_p: Finite | None = Field(default=None, ge=0, le=1)
    presence_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(default=None, gt=0, le=10)
    stop: str | list[str] | None = Field(default=None, max_length=16)
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    logit_bias: dict[str, Finite] | None = Field(default=None, max_length=1024)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: ImageKwargs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    user: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, doc: Any) -> Any:
        if not isinstance(doc, dict):
            return doc
        for name, (idle, why) in _UNSUPPORTED.items():
            value = doc.get(name)
            if value is not None and value not in idle:
                raise UnsupportedFieldError(name, why)
        return {name: value for name, value in doc.items() if name not in _UNSUPPORTED and name not in _IDLE}

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not (token.isascii() and token.isdecimal()):
                raise ValueError(f"{token[:20]!r} is not a token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} is {bias:g}; it is between -100 and 100")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if any(not text for text in ([value] if isinstance(value, str) else value or [])):
            raise ValueError("a stop text is empty")
        return value

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class UnsupportedFieldError(Exception):
    """A field that OpenAI's API has and this server can't honour."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name


class FeaturesRequest(_Strict):
    """POST /v1/features. images: parts as a message has them, or URLs. warm: encode what is missing."""

    images: list[dict[str, Any] | str] = Field(min_length=1, max_length=256)
    warm: bool = True
    mm_processor_kwargs: ImageKwargs | None = None


# Responses. Written with these models, so that the API's description is what is sent.


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    image_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ServedImage(BaseModel):
    """tier: "device", "host", "disk", "encoded", or "prefix": its KV was held, it wasn't looked up."""

    tier: str
    tokens: int
    key: str


class CacheReport(BaseModel):
    images: list[ServedImage]
    saved_seconds: float


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    featcache: CacheReport

    def to_json(self) -> dict[str, Any]:
        """As it is sent: null where OpenAI's API has null, and nothing where it has nothing."""
        doc = self.model_dump(exclude_none=True)
        for choice in doc["choices"]:
            choice["logprobs"] = choice.get("logprobs")
            message = choice["message"]
            message |= {"content": message.get("content"), "refusal": None}
            for call in message.get("tool_calls", ()):
                del call["index"]  # it is for putting streamed ones together
        return doc


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | None = None
    featcache: CacheReport | None = None

    def to_event(self, *, usage_asked: bool) -> bytes:
        """As a server-sent event. `usage` is there, null till the last, if it was asked for."""
        doc = self.model_dump(exclude_none=True)
        for choice, sent in zip(self.choices, doc["choices"], strict=True):
            sent["finish_reason"] = choice.finish_reason
            sent["logprobs"] = sent.get("logprobs")
        if usage_asked:
            doc["usage"] = doc.get("usage")
        return b"data: " + json.dumps(doc, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "featcache"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class FeatureInfo(BaseModel):
    """tier: where they are now, None if nowhere. error: why this image has none."""

    key: str | None
    tier: str | None
    layout: dict[str, Any] | None
    error: str | None = None


class FeaturesResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[FeatureInfo]


class Deleted(BaseModel):
    deleted: int


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail
