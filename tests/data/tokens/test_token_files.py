"""`.npy` token files, globs and label masks behind the interface of the .bin/.idx datasets."""

from __future__ import annotations

import errno
import gzip
import logging
import multiprocessing
import pickle
import re
import resource
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.datasets import build_datasets, plan_datasets
from megatron.data.order.saved_order import SavedOrder
from megatron.data.tokens import npy
from megatron.data.tokens.cache import IndexCaches
from megatron.data.tokens.manifest import check_tokenizer
from megatron.data.tokens.token_files import TokenFiles
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig, TokenizerConfig
from megatron.tokenizer import build_tokenizer
from tests.data.corpus import GOLDEN, write

pytestmark = pytest.mark.cpu

EOD = 50256
DOCUMENTS = [[5, 6, 7, EOD], [EOD], [30000, 2, EOD], [9, 8]]
TOKENS = [*chain(*DOCUMENTS)]


def raw(path: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    """As OLMo-core's tools write it: the ids and nothing else."""
    np.asarray([token for document in documents for token in document], dtype).tofile(path)
    return path


def content(data) -> list[list[int]]:
    return [data.get(i).tolist() for i in range(len(data))]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_raw_ids_are_cut_behind_each_end_of_document(tmp_path: Path, dtype: str) -> None:
    data = TokenFiles(EOD).open(raw(tmp_path / "part-0.npy", DOCUMENTS, dtype))
    assert data.dtype == np.dtype(dtype)
    assert content(data) == DOCUMENTS
    assert data.sizes.tolist() == [4, 1, 3, 2] and data.sizes.dtype == np.int32
    assert (len(data), data.num_documents, data.num_tokens) == (4, 4, 10)
    assert data.get(2, 1, 2).tolist() == [2, EOD]
    assert data.tokens.tolist() == TOKENS
    with pytest.raises(IndexError):
        data.get(2, 1, 3)
    again = pickle.loads(pickle.dumps(data))
    assert content(again) == DOCUMENTS


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<u4", "<i8"])
def test_files_with_a_header_say_their_type(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "x.npy", np.asarray(TOKENS, dtype))
    data = TokenFiles(EOD).open(tmp_path / "x")  # the suffix may be left out
    assert data.dtype == np.dtype(dtype)
    assert content(data) == DOCUMENTS


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_every_token_is_in_one_document(tokens: list[int], chunk: int) -> None:
    kept, npy._CHUNK = npy._CHUNK, chunk
    try:
        ends = npy.find_ends(np.asarray(tokens, np.uint16), 3, "x").tolist()
    finally:
        npy._CHUNK = kept
    pieces = [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert [*chain(*pieces)] == tokens
    assert all(piece and 3 not in piece[:-1] for piece in pieces)
    assert all(piece[-1] == 3 for piece in pieces[:-1])


def test_dolmas_list_of_documents_is_used(tmp_path: Path) -> None:
    path = raw(tmp_path / "part-0.npy", DOCUMENTS)
    with gzip.open(tmp_path / "part-0.csv.gz", "wt") as file:
        file.write("0,5,some-id,s3://a/b,1\n5,10,other,s3://a/b,2\n")
    assert content(TokenFiles().open(path)) == [[5, 6, 7, EOD, EOD], [30000, 2, EOD, 9, 8]]
    for wrong in ("0,5\n5,9\n", "0,5\n6,10\n", "a,b\n", ""):
        with gzip.open(tmp_path / "part-0.csv.gz", "wt") as file:
            file.write(wrong)
        with pytest.raises(UserError, match="part-0.csv.gz"):
            TokenFiles().open(path)


def test_borders_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = raw(tmp_path / "x.npy", DOCUMENTS)
    caches = IndexCaches(tmp_path / "cache")
    TokenFiles(EOD, caches=caches).open(path)
    TokenFiles(EOD, caches=caches).open(path)
    assert [entry.built for entry in caches.entries] == [True, False]
    TokenFiles(7, caches=caches).open(path)
    raw(path, [[1, 2, 60000], *DOCUMENTS])
    assert content(TokenFiles(EOD, caches=caches).open(path))[0] == [1, 2, 60000, 5, 6, 7, EOD]
    assert [entry.built for entry in caches.entries] == [True, False, True, True]


def test_a_type_that_cannot_be_detected_must_be_set(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.npy", [[1, 2, 3, 0], [4, 0]])
    with pytest.raises(UserError, match=r"x.npy: .*npy_dtype"):
        TokenFiles(0).open(path)
    assert content(TokenFiles(0, "uint16").open(path)) == [[1, 2, 3, 0], [4, 0]]
    with pytest.raises(UserError, match="y.npy: 6 bytes .*uint32"):
        TokenFiles(0, "uint32").open(raw(tmp_path / "y.npy", [[1, 2, 3]]))


@pytest.mark.parametrize("vocabulary", [300, 50257, 100_278, 262_144])
def test_the_type_is_detected_for_common_vocabularies(tmp_path: Path, vocabulary: int) -> None:
    tokens = np.random.default_rng(0).zipf(1.3, 200_000) % vocabulary
    for dtype in ("<u2", "<u4")[vocabulary > 65536 :]:
        tokens.astype(dtype).tofile(tmp_path / "x.npy")
        assert npy.read_npy(tmp_path / "x.npy", None)[1] == np.dtype(dtype)


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.uint16))
    np.save(tmp_path / "float.npy", np.zeros(2))
    np.save(tmp_path / "cut.npy", np.zeros(99, np.uint16))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-2])
    faults = {"empty": "empty", "square": "shape", "float": "float64", "cut": "whole", "no": "no.npy"}
    for name, said in faults.items():
        with pytest.raises(UserError, match=said) as error:
            TokenFiles(0).open(tmp_path / f"{name}.npy")
        assert f"{name}.npy" in str(error.value)
    with pytest.raises(UserError, match="npy_eod"):
        TokenFiles().open(raw(tmp_path / "x.npy", DOCUMENTS))
    with pytest.raises(UserError, match=r"z\*\.npy"):
        TokenFiles(0).open(tmp_path / "z*.npy")


