"""The source tree at a commit, as a folder to send: what a job runs does not change while it waits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.manifest import COMMIT_FILE
from megatron.errors import UserError
from megatron.secrets import find_secrets

PATCH_FILE = "uncommitted.patch"
# Not part of the code, should somebody have them in the repository; matched at the root only.
EXCLUDED = ("/.git", "/.venv", "/data", "/checkpoints")


@dataclass(frozen=True)
class Tree:
    """`name`: of its folder on a cluster. `commit`: what runs from it record as `git_hash`, with `-dirty` where it was
    changed. `object`: git's id of the files. `patch`: the changes since the commit, for people."""

    root: Path
    name: str
    commit: str
    object: str
    patch: str = ""

    def has(self, path: Path) -> bool:
        """Whether a file of the working tree is in it with the same content."""
        try:
            relative = path.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError:
            return False
        stored = _git(self.root, "rev-parse", "--quiet", "--verify", f"{self.object}:{relative}", wanted=False)
        return bool(stored) and stored == _git(self.root, "hash-object", "--", relative)

    def write(self, folder: Path) -> None:
        """Put its files, its commit and its patch into a folder."""
        archive = ["git", "-C", str(self.root), "archive", "--format=tar", self.object]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as process:
            unpacked = subprocess.run(["tar", "-x", "-C", str(folder)], stdin=process.stdout, check=False)
        if process.returncode or unpacked.returncode:
            raise UserError(f"{self.root}: `git archive {self.object}` failed; its message is above")
        (folder / COMMIT_FILE).write_text(f"{self.commit}\n", encoding="utf-8")
        if self.patch:
            (folder / PATCH_FILE).write_text(self.patch, encoding="utf-8", errors="surrogateescape")


def read_tree(root: Path, allow_dirty: bool = False) -> Tree:
    """The tree at HEAD; with `allow_dirty`, changes of tracked files and what was `git add`ed over it.

    Files that git does not know never travel: nobody knows what is in them. Raises `UserError` for changes that are not
    committed, and for a folder that is no repository.
    """
    commit = _git(root, "rev-parse", "--verify", "HEAD", wanted=False)
    if not commit or not Path(_git(root, "rev-parse", "--show-toplevel")).samefile(root):
        raise UserError(f"{root} is not a clone of Deepy with a commit; submit from one, so that it is known what runs")
    changed = [line[3:] for line in _git(root, "status", "--porcelain", "--untracked-files=no").splitlines()]
    if not changed:
        return Tree(root, commit, commit, commit)
    if not allow_dirty:
        shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise UserError(
            f"{root} has changes that are not committed: {shown}. Commit them, or give --allow-dirty: they are sent,"
            f" and kept as {PATCH_FILE} next to the code"
        )
    with tempfile.TemporaryDirectory(prefix="deepy-") as folder:
        env = {**os.environ, "GIT_INDEX_FILE": f"{folder}/index"}  # the user's own index stays as it is
        _git(root, "read-tree", _git(root, "write-tree"), env=env)
        _git(root, "add", "--update", ".", env=env)
        changed_tree = _git(root, "write-tree", env=env)
    patch = _git(root, "diff", "--binary", commit, changed_tree) + "\n"
    added = "\n".join(line for line in patch.splitlines() if line.startswith("+"))
    for secret in find_secrets(added):
        raise UserError(f"{root}: a change that is not committed holds {secret.kind}: {secret.instead}")
    digest = hashlib.sha256(patch.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return Tree(root, f"{commit}-{digest}", f"{commit}-dirty", changed_tree, patch)


def _git(root: Path, *command: str, env: dict[str, str] | None = None, wanted: bool = True) -> str:
    """What git prints, without the white space at its end. Raises `UserError`, unless it is not `wanted`: then ""."""
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, env=env, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"git cannot be run: {error}") from error
    if done.returncode != 0 and wanted:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise UserError(f"`git {' '.join(command)}` failed in {root}: {said}")
    return done.stdout.decode("utf-8", "surrogateescape").rstrip() if done.returncode == 0 else ""
