"""The real vocabulary of GPT-2: 50,000 merges, from which all of it follows.

`gpt2_merges.xz` is the `vocab.bpe` that OpenAI published with GPT-2 (MIT licence), packed. Who reads it here as a
reference is tiktoken, by its own loader, which knows the checksums of the files that OpenAI published.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.tokenizer import choose_encoder, create_tokenizer
from megatron.tokenizer.exact import ORDER, difference
from megatron.tokenizer.hugging_face import LibraryTokenizer
from megatron.tokenizer.probes import hostile_texts
from tests.tokenizer.vocabularies import byte_tokens, byte_tokens_in_byte_order
from tests.tokenizer.zoo import training_text

pytestmark = pytest.mark.cpu

PACKED = Path(__file__).parent / "gpt2_merges.xz"


def write_files(folder: Path) -> tuple[Path, Path]:
    """OpenAI's encoder.json and vocab.bpe, byte for byte."""
    merges = lzma.decompress(PACKED.read_bytes())
    pairs = [line.replace(" ", "") for line in merges.decode().split("\n")[1:-1]]
    # The bytes that GPT-2's alphabet shows as themselves come first.
    alphabet = byte_tokens_in_byte_order()
    alone = [char for byte, char in enumerate(alphabet) if ord(char) == byte]
    tokens = [*alone, *(char for char in byte_tokens() if char not in alone), *pairs, "<|endoftext|>"]
    (folder / "vocab.bpe").write_bytes(merges)
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    return folder / "encoder.json", folder / "vocab.bpe"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_files(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def gpt2(files: tuple[Path, Path]) -> Iterator[LibraryTokenizer]:
    tokenizer = create_tokenizer("GPT2BPETokenizer", *map(str, files))
    assert isinstance(tokenizer, LibraryTokenizer)
    yield tokenizer
    tokenizer.fast = None


def test_ids_are_those_of_gpt2(
    files: tuple[Path, Path], gpt2: LibraryTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # From the documentation of transformers' GPT2Tokenizer.
    assert gpt2.tokenize("Hello world") == [15496, 995]
    assert gpt2.tokenize(" Hello world") == [18435, 995]
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)

    import tiktoken
    import tiktoken.load
    import tiktoken_ext.openai_public as public

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")

    def from_here(vocab_bpe_file: str, encoder_json_file: str, **checksums: str) -> dict[bytes, int]:
        return tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(files[1]), str(files[0]), **checksums)

    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", from_here)
    reference = tiktoken.Encoding(**public.gpt2())
    texts = [*training_text()[:4], *hostile_texts(("<|endoftext|>",), gpt2.detokenize, gpt2.vocab_size)]
    for text, ids in zip(texts, gpt2.tokenize_batch(texts)):
        assert ids == reference.encode(text, allowed_special="all")


@pytest.mark.parametrize("encoder", ORDER)
def test_every_fast_encoder_is_exact_for_it(gpt2: LibraryTokenizer, encoder: str) -> None:
    assert choose_encoder(gpt2) == "gigatoken"
    choose_encoder(gpt2, encoder)
    texts = [piece for text in training_text()[:4] for piece in (text, *text.split("\n\n"))]
    texts += [text.replace(" ", "<|endoftext|>", 9) for text in texts]
    assert difference(texts, gpt2.encode_exactly(texts), gpt2.encode_batch(texts)) is None
