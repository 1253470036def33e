"""A dataset with its companions: labels, rewards, the other side of preference pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.labels import ENDING, check_labels, check_rewards, find_labels
from megatron.data.tokens.manifest import check_tokenizer
from megatron.data.tokens.pairs import SIDES, Pairs
from megatron.data.tokens.prefixes import exists
from megatron.data.tokens.token_files import TokenFiles
from megatron.data.view.content import View, document_view
from megatron.errors import UserError
from megatron.log import Once, get_logger
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Documents:
    """Documents to be shown.

    Attributes:
        data, labels: the tokens and their labels (None: all are trained).
        rewards: one number per document.
        side: chosen or rejected; "" if not of a preference pair.
        other: the other side.
        vocab_size: ids that are to be decoded must be below it.
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
        """The names of a document's `views`."""
        return [one.side or "document" for one in self._sides]

    def views(self, index: int) -> list[View]:
        """The document; of a preference pair, chosen and rejected. Raises `UserError` for ids beyond the vocabulary."""
        reward = self.reward(index)
        views = [
            document_view(one.data, index, one.labels, reward, f"{one.side} document" if one.side else "document")
            for one in self._sides
        ]
        for view in views:
            if self.vocab_size is not None and np.any((view.tokens < 0) | (view.tokens >= self.vocab_size)):
                raise UserError(
                    f"{view.title} has ids from {view.tokens.min()} to {view.tokens.max()}, outside the vocabulary of "
                    f"{self.vocab_size}: these are labels (show their dataset instead), or data of another tokenizer."
                )
        return views

    def reward(self, index: int) -> float | int | None:
        """The reward of a document, if any."""
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
        tokenizer: refused if the data is of another.
        labels: their prefix, if not next to the data; "none" ignores them.
        eod, dtype: of `.npy` files, see `TokenFiles`; the end of document defaults to the tokenizer's.

    Raises `UserError`.
    """
    files = TokenFiles(eod if eod is not None or tokenizer is None else tokenizer.eod, dtype)
    data = files.open(path)
    if tokenizer is not None:
        check_tokenizer(data, tokenizer, Once(get_logger(__name__)))
    if data.dtype.kind == "f":
        raise UserError(f"{data.prefix} has {data.dtype} numbers, not tokens: show the dataset that they belong to.")
    found = replace(_with_companions(files, data, labels), vocab_size=tokenizer.vocab_size if tokenizer else None)
    name = next((side for side in SIDES if str(data.prefix).endswith(f"_{side}{ENDING}")), None)
    if name is None:
        return found
    other = SIDES[1 - SIDES.index(name)]
    opposite_prefix = f"{str(data.prefix).removesuffix(f'_{name}{ENDING}')}_{other}{ENDING}"
    if not exists(opposite_prefix):
        return found
    opposite = _with_companions(files, files.open(opposite_prefix), "none" if labels == "none" else None)
    Pairs(data, opposite.data)
    rewards = found.rewards if found.rewards is not None else opposite.rewards
    pair = Documents(opposite.data, opposite.labels, side=other)
    return replace(found, rewards=rewards, side=name, other=pair)


def _with_companions(files: TokenFiles, data: IndexedDataset, labels: str | None) -> Documents:
    prefix = str(data.prefix)
    where = find_labels(prefix) if labels is None else labels
    opened = None if where in (None, "none") else files.open_labels(str(where), data)
    if opened is not None:
        check_labels(data, opened)
    reward_prefix = f"{prefix.removesuffix(ENDING)}_reward{ENDING}"
    rewards = IndexedDataset(reward_prefix) if prefix.endswith(ENDING) and exists(reward_prefix) else None
    if rewards is not None:
        check_rewards(data, rewards)
    return Documents(data, opened, rewards)
