"""How many bytes of text tokens stand for: compared with the length of the text itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megatron.tokenizer import create_tokenizer
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.hugging_face import LibraryTokenizer
from tests.tokenizer.vocabularies import write_tiktoken
from tests.tokenizer.zoo import ZOO, training_text

pytestmark = pytest.mark.cpu

TEXTS = ("def f(x):\n\treturn  x  # naïve café; Ελληνικά 中文测试 한국어 🤖👍🏽 12345", "a", "I'll don't")


def counted(tokenizer: Tokenizer, text: str) -> int:
    counts = tokenizer.byte_counts()
    assert counts is not None and counts.dtype == np.int64 and len(counts) == tokenizer.vocab_size
    return int(counts[tokenizer.tokenize(text)].sum())


@pytest.mark.parametrize(
    ("name", "before"), [("gpt2", 0), ("neox", 0), ("llama3", 0), ("llama2", 1), ("metaspace", 1), ("prefix_space", 1)]
)
def test_bytes_of_the_tokens_are_those_of_the_text(name: str, before: int) -> None:
    """`before`: the space that such a tokenizer puts before a text."""
    tokenizer = LibraryTokenizer("HFTokenizer", ZOO[name](), {}, None, None)
    for text in TEXTS:
        assert counted(tokenizer, text) == len(text.encode()) + before
    special = [i for i, token in tokenizer.id_map().items() if token in ("<|endoftext|>", "<|im_end|>", "<s>", "<unk>")]
    counts = tokenizer.byte_counts()
    assert special and counts is not None and not counts[special].any()


def test_bytes_of_other_kinds(tmp_path: Path) -> None:
    tiktoken = create_tokenizer(
        "TiktokenTokenizer", str(write_tiktoken(tmp_path / "t.tiktoken", {"<|endoftext|>": 264}))
    )
    for tokenizer in (create_tokenizer("CharLevelTokenizer"), create_tokenizer("bytes"), tiktoken):
        assert [counted(tokenizer, text) for text in TEXTS] == [len(text.encode()) for text in TEXTS]
        counts = tokenizer.byte_counts()
        assert counts is not None and counts[tokenizer.eod] == 0
    lines = (line for text in training_text() for line in text.splitlines() if line)
    options = {"vocab_size": 600, "byte_fallback": True, "normalization_rule_name": "identity", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(tmp_path / "m"), remove_extra_whitespaces=False, **options
    )
    spm = create_tokenizer("SPMTokenizer", str(tmp_path / "m.model"))
    assert [counted(spm, text) for text in TEXTS] == [len(text.encode()) + 1 for text in TEXTS]


def test_no_number_where_a_token_s_bytes_depend_on_its_neighbours() -> None:
    assert LibraryTokenizer("HFTokenizer", ZOO["wordpiece"](), {}, None, None).byte_counts() is None
