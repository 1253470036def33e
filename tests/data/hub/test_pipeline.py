"""`prepare_hf_dataset`: every kind of input, counts, the export, tokens, and what a second run does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.data.hub import pipeline, records, stages
from megatron.data.hub.pipeline import PrepareOptions, output_name, prepare_hf_dataset
from megatron.data.hub.records import FileRecords, Request, TableRecords
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import read_manifest
from megatron.errors import DeepyError, UserError
from tests.tokenizer.vocabularies import HOSTILE, write_json

pytestmark = pytest.mark.cpu

TEXTS = [f"hello world {i} {HOSTILE[i % len(HOSTILE)]}" for i in range(60)]
ROWS = [{"id": i, "text": text, "note": f"n{i}"} for i, text in enumerate(TEXTS)]
Prepare = Callable[..., dict[str, Any]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_json(tmp_path / "tokenizer" / "tokenizer.json")


@pytest.fixture
def prepare(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Runs the pipeline into `<tmp_path>/out`, with the caches of `datasets` in `tmp_path`."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(dataset: Path | str, split: str = "train", subset: str | None = None, **flags: Any) -> dict[str, Any]:
        files = tuple(flags.pop("data_files", ()))
        request = Request(str(dataset), subset, split, flags.pop("data_dir", None), files)
        options = PrepareOptions(request, tmp_path / "out", vocab_file=str(tokenizer))
        return prepare_hf_dataset(replace(options, **flags))

    return run


def write_jsonl(path: Path, rows: list[Any] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def exported(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "dataset.jsonl").read_text("utf-8").splitlines()]


def table() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


def write_kind(kind: str, folder: Path) -> Path:
    """The rows in a form that users have."""
    import datasets

    path = folder / f"corpus{kind}"
    folder.mkdir()
    if kind == ".jsonl":
        write_jsonl(path)
    elif kind == ".json":
        path.write_text(json.dumps(ROWS))
    elif kind == ".jsonl.gz":
        import gzip

        path.write_bytes(gzip.compress(write_jsonl(folder / "plain").read_bytes()))
    elif kind == ".parquet":
        table().to_parquet(path)
    elif kind == ".csv":
        table().to_csv(path)
    elif kind == " saved":
        table().save_to_disk(path)
    elif kind == " saved splits":
        datasets.DatasetDict({"train": table(), "test": table().select(range(3))}).save_to_disk(path)
    elif kind == " folder":
        write_jsonl(path / "data" / "train-0.jsonl")
        write_jsonl(path / "data" / "test.jsonl", ROWS[:3])
    return path


KINDS = [".jsonl", ".json", ".jsonl.gz", ".parquet", ".csv", " saved", " saved splits", " folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_data(kind: str, tmp_path: Path, tokenizer: Path, prepare: Prepare) -> None:
    """Counted with transformers; the tokens written are those of the library itself, each document ended with eod."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    results = prepare(write_kind(kind, tmp_path / "in"))
    reference = AutoTokenizer.from_pretrained(str(tokenizer.parent))
    assert results["token_count"] == sum(len(reference(text, add_special_tokens=False).input_ids) for text in TEXTS)
    assert results["num_documents"] == len(TEXTS)
    assert exported(tmp_path / "out") == [{"text": text} for text in TEXTS]
    data = IndexedDataset(results["data_path"])
    library = Tokenizer.from_file(str(tokenizer))
    assert [data.get(i).tolist() for i in range(len(data))] == [[*library.encode(text).ids, 0] for text in TEXTS]
    assert results["tokens_written"] == results["token_count"] + len(TEXTS)


@pytest.mark.parametrize("kind", [" saved splits", " folder"])
def test_splits(kind: str, tmp_path: Path, prepare: Prepare) -> None:
    path = write_kind(kind, tmp_path / "in")
    assert prepare(path, split="test")["num_documents"] == 3
    for split in ("trian", "trian[:10]"):
        named = rf"--split {re.escape(split)}: .*'train'.*: (train, test|test, train)$"
        with pytest.raises(UserError, match=named):
            prepare(path, split=split)


