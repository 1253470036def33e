"""A finished folder to a model repository of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import UserError
from megatron.tokenizer.hub import require_hub

KEY = "--push-to-hub"


def check_hub(repo: str) -> str:
    """The full name of a repository that this user may write: before the work, what would fail after it.

    `repo`: `name` (of the user) or `owner/name`. Raises `UserError` when the Hub does not answer or knows no user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        require_hub()
        user = HfApi().whoami()["name"]
    except LocalTokenNotFoundError as error:
        raise UserError(f"{KEY}: nobody is logged in to the Hub; run `hf auth login`, or set HF_TOKEN") from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{KEY}: cannot write to {repo} on the Hub: {first_line(error)}. Nothing was done.") from error
    return repo if "/" in repo else f"{user}/{repo}"


def push_folder(folder: Path, repo: str, *, revision: str | None = None, private: bool = False) -> str:
    """Upload all files of `folder`; the repository and the branch `revision` are made when they are missing.

    Files that are there already with the same content are not sent again. Returns the address. Raises `UserError`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=f"Upload {folder.name}")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"{KEY}: uploading {folder} to {repo} failed: {first_line(error)}. The folder is complete; upload it with "
            f"`hf upload {repo} {folder}`"
        ) from error
    return f"{constants.ENDPOINT}/{repo}" + (f"/tree/{revision}" if revision else "")


def first_line(error: BaseException) -> str:
    """What an error of a client says, without the full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
