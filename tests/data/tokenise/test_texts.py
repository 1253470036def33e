"""The encoder of texts: one result whatever parses the lines, encodes the texts or shares the work."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.tokenise import chunks as chunks_module
from megatron.data.tokenise.chunks import Document, Fault, LineChunk, RowChunk
from megatron.data.tokenise.encode import write_datasets
from megatron.data.tokenise.formats import read_chunks
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder, sample_of_files, texts_of
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import DeepyError, UserError
from megatron.tokenizer import Ragged, Tokenizer, choose_encoder, create_tokenizer
from tests.tokenizer.zoo import ZOO, training_text

pytestmark = pytest.mark.cpu

ENCODERS = ("tokenizers", "gigatoken", "fastokens", "tiktoken")


@cache
def corpus() -> list[str]:
    """A few hundred documents of ordinary and of odd text."""
    random = np.random.default_rng(0)
    code = "".join(training_text())
    cuts = np.sort(random.integers(0, len(code), 300))
    odd = [
        "",
        " ",
        "a<|endoftext|>b",
        "naïve 中文 🤖",
        "\U000323b0'llof",
        "half \ud83d of a pair",
        "x" * 20_000,
        "\n\n \t",
    ]
    return [code[a:b] for a, b in itertools.pairwise(cuts)] + odd * 3


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    ZOO["gpt2"]().save(str(path))
    return str(path)


def test_neither_workers_nor_encoders_change_a_byte(tmp_path: Path, tokenizer_json: str) -> None:
    lines = [json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(corpus())]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(lines))
    raw = path.read_bytes()
    starts = np.cumsum([0, *map(len, lines)])
    pieces = [
        LineChunk(str(path), first + 1, raw[starts[first] : starts[min(first + 7, len(lines))]], 1)
        for first in range(0, len(lines), 7)
    ]
    results = {}
    for encoder in ENCODERS:
        for workers in (1, 2, 3) if encoder != "tiktoken" else (1, 2):
            tokenizer = create_tokenizer("HFTokenizer", tokenizer_json)
            assert choose_encoder(tokenizer, encoder, sample_of_files([path], ["text"])) == encoder
            prefix = tmp_path / f"{encoder}{workers}"
            options = EncodeOptions(append_eod=True)
            write_datasets(iter(pieces), TextEncoder(tokenizer, options), str(prefix), workers=workers)
            ends = (".bin", ".idx", ".manifest.json")
            results[encoder, workers] = [Path(f"{prefix}_text_document{end}").read_bytes() for end in ends]
    first = results["tokenizers", 1]
    assert {name for name, files in results.items() if files != first} == set()
    data = IndexedDataset(tmp_path / "tokenizers1_text_document")
    own = create_tokenizer("HFTokenizer", tokenizer_json)
    kept = [text.replace("\ud83d", "\ufffd") for text in corpus() if text]
    assert [data.get(i).tolist() for i in range(len(data))] == [[*own.tokenize(text), own.eod] for text in kept]
    assert json.loads(first[2])["extra"]["text_bytes"] == sum(len(text.encode()) for text in kept)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
records = st.dictionaries(st.sampled_from(("text", "other", "a\u00e9")), json_values, max_size=3) | json_values
good_lines = records.map(lambda record: json.dumps(record).encode())
utf8_lines = records.map(lambda record: json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass"))
spoilt = st.tuples(good_lines, st.integers(0, 40), st.binary(max_size=2)).map(
    lambda t: t[0][: t[1]] + t[2] + t[0][t[1] :]
)
BY_HAND = rb"""
{"text": NaN}
{"text": "a", "n": 1e999}
{"text": "\ud800"}
{"text": "\ud83d\ude00"}
{"text": "a", "text": "b"}
{"text": "a	b"}
{"text": "a",}
{"text": "a"} {"text": "b"}
{"text": 123456789012345678901234567890}
{"text": "\u0000\u2028"}
"text"
["text"]
null
{"Text": "a"}
{'text': 'a'}
""".splitlines()
RAW = [b'\xef\xbb\xbf{"text": "a"}', b'{"text": "\xed\xa0\x80"}', b'{"text": "\xff"}', b"[" * 3000, b"\r", b" "]
by_hand = st.sampled_from([*BY_HAND, *RAW, b'{"text": "a"}\r'])


@given(
    lines=st.lists(
        (good_lines | utf8_lines | spoilt | by_hand).map(lambda line: line.replace(b"\n", b" ")), max_size=6
    ),
    keys=st.sampled_from((("text",), ("text", "other"), ("other", "a\u00e9", "text"))),
)
@settings(deadline=None, max_examples=400)
def test_the_short_way_through_a_line_gives_what_python_s_parser_does(
    lines: list[bytes], keys: tuple[str, ...]
) -> None:
    chunk = LineChunk("in.jsonl", 1, b"\n".join(lines) + b"\n", 1)
    columns, faults = chunk.columns(keys)
    documents = list(chunk.documents(keys))  # by Python's parser, line by line
    assert faults == [document for document in documents if isinstance(document, Fault)]
    good = [document for document in documents if isinstance(document, Document)]
    assert columns == [[document.texts[key] for document in good] for key in keys]


def test_the_faster_parser_is_in_use_here_and_need_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import orjson

    assert chunks_module._parse_fast is orjson.loads
    line = b'{"text": "half \\ud83d"}\n{"text": "whole"}\n{"text": 1}\n'
    fast = LineChunk("in.jsonl", 1, line, 1).columns(["text"])
    monkeypatch.setattr(chunks_module, "_parse_fast", chunks_module._parse_json)
    assert LineChunk("in.jsonl", 1, line, 1).columns(["text"]) == fast
    assert fast[0] == [["half \ufffd", "whole"]]


def test_a_line_of_50_mb_is_fine(tmp_path: Path, tokenizer_json: str) -> None:
    text = "lorem" + " ipsum lorem" * (50_000_000 // 12)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("before", text, "after")))
    tokenizer = create_tokenizer("HFTokenizer", tokenizer_json)
    assert choose_encoder(tokenizer, sample=sample_of_files([path], ["text"])) == "gigatoken"
    write_datasets(read_chunks([path]), TextEncoder(tokenizer, EncodeOptions()), str(tmp_path / "out"))
    data = IndexedDataset(tmp_path / "out_text_document")
    first, again = tokenizer.tokenize("lorem"), tokenizer.tokenize(" ipsum lorem")
    assert len(data) == 3
    assert np.array_equal(data.get(1), first + again * (50_000_000 // 12))


def test_the_sample_comes_from_several_files_and_not_from_pipes(tmp_path: Path) -> None:
    import os

    paths = []
    for i in range(20):
        paths.append(tmp_path / f"{i:02d}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": f"file {i} " * 200}) + "\n" for _ in range(100)))
    os.mkfifo(tmp_path / "pipe")
    texts = list(sample_of_files([tmp_path / "pipe", *paths], ["text"]))
    assert {text.split()[1] for text in texts} == {str(i) for i in range(0, 16, 2)}
    assert sum(map(len, texts)) < 1 << 17


def test_texts_of_chunks_leave_out_what_cannot_be_used() -> None:
    chunk = RowChunk("memory", 0, [{"text": "a"}, {"text": 1}, {}, {"text": "b"}], 1)
    assert list(texts_of([chunk])) == ["a", "b"]


class Wrapping(Tokenizer):
    """Gives an id that is not in its vocabulary, as a library with a bug would."""

    name = "wrapping"

    def tokenize(self, text: str) -> list[int]:
        return [65536 + 7] * len(text)

    def detokenize(self, ids: object) -> str:
        return ""

    def id_map(self) -> dict[int, str]:
        return {i: str(i) for i in range(100)}

    def files(self) -> dict[str, Path]:
        return {}


def test_an_id_outside_the_vocabulary_is_never_wrapped_to_16_bits() -> None:
    encoder = TextEncoder(Wrapping(), EncodeOptions())
    with pytest.raises(DeepyError, match=r"wrapping: .*\b65543\b.*\b100\b"):
        encoder.encode(RowChunk("memory", 0, [{"text": "a"}], 1))


def test_a_text_of_which_nothing_is_left_is_empty(tokenizer_json: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = create_tokenizer("HFTokenizer", tokenizer_json)
    rows = Ragged(np.array([5, 6, 7], np.uint32), np.array([2, 0, 1]))
    monkeypatch.setattr(tokenizer, "encode_exactly", lambda texts: rows)
    encoder = TextEncoder(tokenizer, EncodeOptions(append_eod=True))
    chunk = RowChunk("memory", 0, [{"text": text} for text in ("one", "two", "", "three")], 1)
    encoded = encoder.encode(chunk)
    assert encoded.ids[0].tolist() == [5, 6, 0, 7, 0]
    assert encoded.lengths[0].tolist() == [3, 2]
    assert (encoded.tally.documents, encoded.tally.empty, encoded.tally.tokens) == ([2], [2], [5])
    assert encoded.tally.text_bytes == [len("one") + len("three")]
    assert encoded.ids[0].dtype == np.uint16


def test_the_first_fault_of_a_chunk_is_the_one_that_is_named() -> None:
    chunk = LineChunk("in.jsonl", 7, b'{"text": "a"}\n{"txt": "b"}\n{\n', 1)
    with pytest.raises(UserError, match=r"in\.jsonl:8: no key 'text'"):
        TextEncoder(create_tokenizer("bytes"), EncodeOptions()).encode(chunk)