@pytest.mark.parametrize("kind", [".jsonl", " saved", " saved splits", " folder"])
def test_a_slice_of_a_split(kind: str, tmp_path: Path, prepare: Prepare) -> None:
    path = write_kind(kind, tmp_path / "in")
    prepare(path, split="train[5:9]")
    assert exported(tmp_path / "out") == [{"text": text} for text in TEXTS[5:9]]
    prepare(path, split="train[:10%]")
    assert exported(tmp_path / "out") == [{"text": text} for text in TEXTS[:6]]


def test_data_files(tmp_path: Path, prepare: Prepare) -> None:
    """Local files replace what `--dataset` names; others are looked for inside it."""
    write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:5])
    assert prepare("me/name", data_files=[str(tmp_path / "*.jsonl")])["num_documents"] == 5
    folder = write_kind(" folder", tmp_path / "in")
    assert prepare(folder, data_files=["data/test.jsonl"])["num_documents"] == 3
    assert prepare(folder, data_dir="data", split="test")["num_documents"] == 3
    with pytest.raises(UserError, match="gone.jsonl: no such file"):
        prepare("me/name", data_files=[str(tmp_path / "gone.jsonl")])


def test_subsets_of_a_folder(tmp_path: Path, prepare: Prepare) -> None:
    """As the card of a cloned repository describes them."""
    folder = tmp_path / "clone"
    write_jsonl(folder / "x" / "one.jsonl", ROWS[:2])
    write_jsonl(folder / "y" / "one.jsonl", ROWS[:7])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in "xy")
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert prepare(folder, subset="y")["num_documents"] == 7
    with pytest.raises(UserError, match=r"Config name is missing.*'x', 'y'.*--subset"):
        prepare(folder)


def test_records_of_many_shapes(tmp_path: Path, prepare: Prepare) -> None:
    """What `datasets` would have to bring to one schema is read as it is."""
    rows = [{"text": "a", "meta": {"x": 1}}, {"text": "b", "meta": [1]}, {"text": "c", "meta": "s", "more": None}]
    prepare(write_jsonl(tmp_path / "a.jsonl", rows))
    assert exported(tmp_path / "out") == [{"text": text} for text in "abc"]


def test_unusable_records(tmp_path: Path, prepare: Prepare) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], {"text": None}, {"text": " "}, {"text": 3}, {"body": "x"}])
    with pytest.raises(UserError, match=r"a.jsonl:5: key 'text' holds a number"):
        prepare(path)
    assert not (tmp_path / "out").exists()
    results = prepare(path, skip_bad_lines=True)
    assert [results[n] for n in ("num_documents", "empty_documents", "bad_records")] == [3, 1, 2]


@pytest.mark.parametrize("rows", [[], [{"text": ""}]])
def test_nothing_to_export(rows: list[Any], tmp_path: Path, prepare: Prepare) -> None:
    with pytest.raises(UserError, match="no column|no document"):
        prepare(write_jsonl(tmp_path / "a.jsonl", rows))
    assert not (tmp_path / "out").exists()


