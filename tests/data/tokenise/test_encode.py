"""Tokenising a corpus into datasets: bytes, order, counts, failures."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from megatron.data.tokenise.chunks import Chunk, Fault, Record, RowChunk
from megatron.data.tokenise.encode import Tally, encode_stream, write_datasets
from megatron.data.tokenise.formats import read_chunks
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder
from megatron.data.tokenise.worker_pool import AHEAD_PER_WORKER
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import Manifest, check_tokenizer, read_manifest, verify
from megatron.errors import DeepyError, UserError
from megatron.tokenizer import Tokenizer, create_tokenizer
from tests.tokenizer.vocabularies import byte_level, write_json

pytestmark = pytest.mark.cpu


def rows(*texts: str) -> list[Chunk]:
    return [RowChunk("memory", 0, [{"text": text} for text in texts], 1)]


def write(
    chunks: Sequence[Chunk] | Iterator[Chunk],
    prefix: Path,
    tokenizer: Tokenizer | None = None,
    workers: int = 1,
    **options: object,
) -> tuple[list[Manifest], Tally]:
    """Tokenise into `<prefix>_<key>_document` with CharLevel unless told otherwise."""
    options_ = EncodeOptions(**options)  # type: ignore[arg-type]
    encoder = TextEncoder(tokenizer or create_tokenizer("CharLevelTokenizer"), options_)
    return write_datasets(chunks, encoder, str(prefix), workers=workers, source="test")


def corpus(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return ["".join(chr(c) for c in random.integers(32, 0x3000, random.integers(1, 60))) for _ in range(count)]


def test_bytes_are_the_documented_layout(tmp_path: Path) -> None:
    write(rows("ab", "c"), tmp_path / "out", append_eod=True)
    assert (tmp_path / "out_text_document.bin").read_bytes() == struct.pack("<5H", 97, 98, 0, 99, 0)
    assert (tmp_path / "out_text_document.idx").read_bytes() == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 2, 3)  # version, u16, two items, three entries in the document index
        + struct.pack("<2i", 3, 2)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )


def test_without_eod_nothing_is_appended(tmp_path: Path) -> None:
    write(rows("ab", "c"), tmp_path / "out")
    assert (tmp_path / "out_text_document.bin").read_bytes() == struct.pack("<3H", 97, 98, 99)


def test_three_formats_give_identical_datasets(tmp_path: Path) -> None:
    import zstandard

    data = "".join(json.dumps({"text": text}) + "\n" for text in corpus(500)).encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    for path in sorted(tmp_path.iterdir()):
        write(read_chunks([path]), tmp_path / path.name[0], append_eod=True)
    for suffix in (".bin", ".idx"):
        first, *others = ((tmp_path / f"{name}_text_document{suffix}").read_bytes() for name in "abc")
        assert first == others[0] == others[1]
    assert len(IndexedDataset(tmp_path / "a_text_document")) == 500


def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    texts = corpus(900)
    chunks = [RowChunk("memory", i, [{"text": text} for text in texts[i : i + 7]], 1) for i in range(0, 900, 7)]
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json")))
    for workers in (1, 4):
        write(iter(chunks), tmp_path / str(workers), tokenizer, workers, append_eod=True)
    for suffix in (".bin", ".idx", ".manifest.json"):
        one, four = ((tmp_path / f"{workers}_text_document{suffix}").read_bytes() for workers in (1, 4))
        assert one == four
    data = IndexedDataset(tmp_path / "4_text_document")
    assert [tokenizer.detokenize(data.get(i)[:-1].tolist()) for i in range(900)] == texts
    assert all(data.get(i)[-1] == tokenizer.eod for i in range(900))


@dataclass(frozen=True)
class Deadly(Chunk):
    """Kills the process that works on it."""

    nbytes: int = 1

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()


def test_a_killed_worker_ends_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(DeepyError, match="signal 9") as caught:
        write([*rows("a") * 20, Deadly(), *rows("b") * 20], tmp_path / "out", workers=2)
    assert caught.value.exit_code == 1
    assert time.monotonic() - started < 40
    assert not list(tmp_path.iterdir())


def test_a_worker_s_error_is_the_caller_s(tmp_path: Path) -> None:
    bad = RowChunk("memory", 5, [{"text": 1}], 1)
    for workers in (1, 2):
        with pytest.raises(UserError, match="memory, row 5: key 'text' .*number.*--skip-bad-lines"):
            write([*rows("a") * 10, bad, *rows("a") * 10], tmp_path / "out", workers=workers)
    assert not list(tmp_path.iterdir())


ORPHANS = """
import sys, time
from megatron.data.tokenise.chunks import Chunk, RowChunk
from megatron.data.tokenise.encode import encode_stream
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder
from megatron.tokenizer import create_tokenizer

