"""Which columns of a corpus hold its chats: as named by flags, else as the first record shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.chat.conversation import chat_key, prompt_keys
from megatron.data.tokenise.chunks import Record
from megatron.data.tokenise.formats import read_chunks
from megatron.errors import UserError

HELP = (
    "Name the columns: --jsonl-keys for chats (lists of messages), --prompt-key and --completion-key, or --chosen-key "
    "and --rejected-key"
)


@dataclass(frozen=True)
class Columns:
    """Columns with chats (`keys`), or those of prompt and completion, or those of a preference pair."""

    keys: tuple[str, ...] = ()
    prompt_key: str | None = None
    completion_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None

    def described(self) -> str:
        """A few words for the log."""
        if self.chosen_key:
            prompt = f" of the prompt {self.prompt_key!r}" if self.prompt_key else ""
            return f"pairs {self.chosen_key!r} over {self.rejected_key!r}{prompt}"
        if self.completion_key:
            return f"prompt {self.prompt_key!r} with completion {self.completion_key!r}"
        return ", ".join(map(repr, self.keys))


def find_columns(
    paths: Sequence[Path],
    keys: Sequence[str] | None = None,
    prompt_key: str | None = None,
    completion_key: str | None = None,
    chosen_key: str | None = None,
    rejected_key: str | None = None,
) -> Columns:
    """The columns that the arguments name; without any, what the first record of the corpus is recognised as.

    Raises `UserError` when the arguments name several kinds of data, and when nothing is recognised.
    """
    pair = bool(chosen_key or rejected_key)
    if keys and (pair or prompt_key or completion_key):
        raise UserError("--jsonl-keys names columns with chats; prompts, completions and pairs have flags of their own")
    if pair and completion_key:
        raise UserError("--completion-key goes with --prompt-key alone, not with a preference pair")
    if keys:
        return Columns(tuple(keys))
    if pair or completion_key:
        return Columns((), prompt_key, completion_key, chosen_key, rejected_key)
    record = _first_record(paths)
    found = recognised(record, prompt_key)
    if found is None:
        raise UserError(f"{paths[0]}: no column that is known to hold chats among {', '.join(record)}. {HELP}.")
    return found


def recognised(record: Mapping[str, Any], prompt_key: str | None = None) -> Columns | None:
    """What a record shows itself to be, None when it is nothing known."""
    if "chosen" in record and "rejected" in record:
        prompt = prompt_key or ("prompt" if "prompt" in record else None)
        return Columns((), prompt, None, "chosen", "rejected")
    key = chat_key(record)
    if key is not None and prompt_key is None:
        return Columns((key,))
    pair = prompt_keys(record)
    return Columns((), prompt_key or pair[0], pair[1]) if pair else None


def _first_record(paths: Sequence[Path]) -> Mapping[str, Any]:
    for chunk in read_chunks(paths):
        for record in chunk.records():
            if isinstance(record, Record):
                return record.value
    raise UserError(f"{', '.join(map(str, paths[:3]))}: no record in it")
