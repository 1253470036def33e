"""Which documents the labels leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.index_builders import packing as index_packing
from megatron.data.index_builders import packing_fallback
from megatron.data.packing import usable as usable_module
from megatron.data.packing import whole_documents as rows_module
from megatron.data.packing.usable import fragment_pieces, scan_labels, whole_pieces
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.token_files import JoinedTokens
from tests.data.corpus import write
from tests.data.packing_cases import WHOLE, cases, corpus, packing

pytestmark = pytest.mark.cpu


class NoFile(IndexedDataset):
    """Stands for labels that are made when they are read (masks), with no file of labels behind them."""

    @property
    def tokens(self) -> np.ndarray:
        raise AssertionError("all labels are made in memory")


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 40), st.integers(1, 5))
def test_labels_are_read_in_stretches(case: Any, seq: int, chunk: int, chunk_pieces: int) -> None:
    sizes, masks = case
    if masks is None:
        return
    with (
        corpus(sizes, masks) as (data, labels),
        mock.patch.object(packing_fallback, "CHUNK_TOKENS", chunk),
        mock.patch.object(usable_module, "CHUNK_PIECES", chunk_pieces),
    ):
        for cut in (whole_pieces(data.sizes[None], 0, seq + 1, True), fragment_pieces(data.sizes, 0, seq + 1)):
            pieces = cut[0]
            documents = [*range(len(sizes)), *pieces.later_documents.tolist()]
            offsets = [*[0] * len(sizes), *pieces.later_offsets.tolist()]
            expected = [
                any(masks[d][offset + 1 : offset + length])
                for d, offset, length in zip(documents, offsets, pieces.lengths.tolist(), strict=True)
            ]
            for module in (index_packing.builders(), packing_fallback):
                with mock.patch.object(index_packing, "builders", lambda module=module: module):
                    assert scan_labels(pieces, pieces.lengths, labels).tolist() == expected
            assert scan_labels(pieces, pieces.lengths, NoFile(labels.prefix)).tolist() == expected


def test_labels_of_joined_files(tmp_path: Path) -> None:
    """Each file has its own offsets: what trains is found in the right one."""
    parts, label_parts = [], []
    for k, mask in enumerate([[True, False], [False, False, True]]):
        documents = [[10 * k + i + 1] * (3 + i) for i in range(len(mask))]
        parts.append(IndexedDataset(write(tmp_path / f"x{k}", documents)))
        kept = [d if m else [-100] * len(d) for d, m in zip(documents, mask, strict=True)]
        label_parts.append(IndexedDataset(write(tmp_path / f"l{k}", kept, np.int32)))
    data, labels = JoinedTokens(parts, "x"), JoinedTokens(label_parts, "l")
    found = packing("unpacked", data, 4, labels=labels)
    dataset = found.dataset(found.segments(2, 1))
    assert sorted(dataset.locate(i).pieces[0].document for i in range(2)) == [0, 4]
    assert found.left_out.silent == 3


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(1, 9), st.booleans(), st.integers(1, 4), st.sampled_from(WHOLE))
def test_counting_goes_through_the_documents_in_stretches(
    case: Any, seq: int, chop: bool, stretch: int, name: str
) -> None:
    sizes, masks = case
    with corpus(sizes, masks) as (data, labels):
        found = [packing(name, data, seq, labels=labels, allow_chopped=chop) for _ in range(2)]
        whole = (found[0].histogram.tolist(), found[0].notes())
        with mock.patch.object(rows_module, "CHUNK_PIECES", stretch):
            assert (found[1].histogram.tolist(), found[1].notes()) == whole
        lengths = found[0].pieces.lengths
        assert whole[0] == [0, *(int(np.count_nonzero(lengths == n)) for n in range(1, seq + 2))]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_labels_of_every_signed_type(tmp_path: Path, dtype: type) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[1, 2, 3], [4, 5], [6, 7]]))
    labels = IndexedDataset(write(tmp_path / "l", [[-100, -100, 3], [4, -100], [-100, 7]], dtype))
    assert packing("unpacked", data, 4, labels=labels).pieces.lengths.tolist() == [3, 0, 2]
