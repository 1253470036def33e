"""A Hugging Face tokenizer with its chat template, as `--tokenizer-path` names it."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, create_tokenizer
from megatron.tokenizer.hub import require_hub
from megatron.tokenizer.hugging_face import LibraryTokenizer

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
)


def tokenizer_folder(path: str) -> Path:
    """The folder of a tokenizer: a folder, the folder of a tokenizer.json, or the files of a Hub repository.

    Raises `UserError` when there is nothing of that name.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        return local.parent
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise UserError(f"--tokenizer-path {path}: no such folder")
    return _from_hub(path)


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


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        require_hub()
        return Path(snapshot_download(repo, allow_patterns=list(FILES)))
    # A failure surfaces as one of these, depending on where on the way it happens.
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    try:
        return Path(snapshot_download(repo, allow_patterns=list(FILES), local_files_only=True))
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--tokenizer-path {repo}: no such folder, and the Hub has nothing of that name for us ({reason}). Give a "
            "folder with tokenizer.json and a chat template."
        ) from error
