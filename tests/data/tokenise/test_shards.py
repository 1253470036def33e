"""Shards of a corpus: together they are the corpus, and joined they are the bytes of one run."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.tokenise.chunks import Document, Fault
from megatron.data.tokenise.command import CommandOptions, check_writable, tokenise_files
from megatron.data.tokenise.formats import Part, read_parts
from megatron.data.tokenise.inputs import find_inputs
from megatron.data.tokenise.shards import Shard, parse_shard
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import find_groups
from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer

pytestmark = pytest.mark.cpu

KEYS = ("text", "title")


def rows(count: int, seed: int) -> list[dict[str, str]]:
    pick = random.Random(seed)
    return [{"text": f"{seed}.{i} " + "x" * int(pick.expovariate(0.01)), "title": f"t{i}"} for i in range(count)]


def lines(records: list[dict[str, str]], end: str = "\n") -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode().removesuffix(b"\n") + end.encode()


def write_mixture(folder: Path) -> list[Path]:
    """Every kind of file; some empty, one with a line longer than all others together."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    folder.mkdir()
    big = [*rows(5, 3), {"text": "y" * 60_000, "title": "long"}, *rows(5, 4)]
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(rows(200, 1)))
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(lines(big, end=""))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines(rows(50, 5))))
    pq.write_table(pa.Table.from_pylist(rows(300, 6)), folder / "e.parquet", row_group_size=40)
    (folder / "f.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(rows(50, 7))))
    with pa.OSFile(str(folder / "g.arrow"), "wb") as sink:
        table = pa.Table.from_pylist(rows(600, 8))
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    with pa.OSFile(str(folder / "h.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=150)
    (folder / "i.json").write_text(json.dumps(rows(30, 9), indent=1))
    (folder / "j.json").write_bytes(lines(rows(30, 10)))
    return find_inputs([str(folder)])


def encoder(keys: tuple[str, ...] = KEYS) -> TextEncoder:
    return TextEncoder(create_tokenizer("bytes"), EncodeOptions(keys, append_eod=True))


def tokenise(paths: list[Path], prefix: Path, shard: Shard | None = None, keys: tuple[str, ...] = KEYS) -> None:
    options = CommandOptions(shard=shard, save_every=0)
    tokenise_files(paths, encoder(keys), str(prefix), options, settings={}, skip_bad=False)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_shards_joined_are_the_bytes_of_one_run(tmp_path: Path, count: int) -> None:
    paths = write_mixture(tmp_path / "in")
    tokenise(paths, tmp_path / "whole" / "c")
    for index in range(count):
        tokenise(paths, tmp_path / "shards" / "c", Shard(index, count))
    merge_groups(find_groups([str(tmp_path / "shards")], str(tmp_path / "joined" / "c")))
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(f"c_{key}_document{end}" for key in KEYS for end in (".bin", ".idx", ".manifest.json"))
    assert sorted(path.name for path in (tmp_path / "joined").iterdir()) == names
    for name in names:
        assert (tmp_path / "joined" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_large_files_are_cut_evenly(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_bytes(lines(rows(1000, 1)))
    pq.write_table(pa.Table.from_pylist(rows(1000, 2)), tmp_path / "a.parquet", row_group_size=25, compression="none")
    for name in ("a.jsonl", "a.parquet"):
        prefix = tmp_path / name.replace(".", "_")
        for index in range(4):
            tokenise([tmp_path / name], prefix, Shard(index, 4))
        sizes = [IndexedDataset(f"{prefix}{Shard(i, 4).name}_text_document").num_tokens for i in range(4)]
        assert max(sizes) < 1.2 * min(sizes), sizes


def test_text_files_are_shared_out_as_wholes(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02d}.txt").write_text(f"document {i}\n" * (i % 3))
    paths = find_inputs([str(tmp_path / "*.txt")])
    tokenise(paths, tmp_path / "whole", keys=("text",))
    for index in range(3):
        tokenise(paths, tmp_path / "s" / "c", Shard(index, 3), keys=("text",))
    merge_groups(find_groups([str(tmp_path / "s")], str(tmp_path / "joined")))
    for end in (".bin", ".idx", ".manifest.json"):
        joined, whole = tmp_path / f"joined_text_document{end}", tmp_path / f"whole_text_document{end}"
        assert joined.read_bytes() == whole.read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(st.sampled_from(['{"text": "a"}', "", "  ", '{"text": "' + "b" * 40 + '"}']), max_size=12),
    newline_at_end=st.booleans(),
    count=st.integers(1, 9),
)
def test_every_line_is_in_one_shard(tmp_path: Path, content: list[str], newline_at_end: bool, count: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(content) + ("\n" if newline_at_end and content else ""))
    whole = [d for chunk, _ in read_parts([Part(path)]) for d in chunk.documents(["text"])]
    parts = [part for i in range(count) for part in Shard(i, count).parts([path])]
    shared = [d for part in parts for chunk, _ in read_parts([part]) for d in chunk.documents(["text"])]
    assert [d.texts for d in shared if isinstance(d, Document)] == [d.texts for d in whole if isinstance(d, Document)]


def test_a_bad_line_has_its_number_in_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": "x" * 50})] * 100
    path.write_text("\n".join([*good, '{"txt": 1}', *good[:50], "{", *good[:10]]))
    found = [
        document.where
        for part in Shard(2, 3).parts([path])
        for chunk, _ in read_parts([part])
        for document in chunk.documents(["text"])
        if isinstance(document, Fault)
    ]
    assert found == [f"{path}:152"]
    with pytest.raises(UserError, match=r"a\.jsonl:101: no key 'text'"):
        tokenise([path], tmp_path / "c", Shard(1, 3), keys=("text",))
    assert [child.name for child in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_shard_may_be_empty_but_not_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "only"}\n')
    for index in range(3):
        tokenise([path], tmp_path / "s" / "c", Shard(index, 3), keys=("text",))
    data = [IndexedDataset(tmp_path / "s" / f"c{Shard(i, 3).name}_text_document") for i in range(3)]
    assert [len(part) for part in data] == [1, 0, 0]
    path.write_text("\n")
    for index in range(2):
        tokenise([path], tmp_path / "e" / "c", Shard(index, 2), keys=("text",))
    with pytest.raises(UserError, match="no document.*joined"):
        merge_groups(find_groups([str(tmp_path / "e")], str(tmp_path / "joined")))
    assert not list(tmp_path.glob("joined*"))


def test_which_shard_a_process_is() -> None:
    assert parse_shard("3/16", {}) == Shard(3, 16)
    assert Shard(3, 16).name == "_shard_00003_of_00016"
    for text, said in (
        ("16/16", r"--shard 16/16: .*15/16"),
        ("0/0", "--shard 0/0: "),
        ("1", "--shard 1: .*i/n"),
        ("-1/4", "--shard -1/4: .*i/n"),
        ("a/b", "--shard a/b: .*i/n"),
        ("auto", "--shard auto: .*RANK.*SLURM_PROCID"),
    ):
        with pytest.raises(UserError, match=said):
            parse_shard(text, {"HOME": "/"})


@pytest.mark.parametrize(
    ("env", "shard"),
    [
        ({"RANK": "2", "WORLD_SIZE": "4"}, Shard(2, 4)),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_PROCID": "0"}, Shard(2, 4)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, Shard(5, 8)),
        ({"SLURM_PROCID": "5", "SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "1"}, Shard(5, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, Shard(1, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Shard(1, 3)),
        ({"PMI_RANK": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "3"}, Shard(1, 3)),
    ],
)
def test_auto_takes_the_launcher_s_rank(env: dict[str, str], shard: Shard) -> None:
    assert parse_shard("auto", env) == shard


def test_an_incomplete_environment_is_refused() -> None:
    with pytest.raises(UserError, match="WORLD_SIZE"):
        parse_shard("auto", {"RANK": "1"})


def test_a_folder_that_cannot_be_written_to_is_known_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"--output-prefix .*permission"):
        tokenise([tmp_path / "absent.jsonl"], tmp_path / "new" / "c")
    with pytest.raises(UserError, match="--output-prefix .*corpus"):
        check_writable(f"{tmp_path}/")
    assert not list(tmp_path.iterdir())
