"""How many samples a run needs, and which documents each of train, valid and test gets."""

from __future__ import annotations

import math
import re

from megatron.errors import UserError

_MOST_SAMPLES = 2**36  # whose index, of 8 bytes each or more, would take 512 GiB
NAMES = ("train", "valid", "test")


def sample_counts(
    *,
    train_iters: int,
    eval_interval: int,
    eval_iters: int,
    train_batch_size: int,
    train_samples: int | None = None,
) -> tuple[int, int, int]:
    """Samples for training (`train_samples`, where steps differ in size), for all validations of the run, and for the
    test at its end.

    As in GPT-NeoX: validation is counted at every multiple of `eval_interval` and once more at the end. An
    `eval_interval` of 0 or less leaves only that last one. Raises `UserError` for more samples than can be indexed.
    """
    validations = (train_iters // eval_interval if eval_interval > 0 else 0) + 1
    evaluation = max(eval_iters, 0) * train_batch_size
    trained = train_iters * train_batch_size if train_samples is None else train_samples
    counts = trained, validations * evaluation, evaluation
    for key, samples in zip(("train_iters", "eval_iters", "eval_iters"), counts, strict=True):
        if samples > _MOST_SAMPLES:
            raise UserError(f"{key}: {samples} samples, with train_batch_size {train_batch_size}; at most 2^36 work")
    return counts


def parse_split(split: str) -> tuple[float, float, float]:
    """The three shares, adding up to 1, of a string like `969, 30, 1` (separators `,` or `/`; missing ones are 0)."""
    fault = UserError(f"split: {split!r} must be one to three non-negative numbers such as '969, 30, 1'.")
    try:
        parts = [float(part) for part in re.split(r"[,/]", str(split)) if part.strip()]
    except ValueError as error:
        raise fault from error
    if not 1 <= len(parts) <= 3 or not all(math.isfinite(part) and part >= 0 for part in parts) or sum(parts) == 0:
        raise fault
    total = sum(parts)
    train, valid, test = [part / total for part in parts + [0.0] * (3 - len(parts))]
    return train, valid, test


def split_bounds(split: str, documents: int) -> tuple[int, int, int, int]:
    """Document ranges of the three splits: split i is `[bounds[i], bounds[i + 1])`.

    GPT-NeoX's rounding, which resumed runs depend on, with two repairs: no bound is before the one to its left
    (NeoX gives [0, -1, 1, 3] for "0,50,50" of 3 documents), and a first share of 0 gets no document.
    """
    shares = parse_split(split)
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * float(documents)))
    excess = bounds[-1] - documents
    first, second = (bounds[i] - excess for i in (1, 2))
    first = max(first, 0) if shares[0] > 0 else 0
    return 0, first, max(first, second), documents
