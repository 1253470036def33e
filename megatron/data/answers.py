"""What samples carry besides tokens: the answers that preferences are about, and numbers per token or per answer.

Shapes: b rows of a micro-batch, s sequence, gas micro-batches of a step, n answers of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.sample import Sample
from megatron.errors import UserError

ANSWER_TOKENS = "answer_tokens"
"""The extra that every batch with answers has: how many tokens of each answer are trained."""
TRAINED_PLACES = "trained_places"
"""An extra that an objective may read: int64 `[gas, m]`, where among the b·s targets of a micro-batch the trained ones
are, then, where others have more, one that is not."""
_ROUND = 128  # m is a multiple of it: steps of a few sizes


class Carried:
    """That of one rank and step; see `StepBatch` for what the attributes are when all rows are written.

    Args:
        shape: (gas, b, s).
        reads: names of the extras that the objective reads, "answers" for the answers.
    """

    def __init__(self, shape: tuple[int, int, int], reads: Sequence[str]) -> None:
        self.reads = reads
        self.shape = shape
        self.answers = np.full(shape, -1, np.int64) if "answers" in reads else None
        self.answered = [0] * shape[0]
        self.extras: dict[str, np.ndarray] = {}

    def write(self, at: tuple[int, int], sample: Sample) -> None:
        """Row `at` (micro-batch, row): answers are numbered on behind those of the rows before. All samples have the
        same extras."""
        micro, count = at[0], 0
        first = self.answered[micro]
        if self.answers is not None:
            count, self.answers[at] = 1, first
            if sample.answers is not None:
                own, count = sample.answers[1:], int(sample.answers.max(initial=-1)) + 1
                self.answers[at] = np.where(own < 0, -1, own + first)
            self.answered[micro] += count
        for name in self.reads:
            values = sample.extras.get(name)
            if (values is not None) != (name in self.extras) and at != (0, 0):
                raise UserError(f"some samples have {name} and others do not: every source needs it, or none")
            if values is None:
                continue
            if len(values) == len(sample.tokens):
                self.extras.setdefault(name, np.zeros((*self.shape, *values.shape[1:]), np.float32))[at] = values[1:]
            elif len(values) == count:
                self._reach(name, first + count)[micro, first : first + count] = values
            else:
                raise ValueError(f"{name} has {len(values)} values for {len(sample.tokens)} tokens and {count} answers")

    def _reach(self, name: str, answers: int) -> np.ndarray:
        """An extra per answer, of at least so many."""
        found = self.extras.get(name, np.zeros((self.shape[0], 0), np.float32))
        self.extras[name] = np.pad(found, ((0, 0), (0, max(0, answers - found.shape[1]))))
        return self.extras[name]

    def cut(self, rows: Callable[[np.ndarray], np.ndarray]) -> None:
        """Make `rows` of everything that is per token."""
        if self.answers is not None:
            self.answers = rows(self.answers)
        self.extras = {name: rows(part) if part.ndim == 3 else part for name, part in self.extras.items()}

    def complete(self, mask: np.ndarray) -> None:
        """All rows are written, and `mask` says which tokens are trained."""
        if TRAINED_PLACES in self.reads:
            self.extras[TRAINED_PLACES] = trained_places(mask.reshape(len(mask), -1) > 0)
        if self.answers is None:
            return
        most = max(self.answered, default=0)
        for name, values in self.extras.items():
            if values.ndim == 2 and name != TRAINED_PLACES:
                self._reach(name, most)
        trained = np.where(mask > 0, self.answers, -1)
        counts = [np.bincount(one[one >= 0], minlength=most) for one in trained]
        self.extras[ANSWER_TOKENS] = np.array(counts, np.float32).reshape(len(trained), most)


def trained_places(trained: np.ndarray) -> np.ndarray:
    """`TRAINED_PLACES` of bool `[gas, t]`."""
    most = int(trained.sum(axis=1).max(initial=0))
    width = min(trained.shape[1], -(-most // _ROUND) * _ROUND)
    # Trained ones first, in their order; then the first of the others again and again.
    places, counts = np.argsort(~trained, axis=1, kind="stable"), trained.sum(axis=1, keepdims=True)
    other = np.take_along_axis(places, np.minimum(counts, trained.shape[1] - 1), axis=1)
    return np.where(np.arange(width) < counts, places[:, :width], other)
