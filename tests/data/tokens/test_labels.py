"""Labels that lie beside the data and are not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.data.tokens.labels import labels_beside, unused_labels
from megatron.data.tokens.manifest import Manifest, write_manifest
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
    assert labels_beside(prefix) is None
    write(tmp_path / labels, [[1]])
    assert labels_beside(prefix) == str(tmp_path / labels)
    assert labels_beside(str(tmp_path / labels)) is None
    assert labels_beside(str(tmp_path / "other")) is None
    assert unused_labels([(prefix, True)]) == []
    (sentence,) = unused_labels([(prefix, False), (prefix, False)])
    assert sentence.startswith(f"{prefix}: every token of it is trained, prompts too, although {tmp_path / labels} ")


def test_data_that_is_meant_to_be_trained_whole(tmp_path: Path) -> None:
    prefix, labels = (write(tmp_path / name, [[1]]) for name in ("x_a_document", "x_a_label_document"))
    for no_mask in (False, True):
        write_manifest(labels, Manifest(1, 1, 1, "int32", "", extra={"no_mask": no_mask}))
        assert bool(unused_labels([(prefix, False)])) == (not no_mask)