def test_a_missing_end_of_document_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.npy"
    np.full(1_100_000, 777, "<u2").tofile(path)
    with caplog.at_level(logging.WARNING):
        assert len(TokenFiles(EOD).open(path)) == 1
    assert "npy_eod" in caplog.text
    monkeypatch.setattr(npy, "MAX_ITEM", 1000)
    with pytest.raises(UserError, match="a document of 1100000 tokens"):
        TokenFiles(EOD - 1).open(path)


def test_a_glob_joins_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    raw(tmp_path / "part-1.npy", DOCUMENTS[2:])
    raw(tmp_path / "part-0.npy", DOCUMENTS[:2])
    data = TokenFiles(EOD, "uint16").open(tmp_path / "part-*.npy")
    assert content(data) == DOCUMENTS and data.sizes.tolist() == [4, 1, 3, 2]
    assert data.tokens.tolist() == TOKENS and data.num_tokens == 10 and data.num_documents == 4
    assert [len(part) for part in data.parts] == [2, 2]
    assert content(pickle.loads(pickle.dumps(data))) == DOCUMENTS
    with pytest.raises(IndexError):
        data.get(4)
    data.warm_up()


def test_a_glob_without_manifests_is_one_warning_and_all_ids_are_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(3):
        raw(tmp_path / f"{k}.npy", [[1, 2, 30 + k, 0]])
    data = TokenFiles(0, "uint16").open(tmp_path / "*.npy")
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="CharLevelTokenizer"))
    with caplog.at_level(logging.WARNING):
        check_tokenizer(data, tokenizer)
    (record,) = caplog.records
    assert re.search(r"\*\.npy \(3 .*\bmanifest\b", record.message)
    raw(tmp_path / "2.npy", [[1, 2, 60_000, 0]])
    with pytest.raises(UserError, match=r"2\.npy: token 2 has id 60000"):
        check_tokenizer(TokenFiles(0, "uint16").open(tmp_path / "*.npy"), tokenizer)


