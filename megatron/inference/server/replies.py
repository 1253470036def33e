"""What clients are told, in OpenAI's forms: texts, parts of texts while they grow, token probabilities, errors."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.inference.server.decoder import NewToken
from megatron.inference.server.questions import BadRequest, Question
from megatron.inference.stop_strings import GrowingText, StopStrings

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

# How Hermes, Qwen and their kin write calls of tools; what is written in another way stays text.
_CALL, _CALLS = "<tool_call>", re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class Writing:
    """A text while it is written.

    Args:
        index: its number among the request's.
        calls_tools: it may call tools; from the first call on nothing is told until it is complete.

    Attributes:
        tokens: its ids, with the one that ended it.
        finish: why it ended, in OpenAI's words; None while it goes on.
    """

    def __init__(self, index: int, prompt: list[int], question: Question, decode: Decode, calls_tools: bool) -> None:
        self.index, self.prompt, self.decode, self.calls_tools = index, prompt, decode, calls_tools
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.calls: list[Json] = []
        self._stops = StopStrings(question.stop, decode)
        hold = StopStrings((*question.stop, _CALL), decode) if calls_tools else self._stops
        self._pieces: list[str] = []
        self._growing = GrowingText(hold, self._pieces.append)

    def take(self, token: NewToken) -> str:
        """The next token; what can be told of the text since the last one."""
        self.tokens.append(token.token)
        text = self.tokens[:-1] if token.finish == "end" else self.tokens
        if token.finish is None:
            self._growing.grew(text)
            piece = "".join(self._pieces)
            self._pieces.clear()
            return piece
        content, self.calls = self._split(self._stops.cut(self.decode(text)))
        self.finish = "tool_calls" if self.calls else "length" if token.finish == "length" else "stop"
        return content[len(self._growing.shown) :]

    def _split(self, text: str) -> tuple[str, list[Json]]:
        """The text before the first call, and the calls; all of it where one of them is no call."""
        if not self.calls_tools or _CALL not in text:
            return text, []
        calls = []
        for match in _CALLS.finditer(text):
            try:
                call = json.loads(match.group(1))
            except ValueError:
                return text, []
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return text, []
            arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return text.partition(_CALL)[0], calls


@dataclass
class Told:
    """A part of a text, or all of it, with the tokens that were written meanwhile."""

    writing: Writing
    text: str = ""
    tokens: list[NewToken] = field(default_factory=list)

    def add(self, token: NewToken) -> None:
        """The next token of the text."""
        self.text += self.writing.take(token)
        self.tokens.append(token)


class Replies:
    """The forms of one kind of request. `chat`: messages, else plain texts."""

    def __init__(self, model: str, question: Question, decode: Decode, chat: bool) -> None:
        self.question, self.decode, self.chat = question, decode, chat
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self._kind = kind
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, told: Sequence[Told]) -> Json:
        """The answer to a request that does not stream."""
        choices = [self._choice(one, delta=False) for one in told]
        body: Json = {**self._head, "object": self._kind, "choices": choices}
        if self.chat and self.question.token_ids:
            body["prompt_token_ids"] = told[0].writing.prompt
        return {**body, "usage": _usage([one.writing for one in told])}

    def opening(self, writings: Sequence[Writing]) -> list[Json]:
        """The first chunks of a stream."""
        if not self.chat:
            return []
        extra = {"prompt_token_ids": writings[0].prompt} if self.question.token_ids else {}
        role = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": one.index, "delta": role, "logprobs": None, "finish_reason": None}], extra)
            for one in writings
        ]

    def part(self, told: Told) -> Json:
        """A chunk of a stream."""
        return self._chunk([self._choice(told, delta=True)])

    def closing(self, writings: Sequence[Writing]) -> list[Json]:
        """The last chunks of a stream."""
        return [self._chunk([], {"usage": _usage(writings)})] if self.question.include_usage else []

    def _chunk(self, choices: list[Json], extra: Mapping[str, Any] = {}) -> Json:
        kind = "chat.completion.chunk" if self.chat else self._kind
        usage = {"usage": None} if self.question.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage, **extra}

    def _choice(self, told: Told, delta: bool) -> Json:
        writing, question = told.writing, self.question
        choice: Json = {"index": writing.index, "finish_reason": writing.finish}
        # The token that ends a text is none of its text; with it log-probabilities are those of all that was drawn.
        tokens = [one for one in told.tokens if question.token_ids or one.finish != "end"]
        if not self.chat:
            choice |= {"text": told.text, "logprobs": self._logprobs_of_text(tokens)}
            if question.token_ids:
                choice["prompt_token_ids"] = writing.prompt
        else:
            choice["logprobs"] = self._logprobs_of_chat(tokens)
            message: Json = {"content": told.text} if delta else {"role": "assistant", "content": told.text}
            if writing.calls:
                calls = writing.calls
                message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)] if delta else calls
                if not delta:
                    message["content"] = told.text or None
            choice["delta" if delta else "message"] = message
        if question.token_ids:
            choice["token_ids"] = [one.token for one in told.tokens]
        return choice

    def _logprobs_of_chat(self, tokens: Sequence[NewToken]) -> Json | None:
        if self.question.alternatives is None:
            return None
        rows = [
            {
                **self._one(token.token, token.logprob),
                "top_logprobs": [self._one(*pair) for pair in token.alternatives],
            }
            for token in tokens
        ]
        return {"content": rows, "refusal": None}

    def _one(self, token: int, logprob: float | None) -> Json:
        text = self.decode([token])
        # A part of a character has no text.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}

    def _logprobs_of_text(self, tokens: Sequence[NewToken]) -> Json | None:
        if self.question.alternatives is None:
            return None
        texts = [self.decode([token.token]) for token in tokens]
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
        # Parts of characters have the same text: the likeliest of them is told.
        best = [{self.decode([one]): logprob for one, logprob in reversed(token.alternatives)} for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": best if self.question.alternatives else None,
            "text_offset": offsets,
        }


def _usage(writings: Sequence[Writing]) -> Json:
    prompts = {id(writing.prompt): len(writing.prompt) for writing in writings}  # the choices of one prompt share it
    read, written = sum(prompts.values()), sum(len(writing.tokens) for writing in writings)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(problem: BadRequest) -> Json:
    """The same of a request that cannot be answered."""
    return error(str(problem), "invalid_request_error", problem.param, problem.code)
