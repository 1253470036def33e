"""The small corpora that the data tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.data.tokens.builder import IndexedDatasetBuilder

# The five documents of the golden sample order: sizes 5, 9, 3, 12, 7.
GOLDEN = [[1, 2, 3, 4, 5], [10] * 9, [7, 8, 9], list(range(20, 32)), list(range(40, 47))]


def write(prefix: Path | str, documents: list[list[int]], dtype: type = np.uint16) -> str:
    """A dataset of one item per document; returns its prefix."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return str(prefix)
