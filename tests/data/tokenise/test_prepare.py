"""Named corpora: the standard library, and the Hub's (a local folder stands for a repository)."""

from __future__ import annotations

import dataclasses
import json
import sysconfig
from pathlib import Path

import pytest

from megatron.data.tokenise import corpora
from megatron.data.tokenise import prepare as prepare_module
from megatron.data.tokenise.corpora import HUB_CORPORA, HubCorpus, hub_chunks, stdlib_files
from megatron.data.tokenise.prepare import prepare
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import read_manifest
from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer
from tests.tokenizer.vocabularies import write_gpt2, write_json

pytestmark = pytest.mark.cpu

TREE = {
    "json/decoder.py": "def decode(text):\n    return text\n" * 20,
    "json/encoder.py": "def encode(value):\n    return str(value)\n" * 20,
    "LICENSE.txt": "a licence\n" * 20,
    "lib2to3/Grammar.txt": "grammar\n",
    "latin.py": None,  # not UTF-8
    "empty.py": "",
    "test/test_json.py": "no",
    "idlelib/idle_test/x.py": "no",
    "site-packages/numpy/core.py": "no",
    "json/__pycache__/decoder.py": "no",
    "lib-dynload/_json.so": "no",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name, text in TREE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xe9\xe9" if text is None else text.encode())
    return root


def test_stdlib_takes_source_and_text_and_no_tests_or_packages(library: Path) -> None:
    files = [str(path.relative_to(library)) for path in stdlib_files(library)]
    assert sorted(files) == ["LICENSE.txt", "json/decoder.py", "json/encoder.py", "latin.py", "lib2to3/Grammar.txt"]
    assert files == [str(path.relative_to(library)) for path in stdlib_files(library)]
    assert files != sorted(files)  # mixed, so that the ranges of a split are alike


def test_stdlib_of_this_python_is_a_corpus() -> None:
    size = sum(path.stat().st_size for path in stdlib_files())
    assert 5e6 < size < 40e6


def test_stdlib_makes_its_tokenizer_and_one_document_per_file(tmp_path: Path, library: Path) -> None:
    prepared = prepare("stdlib", str(tmp_path / "data"), stdlib_root=library)
    assert prepared.data_path == str(tmp_path / "data/stdlib/stdlib_text_document")
    assert (prepared.tokenizer_type, prepared.merge_file) == ("HFTokenizer", None)
    tokenizer = create_tokenizer(prepared.tokenizer_type, prepared.vocab_file)
    data = IndexedDataset(prepared.data_path)
    texts = [tokenizer.detokenize(data.get(i)[:-1].tolist()) for i in range(len(data))]
    assert texts == [TREE[str(p.relative_to(library))] for p in stdlib_files(library) if p.name != "latin.py"]
    assert all(data.get(i)[-1] == tokenizer.eod for i in range(len(data)))
    manifest = read_manifest(prepared.data_path)
    assert manifest is not None
    assert manifest.source["corpus"] == "stdlib"
    assert manifest.extra["bad_records"] == 1


def test_what_exists_is_used_again_unless_forced(tmp_path: Path, library: Path) -> None:
    def stamps() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (tmp_path / "data/stdlib").iterdir()}

    prepare("stdlib", str(tmp_path / "data"), stdlib_root=library)
    before = stamps()
    again = prepare("stdlib", str(tmp_path / "data"), stdlib_root=library)
    assert stamps() == before
    assert prepare("stdlib", str(tmp_path / "data"), stdlib_root=library, force=True) == again
    assert set(stamps()) == set(before)
    assert not set(stamps().items()) & set(before.items())


def test_existing_data_of_another_tokenizer_is_refused(tmp_path: Path, library: Path) -> None:
    prepare("stdlib", str(tmp_path), stdlib_root=library)
    with pytest.raises(UserError, match=r"stdlib_text_document.*tokenizer.*\(-f "):
        prepare("stdlib", str(tmp_path), tokenizer_type="bytes", stdlib_root=library)
    prepare("stdlib", str(tmp_path), tokenizer_type="bytes", stdlib_root=library, force=True)
    manifest = read_manifest(tmp_path / "stdlib/stdlib_text_document")
    assert manifest is not None
    assert manifest.extra["tokenizer_type"] == "bytes"


