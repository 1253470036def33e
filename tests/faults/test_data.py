"""Known faults of data: a disk that fills up while tokens are written (15, 59), splits of few documents (D2)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.data.order.splits import split_bounds
from megatron.data.tokens.builder import IndexedDatasetBuilder

pytestmark = pytest.mark.cpu


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process may grow beyond 1000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("documents", [2, 40], ids=["met when the file is closed", "met while it is written"])
def test_a_full_disk_leaves_no_part_of_a_dataset(tmp_path: Path, small_disk: None, documents: int) -> None:
    with pytest.raises(OSError, match="too large"), IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for _ in range(documents):
            builder.add_document([7] * 400)
        builder.finalize()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("documents", "bounds"), [(3, (0, 0, 1, 3)), (7, (0, 0, 3, 7)), (11, (0, 0, 5, 11))])
def test_a_share_of_nothing_starts_at_no_negative_document(documents: int, bounds: tuple[int, ...]) -> None:
    """D2: "0,50,50" over 3, 7 and 11 documents. No split starts before 0, none shares a document with another."""
    found = split_bounds("0,50,50", documents)
    assert found[0] == found[1] == 0 and found[3] == documents
    assert found == bounds
