"""What the inputs of a command line stand for."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from megatron.data.tokenise.command import CommandOptions, tokenise_files, write_metadata
from megatron.data.tokenise.inputs import find_inputs
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder
from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer

pytestmark = pytest.mark.cpu


def test_a_list_of_files_names_inputs(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "list").write_text(f"# the order is kept\n{tmp_path}/c.txt\n\n{tmp_path}/*.jsonl\n")
    found = find_inputs([f"@{tmp_path}/list", str(tmp_path / "a.jsonl")])
    assert [path.name for path in found] == ["c.txt", "a.jsonl", "b.jsonl", "a.jsonl"]
    (tmp_path / "list").write_text("# nothing\n")
    for name, said in (("list", "@.*list"), ("absent", "@.*absent")):
        with pytest.raises(UserError, match=said):
            find_inputs([f"@{tmp_path}/{name}"])


def test_inputs_are_lists_globs_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "c.txt", "sub/z.jsonl.zst", "sub/notes.md", "odd,name.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("")

    def names(*inputs: str) -> list[str]:
        return [str(path.relative_to(tmp_path) if path.is_absolute() else path) for path in find_inputs(inputs)]

    assert names("b.jsonl,a.jsonl") == ["b.jsonl", "a.jsonl"]
    assert names("b.jsonl", "*.jsonl") == ["b.jsonl", "a.jsonl", "b.jsonl"]
    assert names("sub") == ["sub/z.jsonl.zst"]
    assert names("odd,name.txt") == ["odd,name.txt"]
    assert names("**/*.zst", "a.jsonl,") == ["sub/z.jsonl.zst", "a.jsonl"]


def test_a_list_may_be_longer_than_a_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("")
    for path in ("a.jsonl", tmp_path / "a.jsonl"):
        assert find_inputs([",".join([str(path)] * 2000)]) == [Path(path)] * 2000
    with pytest.raises(UserError, match=r"\.\.\.: no such file"):
        find_inputs(["x" * 5000])


def test_what_tools_write_into_a_folder_is_none_of_its_documents(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(saved))
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n')
    before = find_inputs([str(tmp_path)])
    tokenizer = create_tokenizer("bytes", None, None)
    prefix = str(tmp_path / "out")
    encoder = TextEncoder(tokenizer, EncodeOptions())
    result = tokenise_files(before, encoder, prefix, CommandOptions(), settings={}, skip_bad=False)
    write_metadata(prefix, {}, result)
    assert [path.name for path in before] == ["a.jsonl", "data-00000-of-00001.arrow"]
    assert find_inputs([str(tmp_path)]) == before
    # Asked for by its name, everything is an input.
    assert find_inputs([str(saved / "state.json")]) == [saved / "state.json"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("absent.jsonl", "absent.jsonl: no such file"),
        ("*.parquet", r"\*\.parquet"),
        ("notes.md", r"notes\.md: .*\.jsonl"),
        ("notes.md.gz", r"notes\.md\.gz: .*\.jsonl"),
        ("empty", r"empty: .*\.jsonl"),
    ],
)
def test_inputs_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name in ("notes.md", "notes.md.gz"):
        Path(name).write_text("x")
    with pytest.raises(UserError, match=said):
        find_inputs([given])
