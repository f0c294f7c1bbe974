"""`ChatTemplate`: from messages to token ids, as the model's own processor would, with text kept as text.

Whoever writes the name of a control token or of an image placeholder into a message gets its characters, not
the token: each such name is cut after its first character by a marker that the tokenizer knows, and the
marker's id is dropped from the result. All else is tokenized in one piece, as the processor does it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer

from featcache.errors import ModelError, RequestError

_Form = Literal["text", "parts"]
_PROBE = "featcacheprobe"


class ChatTemplate:
    """The chat template and tokenizer of one model. Thread-safe.

    source: Jinja text. placeholder: what the template leaves for one image. controls: more texts that stand
        for something else than themselves.

    Raises ModelError if there is no template, or the tokenizer isn't a fast one.
    """

    def __init__(
        self, tokenizer: Any, source: Any, placeholder: str, controls: Sequence[str], model: str
    ) -> None:
        if isinstance(source, Mapping):
            source = source.get("default")
        if not source:
            raise ModelError(f"{model}: has no chat template; give one with chat_template=")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelError(f"{model}: its tokenizer isn't a fast one (tokenizer.json is missing)")
        self.source: str = source
        self.placeholder = placeholder
        self.model = model
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | {placeholder, *controls}
        written = {token.content for token in added if token.content in source and token.content.strip()}
        self._special = _positions_of(special)
        self._control = _positions_of(special | written)
        self._cut = f"\ue000{secrets.token_hex(12)}\ue001"  # unguessable, so that no message can hold it
        # a tokenizer of our own, which knows the marker as a token
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.add_special_tokens([AddedToken(self._cut, special=True, normalized=False)])
        self._cut_id = self._backend.token_to_id(self._cut)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages (see messages.py) as text, with a placeholder an image, and markers in it.

        Raises RequestError if the template refuses the messages, or drops something that they hold.
        """
        safe = [self._formed(self._escaped_message(message)) for message in messages]
        text = self._rendered(
            safe,
            tools=self._escaped(list(tools), self._control) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **self._escaped(dict(variables or {}), self._control),
        )
        self._check_complete(safe, text)
        return text

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text, without the markers."""
        bos = self._tokenizer.bos_token
        # as processors do: a template that writes the first token itself gets no second one
        add_special_tokens = bos is None or not text.startswith(bos)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [token for token in ids if token != self._cut_id] if self._cut in text else ids

    def _rendered(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, chat_template=self.source, tokenize=False, **kwargs
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as exc:
            reason = str(exc) or type(exc).__name__
            raise RequestError(f"messages: the chat template of {self.model} refuses them: {reason}") from exc
        return text

    # Text stays text

    def _escaped_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # templates look for tags like </think> in what the model itself said before
        controls = self._special if message["role"] == "assistant" else self._control
        content = message["content"]
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        return {
            "role": self._role(message["role"]),
            "content": self._escaped_parts(content, controls)
            if isinstance(content, list)
            else self._escaped(content, controls),
            **self._escaped(others, controls),
        }

    def _role(self, role: str) -> str:
        return "system" if role == "developer" and "developer" not in self.source else role

    def _escaped_parts(self, parts: list[dict[str, Any]], controls: re.Pattern[str]) -> list[dict[str, Any]]:
        """Neighbouring texts are looked at as one: a name may begin in one and end in the next."""
        out: list[dict[str, Any]] = []
        run: list[str] = []
        for part in [*parts, None]:
            if part is not None and part["type"] == "text":
                run.append(part["text"])
                continue
            out += [{"type": "text", "text": text} for text in self._escaped_run(run, controls)]
            run = []
            if part is not None:
                out.append(part)
        return out

    def _escaped_run(self, texts: list[str], controls: re.Pattern[str]) -> list[str]:
        cuts = [match.start() + 1 for match in controls.finditer("".join(texts))]
        out, begin = [], 0
        for text in texts:
            inside = [cut - begin for cut in cuts if begin < cut <= begin + len(text)]
            edges = [0, *inside, len(text)]
            out.append(self._cut.join(text[a:b] for a, b in pairwise(edges)))
            begin += len(text)
        return out

    def _escaped(self, value: Any, controls: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return self._escaped_run([value], controls)[0]
        if isinstance(value, Mapping):
            return {self._escaped(k, controls): self._escaped(v, controls) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._escaped(item, controls) for item in value]
        return value

    # What the template understands

    @cached_property
    def _forms(self) -> frozenset[_Form]:
        """Whether the template takes content as text, as a list of parts with images, or both."""
        image = [{"type": "text", "text": _PROBE}, {"type": "image"}]
        forms: set[_Form] = set()
        if _PROBE in self._probe(_PROBE):
            forms.add("text")
        parts = self._probe(image)
        if _PROBE in parts and self.placeholder in parts:
            forms.add("parts")
        if not forms:
            raise ModelError(f"{self.model}: its chat template writes neither a plain message nor its parts")
        return frozenset(forms)

    def _probe(self, content: Any) -> str:
        try:
            return self._rendered([{"role": "user", "content": content}], add_generation_prompt=True)
        except RequestError:
            return ""

    def _formed(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, list) and "parts" not in self._forms:
            pieces = [self.placeholder if part["type"] == "image" else part["text"] for part in content]
            return {**message, "content": "".join(pieces)}
        if isinstance(content, str) and "text" not in self._forms:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _check_complete(self, messages: Sequence[Mapping[str, Any]], text: str) -> None:
        images = sum(self._images(message["content"]) for message in messages)
        places = text.count(self.placeholder)
        if places != images:
            where = [i for i, message in enumerate(messages) if self._images(message["content"])]
            raise RequestError(
                f"messages: {images} images (in messages {where}), but the chat template of {self.model} "
                f"leaves {places} places for them; it may not take images in these roles"
            )
        for i, message in enumerate(messages):
            if message["role"] not in ("user", "system"):
                continue  # templates rewrite what assistants and tools said
            content = message["content"]
            texts = [content] if isinstance(content, str) else [p["text"] for p in content if "text" in p]
            if any(piece.strip() not in text for piece in texts):
                raise RequestError(
                    f"messages[{i}]: the chat template of {self.model} drops its text; "
                    f"it may not take the role {message['role']!r} here"
                )

    def _images(self, content: str | list[dict[str, Any]]) -> int:
        if isinstance(content, str):
            return content.count(self.placeholder)
        return sum(part["type"] == "image" for part in content)


def _positions_of(texts: set[str]) -> re.Pattern[str]:
    """Matches, with no width, where one of `texts` begins; those of one character can't be cut."""
    names = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("(?=" + "|".join(re.escape(name) for name in names) + ")" if names else "(?!)")
