"""What clients ask for, in OpenAI's words: JSON to checked values. Needs no torch.

Source: OpenAI's API reference, /v1/completions and /v1/chat/completions; `return_token_ids` and `top_k` as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_CHOICES = 128  # texts of one request
MOST_ALTERNATIVES = 20
MOST_STOPS = 16
# What clients send along that changes no text.
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
# What is not here, with the value that asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "response_format": {"type": "text"},
    "modalities": ["text"],
}


class BadRequest(Exception):
    """What a client sent cannot be answered; `param`: the field to blame."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Question:
    """How texts are to be written, and what is to be told about them.

    Attributes:
        temperature, top_p, top_k: see `Sampling`; 1, 0 and 0 draw from the model as it is.
        maximum_tokens: None: until the model ends the text, or has no more positions.
        choices: texts per prompt.
        seed: None: another one each time.
        alternatives: likeliest tokens told with each new one; None: no log-probabilities.
        token_ids: tell the ids of prompt and text, with the token that ended it.
    """

    temperature: float
    top_p: float
    top_k: int
    maximum_tokens: int | None
    stop: tuple[str, ...]
    choices: int
    seed: int | None
    alternatives: int | None
    stream: bool
    include_usage: bool
    token_ids: bool


@dataclass(frozen=True)
class ChatQuestion:
    """The turns of a chat and the tools that it may call, as the template is to see them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def read_body(body: bytes) -> dict[str, Any]:
    """The object in a request. Raises `BadRequest`."""
    try:
        value = json.loads(body)
        if b"\\u" in body:  # half of a surrogate pair, where a client cut a text, is no Unicode
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object")
    return {name: field for name, field in value.items() if field is not None}


def read_question(fields: Mapping[str, Any], more: Sequence[str], default_tokens: int | None) -> Question:
    """What both kinds of requests have. `more`: the names of the other fields of this kind. Raises `BadRequest`, also
    for a field that is not known: it would be left out without a word."""
    known = {*_IGNORED, *_NEUTRAL, *_OF_BOTH, *more}
    for name, value in fields.items():
        if name not in known:
            raise BadRequest(f"{name} is not known here", name, "unknown_parameter")
        if name in _NEUTRAL and value != _NEUTRAL[name] and value not in ({}, []):
            raise BadRequest(f"{name} is not available: leave it out", name, "unsupported_parameter")
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    return Question(
        temperature=_number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(fields, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, _whole(fields, "top_k", 0, -1, 1 << 31)),
        maximum_tokens=_whole(fields, names[0], 0, 1, 1 << 31) if names else default_tokens,
        stop=_stops(fields),
        choices=_whole(fields, "n", 1, 1, MOST_CHOICES),
        seed=_whole(fields, "seed", 0, -(1 << 63), (1 << 63) - 1) if "seed" in fields else None,
        alternatives=_alternatives(fields),
        stream=_flag(fields, "stream"),
        include_usage=_include_usage(fields),
        token_ids=_flag(fields, "return_token_ids"),
    )


_OF_BOTH = ("model", "temperature", "top_p", "top_k", "max_tokens", "stop", "n", "seed", "stream", "stream_options")
_OF_BOTH += ("logprobs", "return_token_ids")
OF_COMPLETIONS = ("prompt",)
OF_CHATS = ("messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens")


def read_prompts(fields: Mapping[str, Any]) -> list[str | list[int]]:
    """`prompt`: a text, its ids, or a list of either. Raises `BadRequest`."""
    given = fields.get("prompt", "")
    several = isinstance(given, list) and not _are_ids(given)
    prompts = given if several else [given]
    if not prompts or len(prompts) > MOST_CHOICES:
        raise BadRequest(f"prompt: there are {len(prompts)}; send 1 to {MOST_CHOICES}", "prompt")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _are_ids(prompt)):
            raise BadRequest("prompt is neither a text nor a list of token ids, nor a list of these", "prompt")
    return prompts


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def read_chat(fields: Mapping[str, Any]) -> ChatQuestion:
    """`messages`, `tools` and `tool_choice`. Raises `BadRequest`."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is not a list of messages", "messages")
    tools, choice = fields.get("tools"), fields.get("tool_choice", "auto")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRequest("tools is not a list of objects", "tools")
    if choice not in ("auto", "none"):
        raise BadRequest("tool_choice: only auto and none are available", "tool_choice", "unsupported_parameter")
    turns = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return ChatQuestion(turns, tools if tools and choice == "auto" else None)


def _message(message: Any, where: str) -> dict[str, Any]:
    """A turn as templates know it: text for content, objects for the arguments of calls."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} has no role", where)
    turn = {name: value for name, value in message.items() if value is not None}
    content = turn.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRequest(f"{where}: only parts that are text can be read", where)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRequest(f"{where}: content is no text", where)
    turn["content"] = content
    if "tool_calls" in turn:
        if not isinstance(turn["tool_calls"], list):
            raise BadRequest(f"{where}: tool_calls is not a list", where)
        turn["tool_calls"] = [_call(call, where) for call in turn["tool_calls"]]
    return turn


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: a call in tool_calls has no function with a name", where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise BadRequest(f"{where}: the arguments of {function['name']} are not JSON: {error}", where) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _number(fields: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise BadRequest(f"{name} is not a number between {least:g} and {most:g}", name)
    return float(value)


def _whole(fields: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadRequest(f"{name} is not a whole number between {least} and {most}", name)
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} is neither true nor false", name)
    return value


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise BadRequest("stream_options is not an object", "stream_options")
    return _flag(options, "include_usage")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest("stop is neither a text nor a list of texts", "stop")
    if len(stops) > MOST_STOPS:
        raise BadRequest(f"stop: there are {len(stops)}; send at most {MOST_STOPS}", "stop")
    return tuple(stops)


def _alternatives(fields: Mapping[str, Any]) -> int | None:
    """From `logprobs`, in completions a number, in chats a flag beside the number `top_logprobs`."""
    asked = fields.get("logprobs", False)
    if not isinstance(asked, bool):
        return _whole(fields, "logprobs", 0, 0, MOST_ALTERNATIVES)
    number = _whole(fields, "top_logprobs", 0, 0, MOST_ALTERNATIVES)
    if number and not asked:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return number if asked else None
