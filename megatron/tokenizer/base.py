"""What every tokenizer offers, and the registry keyed by `tokenizer_type`."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron.errors import UserError
from megatron.files import refuse_lfs_pointer
from megatron.registry import Registry
from megatron.tokenizer.byte_counts import byte_level_counts
from megatron.tokenizer.fast import Recipe
from megatron.tokenizer.fingerprint import Fingerprint
from megatron.tokenizer.ragged import Ragged


class Encodes(Protocol):
    """Something that turns texts into ids in a tokenizer's stead."""

    name: str

    def encode(self, texts: Sequence[str]) -> Ragged: ...


class Tokenizer(ABC):
    """Text to ids and back.

    `eod` is the id written between documents of training data (what ends a model's texts: model_tokens.py) and `pad`
    the id of padding; either is None when the tokenizer's files name none. `name` is the `tokenizer_type`.
    """

    name: str
    eod: int | None = None
    pad: int | None = None
    _reserved: int = 0
    fast: Encodes | None = None  # what `exact.choose_encoder` found to give the same ids in less time

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`, with the special tokens that the tokenizer's own template adds (often none)."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are written out."""

    @abstractmethod
    def id_map(self) -> dict[int, str]:
        """Every id with its token, added tokens included. Byte-level tokens are in GPT-2's printable alphabet."""

    @abstractmethod
    def files(self) -> dict[str, Path]:
        """Files that make up the tokenizer: the name each has in a Hugging Face folder, and where it is now."""

    def byte_counts(self) -> np.ndarray | None:
        """How many bytes of text each id stands for, int64 `[vocab_size]`, 0 for special tokens (byte_counts.py); None
        where that depends on the tokens around. Here: of a vocabulary of bytes whose only special tokens are `eod` and
        `pad`."""
        return byte_level_counts(self.vocab_size, self._ids, (), {self.eod, self.pad} - {None})  # type: ignore[arg-type]

    def declared_id(self, role: str) -> int | None:
        """The id of the token that the tokenizer's own files call `bos_token`, `eos_token` or `pad_token`, if any."""
        return None

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` for many texts; faster where the library can."""
        return [self.tokenize(text) for text in texts]

    def encode_batch(self, texts: Sequence[str]) -> Ragged:
        """The ids of `tokenize_batch` without Python integers, by the fast encoder when one was chosen."""
        return self.fast.encode(texts) if self.fast is not None else self.encode_exactly(texts)

    def encode_exactly(self, texts: Sequence[str]) -> Ragged:
        """`encode_batch` by the tokenizer's own library."""
        return Ragged.of(self.tokenize_batch(texts))

    def recipe(self) -> Recipe | None:
        """What other libraries need to do the same work, None when they cannot."""
        return None

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included (so every id is a valid row of an embedding of this size)."""
        return max(self._vocab_size, self._reserved)

    def reserve(self, size: int) -> None:
        """Count ids up to `size`, also those without a token. Raises `UserError` when there are more tokens."""
        if size < self._vocab_size:
            raise UserError(f"vocab_size: {size} is less than the {self._vocab_size} tokens of {self.describe()}")
        self._reserved = size

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the id map, to be stored next to data and in checkpoints."""
        return self._fingerprint

    def covers(self, other: Fingerprint) -> bool:
        """Whether data made with a tokenizer of fingerprint `other` has the same ids here (equal or contained)."""
        return other == self._fingerprint or other.contained_in(self._ids)

    def conflict(self, other: Fingerprint) -> str | None:
        """Why tokens of a tokenizer of fingerprint `other` are not this one's; None when they are (see `covers`)."""
        if not self.covers(other):
            return "their ids mean different tokens"
        if self._fingerprint.adds_the_same(other):
            return None
        return f"a text becomes {self._framed(other)!r} there, {self._framed(self._fingerprint)!r} here"

    def _framed(self, fingerprint: Fingerprint) -> str:
        head, tail = ([self._ids.get(i, str(i)) for i in ids or ()] for ids in (fingerprint.start, fingerprint.end))
        return " ".join([*head, "text", *tail])

    @cached_property
    def added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that it puts by itself before and after every text, both often empty."""
        alone = tuple(self.tokenize(""))
        if not alone:
            return (), ()
        some = tuple(self.tokenize("a"))
        cuts = [(alone[:at], alone[at:]) for at in range(len(alone) + 1)]
        fits = (c for c in cuts if some[: len(c[0])] == c[0] and some[len(some) - len(c[1]) :] == c[1])
        return next(fits, ((), ()))

    def tokenize_openly(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize_batch` for texts that are to be continued: without the end that the tokenizer adds, and with one
        start where a text begins with it already."""
        start, end = self.added
        return [ids[single(ids, start, ())][: -len(end) or None] for ids in self.tokenize_batch(texts)]

    def require_eod(self, purpose: str) -> int:
        """`eod`, or a `UserError` saying what needs it and how to provide one."""
        if self.eod is None:
            raise UserError(
                f"{purpose} needs an end-of-document token, and {self.describe()} names none. Give it one: an added "
                'token "<|endoftext|>" in tokenizer.json (or an "eos_token" in the tokenizer_config.json next to it), '
                "or a vocabulary with such a token."
            )
        return self.eod

    def describe(self) -> str:
        """A few words for messages: type and files."""
        files = ", ".join(str(path) for path in self.files().values())
        return f"{self.name} ({files})" if files else self.name

    def export(self, folder: Path) -> list[Path]:
        """Copy the tokenizer's files into `folder` (created) under the names Hugging Face expects; returns them."""
        folder.mkdir(parents=True, exist_ok=True)
        copies = []
        for name, source in self.files().items():
            copies.append(folder / name)
            shutil.copyfile(source, copies[-1])
        return copies

    @cached_property
    def _ids(self) -> dict[int, str]:
        return self.id_map()

    @cached_property
    def _vocab_size(self) -> int:
        return max(self._ids) + 1

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        start, end = self.added
        return replace(Fingerprint.of(self._ids), start=start, end=end)


def single(ids: Sequence[int] | np.ndarray, start: Sequence[int], end: Sequence[int]) -> slice:
    """Where the ids of a text have `start` and `end` once, when the text has one of them and the tokenizer added it."""
    head, tail, size = len(start), len(end), len(ids)
    first = head if head and size >= 2 * head + tail and list(ids[: 2 * head]) == [*start, *start] else 0
    ends_twice = tail and size - first >= 2 * tail + head and list(ids[size - 2 * tail :]) == [*end, *end]
    return slice(first, size - tail if ends_twice else size)


Factory = Callable[[str | None, str | None], Tokenizer]
TOKENIZERS: Registry[Factory] = Registry(
    "tokenizer_type", wants="a function (vocab_file, merge_file) -> Tokenizer", fits=callable
)
"""Factories of tokenizers: an entry is a function of (vocab_file, merge_file), both optional paths as written in the
YAML, that returns a `Tokenizer`, or raises a `UserError` for files that are missing or wrong.
"""


def required_file(path: str | None, key: str, tokenizer_type: str, what: str) -> Path:
    """The existing file or folder that YAML key `key` names, which holds `what`; raises `UserError` otherwise."""
    if not path:
        raise UserError(f"{key} is not set: {tokenizer_type} needs it ({what})")
    found = Path(path).expanduser()
    if not found.exists():
        raise UserError(f"{key}: no such file: {path} ({tokenizer_type} needs {what})")
    refuse_lfs_pointer(found)
    return found
