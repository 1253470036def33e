"""A small Hub that takes uploads and gives them back: repositories, branches, commits, files by the LFS way.

What is sent is checked by its hash and counted; faults are injected by `UploadHub.fail`.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from tests.hub.hub_models import Answer, Hub, Model
from tests.local_hub import LocalHub

TOKEN = "hf_sesame"
_PIECE = 1 << 14  # bytes of a body that are read at once


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD path` holds `match`.

    `how`: `answer` with `status`, `headers` and the text `error` instead of doing it; `cut` the connection once `bytes`
    of the body have come; do it but `lose` the answer; `hold` it, until the client has closed the connection.
    """

    match: str
    how: Literal["answer", "cut", "lose", "hold"] = "answer"
    times: int = 1
    status: int = 503
    error: str = "injected"
    headers: Mapping[str, str] = field(default_factory=dict)
    bytes: int = 0


class UploadHub(LocalHub):
    """`with UploadHub() as hub:` serves on a free port.

    `models`: the repositories by full name. `log`: `METHOD path status` of the requests, status 0 where the connection
    was cut, and `sent` how many bytes of bodies came to each path. `large`: the LFS store by SHA-256.
    """

    def __init__(self) -> None:
        self._hub = Hub()
        self.models: dict[str, Model] = self._hub.models
        self.large: dict[str, bytes] = self._hub.large
        self.log: list[str] = []
        self.sent: Counter[str] = Counter()
        self.active = self.held = 0  # requests that are being answered, and those of them that a fault holds
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        super().__init__(_handler(self))
        self._hub.endpoint = self.endpoint

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Of a client that is logged in with `token`."""
        return super().environment(home) | ({"HF_TOKEN": token} if token else {})

    def fail(self, match: str, **what: Any) -> None:
        """Inject a `Fault`; those for the same request come one after the other."""
        self._faults.append(Fault(match, **what))

    def count(self, match: str) -> int:
        """How many requests so far hold `match` in their line of the log."""
        return sum(match in line for line in self.log)

    def sent_large(self) -> int:
        """Bytes of large files that came, whether they were taken or not."""
        return sum(count for path, count in self.sent.items() if path.startswith("/_lfs/"))

    def change(self, active: int = 0, held: int = 0) -> None:
        """Count requests."""
        with self._lock:
            self.active, self.held = self.active + active, self.held + held

    def take_fault(self, request: str) -> Fault | None:
        """The fault of this request, counted."""
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.match in request:
                    fault.times -= 1
                    return fault
        return None

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> Answer:
        """Of a request that nothing happens to."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        open_to_all = parts in ([""], ["api", "validate-yaml"]) or parts[0] == "_lfs"
        if token != f"Bearer {TOKEN}" and not open_to_all:
            return Answer(401, {"error": "Invalid credentials in Authorization header"})
        with self._lock:
            return self._hub.route(method, parts, body)


def _handler(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer goes in one piece: two wait for each other, 40 ms

        def handle_request(self) -> None:
            hub.change(active=1)
            try:
                self.do_request()
            finally:
                hub.change(active=-1)

        def do_request(self) -> None:
            fault = hub.take_fault(f"{self.command} {self.path}")
            status = 0
            if fault is not None and fault.how == "cut":
                self.read(until=fault.bytes)
                self.cut()
            elif fault is not None and fault.how == "hold":
                self.hold()
                self.cut()
            else:
                body = self.read()
                if fault is not None and fault.how == "answer":
                    answer = Answer(fault.status, {"error": fault.error}, dict(fault.headers))
                else:
                    answer = hub.answer(self.command, self.path, self.headers.get("Authorization"), body)
                if fault is not None and fault.how == "lose":
                    self.cut()
                else:
                    status = self.send(answer)
            hub.log.append(f"{self.command} {self.path} {status}")

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

        def read(self, until: int | None = None) -> bytes:
            """The body, or its first `until` bytes; counted as it comes."""
            content = bytearray()
            for piece in self.pieces():
                content += piece
                hub.sent[urlsplit(self.path).path] += len(piece)
                if until is not None and len(content) >= until:
                    break
            return bytes(content)

        def pieces(self) -> Iterator[bytes]:
            if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
                while left := int(self.rfile.readline() or b"0", 16):
                    while piece := self.rfile.read(min(left, _PIECE)):
                        left -= len(piece)
                        yield piece
                    self.rfile.readline()
                self.rfile.readline()
            else:
                left = int(self.headers.get("Content-Length") or 0)
                while piece := self.rfile.read(min(left, _PIECE)):
                    left -= len(piece)
                    yield piece

        def hold(self) -> None:
            """Wait until the client is gone; what it sent stays unread."""
            closed = select.poll()
            closed.register(self.connection, select.POLLRDHUP)
            hub.change(held=1)
            closed.poll(60_000)
            hub.change(held=-1)

        def cut(self) -> None:
            """Reset the connection."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def send(self, answer: Answer) -> int:
            content = answer.value if isinstance(answer.value, bytes) else json.dumps(answer.value).encode()
            status, headers = answer.status, {"Content-Type": "application/json", **answer.headers}
            start, end = 0, len(content)
            if status == 200 and isinstance(answer.value, bytes) and (wanted := self.headers.get("Range")):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last) + 1 if last else end, end)
                status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(content)}"
            try:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(end - start)}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[start:end])
            except ConnectionError:  # the client was killed
                self.close_connection = True
            return status

        def handle(self) -> None:
            try:
                super().handle()
            except (ConnectionError, ValueError):  # the client was killed, in the middle of a request
                self.close_connection = True

        def finish(self) -> None:
            try:
                super().finish()
            except (OSError, ValueError):  # cut above
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Quiet: `UploadHub.log` has it."""

    return Handler
