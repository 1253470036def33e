"""Fetching a single file from the Hugging Face Hub (or its local cache)."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import UserError


def fetch(repo: str, filename: str, *, key: str, instead: str) -> Path:
    """The local path of `filename` of Hub repository `repo`, downloaded when it is not cached.

    Raises `UserError` when neither works; `key` is the setting that led here and `instead` what to do about it.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f"{key}: fetching {repo} needs huggingface_hub: pip install huggingface_hub") from error
    try:
        return Path(hf_hub_download(repo, filename, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        require_hub()
        return Path(hf_hub_download(repo, filename))
    # A failure surfaces as one of these, depending on where on the way it happens.
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{key}: cannot fetch {filename} of {repo} from the Hub ({reason}). {instead}") from error


def require_hub(timeout: float = 10.0) -> None:
    """Raise `ConnectionError` when the Hub (or the mirror that `HF_ENDPOINT` names) does not answer.

    The client itself retries for half a minute before it gives up, which is long for a machine that has no network.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    # The client's HTTP library is its own affair (requests before 1.0, httpx since), and so are its exceptions.
    except Exception as error:
        raise ConnectionError(f"{constants.ENDPOINT} does not answer: {error}") from error