def many_files(folder: str) -> int:
    """Open 60 files with room for 40."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return len(TokenFiles(EOD, "uint16").open(f"{folder}/*.npy"))


def test_more_files_than_the_limit_of_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(60):
        raw(tmp_path / f"{k:02}.npy", DOCUMENTS[:2])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(many_files, (str(tmp_path),)) == 120

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("megatron.data.tokens.cache.np.load", full)
    with pytest.raises(UserError, match="ulimit -n"):  # and not: the cache is damaged
        TokenFiles(EOD, "uint16").open(tmp_path / "00.npy")


def test_a_glob_of_indexed_datasets(tmp_path: Path) -> None:
    write(tmp_path / "b_document", GOLDEN[3:])
    write(tmp_path / "a_document", GOLDEN[:3])
    for pattern in ("*_document", "*_document.idx", "*.bin"):
        data = TokenFiles().open(tmp_path / pattern)
        assert content(data) == GOLDEN
        assert data.doc_idx.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("header", [False, True])
def test_a_mask_becomes_labels(tmp_path: Path, header: bool) -> None:
    raw(tmp_path / "part-0.npy", DOCUMENTS[:2])
    raw(tmp_path / "part-1.npy", DOCUMENTS[2:])
    mask = np.asarray([1, 0, 1, 1, 0, 0, 1, 1, 1, 0], bool)
    for name, part in (("mask-0.npy", mask[:5]), ("mask-1.npy", mask[5:])):
        np.save(tmp_path / name, part) if header else part.tofile(tmp_path / name)
    files = TokenFiles(EOD, "uint16")
    data = files.open(tmp_path / "part-*.npy")
    labels = files.open_labels(tmp_path / "mask-*.npy", data)
    expected = [[5, -100, 7, EOD], [-100], [-100, 2, EOD], [9, -100]]
    assert content(labels) == expected and labels.dtype == np.int32
    assert labels.get(2, 1, 1).tolist() == [2]
    assert labels.tokens.tolist() == [*chain(*expected)]
    assert content(pickle.loads(pickle.dumps(labels))) == expected
    with pytest.raises(UserError, match="1 label files for the 2"):
        files.open_labels(tmp_path / "mask-0.npy", data)
    with pytest.raises(UserError, match="5 booleans for 4 tokens"):
        files.open_labels(tmp_path / "mask-0.npy", files.open(raw(tmp_path / "z.npy", DOCUMENTS[:1])))


def test_npy_gives_the_samples_that_an_indexed_dataset_gives(tmp_path: Path) -> None:
    """The whole way: plan, index, samples, labels; the same tokens in both formats."""
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 50000, rng.integers(1, 30)).tolist(), EOD] for _ in range(60)]
    raw(tmp_path / "t0.npy", documents[:20], "<u4")
    raw(tmp_path / "t1.npy", documents[20:], "<u4")
    prefix = write(tmp_path / "x", documents, np.int32)
    counts = {"seq_length": 8, "seed": 3, "train_samples": 100, "valid_samples": 5}
    files = build_datasets(DataConfig(data_path=str(tmp_path / "t*.npy"), npy_eod=EOD, split="8,2"), **counts)
    indexed = build_datasets(DataConfig(data_path=prefix, split="8,2"), **counts)
    assert files.train is not None and indexed.train is not None and len(files.train) == len(indexed.train)
    for mine, theirs in ((files.train, indexed.train), (files.valid, indexed.valid)):
        for k in range(len(theirs)):
            assert mine[k].tokens.tolist() == theirs[k].tokens.tolist()
            assert mine[k].starts.tolist() == theirs[k].starts.tolist()
    # A plan that is continued does not care about the format either.
    plan_datasets(DataConfig(data_path=prefix, split="8,2"), saved=SavedOrder.read(files.plan.state()), **counts)
