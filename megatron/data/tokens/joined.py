"""Several token files as one, in the order of their names: what a glob in a data path means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.tokens.indexed import IndexedDataset


class JoinedTokens(IndexedDataset):
    """The items of `parts`, one after the other. `prefix` is the glob they were found by.

    `tokens` copies everything into memory; go through `parts` instead.
    """

    def __init__(self, parts: Sequence[IndexedDataset], prefix: str) -> None:
        self._parts, self.prefix = list(parts), prefix
        self._open()

    def __getstate__(self) -> dict:
        return {"parts": self._parts, "prefix": self.prefix}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["parts"], state["prefix"])  # type: ignore[misc]

    def _open(self) -> None:
        parts = self._parts
        self.dtype = np.result_type(*(part.dtype for part in parts))
        self.sizes = np.concatenate([part.sizes for part in parts])
        self._first = np.cumsum([0, *(len(part) for part in parts)])
        # Where each item is, counted in tokens of all parts: there is no one file for byte offsets.
        self.pointers = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        ends = [part.doc_idx[1:] + first for part, first in zip(parts, self._first[:-1], strict=True)]
        self.doc_idx = np.concatenate([np.zeros(1, np.int64), *ends])

    @property
    def parts(self) -> list[IndexedDataset]:
        return self._parts

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self._parts)

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([part.tokens for part in self._parts])

    def warm_up(self) -> None:
        """Read all token files once."""
        for part in self._parts:
            part.warm_up()

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `[offset, offset + length)` of item `index`, as the part that holds it gives them."""
        if not 0 <= index < len(self.sizes):
            raise IndexError(f"{self.prefix}: item {index} of {len(self.sizes)}")
        which = int(np.searchsorted(self._first, index, side="right")) - 1
        return self._parts[which].get(index - int(self._first[which]), offset, length)

    __getitem__ = get
