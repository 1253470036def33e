"""The tokenizer's files next to an exported model."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import create_tokenizer

logger = get_logger(__name__)

LEAVE_OUT = "give --config_file with the current vocab_file, or --no_save_tokenizer to leave it out"


def open_tokenizer(
    tokenizer_type: str, vocab_file: str | None, merge_file: str | None, vocab_is_hf: bool = False
) -> Tokenizer:
    """The run's tokenizer; `vocab_is_hf`: `vocab_file` is a Hugging Face tokenizer, whatever `tokenizer_type` is."""
    try:
        if vocab_is_hf:
            return create_tokenizer("HFTokenizer", vocab_file, None)
        return create_tokenizer(tokenizer_type, vocab_file, merge_file)
    except UserError as error:
        raise UserError(f"{error} ({LEAVE_OUT[0].upper()}{LEAVE_OUT[1:]}.)") from error


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the tokenizer's files, chat template included, so that `AutoTokenizer` opens the folder."""
    written = tokenizer.export(folder)
    if not written:
        logger.warning(f"{tokenizer.describe()} has no files: the exported folder has no tokenizer")
