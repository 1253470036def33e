"""A Hugging Face tokenizer with its chat template: a folder, or a repository on the Hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, create_tokenizer
from megatron.tokenizer.hub import require_hub
from megatron.tokenizer.hugging_face import LibraryTokenizer

# What makes a tokenizer and its chat template; weights are not downloaded.
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template*", "*.jinja"]
FILES += ["vocab.json", "merges.txt", "config.json", "generation_config.json", "added_tokens.json"]


def tokenizer_folder(path: str) -> Path:
    """The folder of a tokenizer: a folder, the folder of a tokenizer.json, or the files of a Hub repository.

    Raises `UserError` when none of these exists.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        return local.parent
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise UserError(f"--tokenizer-path {path}: no such folder")
    return download_tokenizer(path, "--tokenizer-path", lambda what, action: action())


def chat_tokenizer(path: str) -> LibraryTokenizer:
    """The tokenizer at `path` (see `tokenizer_folder`); chats need one of the `tokenizers` library.

    Raises `UserError` for a folder without tokenizer.json.
    """
    folder, local = tokenizer_folder(path), Path(path).expanduser()
    if not local.is_file() and not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(
            f"--tokenizer-path {path}: no tokenizer.json in it. transformers makes one of most tokenizers: "
            f"AutoTokenizer.from_pretrained({path!r}).save_pretrained('some-folder')"
        )
    found: Tokenizer = create_tokenizer("HFTokenizer", str(local if local.is_file() else folder))
    assert isinstance(found, LibraryTokenizer), "HFTokenizer is one"
    return found


def download_tokenizer(repo: str, flag: str, attempt: Callable[[str, Callable[[], str]], str]) -> Path:
    """The folder with the tokenizer of a Hub repository, or with its cached copy when the Hub fails.

    `attempt(repo, download)` calls `download`, perhaps again. Raises `UserError` when there is neither.
    """
    from huggingface_hub import constants, snapshot_download

    try:
        if not constants.HF_HUB_OFFLINE:
            require_hub()
        return Path(attempt(repo, lambda: snapshot_download(repo, allow_patterns=FILES)))
    except UserError:
        raise
    # What the client raises is a long and changing list.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    try:
        return Path(snapshot_download(repo, allow_patterns=FILES, local_files_only=True))
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{flag} {repo}: no such folder, and the Hub does not provide it ({reason}). Give a folder with "
            "tokenizer.json and a chat template"
        ) from error
