"""A small Hub that takes uploads: repositories, branches, files by commit and by the LFS way, checked by their hash."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.local_hub import LocalHub

TOKEN = "hf_sesame"
_LFS = (".safetensors", ".bin", ".pt")


@dataclass
class Model:
    """Branches of a repository: {name: {path: content}}; `commits` counts."""

    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: int = 0


class UploadHub(LocalHub):
    """`with UploadHub() as hub:` serves on a free port; `models` are the repositories, `log` the requests."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.log: list[str] = []
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
                    body = hub._chunks(self.rfile)
                known = self.headers.get("Authorization") == f"Bearer {TOKEN}" or "/_lfs/" in self.path
                path = unquote(urlsplit(self.path).path).strip("/").split("/")
                status, value = hub._route(self.command, path, body) if known or path == [""] else (401, {})
                hub.log.append(f"{self.command} {self.path} {status}")
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def log_message(self, *_: object) -> None:
                """Quiet: `UploadHub.log` has it."""

        super().__init__(Handler)

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Of a client that is logged in with `token`."""
        return super().environment(home) | ({"HF_TOKEN": token} if token else {})

    @staticmethod
    def _chunks(file: Any) -> bytes:
        content = b""
        while size := int(file.readline(), 16):
            content += file.read(size)
            file.readline()
        file.readline()
        return content

    def _route(self, method: str, path: list[str], body: bytes) -> tuple[int, Any]:
        if path[0] == "":
            return 200, {}
        if path[0] == "_lfs":
            if hashlib.sha256(body).hexdigest() != path[1]:
                return 400, {"error": "not what was announced"}
            self._large[path[1]] = body
            return 200, {}
        if path[-3:] == ["lfs", "objects", "batch"]:
            return 200, {"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]}
        if path == ["api", "whoami-v2"]:
            return 200, {"type": "user", "name": "me", "orgs": []}
        if path == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if path[:2] != ["api", "models"] or "/".join(path[2:4]) not in self.models:
            return 404, {"error": "Repository not found"}
        return self._model("/".join(path[2:4]), method, path[4:], body)

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        there = wanted["oid"] in self._large
        actions = {} if there else {"actions": {"upload": {"href": f"{self.endpoint}/_lfs/{wanted['oid']}"}}}
        return {"oid": wanted["oid"], "size": wanted["size"], **actions}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        status = 409 if name in self.models else 200
        self.models.setdefault(name, Model())
        return status, {"url": f"{self.endpoint}/{name}", "id": name, "name": name}

    def _model(self, name: str, method: str, rest: list[str], body: bytes) -> tuple[int, Any]:
        model = self.models[name]
        what, branch = (rest + ["revision", "main"])[:2] if rest else ("revision", "main")
        if what == "branch":
            model.branches.setdefault(branch, dict(model.branches["main"]))
            return 200, {}
        files = model.branches.get(branch)
        if files is None:
            return 404, {"error": "Revision not found"}
        if what == "preupload":
            return 200, {"files": [self._mode(each, files) for each in json.loads(body)["files"]]}
        if what == "commit":
            return self._commit(name, model, files, body)
        sha = hashlib.sha1(repr((branch, model.commits)).encode()).hexdigest()
        return 200, {"id": name, "sha": sha, "private": False, "tags": [], "siblings": []}

    def _mode(self, wanted: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
        large, content = wanted["path"].endswith(_LFS), files.get(wanted["path"])
        oid = None
        if content is not None:
            blob = b"blob %d\0" % len(content) + content
            oid = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(blob).hexdigest()
        mode = "lfs" if large else "regular"
        return {"path": wanted["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _commit(self, name: str, model: Model, files: dict[str, bytes], body: bytes) -> tuple[int, Any]:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self._large[value["oid"]]
        model.commits += 1
        url = f"{self.endpoint}/{name}/commit/{model.commits}"
        return 200, {"success": True, "commitOid": f"{model.commits:040x}", "commitUrl": url, "hookOutput": ""}
