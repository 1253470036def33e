"""A small Hugging Face Hub on this machine: repositories with a commit, and answers that fail on purpose.

It speaks the part of the Hub's HTTP interface that reading datasets and tokenizers needs, so that the real client
libraries run against it (`HF_ENDPOINT`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.local_hub import LocalHub


@dataclass
class Fault:
    """The next `times` requests whose path contains `match` get `status` instead of an answer."""

    match: str
    times: int
    status: int = 429
    headers: Mapping[str, str] = field(default_factory=lambda: {"Retry-After": "1"})
    method: str | None = None


@dataclass
class Repo:
    """The files of a repository by path; the commit is made of their content."""

    files: dict[str, bytes]

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for path, content in sorted(self.files.items()):
            digest.update(f"{path}\0{oid(content)}\0".encode())
        return digest.hexdigest()


def oid(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(LocalHub):
    """`with Hub() as hub:` serves on a free port of 127.0.0.1. `requests` lists "METHOD path status" in order."""

    def __init__(self) -> None:
        self.datasets: dict[str, Repo] = {}
        self.models: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self._lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                status, headers, body = hub._answer(self.command, self.path, self.rfile.read(length), self.headers)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_POST = answer

            def log_message(self, *_: object) -> None:
                """Quiet: `Hub.requests` has it."""

        super().__init__(Handler)

    def count(self, part: str) -> int:
        """How many requests so far contain that text."""
        return sum(part in request for request in self.requests)

    def _answer(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict, bytes]:
        with self._lock:
            fault = next(
                (f for f in self.faults if f.times and f.match in path and f.method in (None, method)),
                None,
            )
            if fault is not None:
                fault.times -= 1
                status, head, content = fault.status, dict(fault.headers), b'{"error": "on purpose"}'
            else:
                status, head, content = self._route(path, body, headers)
            self.requests.append(f"{method} {path} {status}")
        return status, head, content

    def _route(self, target: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict, bytes]:
        url = urlsplit(target)
        parts = [unquote(part) for part in url.path.strip("/").split("/") if part]
        if not parts:
            return 200, {}, b""
        if parts[0] == "api" and parts[1] in ("datasets", "models") and len(parts) >= 4:
            repos = self.datasets if parts[1] == "datasets" else self.models
            return self._api(repos.get("/".join(parts[2:4])), "/".join(parts[2:4]), parts[4:], url.query, body)
        repos = self.datasets if parts[0] == "datasets" else self.models
        parts = parts[1:] if parts[0] == "datasets" else parts
        if len(parts) >= 5 and parts[2] == "resolve":
            return self._file(repos.get("/".join(parts[:2])), parts[3], "/".join(parts[4:]), headers)
        return _error(404, "RepoNotFound")

    def _api(self, repo: Repo | None, name: str, rest: list[str], query: str, body: bytes) -> tuple[int, dict, bytes]:
        if repo is None:
            return _error(404, "RepoNotFound")
        kind, revision = (rest or ["revision"])[0], rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", repo.commit):
            return _error(404, "RevisionNotFound")
        if kind == "revision":
            siblings = [{"rfilename": path} for path in sorted(repo.files)]
            info = {"id": name, "sha": repo.commit, "private": False, "tags": [], "siblings": siblings}
            return _json(info)
        if kind == "tree":
            return self._tree(repo, "/".join(rest[2:]), "recursive=true" in query.lower())
        if kind == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            return _json([entry for path in wanted for entry in _entries(repo, path)])
        return _error(404, "EntryNotFound")

    def _tree(self, repo: Repo, folder: str, recursive: bool) -> tuple[int, dict, bytes]:
        below = f"{folder}/" if folder else ""
        inside = [path for path in sorted(repo.files) if path.startswith(below)]
        if folder and not inside:
            return _error(404, "EntryNotFound")
        found: dict[str, dict] = {}
        for path in inside:
            names = path[len(below) :].split("/")
            for depth in range(1, len(names)):
                if recursive or depth == 1:
                    above = below + "/".join(names[:depth])
                    found[above] = {"type": "directory", "path": above, "oid": "0" * 40, "size": 0}
            if recursive or len(names) == 1:
                found[path] = _entry(path, repo.files[path])
        return _json(list(found.values()))

    def _file(self, repo: Repo | None, revision: str, path: str, headers: Mapping[str, str]) -> tuple[int, dict, bytes]:
        if repo is None:
            return _error(404, "RepoNotFound")
        if revision not in ("main", repo.commit):
            return _error(404, "RevisionNotFound")
        if path not in repo.files:
            return _error(404, "EntryNotFound")
        content = repo.files[path]
        head = {"X-Repo-Commit": repo.commit, "ETag": f'"{oid(content)}"', "Accept-Ranges": "bytes"}
        wanted = headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(content) - 1), len(content) - 1)
            part = content[int(first) : end + 1]
            return 206, {**head, "Content-Range": f"bytes {first}-{end}/{len(content)}"}, part
        return 200, head, content


def _entry(path: str, content: bytes) -> dict:
    return {"type": "file", "path": path, "oid": oid(content), "size": len(content)}


def _entries(repo: Repo, path: str) -> list[dict]:
    if path in repo.files:
        return [_entry(path, repo.files[path])]
    if any(other.startswith(f"{path}/") for other in repo.files):
        return [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0}]
    return []


def _json(value: object) -> tuple[int, dict, bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status: int, code: str) -> tuple[int, dict, bytes]:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, json.dumps({"error": code}).encode()