def test_workers_and_batches_change_nothing(tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (write_kind(".jsonl", tmp_path / "in"), write_kind(" saved", tmp_path / "in2")):
        made = []
        for workers, rows in ((1, 10000), (3, 7), (2, 59)):  # 59: the last piece is one row
            prepare(path, num_proc=workers, tokenize_workers=workers, batch_size=rows)
            out = tmp_path / "out"
            made.append([(out / name).read_bytes() for name in ("dataset.jsonl", "out_text_document.bin")])
            out.rename(tmp_path / f"{path.name} {workers}")
        assert made[0] == made[1] == made[2]


def test_a_table_is_read_in_pieces_of_bounded_size() -> None:
    """However large --batch-size is: a worker holds a few megabytes."""
    import datasets

    long = datasets.Dataset.from_dict({"text": ["x" * 100_000] * 200})
    source = TableRecords(long, "x", "key", {}, batch_size=10_000)
    pieces = list(source.pieces())
    assert max(piece.stop - piece.start for piece in pieces) < 50
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert pieces[-1].stop == 200
    assert sum(piece.nbytes for piece in pieces) == source.nbytes


def test_large_row_groups_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into pieces that together are the rows, each once, under their own numbers."""
    path = tmp_path / "a.parquet"
    table().to_parquet(path)
    whole = FileRecords([path], "key", {})
    (piece,) = whole.pieces()
    rows = list(whole.read(piece, ["text"]))
    monkeypatch.setattr(records, "GROUP_BYTES", path.stat().st_size // 7)
    pieces = list(whole.pieces())
    assert len(pieces) >= 7
    assert sum(piece.nbytes for piece in pieces) == path.stat().st_size
    assert [record for piece in pieces for record in whole.read(piece, ["text"])] == rows
    assert [r.value["text"] for r in rows] == TEXTS


def test_columns_of_images_are_no_obstacle(tmp_path: Path, prepare: Prepare) -> None:
    """Nothing decodes them: the file is no image."""
    import datasets

    features = datasets.Features({"picture": datasets.Image(), "text": datasets.Value("string")})
    rows = [{"picture": {"bytes": b"no image", "path": None}, "text": text} for text in TEXTS]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    assert prepare(tmp_path / "saved")["num_documents"] == len(TEXTS)


def test_half_a_utf16_pair_survives_the_export(tmp_path: Path, prepare: Prepare) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "caf\\u00e9 \\ud83d"}\n')
    prepare(path)
    assert (tmp_path / "out" / "dataset.jsonl").read_bytes() == b'{"text": "caf\\u00e9 \\ud83d"}\n'
    path.write_text('{"text": "caf\\u00e9"}\n')
    prepare(path)
    assert (tmp_path / "out" / "dataset.jsonl").read_text("utf-8") == '{"text": "café"}\n'


def test_a_tokenizers_own_template_is_not_counted_as_text(tmp_path: Path, tokenizer: Path, prepare: Prepare) -> None:
    """GPT-NeoX's fork counts without special tokens; here the file adds one to the front of every text."""
    from tokenizers import processors

    from tests.tokenizer.vocabularies import byte_level

    changed = byte_level()
    changed.post_processor = processors.TemplateProcessing(single="<|padding|> $A", special_tokens=[("<|padding|>", 1)])
    plain = prepare(write_jsonl(tmp_path / "a.jsonl"), count_only=True)
    changed.save(str(tokenizer))
    assert prepare(tmp_path / "a.jsonl", count_only=True)["token_count"] == plain["token_count"]


# ---- stages


def test_count_only_writes_nothing(tmp_path: Path, prepare: Prepare) -> None:
    results = prepare(write_jsonl(tmp_path / "a.jsonl"), count_only=True)
    assert results["token_count"] > 0
    assert results["status"] == "completed"
    assert not (tmp_path / "out").exists()


def test_skipped_stages(tmp_path: Path, prepare: Prepare) -> None:
    results = prepare(write_jsonl(tmp_path / "a.jsonl"), skip_count=True, skip_tokenize=True, vocab_file=None)
    assert (results["token_count"], results["tokenized"], results["num_documents"]) == (None, False, len(ROWS))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["dataset.jsonl", "pipeline_results.json"]


def test_results_file(tmp_path: Path, prepare: Prepare) -> None:
    results = prepare(write_jsonl(tmp_path / "a.jsonl"))
    stored = json.loads((tmp_path / "out" / "pipeline_results.json").read_text())
    assert {name: stored[name] for name in results} == results
    assert stored["status"] == "completed"
    prefix = str(tmp_path / "out" / "out_text_document")
    assert (stored["bin_path"], stored["idx_path"]) == (f"{prefix}.bin", f"{prefix}.idx")
    manifest = read_manifest(prefix)
    assert manifest is not None
    metadata = json.loads((tmp_path / "out" / "out_metadata.json").read_text())  # as of preprocess_data.py
    assert metadata["total_tokens"] == results["tokens_written"]
    assert manifest.source == {"dataset": "a.jsonl", "split": "train", "files": ["a.jsonl"]}


class Stages:
    """What was done again, by the inodes of the files that the stages write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = self.inodes()

    def inodes(self) -> dict[str, int]:
        names = {"export": "dataset.jsonl", "tokenize": "out_text_document.bin"}
        return {
            stage: (self.folder / name).stat().st_ino for stage, name in names.items() if (self.folder / name).exists()
        }

    def redone(self) -> set[str]:
        now = self.inodes()
        changed = {stage for stage, inode in now.items() if self.before.get(stage) != inode}
        self.before = now
        return changed


def test_what_is_done_is_not_done_again(tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    first = prepare(path)
    # Files that are kept open keep their inode from being given to another.
    with (tmp_path / "out" / "dataset.jsonl").open(), (tmp_path / "out" / "out_text_document.bin").open():
        files = Stages(tmp_path / "out")
        monkeypatch.setattr(stages.Renderer, "__call__", None)  # nothing may be read record by record
        second = prepare(path)
        assert files.redone() == set()
    times = ("elapsed_time",)
    assert {n: v for n, v in first.items() if n not in times} == {n: v for n, v in second.items() if n not in times}


def test_what_changed_is_done_again(tmp_path: Path, tokenizer: Path, prepare: Prepare) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    prepare(path)
    out = tmp_path / "out"
    stages = Stages(out)
    keep = [(out / "dataset.jsonl").open(), (out / "out_text_document.bin").open()]

    os.utime(path)  # touched, but the same content
    prepare(path)
    assert stages.redone() == set()

    from tests.tokenizer.vocabularies import byte_level

    byte_level(added=["hello world"]).save(str(tokenizer))
    prepare(path)
    assert stages.redone() == {"tokenize"}
    keep.append((out / "out_text_document.bin").open())

    from tokenizers import normalizers

    other = byte_level(added=["hello world"])
    other.normalizer = normalizers.Lowercase()  # the ids mean what they did, but texts get others
    other.save(str(tokenizer))
    prepare(path)
    assert stages.redone() == {"tokenize"}
    keep.append((out / "out_text_document.bin").open())

    with (out / "dataset.jsonl").open("a") as file:  # somebody's hand
        file.write('{"text": "x"}\n')
    assert prepare(path)["num_documents"] == len(ROWS)
    assert stages.redone() == {"export"}  # the same text as before, so the same tokens
    keep.append((out / "dataset.jsonl").open())

    write_jsonl(path, ROWS[:-1])
    assert prepare(path)["num_documents"] == len(ROWS) - 1
    assert stages.redone() == {"export", "tokenize"}
    keep += [(out / "dataset.jsonl").open(), (out / "out_text_document.bin").open()]

    prepare(path, text_column="note")
    assert stages.redone() == {"export", "tokenize"}
    keep += [(out / "dataset.jsonl").open(), (out / "out_text_document.bin").open()]

    (out / "out_text_document.idx").unlink()
    prepare(path, text_column="note")
    assert stages.redone() == {"tokenize"}
    for file in keep:
        file.close()


def test_a_failed_stage_leaves_the_ones_before_it(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")

    def fail(*_: Any, **__: Any) -> None:
        raise DeepyError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "tokenise_files", fail)
        with pytest.raises(DeepyError):
            prepare(path)
    stored = json.loads((tmp_path / "out" / "pipeline_results.json").read_text())
    assert (stored["status"], stored["error"], sorted(stored["stages"])) == (
        "failed",
        "the disk is full",
        ["count", "export"],
    )
    stages = Stages(tmp_path / "out")
    assert prepare(path)["status"] == "completed"
    assert stages.redone() == {"tokenize"}
    assert "error" not in json.loads((tmp_path / "out" / "pipeline_results.json").read_text())


def test_a_failed_export_leaves_nothing_half(tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": 3}])
    monkeypatch.setattr(
        "megatron.data.tokenise.formats.CHUNK_BYTES", 512
    )  # so that much is written before the bad line
    with pytest.raises(UserError, match="a.jsonl:61"):
        prepare(path, skip_count=True)
    assert not (tmp_path / "out" / "dataset.jsonl").exists()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["pipeline_results.json"]


@pytest.mark.parametrize("content", ['{"status": "completed", "token_count": 3}', "{", "[]", '{"stages": []}'])
def test_results_of_something_else_are_no_obstacle(content: str, tmp_path: Path, prepare: Prepare) -> None:
    """GPT-NeoX's fork writes a file of that name too."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pipeline_results.json").write_text(content)
    assert prepare(write_jsonl(tmp_path / "a.jsonl"))["num_documents"] == len(ROWS)


def test_the_hub_is_waited_for_with_the_sleep_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine waits before the tenth and last try; the results say what happened when there is a folder for them."""
    from tests.data.hub.test_retry import HTTPError

    def refuse(*_: Any, **__: Any) -> None:
        raise HTTPError(429)

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    (tmp_path / "out").mkdir()
    options = PrepareOptions(Request("me/x"), tmp_path / "out", skip_count=True, skip_tokenize=True)
    waits: list[float] = []
    with pytest.raises(UserError, match="me/x: .*429"):
        prepare_hf_dataset(options, sleep=waits.append)
    assert waits == [300] + [600] * 8
    stored = json.loads((tmp_path / "out" / "pipeline_results.json").read_text())
    assert stored["status"] == "failed" and "429" in stored["error"]


# ---- tokenizers and names


def test_tokenizers(tmp_path: Path, tokenizer: Path, prepare: Prepare) -> None:
    from tests.tokenizer.vocabularies import byte_level

    path = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="default of --hf-tokenizer .*gpt-neox-instruct-tokenizer"):
        prepare(path, vocab_file=None)
    one = prepare(path, vocab_file=None, hf_tokenizer=str(tokenizer.parent))["token_count"]
    assert one == prepare(path, hf_tokenizer=str(tokenizer.parent), count_only=True)["token_count"]
    other = write_json(tmp_path / "other" / "tokenizer.json", byte_level(added=["<|user|>"]))
    with pytest.raises(UserError, match="--vocab-file .*--hf-tokenizer .*ids"):
        prepare(path, hf_tokenizer=str(other.parent))
    with pytest.raises(UserError, match="--hf-tokenizer ./gone: no such file"):
        prepare(path, hf_tokenizer="./gone")


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request("cais/wmdp-corpora", "bio-retain-corpus"), "wmdp-corpora_bio-retain-corpus_train"),
        (Request("me/x", split="test"), "x_test"),
        (Request("data/corpus.jsonl.zst"), "corpus_train"),
        (Request("folder/", split="train[:10%]"), "folder_train-10"),
    ],
)
def test_names_of_folders(request_: Request, name: str) -> None:
    assert output_name(request_) == name


def test_the_folder_one_stands_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path / "corpus")
    assert output_name(Request(".")) == "corpus_train"


@pytest.mark.parametrize("below", [".", "sub"])
def test_an_output_folder_that_cannot_be_is_known_before_anything_is_read(
    tmp_path: Path, prepare: Prepare, below: str
) -> None:
    taken = write_jsonl(tmp_path / "taken")
    with pytest.raises(UserError, match=r"output folder .*taken"):
        prepare("me/absent", output_dir=taken / below)
