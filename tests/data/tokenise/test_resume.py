"""Going on where a tokenisation was killed: the result is what an uninterrupted run writes, byte for byte."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.data.tokenise import command, formats
from megatron.data.tokenise.chunks import Chunk
from megatron.data.tokenise.command import CommandOptions, tokenise_files
from megatron.data.tokenise.encode import Encoded
from megatron.data.tokenise.formats import Part, read_parts
from megatron.data.tokenise.shards import Shard
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder
from megatron.data.tokens import builder as indexed_builder
from megatron.data.tokens import partial
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.partial import WriteError
from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer
from tests.data.tokenise.test_shards import KEYS, lines, rows, write_mixture

pytestmark = pytest.mark.cpu


class Killed(BaseException):
    """Stands for the end of the process."""


class Mortal(TextEncoder):
    """Dies at its n-th chunk."""

    def __init__(self, options: EncodeOptions, chunks: int) -> None:
        super().__init__(create_tokenizer("bytes"), options)
        self.left = chunks

    def encode(self, chunk: Chunk) -> Encoded:
        if not self.left:
            raise Killed
        self.left -= 1
        return super().encode(chunk)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", 4000)


def tokenise(
    paths: list[Path],
    prefix: Path,
    *,
    chunks: int = 10**9,
    keys: tuple[str, ...] = KEYS,
    shard: Shard | None = None,
    skip_bad: bool = False,
    **options: Any,
) -> None:
    encoder = Mortal(EncodeOptions(keys, append_eod=True, skip_bad=skip_bad), chunks)
    job = CommandOptions(shard=shard, **{"save_every": 1e-9, **options})
    tokenise_files(paths, encoder, str(prefix), job, settings={"keys": keys}, skip_bad=skip_bad)


def killed(paths: list[Path], prefix: Path, chunks: int, **options: Any) -> None:
    with pytest.raises(Killed):
        tokenise(paths, prefix, chunks=chunks, **options)


def same(one: Path, other: Path, keys: tuple[str, ...] = KEYS) -> bool:
    ends = [f"_{key}_document{end}" for key in keys for end in (".bin", ".idx", ".manifest.json")]
    return all(Path(f"{one}{end}").read_bytes() == Path(f"{other}{end}").read_bytes() for end in ends)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_killed_after_every_chunk_and_continued(tmp_path: Path) -> None:
    """One chunk per life, through every kind of file."""
    paths = write_mixture(tmp_path / "in")
    tokenise(paths, tmp_path / "whole" / "c")
    for life in range(200):
        try:
            tokenise(paths, tmp_path / "out" / "c", chunks=1)
            assert life > 30
            break
        except Killed:
            assert names(tmp_path / "out") == {
                *(f"c_{key}_document.{end}.partial" for key in KEYS for end in ("bin", "idx")),
                "c.resume.partial",
            }
    assert same(tmp_path / "out" / "c", tmp_path / "whole" / "c")
    assert names(tmp_path / "out") == names(tmp_path / "whole")


def test_chunks_that_workers_have_ahead_are_not_taken_for_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)))
    tokenise([path], tmp_path / "whole")
    real = command.TallyProgress

    class Killing(real):  # type: ignore[valid-type,misc]
        left = 2

        def __call__(self, tally: Any) -> None:
            self.left -= 1
            if not self.left:
                raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(command, "TallyProgress", Killing)
        killed([path], tmp_path / "c", 10**9, workers=2)
    tokenise([path], tmp_path / "c", workers=2)
    assert same(tmp_path / "c", tmp_path / "whole")


@pytest.mark.parametrize("shard", [Shard(0, 3), Shard(1, 3), Shard(2, 3)], ids=str)
def test_a_shard_is_resumed(tmp_path: Path, shard: Shard) -> None:
    paths = write_mixture(tmp_path / "in")
    tokenise(paths, tmp_path / "whole" / "c", shard=shard)
    for chunks in (3, 2, 1):
        killed(paths, tmp_path / "out" / "c", chunks, shard=shard)
    tokenise(paths, tmp_path / "out" / "c", shard=shard)
    assert same(tmp_path / "out" / f"c{shard.name}", tmp_path / "whole" / f"c{shard.name}")


def test_reading_resumes_at_every_position(tmp_path: Path) -> None:
    paths = write_mixture(tmp_path / "in")
    parts = [Part(path) for path in paths]
    cuts = list(read_parts(parts))

    def places(chunks: list[Chunk]) -> list[tuple[str, str]]:
        return [(d.where, d.texts["text"]) for chunk in chunks for d in chunk.documents(["text"])]  # type: ignore[union-attr]

    for index, (_, after) in enumerate(cuts):
        rest = [chunk for chunk, _ in read_parts(parts, after)]
        assert places(rest) == places([chunk for chunk, _ in cuts[index + 1 :]]), after


def test_what_was_written_after_the_last_save_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)))
    tokenise([path], tmp_path / "whole")
    killed([path], tmp_path / "c", 4)
    for file in tmp_path.glob("*.partial"):
        if "resume" not in file.name:
            with file.open("ab") as more:
                more.write(b"left by a process that was killed between two saves" * 10_000)
    tokenise([path], tmp_path / "c")
    assert same(tmp_path / "c", tmp_path / "whole")


def test_a_run_killed_before_its_first_save_starts_from_scratch(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)))
    (tmp_path / "c_text_document.bin.partial").write_bytes(b"of a killed run")
    tokenise([path], tmp_path / "c")
    tokenise([path], tmp_path / "whole")
    assert same(tmp_path / "c", tmp_path / "whole")
    assert not list(tmp_path.glob("*.partial"))


def test_killed_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every one of them, with an older result of that name there."""
    path, older = tmp_path / "a.jsonl", tmp_path / "older.jsonl"
    path.write_bytes(lines(rows(100, 1)))
    older.write_bytes(lines(rows(7, 2)))
    tokenise([path], tmp_path / "whole" / "c")
    real = os.replace
    for step in range(20):
        prefix, moved = tmp_path / f"out{step}" / "c", 0
        tokenise([older], prefix)

        def dying(source: Any, target: Any, step: int = step) -> None:
            nonlocal moved
            if str(target).endswith((".bin", ".idx", ".manifest.json")):
                moved += 1
                if moved > step:
                    raise Killed
            real(source, target)

        monkeypatch.setattr(os, "replace", dying)
        try:
            tokenise([path], prefix)
            assert step == 6  # two datasets of three files
            break
        except Killed:
            monkeypatch.setattr(os, "replace", real)
            tokenise([path], prefix)
            assert same(prefix, tmp_path / "whole" / "c"), step
            assert names(prefix.parent) == names(tmp_path / "whole"), step
    else:
        pytest.fail("never came to the end")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("content", "the input files"),
        ("touched", "the input files"),
        ("more", "the input files"),
        ("keys", "the options"),
        ("shard", None),
    ],
)
def test_another_command_is_not_resumed(tmp_path: Path, change: str, said: str | None) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_bytes(lines(rows(400, 1)))
    killed(paths[:1], tmp_path / "c", 3)
    options: dict[str, Any] = {"paths": paths[:1]}
    if change == "content":
        paths[0].write_bytes(lines(rows(400, 2)))
    elif change == "touched":
        os.utime(paths[0], ns=(1, 1))
    elif change == "more":
        options["paths"] = paths
    elif change == "keys":
        options["keys"] = ("text",)
    else:
        options["shard"] = Shard(0, 1)  # has its own name: nothing to resume
    if said:
        with pytest.raises(UserError, match=rf"c\.resume\.partial: .*{said}.*--restart"):
            tokenise(**options, prefix=tmp_path / "c")
    tokenise(**options, prefix=tmp_path / "c", restart=True)


