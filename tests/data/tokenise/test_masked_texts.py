"""Labels that leave out everything up to a delimiter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.tokenise.chunks import RowChunk
from megatron.data.tokenise.masked_texts import Delimiter, MaskedTextEncoder
from megatron.data.tokenise.texts import EncodeOptions
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, create_tokenizer
from tests.tokenizer.vocabularies import byte_level, write_json

pytestmark = pytest.mark.cpu

BYTES = create_tokenizer("bytes")


def encoded(
    given: str | None, *texts: str, tokenizer: Tokenizer = BYTES, drop: bool = False, **options: Any
) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of every text that is kept."""
    encoder = MaskedTextEncoder(tokenizer, EncodeOptions(**options), Delimiter.parse(given), drop_unmatched=drop)
    found = encoder.encode(RowChunk("memory", 0, [{"text": text} for text in texts], 1))
    assert found.lengths[0].tolist() == found.lengths[1].tolist()
    assert found.ids[1].dtype == np.int32
    ends = np.cumsum(found.lengths[0])[:-1]
    tokens, labels = (np.split(values, ends) for values in found.ids)
    return [(a.tolist(), b.tolist()) for a, b in zip(tokens, labels)]


def codes(text: str) -> str:
    return ",".join(str(byte) for byte in text.encode())


@pytest.fixture
def words(tmp_path: Path) -> Tokenizer:
    return create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json", byte_level())))


def test_up_to_and_including_the_first() -> None:
    tokens = list(b"q: ab: cd")
    assert encoded(codes(": "), "q: ab: cd") == [(tokens, [-100] * 3 + tokens[3:])]
    assert encoded(codes("d"), "q: ab: cd") == [(tokens, [-100] * 9)]


def test_ids_follow_one_another() -> None:
    """A run of ids, not a choice of them; and none that reaches over the border of two texts."""
    assert encoded("97,98", "ba", "bab") == [([98, 97], [98, 97]), ([98, 97, 98], [-100] * 3)]
    assert encoded("97,97,98", "aaab") == [([97, 97, 97, 98], [-100] * 4)]


def test_a_text_without_it_is_trained_whole_or_left_out() -> None:
    assert encoded(codes(":"), "ab", "a:b") == [([97, 98], [97, 98]), ([97, 58, 98], [-100, -100, 98])]
    assert encoded(codes(":"), "ab", "a:b", drop=True) == [([97, 58, 98], [-100, -100, 98])]


def test_without_a_delimiter_everything_is_trained() -> None:
    assert encoded(None, "ab") == [([97, 98], [97, 98])]


def test_the_end_of_document_is_trained() -> None:
    (tokens, labels), *_ = encoded(codes(":"), "a:b", append_eod=True)
    assert (tokens, labels) == ([97, 58, 98, BYTES.eod], [-100, -100, 98, BYTES.eod])


def test_a_string(words: Tokenizer) -> None:
    text = "hello:hello world"
    (tokens, labels), *_ = encoded("hello:", text, tokenizer=words, append_eod=True)
    assert tokens == [*words.tokenize(text), words.eod]
    trained = [label for label in labels if label >= 0]
    assert words.detokenize(trained) == "hello world<|endoftext|>"
    assert labels == [-100] * (len(tokens) - len(trained)) + tokens[-len(trained) :]


def test_a_token_over_the_border_is_the_answers(words: Tokenizer) -> None:
    """ "Ġwo" begins with the blank that the delimiter ends with."""
    (_, labels), *_ = encoded("hello ", "hello world", tokenizer=words)
    assert words.detokenize([label for label in labels if label >= 0]) == " world"


def test_a_string_at_the_end_and_one_that_is_missing(words: Tokenizer) -> None:
    found = encoded("world", "hello world", "hello", tokenizer=words)
    assert [any(label >= 0 for label in labels) for _, labels in found] == [False, True]


@given(
    st.lists(st.text(alphabet="ab:é", min_size=1, max_size=8), min_size=1, max_size=5),
    st.text(":ab", min_size=1, max_size=3),
)
def test_any_text(texts: list[str], delimiter: str) -> None:
    for text, (tokens, labels) in zip(texts, encoded(codes(delimiter), *texts), strict=True):
        before, found, after = text.encode().partition(delimiter.encode())
        assert bytes(tokens) == text.encode()
        expected = after if found else before
        assert labels == [-100] * (len(tokens) - len(expected)) + list(expected)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (("text",), ["_text_document", "_label_document"]),
        (("qa",), ["_qa_document", "_qa_label_document"]),
        (("a", "b"), ["_a_document", "_a_label_document", "_b_document", "_b_label_document"]),
    ],
)
def test_names(keys: tuple[str, ...], names: list[str]) -> None:
    encoder = MaskedTextEncoder(BYTES, EncodeOptions(keys), Delimiter.parse("1"))
    assert [output.suffix for output in encoder.outputs] == names


@pytest.mark.parametrize(
    ("given", "expected"),
    [("1, 2", Delimiter((1, 2))), ("A:", Delimiter(text="A:")), ("1,A", Delimiter(text="1,A")), ("", Delimiter())],
)
def test_the_flag_is_parsed(given: str, expected: Delimiter) -> None:
    assert Delimiter.parse(given) == expected


def test_impossible_delimiters_are_refused() -> None:
    with pytest.raises(UserError, match=r"--mask-before-token: .*\b300\b.*\b258\b"):
        encoded("300", "a")
    with pytest.raises(UserError, match="--mask-before-token A:: bytes .*65,58"):
        encoded("A:", "a")


def test_empty_texts_are_counted() -> None:
    encoder = MaskedTextEncoder(BYTES, EncodeOptions(("a", "b")), Delimiter.parse("1"))
    found = encoder.encode(RowChunk("memory", 0, [{"a": "", "b": "x"}, {"a": "y", "b": "z"}], 1))
    assert found.tally.empty == [1, 0, 0, 0]
    assert found.tally.documents == [1, 1, 2, 2]
    kept = encoder.encode(RowChunk("memory", 0, [{"a": " ", "b": "\n\t"}], 1))
    assert kept.tally.documents == [1, 1, 1, 1] and [len(ids) for ids in kept.ids] == [1, 1, 2, 2]
