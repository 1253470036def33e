"""Training a byte-level BPE."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer
from megatron.tokenizer.train import PIECE, _pieces, train_bpe
from tests.tokenizer.vocabularies import HOSTILE

pytestmark = pytest.mark.cpu

TEXTS = ["hello world, hello there\n" * 50, "def hello(world):\n    return world\n" * 50]


def test_a_trained_tokenizer_has_its_specials_first_and_loses_nothing(tmp_path: Path) -> None:
    size = train_bpe(TEXTS, 270, tmp_path / "out" / "tokenizer.json")
    ours = create_tokenizer("HFTokenizer", str(tmp_path / "out" / "tokenizer.json"))
    assert (ours.vocab_size, ours.eod, ours.pad) == (size, 0, 1) == (270, 0, 1)
    assert len(ours.tokenize("hello world")) < 8
    for text in HOSTILE:
        assert ours.detokenize(ours.tokenize(text)) == text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]


def test_training_twice_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_bpe(iter(TEXTS), 320, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("text", ["zq" * 100_000, "a line\n" * 30_000, "\n" * 70_000, ""])
def test_long_documents_are_cut_without_losing_text(text: str) -> None:
    pieces = list(_pieces([text]))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE


def test_nfkc_is_applied_only_when_asked(tmp_path: Path) -> None:
    train_bpe(TEXTS, 300, tmp_path / "a", normalizer="nfkc")
    train_bpe(TEXTS, 300, tmp_path / "b", normalizer="none")
    decoded = [
        t.detokenize(t.tokenize("ﬁ")) for t in (create_tokenizer("HFTokenizer", str(tmp_path / n)) for n in "ab")
    ]
    assert decoded == ["fi", "ﬁ"]


@pytest.mark.parametrize(
    ("texts", "size", "normalizer", "said"),
    [(TEXTS, 257, "none", "below 258"), ([], 300, "none", "no text"), (TEXTS, 300, "nfd", "normalizer: 'nfd'")],
)
def test_bad_input(tmp_path: Path, texts: list[str], size: int, normalizer: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train_bpe(texts, size, tmp_path / "a", normalizer=normalizer)
    assert not list(tmp_path.iterdir())
