"""`RandomState.shuffle`, which decides GPT-NeoX's order of samples, faster where it was compiled."""

from __future__ import annotations

import numpy as np

try:
    from megatron.data.index_builders import _shuffle  # type: ignore[attr-defined]
except ImportError:  # no compiler when the package was installed
    _shuffle = None

_COMPILED = (np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.int64))
_SMALL = 1 << 12  # entries below which calling over is not worth it


def shuffle(rng: np.random.RandomState, array: np.ndarray) -> None:
    """Shuffle a flat array in place: the same order as `rng.shuffle(array)`, and the same state of `rng` after it."""
    fits = array.ndim == 1 and array.flags.c_contiguous and array.dtype in _COMPILED and _SMALL <= len(array) < 2**32
    if _shuffle is None or not fits:
        rng.shuffle(array)
        return
    kind, words, following, *rest = rng.get_state(legacy=True)
    words = np.array(words, dtype=np.uint32)
    following = _shuffle.shuffle(array, words, int(following))
    rng.set_state((kind, words, following, *rest))
