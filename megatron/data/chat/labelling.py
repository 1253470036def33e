"""From a rendered chat to tokens and labels. Shapes: n tokens of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.sample import IGNORE


@dataclass(frozen=True)
class LabelRules:
    """How a chat's tokens are labelled and ended.

    Attributes:
        eos: id that ends a chat unless it ends with it already; None appends nothing.
        no_mask: every token is trained.
        for_rm: for a reward model: only one more eos at the end is trained; its input is the eos at which the reward is
            read.
        leave_open: the last turn is to be continued: nothing ends it.
    """

    eos: int | None = None
    no_mask: bool = False
    for_rm: bool = False
    leave_open: bool = False


def find_covered(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens hold a character of one of `spans`: bool `[n]`.

    A token that crosses the border of a span counts: " Yes" after "Answer:" is the answer's first token. `transformers`
    has the same rule for `{% generation %}` spans.

    Args:
        offsets: `[n, 2]`, the characters `[begin, end)` that each token stands for, in order.
        spans: half-open ranges of characters, in order and without overlap.
    """
    if not spans:
        return np.zeros(len(offsets), dtype=bool)
    begins, ends = np.asarray(spans, dtype=np.int64).T
    first = np.searchsorted(ends, offsets[:, 0], side="right")  # the first span that ends after the token's start
    reached = np.append(begins, np.iinfo(np.int64).max)[first]
    return offsets[:, 1] > reached


def label(
    text: str, ids: np.ndarray, offsets: np.ndarray, spans: Sequence[tuple[int, int]], rules: LabelRules
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a chat and their labels: the token itself where trained, -100 elsewhere.

    `ids` `[n]` and `offsets` `[n, 2]` are those of `text`; both results have up to two tokens more.
    """
    trained = np.full(len(ids), rules.no_mask) | (find_covered(offsets, spans) & (not rules.for_rm))
    more: list[tuple[int, bool]] = []
    if rules.for_rm and rules.eos is not None:
        more = [(rules.eos, True)]
        if not len(ids) or ids[-1] != rules.eos:
            more.insert(0, (rules.eos, False))
    elif rules.eos is not None and not rules.leave_open and not _ends_with(text, ids, offsets, rules.eos):
        # It ends the turn if the template writes no end of turn; else it is trained if that end of turn is.
        more = [(rules.eos, bool(len(trained) and trained[-1]))]
    tokens = np.append(ids, [token for token, _ in more]).astype(np.int64)
    trained = np.append(trained, [flag for _, flag in more]).astype(bool)
    return tokens, np.where(trained, tokens, IGNORE)


def _ends_with(text: str, ids: np.ndarray, offsets: np.ndarray, eos: int) -> bool:
    """Whether nothing but blanks follows the last `eos`."""
    found = np.flatnonzero(ids == eos)
    return bool(len(found)) and not text[int(offsets[found[-1], 1]) :].strip()
