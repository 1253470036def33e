"""The HTTP interface: /v1/models, /v1/completions, /v1/chat/completions, and a page to talk to the model at /.

It runs in a thread of rank 0 beside the decoding. Errors are JSON in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron.errors import UserError
from megatron.inference.chats import Chats, Written, tokenize
from megatron.inference.sampling import Sampling
from megatron.inference.server.decoder import NewToken, Order
from megatron.inference.server.desk import Desk, Full
from megatron.inference.server.questions import (
    OF_CHATS,
    OF_COMPLETIONS,
    BadRequest,
    Question,
    read_body,
    read_chat,
    read_prompts,
    read_question,
)
from megatron.inference.server.replies import Replies, Told, Writing, error, refusal
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer

logger = get_logger(__name__)

LARGEST_BODY = 8 << 20  # bytes
COMPLETION_TOKENS = 16  # OpenAI's default for a completion; a chat goes on until its end
PAGE = Path(__file__).with_name("page.html")
_OWN_HOSTS = {"localhost", "127.0.0.1", "::1"}
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerEnds(Exception):
    """The decoding has stopped: there will be no more tokens."""


@dataclass(frozen=True)
class Served:
    """What the interface knows of the model.

    Attributes:
        name: its id for clients.
        positions: most tokens of prompt and text together.
        most_tokens: most new tokens of a text that a client may ask for; None: what positions are left.
        chats: None where the tokenizer has no chat template.
        defaults: fields of requests that do not have them.
    """

    name: str
    created: int
    tokenizer: Tokenizer
    positions: int
    most_tokens: int | None
    chats: Chats | None
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Interface:
    """The handlers. `own_host`: only requests to this machine's own names are answered, so that no web page can reach
    the model by a name that it makes point here."""

    def __init__(self, served: Served, desk: Desk, own_host: bool) -> None:
        self.served, self.desk, self.own_host = served, desk, own_host

    def application(self) -> web.Application:
        """For aiohttp's runner."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._errors])
        app.router.add_get("/", self._page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self.own_host and request.url.host not in _OWN_HOSTS:
                raise BadRequest(f"this server answers at localhost, not at {request.url.host}", status=403)
            return await handler(request)
        except BadRequest as problem:
            return web.json_response(refusal(problem), status=problem.status)
        except Full as full:
            return web.json_response(error(str(full), "overloaded_error"), status=503)
        except ServerEnds:
            return web.json_response(error("the server ends", "server_error"), status=503)
        except web.HTTPException as problem:
            message = f"{request.method} {request.path}: {problem.reason}"
            status = problem.status
            return web.json_response(error(message, "invalid_request_error"), status=status, headers=_allow(problem))

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text(encoding="utf-8"), content_type="text/html", headers=_SAFE)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model({"model": request.match_info["name"]})
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        served = self.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "deepy",
            "max_model_len": served.positions,
            "maximum_tokens": served.most_tokens,
            "chat_template": served.chats is not None,
        }

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        fields = await self._read(request)
        default = COMPLETION_TOKENS if self.served.most_tokens is None else self.served.most_tokens
        question = read_question(fields, OF_COMPLETIONS, default)
        prompts = [self._ids(prompt) for prompt in read_prompts(fields)]
        return await self._answer(request, question, prompts, chat=False, calls_tools=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        fields = await self._read(request)
        question = read_question(fields, OF_CHATS, self.served.most_tokens)
        asked = read_chat(fields)
        if self.served.chats is None:
            raise BadRequest("the model's tokenizer has no chat template; use /v1/completions", code="no_chat_template")
        try:
            written = self.served.chats.write_turns(asked.messages, asked.tools)
        except UserError as problem:
            raise BadRequest(str(problem), "messages") from problem
        prompt = self._ids(written)
        return await self._answer(request, question, [prompt], chat=True, calls_tools=asked.tools is not None)

    async def _read(self, request: web.Request) -> dict[str, Any]:
        # Web pages of other origins can send other types without asking first.
        if request.content_type != "application/json":
            raise BadRequest("the Content-Type is not application/json", status=415)
        fields = read_body(await request.read())
        self._check_model(fields)
        return {**self.served.defaults, **fields}

    def _check_model(self, fields: dict[str, Any]) -> None:
        if (name := fields.get("model", self.served.name)) != self.served.name:
            message = f"there is no model {name!r} here, but {self.served.name!r}"
            raise BadRequest(message, "model", "model_not_found", status=404)

    def _ids(self, prompt: str | Written | list[int]) -> list[int]:
        """The tokens of a prompt; an empty one begins a document. Raises `BadRequest` when it is too long."""
        tokenizer, most = self.served.tokenizer, self.served.positions
        if isinstance(prompt, list):
            if not all(0 <= one < tokenizer.vocab_size for one in prompt):
                raise BadRequest(f"prompt: a token id is not between 0 and {tokenizer.vocab_size - 1}", "prompt")
            ids = prompt
        else:
            (ids,) = tokenize([prompt if isinstance(prompt, Written) else Written(prompt)], tokenizer)
        ids = ids or [tokenizer.require_eod("generation")]
        if len(ids) >= most:
            message = f"the prompt has {len(ids)} tokens, the model takes {most} with the new ones"
            raise BadRequest(message, "prompt", "context_length_exceeded")
        return ids

    async def _answer(
        self, request: web.Request, question: Question, prompts: Sequence[list[int]], *, chat: bool, calls_tools: bool
    ) -> web.StreamResponse:
        limit = self.served.most_tokens
        if limit is not None and (question.maximum_tokens or 0) > limit:
            raise BadRequest(f"max_tokens: at most {limit} are allowed here (maximum_tokens)", "max_tokens")
        texts = [prompt for prompt in prompts for _ in range(question.choices)]
        decode = self.served.tokenizer.detokenize
        writings = [Writing(i, prompt, question, decode, calls_tools) for i, prompt in enumerate(texts)]
        replies = Replies(self.served.name, question, decode, chat)
        async with self._written(question, texts) as tokens:
            if question.stream:
                return await _stream(request, replies, writings, tokens)
            told = [Told(writing) for writing in writings]
            async for index, token in tokens:
                told[index].add(token)
            return web.json_response(replies.whole(told))

    @asynccontextmanager
    async def _written(
        self, question: Question, prompts: Sequence[list[int]]
    ) -> AsyncIterator[AsyncIterator[tuple[int, NewToken]]]:
        """The tokens of all texts, as they come; what is not finished when nobody waits any more is cancelled."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, NewToken | None]]()
        seed = secrets.randbits(63) if question.seed is None else question.seed
        # A set of no probability at all holds the best token.
        top_p = 0.0 if question.top_p == 1.0 else max(question.top_p, 1e-9)
        sampling = Sampling(question.temperature, question.top_k, top_p)
        open_: dict[int, int] = {}

        def listen(index: int) -> Callable[[NewToken | None], None]:
            return lambda token: loop.call_soon_threadsafe(queue.put_nowait, (index, token))  # type: ignore[return-value]

        async def tokens() -> AsyncIterator[tuple[int, NewToken]]:
            while open_:
                index, token = await queue.get()
                if token is None:
                    raise ServerEnds
                if token.finish is not None:
                    del open_[index]
                yield index, token

        try:
            for index, prompt in enumerate(prompts):
                room = self.served.positions - len(prompt)
                most = min(question.maximum_tokens or room, room)
                order = Order(0, prompt, most, sampling, question.stop, seed, index, question.alternatives)
                open_[index] = self.desk.submit(order, listen(index))
            yield tokens()
        finally:
            for number in open_.values():
                self.desk.cancel(number)


async def _stream(
    request: web.Request,
    replies: Replies,
    writings: Sequence[Writing],
    tokens: AsyncIterator[tuple[int, NewToken]],
) -> web.StreamResponse:
    """Server-sent events: each has the text since the last one of its choice, and the tokens behind it."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def send(*chunks: Any) -> None:
        for chunk in chunks:
            await response.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())

    await send(*replies.opening(writings))
    told = [Told(writing) for writing in writings]
    try:
        async for index, token in tokens:
            one = told[index]
            one.add(token)
            if one.text or token.finish is not None:
                await send(replies.part(one))
                told[index] = Told(one.writing)
        await send(*replies.closing(writings))
    except ServerEnds:
        await send(error("the server ends", "server_error"))
    await response.write(b"data: [DONE]\n\n")
    return response


def _allow(problem: web.HTTPException) -> dict[str, str]:
    return {"Allow": problem.headers["Allow"]} if "Allow" in problem.headers else {}


class HttpThread:
    """Serves an application on a listening socket, in a thread, from `start` to `end`."""

    def __init__(self, application: web.Application, listening: socket.socket) -> None:
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
        self._listening = listening
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)

    def start(self) -> None:
        """Answer requests from now on."""
        self._thread.start()
        self._do(self._open())

    async def _open(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._listening).start()

    def end(self) -> None:
        """Let the last answers reach their clients, and close all connections."""
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