def chunks():
    while True:
        yield RowChunk("memory", 0, [{"text": "a"}], 1)

stream = encode_stream(chunks(), TextEncoder(create_tokenizer("bytes"), EncodeOptions()), 3)
next(stream)
print("ready", flush=True)
time.sleep(60)
"""


def test_workers_end_with_a_killed_parent() -> None:
    import psutil

    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 3
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=10)
    for worker in alive:
        worker.kill()
    assert not alive


def test_results_come_in_order_and_few_chunks_wait(tmp_path: Path) -> None:
    taken: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for i in range(100):
            taken.append(i)
            yield RowChunk("memory", i, [{"text": chr(65 + i % 26)}], 1)

    stream = encode_stream(chunks(), TextEncoder(create_tokenizer("bytes"), EncodeOptions()), 2)
    first = [int(next(stream).ids[0][0]) for _ in range(10)]
    assert first == list(range(65, 75))
    assert len(taken) <= 10 + 2 * (AHEAD_PER_WORKER + 1)
    stream.close()  # type: ignore[attr-defined]


def test_empty_documents_are_left_out_and_counted_white_space_is_kept(tmp_path: Path) -> None:
    manifests, total = write(rows("", "  ", "\n\t\u00a0", "a"), tmp_path / "out", append_eod=True)
    assert (total.empty, total.documents, total.tokens) == ([1], [3], [10])
    assert manifests[0].extra["empty_documents"] == 1
    assert IndexedDataset(tmp_path / "out_text_document").sizes.tolist() == [3, 5, 2]


def test_bad_records_are_left_out_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": ""}\n{"text": "  "}\n{"text": "a"}\n\n{"txt": "x"}\n{\n')
    with pytest.raises(UserError, match=r"in\.jsonl:5: no key 'text'"):
        write(read_chunks([path]), tmp_path / "out" / "x")
    assert not (tmp_path / "out").exists()
    with caplog.at_level("WARNING", logger="deepy"):
        _, total = write(read_chunks([path]), tmp_path / "out" / "x", skip_bad=True)
    assert (total.documents, total.empty, total.faults) == ([2], [2], 2)
    assert "in.jsonl:5: no key 'text'" in caplog.text
    assert "in.jsonl:6: not valid JSON" in caplog.text


def test_many_bad_records_are_counted_not_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chunks = [RowChunk("memory", i, [{"x": 1}, {"text": "a"}], 1) for i in range(50)]
    with caplog.at_level("WARNING", logger="deepy"):
        _, total = write(chunks, tmp_path / "out", skip_bad=True)
    assert total.faults == 50
    assert len(caplog.records) == 6
    assert "45 more" in caplog.text


@pytest.mark.parametrize("texts", [(), ("", "")])
def test_no_document_is_an_error_and_leaves_nothing(tmp_path: Path, texts: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="key 'text'"):
        write(rows(*texts), tmp_path / "deep" / "out")
    assert not list(tmp_path.iterdir())


def test_a_key_without_documents_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    chunk = RowChunk("memory", 0, [{"q": "a", "a": ""}], 1)
    with pytest.raises(UserError, match="key 'a': 1 empty"):
        write([chunk], tmp_path / "out", keys=("q", "a"))
    assert not list(tmp_path.iterdir())


def test_every_key_makes_a_dataset_of_its_own_text(tmp_path: Path) -> None:
    chunk = RowChunk("memory", 0, [{"q": "ab", "a": "c"}, {"q": "d", "a": ""}], 1)
    manifests, _ = write([chunk], tmp_path / "out", keys=("q", "a"), append_eod=True)
    assert IndexedDataset(tmp_path / "out_q_document").get(0).tolist() == [97, 98, 0]
    assert IndexedDataset(tmp_path / "out_q_document").sizes.tolist() == [3, 2]
    assert IndexedDataset(tmp_path / "out_a_document").get(0).tolist() == [99, 0]
    assert [manifest.extra["key"] for manifest in manifests] == ["q", "a"]


def test_old_data_stays_when_the_new_fails(tmp_path: Path) -> None:
    write(rows("old"), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError):
        write([*rows("new"), RowChunk("memory", 0, [{}], 1)], tmp_path / "out")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("added", "dtype"), [(9, np.uint16), (10, np.int32), (60, np.int32)])
def test_the_type_counts_added_tokens(tmp_path: Path, added: int, dtype: type) -> None:
    """A base vocabulary of 65,490 plus added tokens: ids beyond 65,535 must survive, and 65,499 entries stay u16."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(65_490)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens([f"<a{i}>" for i in range(added)])
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json", backend)))
    write(rows(f"w1 <a{added - 1}> w65489"), tmp_path / "out", tokenizer)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert data.dtype == np.dtype(dtype)
    assert data.get(0).tolist() == [1, 65_490 + added - 1, 65_489]


