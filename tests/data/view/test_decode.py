"""Text with its trained parts, for people."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.view.decode import bracket_trained, trained_spans
from megatron.tokenizer import create_tokenizer
from tests.tokenizer.vocabularies import write_json

pytestmark = pytest.mark.cpu

BYTES = create_tokenizer("bytes")


def split(text: str, trained: list[bool]) -> list[tuple[str, bool]]:
    tokens = list(text.encode())
    return trained_spans(BYTES, tokens, [token if yes else -100 for token, yes in zip(tokens, trained)])


def test_parts_in_order() -> None:
    assert split("abcd", [False, True, True, False]) == [("a", False), ("bc", True), ("d", False)]
    assert split("ab", [True, True]) == [("ab", True)]
    assert trained_spans(BYTES, [], []) == []
    assert trained_spans(BYTES, [97, 98], None) == [("ab", True)]


def test_characters_over_several_tokens_stay_whole() -> None:
    # "é" is two tokens, "🤖" four; the border lies inside of them.
    assert split("aé🤖b", [False, False, True, True, True, True, True, False]) == [
        ("a", False),
        ("é🤖", True),
        ("b", False),
    ]
    assert split("🤖", [True, True, False, False]) == [("🤖", False)]
    assert split("é🤖", [True, True, True, False, False, False]) == [("é", True), ("🤖", False)]


def test_a_sample_may_begin_and_end_within_a_character() -> None:
    tokens = list("🤖ab🤖".encode())[2:-1]
    labels = [-100, -100, -100, *tokens[3:]]
    parts = trained_spans(BYTES, tokens, labels)
    assert "".join(text for text, _ in parts) == BYTES.detokenize(tokens)
    assert parts[0][0].endswith("a") and parts[1][0].startswith("b")


@given(st.text(max_size=8), st.data())
def test_the_parts_are_the_whole(text: str, data: st.DataObject) -> None:
    size = len(text.encode())
    trained = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    parts = split(text, trained)
    assert "".join(part for part, _ in parts) == BYTES.detokenize(list(text.encode()))
    assert all(part for part, _ in parts)


def test_brackets(tmp_path: Path) -> None:
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json")))
    tokens = tokenizer.tokenize("hello world é<|endoftext|>")
    labels = [-100, *tokens[1:]]
    assert bracket_trained(tokenizer, tokens, labels) == "hello⟦ world é<|endoftext|>⟧"


def test_as_many_labels_as_tokens() -> None:
    with pytest.raises(ValueError, match="1 labels for 2 tokens"):
        trained_spans(BYTES, [97, 98], [97])
