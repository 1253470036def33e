"""Chats in a file of the user's, tokenised once into a cache: whole datasets by content, or none.

The key of an entry is a hash of the files' bytes, the tokenizer, its chat template and the rules of labels: a change in
any of them tokenises again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checksums import file_crc32
from megatron.data.chat.columns import find_columns
from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import load_template
from megatron.data.chat.tokenizer import chat_tokenizer, tokenizer_folder
from megatron.data.tokenise.command import CommandOptions, tokenise_files, trained_share
from megatron.data.tokenise.inputs import find_inputs
from megatron.data.tokens.cache import content_key, index_folder
from megatron.data.tokens.cache_lock import hold_lock
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import MachineError, UserError
from megatron.log import get_logger

logger = get_logger(__name__)

VERSION = 1  # of the rules of rendering and labelling: another one tokenises again


@dataclass(frozen=True)
class CachedChats:
    """`tokens`, `labels`: prefixes of the two datasets; how many `chats` and `count` tokens they hold."""

    tokens: str
    labels: str
    chats: int
    count: int


def cache_chats(files: Sequence[str], vocab_file: str, root: str | None = None, shared: bool = True) -> CachedChats:
    """The chats of JSON lines (or parquet, ...) with a model's own tokenizer and template; what the assistant says is
    trained.

    Args:
        files: of conversations, or of prompts with their answers, as the tokenising tool finds them.
        vocab_file: the tokenizer's folder, or tokenizer.json in it.
        root, shared: `data_cache_path`, `use_shared_fs`; by default the cache is in `index_cache` next to the files.

    Raises `UserError` naming file and line of what cannot be used.
    """
    paths = find_inputs(files)
    columns = find_columns(paths)
    if columns.chosen_key is not None:
        raise UserError(
            f"chats: {paths[0]} holds preference pairs; tokenise them with "
            "tools/datasets/preprocess_data_with_chat_template.py and name both sides (dataset_impl: pairwise)"
        )
    tokenizer, options = chat_tokenizer(vocab_file), ChatOptions(**asdict(columns))
    template = load_template(tokenizer_folder(vocab_file))
    eos = template.eos_id(tokenizer)
    settings = {**asdict(options), "chat_template": template.digest(), "eos": eos}
    contents = [(path.name, path.stat().st_size, file_crc32(path)) for path in paths]
    key = content_key({"version": VERSION, "files": contents, "ids": tokenizer.fingerprint().to_dict(), **settings})
    entry = index_folder(paths[0], shared, root) / f"chats-{key[:20]}"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(entry.with_suffix(".lock"), entry.is_dir, f"to tokenise {paths[0].name}"):
            if not entry.is_dir():
                encoder = ChatEncoder(tokenizer, template, options, eos)
                _tokenise(paths, encoder, entry, settings)
    except OSError as error:
        raise MachineError(f"chats: cannot write {entry}: {error.strerror}; set data_cache_path") from error
    name = options.names[0]
    tokens, labels = f"{entry}/chats_{name}_document", f"{entry}/chats_{name}_label_document"
    data = IndexedDataset(tokens)
    if not len(data):
        raise UserError(f"chats: {paths[0]} holds no chat with an answer to train")
    logger.info(f"chats: {trained_share(labels, IndexedDataset(labels))}")
    return CachedChats(tokens, labels, len(data), int(data.sizes.sum()))


def _tokenise(paths: Sequence[Path], encoder: ChatEncoder, entry: Path, settings: Mapping[str, Any]) -> None:
    """Write the datasets beside `entry` and give them its name, if nobody else did meanwhile."""
    draft = entry.with_name(f".{entry.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        how = CommandOptions(save_every=0)
        tokenise_files(paths, encoder, str(draft / "chats"), how, settings=settings, skip_bad=False)
        with suppress(OSError) if entry.is_dir() else nullcontext():
            os.rename(draft, entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
