"""A model behind an OpenAI-compatible server, and a server of our own for as long as a conversation lasts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from megatron.cluster.local import end_with_parent
from megatron.errors import DeepyError
from megatron.home import HOME

_PATIENCE = 20.0  # seconds that a server gets to end


class ServerFailed(DeepyError):
    """The server did not answer, or with an error."""


class ServerEnded(DeepyError):
    """Our own server ended by itself, with this exit code; its messages say why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the server ended with exit code {code}")
        self.exit_code = code


@dataclass
class Answer:
    """What a model says, while it grows. `calls`: of tools, in OpenAI's form. `reason`: why it ended."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None

    @property
    def turn(self) -> dict[str, Any]:
        """The same as a turn of the conversation."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.text, **calls}


class Model:
    """The first model of a server. Raises `ServerFailed`."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        with _named_failures():
            found = http.get("v1/models")
            _check(found)
            self.facts: Mapping[str, Any] = found.json()["data"][0]

    @property
    def name(self) -> str:
        """Its id."""
        return str(self.facts["id"])

    @property
    def chats(self) -> bool:
        """Whether it has a chat template, as far as the server says."""
        return bool(self.facts.get("chat_template", True))

    def say(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, answer: Answer
    ) -> Iterator[str]:
        """The answer to a conversation, piece by piece; `answer` grows with it. Raises `ServerFailed`.

        Without a chat template the last turn is continued as it is.
        """
        body: dict[str, Any] = {"model": self.name, "stream": True}
        if self.chats:
            body |= {"messages": list(turns), **({"tools": list(tools)} if tools else {})}
        else:
            body |= {"prompt": turns[-1]["content"], "max_tokens": self.facts.get("maximum_tokens") or 256}
        path = "v1/chat/completions" if self.chats else "v1/completions"
        with _named_failures(), self.http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _pieces(json.loads(line.removeprefix("data: ")), answer)


def _pieces(chunk: Mapping[str, Any], answer: Answer) -> Iterator[str]:
    if "error" in chunk:
        raise ServerFailed(str(chunk["error"].get("message")))
    for choice in chunk["choices"]:
        delta = choice.get("delta", choice)
        piece = delta.get("content") or delta.get("text") or ""
        answer.text += piece
        _add_calls(delta.get("tool_calls") or (), answer.calls)
        answer.reason = choice.get("finish_reason") or answer.reason
        yield piece


def _add_calls(parts: Sequence[Mapping[str, Any]], calls: list[dict[str, Any]]) -> None:
    """Servers send a call whole, or its arguments in pieces."""
    for part in parts:
        while len(calls) <= part.get("index", 0):
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[part.get("index", 0)], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _check(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {response.status_code} {response.reason_phrase}"
    raise ServerFailed(str(message))


@contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise ServerFailed(f"the server does not answer: {error or type(error).__name__}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerFailed(f"the server does not answer in OpenAI's form ({error!r})") from error


def server_at(url: str) -> httpx.Client:
    """A client of a server that runs already; its address with or without the /v1."""
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1") + "/", timeout=httpx.Timeout(600, connect=10))


@contextmanager
def own_server(argv: Sequence[str]) -> Iterator[httpx.Client]:
    """A server for the command line `argv` of serve.py, on a socket that only this user can open.

    It is a process of its own, in which Ctrl-C of the terminal does not arrive. Raises `ServerEnded`.
    """
    with tempfile.TemporaryDirectory(prefix="deepy-") as folder:
        socket = Path(folder, "socket")
        command = [sys.executable, str(HOME / "deepy.py"), str(HOME / "serve.py"), *argv, f"serve_host=unix:{socket}"]
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"LOGLEVEL": "WARNING", **os.environ},
            start_new_session=True,
            preexec_fn=end_with_parent(signal.SIGTERM),
        )
        transport = httpx.HTTPTransport(uds=str(socket))
        try:
            with httpx.Client(transport=transport, base_url="http://localhost/", timeout=None) as http:
                _await(server, socket, http)
                yield http
        finally:
            server.terminate()
            try:
                server.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                server.kill()  # its ranks end with it


def _await(server: subprocess.Popen[bytes], socket: Path, http: httpx.Client) -> None:
    while server.poll() is None:
        try:
            if socket.exists() and http.get("health", timeout=1.0).is_success:
                return
        except httpx.HTTPError:
            pass  # the weights are being read
        time.sleep(0.05)
    raise ServerEnded(server.returncode)