def test_another_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)))
    killed([path], tmp_path / "c", 3)
    monkeypatch.setattr(command, "_tokenizer_identity", lambda encoder: ["another"])
    with pytest.raises(UserError, match="the tokenizer.*--restart"):
        tokenise([path], tmp_path / "c")


def test_skipping_bad_lines_may_be_added_but_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)) + b"{\n" + lines(rows(400, 2)))
    with pytest.raises(UserError, match=r"a\.jsonl:401"):
        tokenise([path], tmp_path / "c")
    assert (tmp_path / "c.resume.partial").exists()
    killed([path], tmp_path / "c", 10, skip_bad=True)
    with pytest.raises(UserError, match=r"\b1\b.*--skip-bad-lines.*--restart"):
        tokenise([path], tmp_path / "c")
    tokenise([path], tmp_path / "c", skip_bad=True)
    tokenise([path], tmp_path / "whole", skip_bad=True)
    assert same(tmp_path / "c", tmp_path / "whole")


def test_damaged_leftovers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)))
    killed([path], tmp_path / "c", 3)
    (tmp_path / "c_text_document.bin.partial").write_bytes(b"short")
    with pytest.raises(UserError, match=r"c_text_document\.bin\.partial .*\b5 bytes.*\b[1-9][0-9]{2,} .*[Rr]emove"):
        tokenise([path], tmp_path / "c")
    (tmp_path / "c.resume.partial").write_text("{")
    with pytest.raises(UserError, match=r"c\.resume\.partial\b.*--restart"):
        tokenise([path], tmp_path / "c")
    tokenise([path], tmp_path / "c", restart=True)


