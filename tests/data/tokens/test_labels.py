"""Label datasets: found next to their data, checked against it, reported when they are not used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.labels import check_labels, find_labels, unused_labels
from megatron.data.tokens.manifest import finalize_with_manifest
from megatron.errors import UserError
from tests.data.corpus import write

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        ("x_messages_document", "x_messages_label_document"),
        ("x_text_document", "x_text_label_document"),
        ("x_text_document", "x_label_document"),
        ("x_chosen_document", "x_chosen_label_document"),
    ],
)
def test_labels_are_found(tmp_path: Path, data: str, labels: str) -> None:
    prefix = write(tmp_path / data, [[1]])
    assert find_labels(prefix) is None
    write(tmp_path / labels, [[1]])
    assert find_labels(prefix) == str(tmp_path / labels)
    assert find_labels(str(tmp_path / labels)) is None
    assert find_labels(str(tmp_path / "other")) is None
    assert unused_labels([(prefix, True)]) == []
    (sentence,) = unused_labels([(prefix, False), (prefix, False)])
    assert sentence.startswith(f"{prefix}: ") and f" {tmp_path / labels} " in sentence


def test_data_that_is_meant_to_be_trained_whole(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x_a_document", [[1]])
    for no_mask in (False, True):
        with IndexedDatasetBuilder(tmp_path / "x_a_label_document", np.int32) as builder:
            builder.add_document([1])
            finalize_with_manifest(builder, tokenizer=None, source=None, extra={"no_mask": no_mask})
        assert bool(unused_labels([(prefix, False)])) == (not no_mask)


def test_labels_that_do_not_fit(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[1, 2], [3]]))
    for number, documents, dtype, fault in (
        (0, [[1, 2]], np.int32, "1 items of 2 .* 2 of 3"),
        (1, [[1, 2], [3]], np.uint16, "uint16"),
    ):
        labels = IndexedDataset(write(tmp_path / f"l{number}", documents, dtype))
        with pytest.raises(UserError, match=f"l{number}.*{fault}"):
            check_labels(data, labels)
