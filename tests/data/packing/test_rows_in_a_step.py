"""How a row of whole documents becomes the arrays of a step: padding, borders, labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.sample import Sample

pytestmark = pytest.mark.cpu


class TestRowsInAStep:
    """How a row of whole documents becomes arrays: padding, borders, labels."""

    def only(self, tokens: list[int], starts: list[int], length: int, labels: Any = None, **rules: Any) -> Any:
        sample = Sample(np.asarray(tokens), np.asarray(starts), labels and np.asarray(labels), length)
        (batch,) = StepLoader([sample], micro_batch=1, gas=1, rules=CollateRules(len(tokens) - 1, **rules)).steps()
        return batch

    def test_padding_is_not_trained_and_a_document_of_its_own(self) -> None:
        batch = self.only([5, 6, 7, 8, 9, 0, 0, 0], [0, 3], 5, intra_document_masking=True)
        assert batch.tokens.tolist() == [[[5, 6, 7, 8, 9, 0, 0]]]
        assert batch.mask.tolist() == [[[1, 1, 0, 1, 0, 0, 0]]]  # 7 does not predict 8, 9 not the padding
        assert batch.doc_ids.tolist() == [[[0, 0, 0, 1, 1, 2, 2]]]
        assert batch.positions.tolist() == [[[0, 1, 2, 0, 1, 0, 1]]]

    def test_positions_count_through_without_document_masking(self) -> None:
        batch = self.only([5, 6, 7, 8, 9, 0, 0, 0], [0, 3], 5)
        assert batch.positions.tolist() == [[list(range(7))]]
        assert batch.doc_ids is None
        assert batch.mask.tolist() == [[[1, 1, 0, 1, 0, 0, 0]]]

    @pytest.mark.parametrize("length", [7, 8])
    def test_a_row_that_is_nearly_full(self, length: int) -> None:
        tokens = [*range(1, length + 1), *[0] * (8 - length)]
        batch = self.only(tokens, [0], length, intra_document_masking=True)
        assert batch.mask.tolist() == [[[1.0] * (length - 1) + [0.0] * (8 - length)]]
        assert batch.doc_ids.tolist() == [[[0] * 7]]

    def test_padding_that_looks_like_the_end_of_a_document(self) -> None:
        batch = self.only([5, 6, 0, 0, 0, 0], [0], 3, eod=0, intra_document_masking=True)
        assert batch.doc_ids.tolist() == [[[0, 0, 0, 1, 1]]]
        assert batch.mask.tolist() == [[[1, 1, 0, 0, 0]]]  # the end is trained although padding has its id

    def test_labels(self) -> None:
        labels = [-100, 6, 7, 8, 9, -100, -100, -100]
        batch = self.only([5, 6, 7, 8, 9, 0, 0, 0], [0, 3], 5, labels)
        assert batch.mask.tolist() == [[[1, 1, 0, 1, 0, 0, 0]]]
        assert batch.targets[batch.mask > 0].tolist() == [6, 7, 9]

    def test_no_loss_after_the_end_of_a_document(self) -> None:
        batch = self.only([5, 1, 7, 8, 1, 0, 0, 0], [0], 5, eod=1, eod_mask_loss=True)
        assert batch.mask.tolist() == [[[1, 0, 1, 1, 0, 0, 0]]]