def test_an_empty_result_leaves_nothing_even_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"text": "only this", "title": ""}\n' + b'{"text": " ", "title": ""}\n' * 1000)
    killed([path], tmp_path / "out" / "c", 2)
    with pytest.raises(UserError, match=r"'title'.*\b1001\b"):
        tokenise([path], tmp_path / "out" / "c")
    assert names(tmp_path / "out") == set()


def full_disk(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Writing into any partial file fails once that many bytes were written to it."""
    real = indexed_builder.open_alone

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            if self.file.tell() + memoryview(data).nbytes > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    monkeypatch.setattr(indexed_builder, "open_alone", lambda path, keep=None: Full(real(path, keep)))


def test_a_full_disk_keeps_what_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(2000, 1)))
    tokenise([path], tmp_path / "whole" / "c")
    with monkeypatch.context() as patched:
        full_disk(patched, 100_000)
        with pytest.raises(WriteError, match=r"c_text_document: .*No space left.*same command"):
            tokenise([path], tmp_path / "out" / "c")
    assert all(name.endswith(".partial") for name in names(tmp_path / "out"))
    tokenise([path], tmp_path / "out" / "c")
    assert same(tmp_path / "out" / "c", tmp_path / "whole" / "c")


def test_a_full_disk_at_the_index_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"text": "x", "title": "y"}] * 1000))
    full_disk(monkeypatch, 9000)  # the lengths fit, the offsets do not
    with pytest.raises(WriteError, match=r"c_(text|title)_document: .*No space left"):
        tokenise([path], tmp_path / "out" / "c", save_every=0)
    assert names(tmp_path / "out") == set()


def test_two_writers_of_one_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PATIENCE", 0.1)
    with IndexedDatasetBuilder(tmp_path / "c", "u2") as builder:
        builder.add_document([1, 2])
        with pytest.raises(UserError, match=f"{tmp_path}/c.*--shard"):
            IndexedDatasetBuilder(tmp_path / "c", "u2")
        builder.finalize()
    with IndexedDatasetBuilder(tmp_path / "c", "u2") as builder:
        builder.add_document([3])
        builder.finalize()
    assert IndexedDataset(tmp_path / "c").get(0).tolist() == [3]


def test_the_journal_is_small_and_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)))
    killed([path], tmp_path / "c", 3)
    journal = json.loads((tmp_path / "c.resume.partial").read_text())
    assert journal["position"]["offset"] > 3000
    assert [mark["items"] for mark in journal["marks"]] == journal["counts"]["documents"]
    assert (tmp_path / "c.resume.partial").stat().st_size < 2000


def test_progress_does_not_count_what_was_done_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows(400, 1)))
    seen: list[Any] = []
    real = command.TallyProgress

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[-1])
        return real(*args, **kwargs)

    monkeypatch.setattr(command, "TallyProgress", spy)
    killed([path], tmp_path / "c", 3)
    tokenise([path], tmp_path / "c")
    assert seen[0] is None
    assert seen[1].nbytes > 3000
