"""Which columns of a corpus hold its chats: the ones named by flags, else found in the first record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.tokenise.chunks import Record
from megatron.data.tokenise.formats import read_chunks
from megatron.errors import UserError

# Keys that hold a chat, in the order in which they are tried. The first is GPT-NeoX's default.
CHAT_KEYS = ("conversation", "messages", "conversations", "chat", "dialogue")
PROMPT_KEYS = ("prompt", "instruction", "question")
COMPLETION_KEYS = ("completion", "response", "output", "answer")
HELP = (
    "Name the columns: --jsonl-keys for chats (lists of messages), --prompt-key and --completion-key, or --chosen-key "
    "and --rejected-key"
)


@dataclass(frozen=True)
class Columns:
    """Columns with chats (`keys`), or of prompt and completion, or of a preference pair."""

    keys: tuple[str, ...] = ()
    prompt_key: str | None = None
    completion_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None

    def description(self) -> str:
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
    """The columns that the arguments name; without any, those found in the first record of the corpus.

    Raises `UserError` when the arguments name several kinds of data, and when none is found.
    """
    pair = bool(chosen_key or rejected_key)
    if keys and (pair or prompt_key or completion_key):
        raise UserError("--jsonl-keys names columns with chats; prompts, completions and pairs have their own flags")
    if pair and completion_key:
        raise UserError("--completion-key goes with --prompt-key alone, not with a preference pair")
    if keys:
        return Columns(tuple(keys))
    if pair or completion_key:
        return Columns((), prompt_key, completion_key, chosen_key, rejected_key)
    record = _first_record(paths)
    found = recognise(record, prompt_key)
    if found is None:
        raise UserError(f"{paths[0]}: no known column of chats among {', '.join(record)}. {HELP}.")
    return found


def recognise(record: Mapping[str, Any], prompt_key: str | None = None) -> Columns | None:
    """The columns of a record by their names, None when no name is known."""
    if "chosen" in record and "rejected" in record:
        prompt = prompt_key or ("prompt" if "prompt" in record else None)
        return Columns((), prompt, None, "chosen", "rejected")
    key = next((key for key in CHAT_KEYS if key in record), None)
    if key is not None and prompt_key is None:
        return Columns((key,))
    prompt = next((key for key in PROMPT_KEYS if key in record), None)
    completion = next((key for key in COMPLETION_KEYS if key in record), None)
    return Columns((), prompt_key or prompt, completion) if prompt and completion else None


def _first_record(paths: Sequence[Path]) -> Mapping[str, Any]:
    for chunk in read_chunks(paths):
        for record in chunk.records():
            if isinstance(record, Record):
                return record.value
    raise UserError(f"{', '.join(map(str, paths[:3]))}: no record in these files")
