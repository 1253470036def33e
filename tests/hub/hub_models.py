"""What the small Hub of uploads knows and answers: repositories with commits, branches and tags, and the LFS store."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

_LFS = (".safetensors", ".bin", ".pt")
_NO_REPO, _NO_REVISION, _NO_ENTRY = "RepoNotFound", "RevisionNotFound", "EntryNotFound"


@dataclass
class Answer:
    """A status, JSON or the bytes of a file, and headers."""

    status: int
    value: Any
    headers: dict[str, str] = field(default_factory=dict)


def missing(code: str) -> Answer:
    """A 404 as the client knows it."""
    return Answer(404, {"error": code}, {"X-Error-Code": code})


@dataclass
class Commit:
    """All files of a state of a branch, by path."""

    oid: str
    files: dict[str, bytes]
    title: str
    parent: Commit | None


@dataclass
class Model:
    """A repository: it begins with one commit of no files that `main` is at."""

    name: str
    private: bool = False
    refs: dict[str, Commit] = field(default_factory=dict)
    commits: int = 0  # that clients made

    def __post_init__(self) -> None:
        self._all: dict[str, Commit] = {}
        self.refs["main"] = self._commit({}, "initial commit", None)

    @property
    def branches(self) -> dict[str, dict[str, bytes]]:
        """{name: {path: content}}."""
        return {name: commit.files for name, commit in self.refs.items()}

    def titles(self, branch: str = "main") -> list[str]:
        """Of the commits of a branch, the newest first."""
        return [commit.title for commit in self.history(self.refs[branch])]

    @staticmethod
    def history(commit: Commit | None) -> list[Commit]:
        """The commit and those before it."""
        found = []
        while commit is not None:
            found.append(commit)
            commit = commit.parent
        return found

    def find(self, revision: str) -> Commit | None:
        """Of a branch or an object id."""
        return self.refs.get(revision.removeprefix("refs/heads/")) or self._all.get(revision)

    def add(self, branch: str, files: dict[str, bytes], title: str) -> Commit:
        """A commit of a client."""
        self.commits += 1
        self.refs[branch] = self._commit(files, title, self.refs[branch])
        return self.refs[branch]

    def _commit(self, files: dict[str, bytes], title: str, parent: Commit | None) -> Commit:
        oid = hashlib.sha1(f"{self.name} {title} {len(self._all)}".encode()).hexdigest()
        return self._all.setdefault(oid, Commit(oid, files, title, parent))


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file in a listing: git's hash, of the pointer for a large file, which has its SHA-256 besides."""
    large = path.endswith(_LFS)
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    if large:
        oid = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n".encode()
        found["lfs"] = {"oid": oid, "size": len(content), "pointerSize": len(pointer)}
    blob = pointer if large else content
    return {**found, "oid": hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()}


