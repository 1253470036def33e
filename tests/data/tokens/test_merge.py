"""Joining datasets."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokenise.encode import write_datasets
from megatron.data.tokenise.formats import read_chunks
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import Manifest, finalize_with_manifest, manifest_path, read_manifest
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import Group, find_groups
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


def merge_one(prefixes: list[str], output: str) -> Manifest:
    return merge_groups([Group(output, tuple(prefixes))])[0]


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
    merge_one(prefixes, str(tmp_path / "joined"))
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
    merge_one(datasets_in(tmp_path / "in", without=""), str(tmp_path / "out"))
    merged = IndexedDataset(tmp_path / "out")
    assert merged.doc_idx.tolist() == [0, 2, 3, 6]
    assert [merged.get(i).tolist() for i in range(6)] == [[1, 2], [3], [4], [5], [6], [7, 8]]


def test_different_tokenizers_or_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    tokenise([tmp_path / "a.jsonl"], tmp_path / "in" / "a")
    tokenise([tmp_path / "a.jsonl"], tmp_path / "in" / "b", "bytes")
    with pytest.raises(UserError, match="b_text_document .*a_text_document .*tokenizers"):
        merge_one(datasets_in(tmp_path / "in", without=""), str(tmp_path / "out"))
    one, two = write(tmp_path / "x", [[1]], np.uint16), write(tmp_path / "y", [[1]], np.int32)
    with pytest.raises(UserError, match=r"y .*\bint32\b.*x .*\buint16\b"):
        merge_one([one, two], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_data_without_a_manifest_makes_a_result_without_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    tokenise([tmp_path / "a.jsonl"], tmp_path / "in" / "a")
    write(tmp_path / "in" / "b", [[1, 2]])
    assert not manifest_path(tmp_path / "in" / "b").exists()
    merge_one(datasets_in(tmp_path / "in", without=""), str(tmp_path / "out"))
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
        assert merge_one(datasets_in(tmp_path, without=output), output).tokens == 2


def test_a_folder_without_whole_datasets_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--input: .*absent"):
        datasets_in(tmp_path / "absent", without="")
    with pytest.raises(UserError, match="no .bin/.idx datasets"):
        datasets_in(tmp_path, without="")
    write(tmp_path / "a", [[1]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"a\.bin is missing"):
        datasets_in(tmp_path, without="")


# ---- which datasets are joined into which


def shard(folder: Path, index: int, count: int, documents: list[list[int]], kind: str = "text_document") -> None:
    write(folder / f"c_shard_{index:05d}_of_{count:05d}_{kind}", documents)


def test_shards_are_taken_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in range(12):
        write(tmp_path / "in" / f"c_shard_{index}_of_12_text_document", [[index]])  # 10 sorts before 2
    (group,) = find_groups([str(tmp_path / "in")], str(tmp_path / "c"))
    assert group.output == str(tmp_path / "c_text_document")
    merge_groups([group])
    assert IndexedDataset(group.output).tokens.tolist() == list(range(12))


@pytest.mark.parametrize("output", ["c", "c_text_document", "c_text_label_document"])
def test_every_dataset_of_the_shards_is_joined(tmp_path: Path, output: str) -> None:
    for index in range(2):
        shard(tmp_path / "in", index, 2, [[index] * 3, [index]])
        shard(tmp_path / "in", index, 2, [[7] * 3, [8]], "text_label_document")
        shard(tmp_path / "in", index, 2, [[1], [2]], "text_reward_document")
    groups = find_groups([str(tmp_path / "in")], str(tmp_path / output))
    assert [Path(group.output).name for group in groups] == [
        f"c_text_{kind}document" for kind in ("", "label_", "reward_")
    ]
    merge_groups(groups)
    assert IndexedDataset(tmp_path / "c_text_label_document").sizes.tolist() == [3, 1, 3, 1]
    assert IndexedDataset(tmp_path / "c_text_reward_document").tokens.tolist() == [1, 2, 1, 2]


def test_companions_of_other_datasets_are_joined(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}_chat_document", [[1, 2], [3]])
        write(tmp_path / f"{name}_chat_label_document", [[1, 2], [3]])
    for _ in range(2):  # with an earlier result in the folder
        merge_groups(find_groups([str(tmp_path)], str(tmp_path / "all_document")))
        for name in ("all_document", "all_label_document"):
            assert IndexedDataset(tmp_path / name).sizes.tolist() == [2, 1, 2, 1]
    for file in tmp_path.glob("b_chat_label_document*"):
        file.unlink()
    with pytest.raises(UserError, match="b_chat_label_document .*_label_document"):
        find_groups([str(tmp_path)], str(tmp_path / "all_document"))


def test_companions_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    shard(tmp_path / "in", 0, 1, [[1, 2, 3], [4]])
    shard(tmp_path / "in", 0, 1, [[1, 2], [3, 4]], "text_label_document")
    with pytest.raises(UserError, match=r"text_label_document .*text_document: 2\b.*\b4\b.*\b2\b.*\b4\b"):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "c")))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_shards_that_are_not_a_whole_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"

    def refused(said: str) -> None:
        with pytest.raises(UserError, match=said):
            find_groups([str(folder)], str(tmp_path / "c"))

    shard(folder, 1, 4, [[1]])
    shard(folder, 3, 4, [[1]])
    refused(r"of 4 shards, 0, 2 \(counted from 0\) are missing\. Make them .*--shard 0/4")
    (folder / "c_shard_00002_of_00004.resume.partial").touch()
    refused("Not finished: 2")
    write(folder / "c_shard_3_of_4_text_document", [[1]])
    refused("shard 3 of 4 .*c_shard_00003_of_00004_text_document .*c_shard_3_of_4_text_document")
    shard(folder, 0, 8, [[1]])
    refused("different numbers of them")
    write(folder / "d_shard_0_of_1_text_document", [[1]])
    refused(r"shards of several runs .*--input '.*/in/c_shard_\*'")
    (group,) = find_groups([str(folder / "d_shard_*")], str(tmp_path / "d"))
    assert group.output == str(tmp_path / "d_text_document")
    write(folder / "wiki_text_document", [[1]])
    with pytest.raises(UserError, match=r"shards .* and other datasets \(wiki_text_document\)"):
        find_groups([str(folder / "d_*"), str(folder / "wiki*")], str(tmp_path / "c"))


def test_shards_of_different_runs_are_refused(tmp_path: Path) -> None:
    from megatron.data.tokenise.command import CommandOptions, tokenise_files
    from megatron.data.tokenise.shards import Shard

    path = tmp_path / "a.jsonl"

    def make(index: int, **options: bool) -> None:
        encoder = TextEncoder(create_tokenizer("bytes"), EncodeOptions(**options))  # type: ignore[arg-type]
        job = CommandOptions(shard=Shard(index, 2))
        tokenise_files([path], encoder, str(tmp_path / "in" / "c"), job, settings={}, skip_bad=False)

    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    make(0)
    path.write_text('{"text": "one"}\n{"text": "three"}\n')
    make(1)
    with pytest.raises(UserError, match="c_shard_00001_of_00002.*c_shard_00000_of_00002.*different runs"):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "c")))
    make(0, append_eod=True)
    with pytest.raises(UserError, match=r"different options \(append_eod: False and True\)"):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "c")))
    make(0)
    for file in list((tmp_path / "in").glob("*_00000_of_00002*")):
        file.rename(str(file).replace("_00000_of", "_00001_of"))
    make(0)
    for file in list((tmp_path / "in").glob("*_00001_of_00002*")):
        file.unlink()
    for file in list((tmp_path / "in").glob("*_00000_of_00002*")):
        (tmp_path / "in" / file.name.replace("_00000_of", "_00001_of")).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="_00001_of_00002_text_document .*shard 0 of 2"):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "c")))
    assert not list(tmp_path.glob("c_*"))


def test_a_damaged_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n{"text": "d"}\n')
    for name in "ab":
        tokenise([tmp_path / "a.jsonl"], tmp_path / "in" / name)
    index = tmp_path / "in" / "b_text_document.idx"
    raw = bytearray(index.read_bytes())
    raw[34], raw[38] = raw[38], raw[34]  # the lengths of two documents change places
    index.write_bytes(raw)
    with pytest.raises(UserError, match=r"b_text_document\.idx: item 1 begins at byte 6\b"):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "out")))
    raw[34 + 12 : 34 + 36] = np.array([0, 4, 10], "<i8").tobytes()  # as if it had been written so
    index.write_bytes(raw)
    with pytest.raises(UserError, match="index_sha256"):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "out")))
    assert not list(tmp_path.glob("out*"))


def test_one_bit_of_the_tokens_of_a_part_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        with IndexedDatasetBuilder(tmp_path / "in" / name, np.uint16) as builder:
            builder.add_documents(np.arange(60_000), [600] * 100)
            finalize_with_manifest(builder, tokenizer=None, source=name)
    tokens = tmp_path / "in" / "b.bin"
    whole = tokens.read_bytes()
    changed = bytearray(whole)
    changed[5000] ^= 1  # between the places of the sample
    tokens.write_bytes(changed)
    said = rf"b\.bin: its CRC-32 is {zlib.crc32(changed)}, .*b\.manifest\.json says {zlib.crc32(whole)}\b"
    with pytest.raises(UserError, match=said):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "out")))
    assert not list(tmp_path.glob("out*"))
    tokens.write_bytes(whole)
    (manifest,) = merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "out")))
    assert manifest.bin_crc32 == zlib.crc32((tmp_path / "out.bin").read_bytes()) == zlib.crc32(whole + whole)


def test_what_is_named_twice_is_written_twice(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}_document", [[ord(name)], [1, 2]])
        write(tmp_path / f"{name}_label_document", [[-100], [1, 2]], np.int32)
    a, b = (str(tmp_path / f"{name}_document") for name in "ab")
    (group,) = find_groups([b, a, f"{a}.idx"], str(tmp_path / "out_document"))
    assert group.prefixes == (a, a, b)
    merge_groups([group])
    assert IndexedDataset(tmp_path / "out_document").tokens.tolist() == [97, 1, 2, 97, 1, 2, 98, 1, 2]
    # Their labels are as often there as they.
    groups = find_groups([a, a, str(tmp_path / "a_label_document")], str(tmp_path / "two_document"))
    merge_groups(groups)
    assert IndexedDataset(tmp_path / "two_document").tokens.tolist() == [97, 1, 2] * 2
    assert IndexedDataset(tmp_path / "two_label_document").tokens.tolist() == [-100, 1, 2] * 2


def test_folders_and_globs_that_overlap_name_a_dataset_once(tmp_path: Path) -> None:
    a = write(tmp_path / "in" / "a", [[1]])
    for inputs in ([str(tmp_path / "in"), a], [str(tmp_path / "in")] * 2, [f"{a}*", f"{tmp_path}/in/*"]):
        assert [group.prefixes for group in find_groups(inputs, str(tmp_path / "out"))] == [(a,)]


def test_a_shard_named_twice_is_refused(tmp_path: Path) -> None:
    for index in range(2):
        shard(tmp_path, index, 2, [[index]])
    first = str(tmp_path / "c_shard_00000_of_00002_text_document")
    with pytest.raises(UserError, match="shard 0 of 2 exists twice"):
        find_groups([str(tmp_path), first, first], str(tmp_path / "c"))


def test_a_part_without_a_document_index_counts_its_items(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "in" / "a", np.uint16) as builder:
        for item in ([1, 2], [3]):
            builder.add_item(item)
        builder.finalize()
    assert IndexedDataset(tmp_path / "in" / "a").doc_idx.tolist() == [0]
    write(tmp_path / "in" / "b", [[4], [5, 6]])
    merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "out")))
    assert IndexedDataset(tmp_path / "out").doc_idx.tolist() == [0, 1, 2, 3, 4]


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.data.tokens.partial import WriteError
    from tests.data.tokenise.test_resume import full_disk

    for index in range(2):
        shard(tmp_path / "in", index, 2, [[1] * 5000])
        shard(tmp_path / "in", index, 2, [[1] * 5000], "text_label_document")
    full_disk(monkeypatch, 15_000)
    with pytest.raises(WriteError, match=r"c_text_document: .*No space left"):
        merge_groups(find_groups([str(tmp_path / "in")], str(tmp_path / "c")))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
