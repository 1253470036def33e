"""Bytes, SentencePiece and tiktoken."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.tokenizer import build_tokenizer, create_tokenizer
from tests.tokenizer.vocabularies import HOSTILE, byte_level, write_json, write_tiktoken

pytestmark = pytest.mark.cpu


def test_char_level_is_neox_s() -> None:
    ours = create_tokenizer("CharLevelTokenizer")
    assert (ours.vocab_size, ours.eod, ours.pad) == (512, 0, 1)
    assert ours.tokenize("Aé\n") == [65, 0xC3, 0xA9, 10]
    assert ours.detokenize([65, 0xC3, 0xA9, 10, 0, 1, 300]) == "Aé\n"
    assert ours.files() == {}


def test_bytes_have_258_ids_and_lose_nothing() -> None:
    ours = create_tokenizer("bytes")
    assert (ours.vocab_size, ours.eod, ours.pad) == (258, 256, 257)
    assert ours.tokenize("\x00\x01é") == [0, 1, 0xC3, 0xA9]
    for text in HOSTILE:
        assert ours.detokenize([*ours.tokenize(text), ours.eod]) == text


def test_tiktoken_gives_the_ids_of_the_same_vocabulary_as_tokenizer_json(tmp_path: Path) -> None:
    special = {"<|endoftext|>": 264}
    ours = create_tokenizer("TiktokenTokenizer", str(write_tiktoken(tmp_path / "tiny.tiktoken", special)))
    same = byte_level(special=())
    same.add_special_tokens(["<|endoftext|>"])
    assert (ours.vocab_size, ours.eod, ours.pad) == (265, 264, None)
    for text in HOSTILE:
        assert ours.tokenize(text) == same.encode(text).ids
        assert ours.detokenize(ours.tokenize(text)) == text
    assert ours.detokenize([*ours.tokenize("a"), 9999]) == "a"
    assert set(ours.files()) == {"tiny.tiktoken", "tiny.tiktoken.json"}


@pytest.mark.parametrize(
    ("kind", "vocab", "said"),
    [
        ("TiktokenTokenizer", None, "^vocab_file .*set: TiktokenTokenizer.*cl100k_base"),
        ("TiktokenTokenizer", "no_such_base", "neither a file nor an encoding"),
        ("TiktokenTokenizer", "lonely.tiktoken", r"lonely\.tiktoken\.json"),
        ("SPMTokenizer", None, "^vocab_file .*set: SPMTokenizer"),
        ("SPMTokenizer", "lonely.tiktoken", "is not a SentencePiece model"),
        ("SPMTokenizer", "absent.model", "vocab_file: no such file"),
    ],
)
def test_what_is_wrong_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, vocab: str | None, said: str
) -> None:
    (tmp_path / "lonely.tiktoken").write_text("YQ== 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        create_tokenizer(kind, vocab)


def train_pieces(folder: Path, **options: object) -> str:
    """A tiny SentencePiece model."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("hello world, hello there\nthe world says hello again\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return str(folder / "tokenizer.model")


@pytest.mark.parametrize(
    ("options", "eod", "pad"),
    [
        ({}, 2, None),  # <unk> <s> </s>
        ({"eos_id": 1, "bos_id": 2}, 1, None),
        ({"eos_id": -1}, None, None),  # not the unknown id
        ({"pad_id": 3}, 2, 3),
        ({"user_defined_symbols": ["<|endoftext|>"]}, 3, None),
    ],
)
def test_sentencepiece_eod_is_the_model_s_own(tmp_path: Path, options: dict, eod: int | None, pad: int | None) -> None:
    import sentencepiece

    path = train_pieces(tmp_path, **options)
    ours = create_tokenizer("SPMTokenizer", str(tmp_path))  # the folder's tokenizer.model
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    assert (ours.vocab_size, ours.eod, ours.pad) == (model.get_piece_size(), eod, pad)
    assert ours.tokenize("hello there world") == model.encode("hello there world")
    assert ours.tokenize_batch(["hello", "the world"]) == [model.encode("hello"), model.encode("the world")]
    assert ours.detokenize([*ours.tokenize("hello there"), 5000]) == "hello there"
    assert ours.files() == {"tokenizer.model": Path(path)}


def test_build_tokenizer_reads_the_config_group(tmp_path: Path) -> None:
    class Group:
        tokenizer_type = "HFTokenizer"
        vocab_file = str(write_json(tmp_path / "tokenizer.json"))
        merge_file = None
        vocab_size = None

    assert build_tokenizer(Group()).vocab_size == 266
    Group.vocab_size = 300  # a model with more rows than the tokenizer has tokens
    assert build_tokenizer(Group()).vocab_size == 300
    Group.vocab_size = 265
    with pytest.raises(UserError, match=r"vocab_size: 265\b.*\b266\b.*HFTokenizer"):
        build_tokenizer(Group())
    Group.tokenizer_type = "GPT2BPETokenizer"
    with pytest.raises(UserError, match="^merge_file .*set: GPT2BPETokenizer"):
        build_tokenizer(Group())


def test_encode_batch_is_tokenize_for_every_type(tmp_path: Path) -> None:
    kinds = {
        "CharLevelTokenizer": None,
        "bytes": None,
        "SPMTokenizer": train_pieces(tmp_path),
        "TiktokenTokenizer": str(write_tiktoken(tmp_path / "tiny.tiktoken", {"<|endoftext|>": 264})),
        "HFTokenizer": str(write_json(tmp_path / "tokenizer.json")),
    }
    for kind, vocab in kinds.items():
        ours = create_tokenizer(kind, vocab)
        rows = ours.encode_batch([*HOSTILE, "", "a"])
        assert [row.tolist() for row in rows.rows()] == [ours.tokenize(text) for text in (*HOSTILE, "", "a")]
        assert ours.encode_batch([]).lengths.tolist() == []


def test_a_named_tiktoken_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library fetches it; here its download stands still, or fails as it does without a network."""
    import requests
    import tiktoken

    file = create_tokenizer("TiktokenTokenizer", str(write_tiktoken(tmp_path / "t.tiktoken", {"<|endoftext|>": 264})))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"cl100k_base": file.encoding}[name])
    named = create_tokenizer("TiktokenTokenizer", "cl100k_base")
    assert (named.eod, named.files()) == (264, {})
    assert named.fingerprint() == file.fingerprint()

    def offline(name: str) -> None:
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match=r"vocab_file: .*cl100k_base \(no route\).*\.tiktoken\b"):
        create_tokenizer("TiktokenTokenizer", "cl100k_base")