class Hub:
    """Answers requests; the server above it has the connections, tokens and faults."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.large: dict[str, bytes] = {}
        self.endpoint = ""

    def route(self, method: str, path: list[str], body: bytes) -> Answer:
        """The answer to a request; `path`: the parts of its address."""
        match path:
            case [""]:
                return Answer(200, {})
            case ["_lfs", oid]:
                return self._store(oid, body)
            case ["api", "validate-yaml"]:
                return Answer(200, {"errors": [], "warnings": []})
            case ["api", "whoami-v2"]:
                return Answer(200, {"type": "user", "name": "me", "orgs": []})
            case ["api", "repos", "create"]:
                return self._create(json.loads(body))
            case ["api", "models", owner, name, *rest]:
                model = self.models.get(f"{owner}/{name}")
                return missing(_NO_REPO) if model is None else self._model(model, method, rest, body)
            case [owner, name, "info", "lfs", "objects", "batch"] if (
                f"{owner}/{name}".removesuffix(".git") in self.models
            ):
                return Answer(200, {"transfer": "basic", "objects": [*map(self._place, json.loads(body)["objects"])]})
            case [owner, name, "resolve", revision, *file] if f"{owner}/{name}" in self.models:
                return self._file(self.models[f"{owner}/{name}"], revision, "/".join(file))
        return missing(_NO_REPO)

    def _store(self, oid: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return Answer(400, {"error": "not what was announced"})
        self.large[oid] = body
        return Answer(200, {})

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        address = f"{self.endpoint}/_lfs/{wanted['oid']}?X-Amz-Signature={'0123456789abcdef'}"
        actions = {} if wanted["oid"] in self.large else {"actions": {"upload": {"href": address}}}
        return {"oid": wanted["oid"], "size": wanted["size"], **actions}

    def _create(self, wanted: dict[str, Any]) -> Answer:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        status = 409 if name in self.models else 200
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.models.setdefault(name, Model(name, private=private))
        return Answer(status, {"url": f"{self.endpoint}/{name}", "id": name, "name": name})

    def _model(self, model: Model, method: str, rest: list[str], body: bytes) -> Answer:
        match rest:
            case ["refs"]:
                refs = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c.oid} for n, c in model.refs.items()]
                return Answer(200, {"branches": refs, "converts": [], "tags": []})
            case ["branch", branch]:
                return self._branch(model, method, branch, json.loads(body or b"{}"))
            case [] | ["revision", _] | ["commits", _] | ["preupload", _] | ["commit", _] | ["tree", _, *_]:
                commit = model.find(rest[1] if rest else "main")
                return missing(_NO_REVISION) if commit is None else self._revision(model, commit, rest, body)
        return missing(_NO_ENTRY)

    def _branch(self, model: Model, method: str, branch: str, wanted: dict[str, Any]) -> Answer:
        if method == "DELETE":
            return missing(_NO_REVISION) if model.refs.pop(branch, None) is None else Answer(200, {})
        if branch in model.refs:
            return Answer(409, {"error": "Reference already exists"})
        start = model.find(wanted.get("startingPoint") or "main")
        if start is None:
            return missing(_NO_REVISION)
        model.refs[branch] = start
        return Answer(200, {})

    def _revision(self, model: Model, commit: Commit, rest: list[str], body: bytes) -> Answer:
        match rest:
            case ["commits", _]:
                facts = {"message": "", "date": "2026-01-01T00:00:00.000Z", "authors": [{"user": "me"}]}
                return Answer(200, [{"id": c.oid, "title": c.title, **facts} for c in model.history(commit)])
            case ["preupload", _]:
                return Answer(200, {"files": [self._mode(each, commit.files) for each in json.loads(body)["files"]]})
            case ["commit", branch]:
                return self._commit(model, branch, commit, [json.loads(line) for line in body.splitlines()])
            case ["tree", _, *folder]:
                inside = "".join(f"{part}/" for part in folder)
                files = [entry(p, content) for p, content in commit.files.items() if p.startswith(inside)]
                return Answer(200, files)
        siblings = [{"rfilename": path} for path in commit.files]
        facts = {"sha": commit.oid, "private": model.private, "tags": [], "siblings": siblings}
        return Answer(200, {"id": model.name, "modelId": model.name, **facts})

    def _mode(self, wanted: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
        path = wanted["path"]
        known = entry(path, files[path]) if path in files else {}
        mode = "lfs" if path.endswith(_LFS) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known.get("lfs", known).get("oid")}

    def _commit(self, model: Model, branch: str, parent: Commit, entries: list[dict[str, Any]]) -> Answer:
        files, title = dict(parent.files), ""
        for each in entries:
            value = each["value"]
            if each["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, parent.oid):
                    return Answer(412, {"error": "A commit has happened since. Please refresh and try again."})
            elif each["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif each["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif each["key"] == "deletedFile":
                files.pop(value["path"], None)
        made = model.add(branch, files, title)
        url = f"{self.endpoint}/{model.name}/commit/{made.oid}"
        return Answer(200, {"success": True, "commitOid": made.oid, "commitUrl": url, "hookOutput": ""})

    def _file(self, model: Model, revision: str, path: str) -> Answer:
        commit = model.find(revision)
        if commit is None:
            return missing(_NO_REVISION)
        if path not in commit.files:
            return missing(_NO_ENTRY)
        listed = entry(path, commit.files[path])
        etag = listed.get("lfs", listed)["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        headers["X-Linked-Size"] = str(listed["size"])
        return Answer(200, commit.files[path], {**headers, "Content-Type": "application/octet-stream"})
