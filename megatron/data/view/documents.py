"""A dataset with what lies beside it: labels, rewards, the other side of preference pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.labels import ENDING, check_labels, labels_beside
from megatron.data.tokens.manifest import check_tokenizer
from megatron.data.tokens.prefixes import exists
from megatron.data.tokens.token_files import TokenFiles
from megatron.data.view.views import View, document_view
from megatron.errors import UserError
from megatron.log import Once, get_logger
from megatron.tokenizer import Tokenizer

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Documents:
    """Documents to be shown.

    Attributes:
        data, labels: the tokens and what of them is trained (None: everything).
        rewards: one number per document.
        side: chosen or rejected; "" for what is no preference pair.
        other: the other side.
        vocab_size: ids must be below it, when they are to be decoded.
    """

    data: IndexedDataset
    labels: IndexedDataset | None = None
    rewards: IndexedDataset | None = None
    side: str = ""
    other: Documents | None = field(default=None)
    vocab_size: int | None = None

    @cached_property
    def _sides(self) -> list[Documents]:
        both = [self, *([self.other] if self.other is not None else [])]
        return sorted(both, key=lambda one: one.side)

    @property
    def names(self) -> list[str]:
        """What the `views` of a document are called."""
        return [one.side or "document" for one in self._sides]

    def views(self, index: int) -> list[View]:
        """The document; of a preference pair, chosen and rejected. Raises `UserError` for what is no text."""
        reward = self.reward(index)
        views = [
            document_view(one.data, index, one.labels, reward, f"{one.side} document" if one.side else "document")
            for one in self._sides
        ]
        for view in views:
            if self.vocab_size is not None and np.any((view.tokens < 0) | (view.tokens >= self.vocab_size)):
                raise UserError(
                    f"{view.title} holds ids outside of the vocabulary of {self.vocab_size}, from {view.tokens.min()} "
                    f"to {view.tokens.max()}: labels (show what they belong to), or data of another tokenizer."
                )
        return views

    def reward(self, index: int) -> float | int | None:
        """The number that belongs to a document."""
        value = None if self.rewards is None else self.rewards.get(index)
        return None if value is None or not len(value) else value[0].item()


def open_documents(
    path: str,
    tokenizer: Tokenizer | None = None,
    *,
    labels: str | None = None,
    eod: int | None = None,
    dtype: str | None = None,
) -> Documents:
    """The dataset at `path` with its companions.

    Args:
        tokenizer: refused when the data is of another.
        labels: where they are, if not beside the data; "none" looks for none.
        eod, dtype: of `.npy` files, see `TokenFiles`; by default the end of document is the tokenizer's.

    Raises `UserError`.
    """
    files = TokenFiles(eod if eod is not None or tokenizer is None else tokenizer.eod, dtype)
    data = files.open(path)
    if tokenizer is not None:
        check_tokenizer(data, tokenizer, Once(get_logger(__name__)))
    if data.dtype.kind == "f":
        raise UserError(f"{data.prefix} holds {data.dtype} numbers, not tokens: show the dataset that it belongs to.")
    found = replace(_with_companions(files, data, labels), vocab_size=tokenizer.vocab_size if tokenizer else None)
    name = next((side for side in SIDES if str(data.prefix).endswith(f"_{side}{ENDING}")), None)
    if name is None:
        return found
    other = SIDES[1 - SIDES.index(name)]
    beside = f"{str(data.prefix).removesuffix(f'_{name}{ENDING}')}_{other}{ENDING}"
    if not exists(beside):
        return found
    opposite = _with_companions(files, files.open(beside), "none" if labels == "none" else None)
    if len(opposite.data) != len(data):
        raise UserError(
            f"{data.prefix} has {len(data)} documents and {beside} {len(opposite.data)}: these are no pairs."
        )
    rewards = found.rewards if found.rewards is not None else opposite.rewards
    pair = Documents(opposite.data, opposite.labels, side=other)
    return replace(found, rewards=rewards, side=name, other=pair)


def _with_companions(files: TokenFiles, data: IndexedDataset, labels: str | None) -> Documents:
    prefix = str(data.prefix)
    where = labels_beside(prefix) if labels is None else labels
    opened = None if where in (None, "none") else files.open_labels(str(where), data)
    if opened is not None:
        check_labels(data, opened)
    beside = f"{prefix.removesuffix(ENDING)}_reward{ENDING}"
    rewards = IndexedDataset(beside) if prefix.endswith(ENDING) and exists(beside) else None
    if rewards is not None and len(rewards) != len(data):
        raise UserError(f"{beside} has {len(rewards)} rewards for the {len(data)} documents of {prefix}.")
    return Documents(data, opened, rewards)