def test_the_result_can_be_pasted_into_yaml(tmp_path: Path, library: Path) -> None:
    import yaml

    prepared = prepare("stdlib", str(tmp_path), stdlib_root=library)
    given = {key: value for key, value in dataclasses.asdict(prepared).items() if value is not None}
    assert yaml.safe_load("{" + prepared.as_yaml() + "}") == given


def test_no_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stdlib: no .py"):
        prepare("stdlib", str(tmp_path / "data"), stdlib_root=tmp_path)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("vocabulary", ["given", "fetched"])
def test_without_a_network_one_error_names_stdlib(
    tmp_path: Path, vocabulary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    vocab, merges = write_gpt2(tmp_path / "gpt2") if vocabulary == "given" else (None, None)
    with pytest.raises(UserError, match=r"prepare_data\.py stdlib") as caught:
        prepare("enwik8", str(tmp_path / "data"), vocab_file=vocab and str(vocab), merge_file=merges and str(merges))
    assert "Traceback" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_names(tmp_path: Path) -> None:
    neox = (
        "enron pile_subset pile github arxiv europarl freelaw nih pubmed books1 books3 hackernews openwebtext2 "
        "stackexchange ubuntu_irc youtube_subtitles c4 c4_openwebtext enwik8"
    )
    assert {*neox.split(), "stdlib"} == set(corpora.NAMES)
    with pytest.raises(UserError, match="'enwik'.*'enwik8'.*: .*stdlib"):
        prepare("enwik", str(tmp_path))
    with pytest.raises(UserError, match="books3: .*withdrawn"):
        prepare("books3", str(tmp_path), tokenizer_type="bytes")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that plays the repository of several corpora, and caches of its own for the libraries."""
    folder = tmp_path / "repository"
    folder.mkdir()
    sets = ("Enron Emails", "ArXiv")
    lines = [{"text": f"mail {i}", "meta": {"pile_set_name": sets[i % 2]}} for i in range(600)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, corpus in HUB_CORPORA.items():
        local = HubCorpus(str(folder), pile_set=corpus.pile_set, cut_after=corpus.cut_after)
        monkeypatch.setitem(HUB_CORPORA, name, local)
    return folder


def test_a_hub_corpus_is_streamed_whole_or_by_component(hub: Path) -> None:
    def texts(name: str) -> list[str]:
        return [d.texts["text"] for chunk in hub_chunks(name) for d in chunk.documents(["text"])]

    assert texts("pile") == [f"mail {i}" for i in range(600)]
    assert texts("enron") == [f"mail {i}" for i in range(0, 600, 2)]
    assert texts("arxiv") == [f"mail {i}" for i in range(1, 600, 2)]


def test_enwik8_is_cut_into_pages(hub: Path, tmp_path: Path) -> None:
    pages = ["<page>one</page>\n", "<page>two</page>\n", "<page>cut sho"]
    (hub / "train.jsonl").write_text(json.dumps({"text": "".join(pages)}) + "\n")
    prepared = prepare("enwik8", str(tmp_path / "data"), tokenizer_type="bytes")
    data = IndexedDataset(prepared.data_path)
    assert [bytes(data.get(i)[:-1].tolist()).decode() for i in range(len(data))] == pages


def test_the_gpt2_vocabulary_is_fetched_once_under_neox_s_names(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gpt2(tmp_path / "gpt2")
    asked: list[str] = []

    def fetch(repo: str, filename: str, *, key: str, instead: str) -> Path:
        asked.append(f"{repo}/{filename}")
        return tmp_path / "gpt2" / filename

    monkeypatch.setattr(prepare_module, "fetch", fetch)
    for _ in range(2):
        prepared = prepare("enron", str(tmp_path / "data"))
    assert asked == ["openai-community/gpt2/vocab.json", "openai-community/gpt2/merges.txt"]
    assert prepared.vocab_file == str(tmp_path / "data" / "gpt2-vocab.json")
    assert prepared.merge_file == str(tmp_path / "data" / "gpt2-merges.txt")
    assert len(IndexedDataset(prepared.data_path)) == 300


def test_a_given_tokenizer_is_used_for_stdlib(tmp_path: Path, library: Path) -> None:
    path = str(write_json(tmp_path / "mine.json"))
    prepared = prepare("stdlib", str(tmp_path), tokenizer_type="HFTokenizer", vocab_file=path, stdlib_root=library)
    assert prepared.vocab_file == path
    assert not (tmp_path / "stdlib" / "tokenizer.json").exists()


def test_the_default_root_is_the_running_python_s() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    assert root / "argparse.py" in stdlib_files()
