"""Joining datasets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.encode import write_datasets
from megatron.data.encode_text import EncodeOptions, TextEncoder
from megatron.data.formats import read_chunks
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.data.manifest import manifest_path, read_manifest
from megatron.data.merge import merge_datasets, merge_groups
from megatron.data.merge_groups import find_groups
from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer
from tests.data.corpus import write

pytestmark = pytest.mark.cpu


def tokenise(files: list[Path], prefix: Path, kind: str = "CharLevelTokenizer") -> None:
    encoder = TextEncoder(create_tokenizer(kind), EncodeOptions(append_eod=True, skip_bad=True))
    source = {"files": [path.name for path in files]}
    write_datasets(read_chunks(files), encoder, str(prefix), source=source)


def datasets_in(folder: Path, without: str) -> list[str]:
    (group,) = find_groups([str(folder)], without or str(folder / "nothing"))
    return list(group.prefixes)


def test_shards_joined_are_the_bytes_of_one_run(tmp_path: Path) -> None:
    files = []
    for i in range(11):
        files.append(tmp_path / f"part{i}.jsonl")
        lines = [json.dumps({"text": f"text {i} {j}" if j else ""}) for j in range(i + 2)]
        files[-1].write_text("\n".join([*lines, "{"]))
        tokenise(files[-1:], tmp_path / "shards" / f"s{i}")
    tokenise(files, tmp_path / "whole")
    prefixes = datasets_in(tmp_path / "shards", without="none")
    assert [Path(prefix).name for prefix in prefixes] == [f"s{i}_text_document" for i in range(11)]  # 10 after 9
    merge_datasets(prefixes, str(tmp_path / "joined"))
    for suffix in (".bin", ".idx", ".manifest.json"):
        assert (tmp_path / f"joined{suffix}").read_bytes() == (tmp_path / f"whole_text_document{suffix}").read_bytes()


def test_documents_of_several_items_keep_their_borders(tmp_path: Path) -> None:
    for name, documents in (("a", [[[1, 2], [3]], [[4]]]), ("b", [[[5], [6], [7, 8]]])):
        with IndexedDatasetBuilder(tmp_path / "in" / name, np.int32) as builder:
            for document in documents:
                for item in document:
                    builder.add_item(item)
                builder.end_document()
            builder.finalize()
    merge_datasets(datasets_in(tmp_path / "in", without=""), str(tmp_path / "out"))
    merged = IndexedDataset(tmp_path / "out")
    assert merged.doc_idx.tolist() == [0, 2, 3, 6]
    assert [merged.get(i).tolist() for i in range(6)] == [[1, 2], [3], [4], [5], [6], [7, 8]]


def test_different_tokenizers_or_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    tokenise([tmp_path / "a.jsonl"], tmp_path / "in" / "a")
    tokenise([tmp_path / "a.jsonl"], tmp_path / "in" / "b", "bytes")
    with pytest.raises(UserError, match="b_text_document and .*a_text_document were made with different tokenizers"):
        merge_datasets(datasets_in(tmp_path / "in", without=""), str(tmp_path / "out"))
    one, two = write(tmp_path / "x", [[1]], np.uint16), write(tmp_path / "y", [[1]], np.int32)
    with pytest.raises(UserError, match=r"y stores int32, but .*x uint16: they cannot be merged"):
        merge_datasets([one, two], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_data_without_a_manifest_makes_a_result_without_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    tokenise([tmp_path / "a.jsonl"], tmp_path / "in" / "a")
    write(tmp_path / "in" / "b", [[1, 2]])
    assert not manifest_path(tmp_path / "in" / "b").exists()
    merge_datasets(datasets_in(tmp_path / "in", without=""), str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.tokenizer, manifest.extra) == (None, {})
    assert manifest.source == {"merged": ["a_text_document", "b"]}
    assert manifest.tokens == 4


def test_the_result_may_lie_in_the_folder_of_the_parts(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    write(tmp_path / "b", [[2]])
    for _ in range(2):  # the second time the result is there already, and is no part
        output = str(tmp_path / "all")
        assert merge_datasets(datasets_in(tmp_path, without=output), output).tokens == 2


def test_a_folder_without_whole_datasets_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent is not a folder, and there is no dataset"):
        datasets_in(tmp_path / "absent", without="")
    with pytest.raises(UserError, match="no .bin/.idx datasets"):
        datasets_in(tmp_path, without="")
    write(tmp_path / "a", [[1]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"a\.bin is missing"):
        datasets_in(tmp_path, without="")
