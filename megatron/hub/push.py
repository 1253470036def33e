"""A finished folder to a model repository of the Hugging Face Hub, and whether all of it has arrived.

The unit that is tried again is the upload of the whole folder: the client asks the Hub for the hash of each file first,
so what has arrived is neither sent nor committed twice, whether the answer to a commit was lost or the process killed.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron.errors import MachineError, UserError
from megatron.hub.retry import RESUMES, Retry, first_line, retry_of
from megatron.log import ProgressBar, get_logger
from megatron.tokenizer.hub import require_hub

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

logger = get_logger(__name__)

__all__ = ["check_hub", "push_folder", "retry_of", "verify_remote"]

MAIN = "main"
HashKind = Literal["sha256", "blob"]
"""SHA-256, or the SHA-1 that git gives a file."""
_CHUNK = 4 << 20  # bytes of a file that are in memory at once


def check_hub(repo: str, retry: Retry | None = None) -> str:
    """The full name of a repository of this user or his organizations: before the work, what would fail after it.

    `repo`: `name` (of the user) or `owner/name`. Raises `UserError` when the Hub does not answer or knows no user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    retry = retry or Retry()
    try:
        require_hub()
        user = retry.call(lambda: HfApi().whoami()["name"], what=f"logging in to write {repo}")
    except ConnectionError as error:
        raise UserError(f"cannot write to {repo} on the Hub: {first_line(error)}. Nothing was done.") from error
    except UserError as error:
        if isinstance(error.__cause__, LocalTokenNotFoundError):
            raise UserError(f"{repo}: nobody is logged in to the Hub; run `hf auth login`, or set HF_TOKEN") from error
        raise UserError(f"cannot write to {repo} on the Hub: {error} Nothing was done.") from error
    return repo if "/" in repo else f"{user}/{repo}"


def push_folder(
    folder: Path,
    repo: str,
    *,
    revision: str | None = None,
    private: bool = True,
    retry: Retry | None = None,
    allow: Sequence[str] | None = None,
) -> str:
    """Upload the files of `folder`, and compare what the Hub then has with them. Returns the address.

    The repository and the branch `revision` are made when they are missing; a new branch begins empty, not as a copy of
    main. A repository that exists keeps its visibility. Files that are there with the same content are not sent again.

    Args:
        repo: `owner/name`.
        private: who sees a new repository: its owner, or everybody.
        allow: patterns of the names to upload (`*.json`); None: all.

    Raises `UserError` when the Hub refuses it or a file differs afterwards, `MachineError` when the Hub stays busy.
    """
    from huggingface_hub import HfApi, constants

    api, retry, branch = HfApi(), retry or Retry(), revision or MAIN
    what = f"uploading {folder} to {repo}" + (f" ({revision})" if revision else "")
    if not local_files(folder, allow):
        raise UserError(f"{folder} has no files to upload")

    def upload() -> None:
        # As the next after this commit: one that is sent again after a lost answer is refused (412), not doubled.
        parent = api.model_info(repo, revision=branch).sha
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=branch,
            parent_commit=parent,
            allow_patterns=None if allow is None else list(allow),
            commit_message=f"Upload {folder.name}",
        )

    try:
        retry.call(api.create_repo, repo, private=private, exist_ok=True, what=f"making {repo}")
        if retry.call(api.model_info, repo, what=f"reading {repo}").private != private:
            logger.warning(f"{repo} exists and is {'public' if private else 'private'}; that is not changed")
        if revision is not None:
            _make_branch(repo, revision, retry)
        retry.call(upload, what=what)
        wrong = verify_remote(folder, repo, revision, retry=retry, allow=allow)
        if wrong:
            raise UserError(
                f"{what}: files that are missing there or differ: {', '.join(wrong[:5])} ({len(wrong)} in all). Were "
                f"they changed during the upload, or does a .gitignore in the folder name them? {RESUMES}."
            )
    except (UserError, MachineError) as error:
        command = resume_command(folder, repo, revision, private=private)
        raise type(error)(f"{error} `{command}` uploads the folder alone.") from error
    return f"{constants.ENDPOINT}/{repo}" + (f"/tree/{revision}" if revision else "")


def _make_branch(repo: str, branch: str, retry: Retry) -> None:
    """Make `branch` where it is missing, from the first commit of the repository: it holds no file of main."""
    from huggingface_hub import HfApi

    api = HfApi()
    refs = retry.call(api.list_repo_refs, repo, what=f"reading the branches of {repo}")
    if branch not in [ref.name for ref in (*refs.branches, *refs.tags)]:
        what = f"making the branch {branch} of {repo}"
        first = retry.call(api.list_repo_commits, repo, what=what)[-1].commit_id
        retry.call(api.create_branch, repo, branch=branch, revision=first, exist_ok=True, what=what)


def verify_remote(
    folder: Path,
    repo: str,
    revision: str | None = None,
    *,
    retry: Retry | None = None,
    allow: Sequence[str] | None = None,
) -> list[str]:
    """The files of `folder` that `repo` lacks at `revision` or has with another content, by size and hash.

    The hashes that the Hub lists (SHA-256 of large files, git's SHA-1 of others) are compared with those of the files
    as they are on the disk now. Nothing is downloaded. Raises as `push_folder`.
    """
    from huggingface_hub import HfApi, RepoFile

    def listing() -> dict[str, RepoFile]:
        tree = HfApi().list_repo_tree(repo, revision=revision, recursive=True)
        return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    there = (retry or Retry()).call(listing, what=f"listing the files of {repo}")
    files = local_files(folder, allow)
    total = sum(path.stat().st_size for path in files.values())
    with ProgressBar(f"comparing {folder} with {repo}", total, "B") as bar:
        return [name for name, path in files.items() if not _is_same(path, there.get(name), bar)]


def _is_same(path: Path, entry: RepoFile | None, report: Callable[[int], None]) -> bool:
    try:
        return is_same(entry, path.stat().st_size, lambda kind: hash_file(path, (kind,), report)[kind])
    except FileNotFoundError:  # deleted meanwhile
        return False


def is_same(entry: RepoFile | None, size: int, hash_of: Callable[[HashKind], str]) -> bool:
    """Whether the Hub's file has this size and hash; it lists one hash, SHA-256 of a large file, git's of others."""
    if entry is None or entry.size != size:
        return False
    return hash_of("blob") == entry.blob_id if entry.lfs is None else hash_of("sha256") == entry.lfs.sha256


def hash_file(path: Path, kinds: Sequence[HashKind], report: Callable[[int], None]) -> dict[HashKind, str]:
    """Hashes of a file, which is read in pieces, whose sizes are reported."""
    start = b"blob %d\0" % path.stat().st_size
    digests = {kind: hashlib.sha1(start) if kind == "blob" else hashlib.sha256() for kind in kinds}
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            for digest in digests.values():
                digest.update(chunk)
            report(len(chunk))
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def local_files(folder: Path, allow: Sequence[str] | None = None) -> dict[str, Path]:
    """The files of `folder` that an upload takes, by their name in the repository: not those of git or the client."""
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects

    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.glob("**/*")) if path.is_file()}
    patterns = None if allow is None else list(allow)
    chosen = filter_repo_objects(files, allow_patterns=patterns, ignore_patterns=DEFAULT_IGNORE_PATTERNS)
    return {name: files[name] for name in chosen}


def resume_command(folder: Path, repo: str, revision: str | None, *, private: bool = True) -> str:
    """What uploads the folder again; what has arrived is not sent."""
    more = [*([revision] if revision else []), *([] if private else ["--public"])]
    return shlex.join(["python", "tools/ckpts/upload.py", str(folder), repo, *more])
