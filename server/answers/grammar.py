"""Answers that obey a JSON schema, by llguidance: tokens that can't follow are ruled out before each step."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from featcache.errors import RequestError
from featcache.server.protocol import FunctionDefinition

_MAX_SCHEMA_BYTES = 256 << 10
# One line, as models mostly write JSON: where white space is free, a weak model may go on with it for ever.
_COMPACT: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class Grammars:
    """Compiles grammars for one tokenizer. `compile` may take a second: call it off the event loop."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: list[int]) -> None:
        self._names = tokenizer
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=stop_ids)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for: perhaps only a part of a character."""
        if self._tokenizer.is_special_token(token):
            return str(self._names.convert_ids_to_tokens(token)).encode()
        return self._tokenizer.decode_bytes([token])

    def json_object(self) -> Grammar:
        return self.json_schema({"type": "object"}, "response_format")

    def tool_call(self, tools: list[FunctionDefinition]) -> Grammar:
        """One call of one of the tools, its arguments after the tool's schema."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": tool.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        schema = json.dumps({"anyOf": calls, "x-guidance": _COMPACT})
        self._check_size(schema, "tools")
        lark = f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'
        return self._compiled(llguidance.LLMatcher.grammar_from_lark(lark), "tools")

    def json_schema(self, schema: dict[str, Any], where: str) -> Grammar:
        """Raises RequestError, naming `where`, for a schema that isn't one or that can't be enforced."""
        self._check_size(json.dumps(schema), where)
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)
        except ValueError as exc:
            raise RequestError(f"{where}: {_first_line(str(exc))}") from exc
        return self._compiled(text, where)

    def _check_size(self, schema: str, where: str) -> None:
        if len(schema) > _MAX_SCHEMA_BYTES:
            raise RequestError(f"{where}: a schema of more than {_MAX_SCHEMA_BYTES} bytes")

    def _compiled(self, text: str, where: str) -> Grammar:
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{where}: {_first_line(matcher.get_error())}")
        return Grammar(matcher, self._tokenizer.vocab_size)


class Grammar:
    """The logits hook of one answer: called before each token with what was generated so far."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._num_consumed = 0
        self._mask = np.zeros((vocabulary + 31) // 32, dtype=np.uint32)

    def copy(self) -> Grammar:
        """Another one at the same place, for another answer."""
        twin = Grammar(self._matcher.deep_copy(), self._mask.size * 32)
        twin._num_consumed = self._num_consumed
        return twin

    def __call__(self, generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        """logits: (vocabulary,). Returns them with all that can't follow `generated` at -inf."""
        self._matcher.consume_tokens(list(generated[self._num_consumed :]))
        self._num_consumed = len(generated)
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise RequestError(f"response_format: {_first_line(self._matcher.get_error())}")
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits.astype(bool))[: logits.shape[-1]]
        if allowed.shape[-1] < logits.shape[-1]:
            allowed = torch.nn.functional.pad(allowed, (0, logits.shape[-1] - allowed.shape[-1]))
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


def _first_line(message: str) -> str:
    return (message.strip() or "it can't be enforced").splitlines()[0][:300]
