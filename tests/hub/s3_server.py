"""A real S3 server (moto's) on this machine that can refuse requests, and what a client needs to find it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>not today</Message></Error>"
_ERRORS = {403: ("403 Forbidden", "AccessDenied"), 503: ("503 Slow Down", "SlowDown")}


class S3Server:
    """`with` it, requests to `endpoint` are answered.

    `log` has them, as (method, path), and `query` is what the newest asks; those for which `refuses(method, path)` is
    true are answered with 403, or with 503 when it is that number; of the answers for which `cuts(method, path)` is
    true half the content comes, and `gate` holds back every PUT until it is set.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.refuses: Callable[[str, str], bool | int] = lambda method, path: False
        self.cuts: Callable[[str, str], bool] = lambda method, path: False
        self.query = ""
        self.gate = threading.Event()
        self.gate.set()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        inner = DomainDispatcherApplication(create_backend_app)

        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.log.append((method, path))
            self.query = environ["QUERY_STRING"]
            if method == "PUT":
                self.gate.wait(60)
            if refused := self.refuses(method, path):
                status, code = _ERRORS[403 if refused is True else refused]
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(status, [("Content-Type", "application/xml"), ("Connection", "close")])
                return [_ERROR.format(code).encode()]
            if self.cuts(method, path):
                whole = b"".join(inner(environ, start_response))
                return [whole[: len(whole) // 2]]
            return inner(environ, start_response)

        self._server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=MotoRequestHandler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> S3Server:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sent(self) -> list[str]:
        """The last parts of the paths of all PUT requests, in order; a large file is there once for each part."""
        return [path.rpartition("/")[2] for method, path in self.log if method == "PUT"]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