def test_a_missing_eod_is_refused_before_any_data_is_read(tmp_path: Path) -> None:
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "t.json", byte_level(("<s>",)))))
    with pytest.raises(UserError, match="--append-eod"):
        TextEncoder(tokenizer, EncodeOptions(append_eod=True))
    assert TextEncoder(tokenizer, EncodeOptions()).eod is None


def test_an_eod_of_the_tokenizer_s_own_template_is_not_doubled(tmp_path: Path) -> None:
    backend = byte_level(("<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "t.json", backend)))
    write(rows("a"), tmp_path / "out", tokenizer, append_eod=True)
    ids = IndexedDataset(tmp_path / "out_text_document").get(0).tolist()
    assert ids == [0, backend.token_to_id("a"), 1]


def test_ftfy_mends_text(tmp_path: Path) -> None:
    write(rows("cafÃ©"), tmp_path / "out", create_tokenizer("bytes"), ftfy=True)
    assert bytes(IndexedDataset(tmp_path / "out_text_document").get(0).tolist()).decode() == "café"


def test_the_manifest_says_what_the_data_is(tmp_path: Path) -> None:
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "a.json")))
    write(rows("é", "b"), tmp_path / "out", tokenizer, append_eod=True)
    manifest = verify(tmp_path / "out_text_document")
    assert manifest == read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    assert (manifest.documents, manifest.items, manifest.tokens, manifest.dtype) == (2, 2, 5, "uint16")
    assert manifest.tokenizer == tokenizer.fingerprint().to_dict()
    assert manifest.extra == {
        "key": "text",
        "tokenizer_type": "HFTokenizer",
        "eod": 0,
        "append_eod": True,
        "ftfy": False,
        "empty_documents": 0,
        "bad_records": 0,
        "text_bytes": 3,
    }


def test_another_eod_than_the_run_s_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, more = byte_level(("<s>", "</s>")), byte_level(("<s>", "</s>"))
    more.add_special_tokens(["<|im_end|>"])
    chat = {"tokenizer_config": {"eos_token": "<|im_end|>"}}
    tokenizers = [
        create_tokenizer("HFTokenizer", str(write_json(tmp_path / "base" / "tokenizer.json", base))),
        create_tokenizer("HFTokenizer", str(write_json(tmp_path / "chat" / "tokenizer.json", more, **chat))),
    ]
    assert [tokenizer.eod for tokenizer in tokenizers] == [1, 266]
    write(rows("a"), tmp_path / "out", tokenizers[0], append_eod=True)
    for tokenizer, said in zip(tokenizers, (False, True)):
        caplog.clear()
        with caplog.at_level("WARNING", logger="deepy"):
            check_tokenizer(IndexedDataset(tmp_path / "out_text_document"), tokenizer)
        assert bool(re.search(r"\b1\b.*\b266\b", caplog.text)) == said


def test_data_of_a_base_tokenizer_is_accepted_by_its_extension_only(tmp_path: Path) -> None:
    base = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "a.json")))
    more = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "b.json", byte_level(added=["<tool>"]))))
    write(rows("a"), tmp_path / "base", base)
    write(rows("a"), tmp_path / "more", more)
    check_tokenizer(IndexedDataset(tmp_path / "base_text_document"), base)
    check_tokenizer(IndexedDataset(tmp_path / "base_text_document"), more)
    for data, tokenizer in (("more", base), ("base", create_tokenizer("bytes"))):
        with pytest.raises(UserError, match=rf"{data}_text_document .*tokenizer_type/vocab_file"):
            check_tokenizer(IndexedDataset(tmp_path / f"{data}_text_document"), tokenizer)
