"""Preference pairs as one dataset: item i is the chosen text i and the rejected text i."""

from __future__ import annotations

import numpy as np

from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError

SIDES = ("chosen", "rejected")
"""How the sides are called in the names of files and in messages, in the order of `Pairs.sides`."""


class Pairs(IndexedDataset):
    """Two datasets of as many items. An item has the tokens of both sides, the chosen first.

    `prefix` is that of the chosen side, `parts` are the files of both, from which `tokens` are read. Raises `UserError`
    naming both datasets when they have different numbers of items.
    """

    def __init__(self, chosen: IndexedDataset, rejected: IndexedDataset) -> None:
        self._sides = (chosen, rejected)
        self.prefix = chosen.prefix
        if len(chosen) != len(rejected):
            raise UserError(
                f"{chosen.prefix} has {len(chosen)} documents and {rejected.prefix} {len(rejected)}: not pairs. Item i "
                "of one belongs to item i of the other; write both in one run of "
                "tools/datasets/preprocess_data_with_chat_template.py (--chosen-key, --rejected-key)."
            )
        self._open()

    def _open(self) -> None:
        chosen, rejected = self._sides
        self.dtype = np.result_type(chosen.dtype, rejected.dtype)
        self.sizes = chosen.sizes + rejected.sizes
        self.pointers = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        self.doc_idx = np.arange(len(self.sizes) + 1)

    @property
    def sides(self) -> tuple[IndexedDataset, ...]:
        return self._sides

    @property
    def parts(self) -> list[IndexedDataset]:
        return [part for side in self._sides for part in side.parts]

    @property
    def num_tokens(self) -> int:
        return sum(side.num_tokens for side in self._sides)

    def warm_up(self) -> None:
        """Read all token files once."""
        for side in self._sides:
            side.warm_up()

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `[offset, offset + length)` of the chosen text followed by the rejected one."""
        whole = np.concatenate([side.get(index) for side in self._sides])
        end = len(whole) if length is None else offset + length
        if not 0 <= offset <= end <= len(whole):
            raise IndexError(f"{self.prefix}: tokens {offset}:{end} of item {index}, which has {len(whole)}")
        return whole[offset:end]

    __getitem__ = get
