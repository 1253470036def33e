"""Builders of the arrays that say what each sample is made of.

The compiled builders are used when the package build produced them, else numpy gives the same arrays. No compiler ever
runs at start-up.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from megatron.data.index_builders import fallback

try:
    from megatron.data.index_builders import _native  # type: ignore[attr-defined]
except ImportError:  # no compiler when the package was installed
    _native = None

INT32_MAX = 2**31 - 1


def builders() -> ModuleType:
    """The module whose `sample_index` and `blend` are in use."""
    return _native if _native is not None else fallback


def index_dtype(largest_value: int, samples: int) -> np.dtype:
    """The type of an index: int32, or int64 when a stored value or the number of samples needs it.

    `largest_value` is the largest position in the document index (epochs x documents) or offset in a document; either
    can pass 2^31 long before the number of samples does.
    """
    return np.dtype(np.int64 if max(largest_value, samples) > INT32_MAX else np.int32)


def build_sample_index(sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """Where each sample starts: `[samples + 1, 2]` of (position in `doc_idx`, offset in that document).

    Args:
        sizes: int32 `[documents]`, tokens per document.
        doc_idx: int32 or int64 `[entries]`, the documents in reading order.
        seq_length: tokens per sample. Sample k has `seq_length + 1` tokens, from row k up to and including the token
            of row k + 1, which it shares with sample k + 1.
        samples: how many; raises `ValueError` when the documents hold fewer than `samples * seq_length + 1` tokens.
    """
    largest = max(len(doc_idx), int(sizes.max(initial=0)))
    out = np.empty((samples + 1, 2), dtype=index_dtype(largest, samples + 1))
    builders().sample_index(sizes, doc_idx, seq_length, out)
    return out


def build_blend(weights: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Which source each of `samples` positions draws from, and which of that source's samples it takes.

    Position i goes to the source with the largest `weights[d] * max(i, 1) - taken[d]`, the first of equals. A longer
    blend of the same weights begins with the shorter one.

    Returns uint8 (uint16 from 256 sources on) and int64 arrays, `[samples]` each.
    """
    weights = np.ascontiguousarray(weights, dtype=np.float64)
    source = np.empty(samples, dtype=np.uint8 if len(weights) <= 256 else np.uint16)
    sample = np.empty(samples, dtype=np.int64)
    builders().blend(weights, source, sample)
    return source, sample
