"""What a run trains of chat data: the labelled tokens, each once per epoch, in every packing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from megatron.data.chat.encoder import ChatOptions
from megatron.data.collate import CollateRules, allocate, fill
from megatron.data.order.datasets import build_datasets
from megatron.data.packing import PACKINGS
from megatron.data.sample import Sample
from megatron.data.tokenise.encode import write_datasets
from megatron.data.tokens.indexed import IndexedDataset
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.chat.chats import THREE, encoder, rows

pytestmark = pytest.mark.cpu

SEQ_LENGTH = 193  # prime, so that some number of chats fills samples exactly


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Chats of one, two and three answers, so many that the stream is a whole number of samples."""
    folder = tmp_path_factory.mktemp("data")
    built = encoder(folder / "tokenizer", "zephyr", ChatOptions())
    sizes = [len(built.encode(rows({"messages": THREE[: 2 * n]})).ids[0]) for n in (1, 2, 3)]
    chats, total = [], 0
    while not chats or len(chats) < 40 or (total - 1) % SEQ_LENGTH:
        assert total < 10**6
        chats.append({"messages": THREE[: 2 + 2 * (len(chats) % 3)]})
        total += sizes[(len(chats) - 1) % 3]
    write_datasets([rows(*chats)], built, str(folder / "chats"))
    return str(folder / "chats")


def trained(samples: Iterable[Sample]) -> tuple[Counter[int], int]:
    """Ids of the trained targets, and how many targets there were."""
    rules = CollateRules(SEQ_LENGTH, eod=2, intra_document_masking=True)
    found, targets = Counter[int](), 0
    for sample in samples:
        arrays = allocate(rules, 1, 1)
        fill(arrays, 0, 0, sample, rules)
        found.update(arrays.targets[arrays.mask > 0].tolist())
        targets += SEQ_LENGTH
    return found, targets


def config(prefix: str, labels: bool) -> DataConfig:
    paths = {"train_label_data_paths": (f"{prefix}_messages_label_document",)} if labels else {}
    return DataConfig(train_data_paths=(f"{prefix}_messages_document",), **paths)


@pytest.mark.parametrize("pack_impl", sorted(PACKINGS))
def test_exactly_the_labelled_tokens_are_trained(prefix: str, pack_impl: str) -> None:
    data, labels = (IndexedDataset(f"{prefix}_messages_{kind}document") for kind in ("", "label_"))
    packing = PACKINGS[pack_impl](data, seq_length=SEQ_LENGTH, labels=labels)
    epoch = packing.samples_per_epoch()
    dataset = packing.dataset(packing.segments(epoch, 3))
    found, targets = trained(dataset[i] for i in range(epoch))
    # Rows that are filled until they overflow go on from pass to pass, so an epoch may end within one.
    pieces = [piece for i in range(epoch) for piece in dataset.locate(i).pieces]
    used = [piece.document for piece in pieces] if pack_impl == "pack_until_overflow" else range(len(data))
    assert set(used) == set(range(len(data)))
    expected = np.concatenate([labels.get(document) for document in used])
    assert found == Counter(expected[expected >= 0].tolist())
    assert 0 < sum(found.values()) < targets


def test_the_same_through_a_config(prefix: str) -> None:
    train = build_datasets(config(prefix, True), seq_length=SEQ_LENGTH, seed=3, train_samples=1).train
    labels = IndexedDataset(f"{prefix}_messages_label_document").tokens
    assert trained(train[i] for i in range(len(train)))[0] == Counter(labels[labels >= 0].tolist())


def test_without_labels_everything_is_and_the_start_says_so(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    unused = f"{prefix}_messages_document: .* {prefix}_messages_label_document"
    for labels in (False, True):
        caplog.clear()
        with caplog.at_level("WARNING", logger="deepy"):
            train = build_datasets(config(prefix, labels), seq_length=SEQ_LENGTH, seed=3, train_samples=1).train
        assert len(re.findall(unused, caplog.text)) == (not labels)
        found, targets = trained(train[i] for i in range(len(train)))
        assert (sum(found.values()) == targets) == (not labels)


def test_the_turns_of_a_chat_are_one_document(prefix: str) -> None:
    """Every turn ends with eos, but the turns of a chat see one another."""
    train = build_datasets(config(prefix, True), seq_length=SEQ_LENGTH, seed=3, train_samples=1).train
    documents = IndexedDataset(f"{prefix}_messages_document")
    rules = CollateRules(SEQ_LENGTH, eod=2, intra_document_masking=True)
    borders = 0
    for i in range(len(train)):
        arrays = allocate(rules, 1, 1)
        fill(arrays, 0, 0, train[i], rules)
        assert arrays.doc_ids is not None
        borders += int(np.count_nonzero(np.diff(arrays.doc_ids[0, 0])))
    assert borders <= len(documents)
