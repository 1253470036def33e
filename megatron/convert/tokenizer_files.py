"""The tokenizer's files next to an exported model, and the special ids that they declare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.convert.parts.family import TokenIds
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import create_tokenizer

logger = get_logger(__name__)


def open_tokenizer(
    tokenizer_type: str, vocab_file: str | None, merge_file: str | None, vocab_is_hf: bool = False
) -> Tokenizer:
    """The run's tokenizer; `vocab_is_hf`: `vocab_file` is a Hugging Face tokenizer, whatever `tokenizer_type` is."""
    try:
        if vocab_is_hf:
            return create_tokenizer("HFTokenizer", vocab_file, None)
        return create_tokenizer(tokenizer_type, vocab_file, merge_file)
    except UserError as error:
        raise UserError(
            f"{error} (Give --config_file with the current vocab_file, or --no_save_tokenizer to leave it out.)"
        ) from error


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the tokenizer's files, chat template included, so that `AutoTokenizer` opens the folder."""
    written = tokenizer.export(folder)
    if not written:
        logger.warning(f"{tokenizer.describe()} has no files: the exported folder has no tokenizer")


def token_ids(tokenizer: Tokenizer | None, pad: int | None) -> TokenIds:
    """Special ids: end of document as eos; bos what the tokenizer's own files name, else the same; pad as given."""
    if tokenizer is None:
        return TokenIds(pad=pad)
    bos = _declared_id(tokenizer, "bos_token")
    own_pad = tokenizer.pad if pad is None else pad
    return TokenIds(bos=tokenizer.eod if bos is None else bos, eos=tokenizer.eod, pad=own_pad)


def _declared_id(tokenizer: Tokenizer, role: str) -> int | None:
    """The id of the token that tokenizer_config.json gives the role, if it has one."""
    path = tokenizer.files().get("tokenizer_config.json")
    if path is None:
        return None
    token: Any = json.loads(path.read_text(encoding="utf-8")).get(role)
    token = token.get("content") if isinstance(token, dict) else token
    return next((i for i, text in tokenizer.id_map().items() if text == token), None)
