"""One training sample, as datasets hand it to the loader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORE = -100  # the label of a token that is not trained


@dataclass(frozen=True)
class Sample:
    """`seq_length + 1` tokens: inputs are all but the last, targets all but the first.

    Consecutive samples of a packed stream share one token, the last target of one and the first input of the next.

    Attributes:
        tokens: `[s + 1]` integer ids.
        starts: where documents begin, increasing positions in `[0, s + 1)`; None when the dataset does not know.
        labels: `[s + 1]`, equal to `tokens` where trained and -100 elsewhere; None trains every token.
    """

    tokens: np.ndarray
    starts: np.ndarray | None = None
    labels: np.ndarray | None = None
