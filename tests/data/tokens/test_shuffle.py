"""Shuffling documents: an order that depends on a seed and the texts alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import read_manifest
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import Group, find_groups
from megatron.data.tokens.shuffle import is_shuffled
from megatron.errors import UserError
from tests.data.corpus import write
from tests.tools.command import run

pytestmark = pytest.mark.cpu

DOCUMENTS = [[d, *range(d % 7)] for d in range(400)]


def read(prefix: Path | str) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data[i].tolist() for i in range(len(data))]


def shuffle(output: Path, *parts: str, seed: int = 1, longest: int | None = None) -> list[list[int]]:
    merge_groups([Group(str(output), parts)], seed=seed, longest=longest)
    assert is_shuffled(read_manifest(output))
    return read(output)


def test_the_order_depends_on_the_seed_and_not_on_the_files(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", DOCUMENTS)
    parts = [write(tmp_path / name, some) for name, some in (("b", DOCUMENTS[250:]), ("a", DOCUMENTS[250::-1][1:]))]
    one = shuffle(tmp_path / "one", whole)
    assert sorted(one) == DOCUMENTS and one != DOCUMENTS
    assert shuffle(tmp_path / "other", *parts) == one
    again = shuffle(tmp_path / "again", whole, seed=2)
    assert sorted(again) == DOCUMENTS and again != one
    # A fair sample: the tail of 40 documents comes from everywhere, as the mean of a uniform sample does (5 sigma).
    assert abs(np.mean([document[0] for document in one[-40:]]) - 199.5) < 5 * 115.5 / np.sqrt(40)


def test_long_documents_are_cut_first(tmp_path: Path) -> None:
    prefix = write(tmp_path / "in", [list(range(1000)), [5, 6], list(range(10))])
    found = shuffle(tmp_path / "out", prefix, longest=10)
    assert Counter(map(len, found)) == {10: 101, 2: 1}
    assert sorted(found)[1:3] == [list(range(10)), [5, 6]] or [5, 6] in found
    assert sorted(token for piece in found for token in piece) == sorted([*range(1000), 5, 6, *range(10)])


def test_sides_of_pairs_stay_together(tmp_path: Path) -> None:
    for number in range(2):
        for side in ("chosen", "rejected"):
            texts = [[number, i, len(side)] for i in range(9)]
            write(tmp_path / f"p_shard_{number:05d}_of_00002_{side}_document", texts)
    groups = find_groups([str(tmp_path / "p_shard_*")], str(tmp_path / "p"))
    with pytest.raises(UserError, match="^--shuffle: .*p_chosen_document is a side of pairs"):
        merge_groups(groups, seed=1)
    assert not list(tmp_path.glob("p_chosen*"))
    merge_groups(groups)
    chosen, rejected = (read(tmp_path / f"p_{side}_document") for side in ("chosen", "rejected"))
    assert [one[:2] for one in chosen] == [other[:2] for other in rejected]


def test_labels_and_rewards_go_with_their_documents(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "x_text_document", DOCUMENTS)
    write(folder / "x_text_label_document", [[token + 1000 for token in document] for document in DOCUMENTS])
    write(folder / "x_text_reward_document", [[document[0] + 2000] for document in DOCUMENTS])
    out = str(tmp_path / "y_text_document")
    merge_groups(find_groups([str(folder)], out), seed=3)
    texts, labels, rewards = (read(tmp_path / f"y_text{kind}_document") for kind in ("", "_label", "_reward"))
    assert texts != DOCUMENTS
    assert labels == [[token + 1000 for token in document] for document in texts]
    assert rewards == [[document[0] + 2000] for document in texts]


def test_damage_is_found_while_reading(tmp_path: Path) -> None:
    prefix = write(tmp_path / "in", DOCUMENTS)
    merge_groups([Group(str(tmp_path / "copy"), (prefix,))])  # with a manifest
    content = bytearray((tmp_path / "copy.bin").read_bytes())
    manifest = json.loads((tmp_path / "copy.manifest.json").read_text())
    manifest["bin_sample_crc32"] = None  # that of all tokens is left
    (tmp_path / "copy.manifest.json").write_text(json.dumps(manifest))
    content[100] ^= 1
    (tmp_path / "copy.bin").write_bytes(content)
    with pytest.raises(UserError, match="CRC-32"):
        shuffle(tmp_path / "out", str(tmp_path / "copy"))
    assert not list(tmp_path.glob("out*"))


def test_the_tools_shuffle_alike(tmp_path: Path) -> None:
    texts = [f"document {i} " + "x" * (i % 5) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::-1]))
    tool, kind = "tools/datasets/preprocess_data.py", ("--tokenizer-type", "CharLevelTokenizer", "--append-eod")
    for name, shuffled in (("a", ("--shuffle", 7)), ("b", ("--shuffle", 7)), ("plain", ())):
        source = tmp_path / f"{'a' if name == 'plain' else name}.jsonl"
        run(tool, "--input", source, "--output-prefix", tmp_path / name, *kind, *shuffled)
    merge = ("tools/datasets/merge_datasets.py", "--input", tmp_path / "plain_text_document", "--shuffle", 7)
    run(*merge, "--output-prefix", tmp_path / "merged_text_document")
    found = [read(tmp_path / f"{name}_text_document") for name in ("a", "b", "merged")]
    assert found[0] == found[1] == found[2] != read(tmp_path / "plain_text_document")
    assert not list(tmp_path.glob("*.ordered*"))
    done = run(
        tool, "--input", source, "--output-prefix", tmp_path / "s", *kind, "--shuffle", 7, "--shard", "0/2", check=2
    )
    assert "merge_datasets.py" in done.stderr and not list(tmp_path.glob("s[._]*"))
