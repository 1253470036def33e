"""Training a byte-level BPE, as `tokenizer.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.errors import UserError
from megatron.files import write_atomically

# The first two ids, as in GPT-NeoX: end of document and padding.
SPECIAL_TOKENS = ("<|endoftext|>", "<|padding|>")
NORMALIZERS = ("nfkc", "none")
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)
PIECE = 1 << 16  # characters per training sequence


def train_bpe(texts: Iterable[str], vocab_size: int, output: Path, *, normalizer: str = "none") -> int:
    """Train a byte-level BPE on `texts` and write it as the tokenizer.json `output` (temporary name, then rename).

    Every byte has a token, so nothing is ever unknown. `normalizer` is `none` (text survives the round trip) or `nfkc`
    (GPT-NeoX's choice). Returns the size reached, which a small corpus may leave below `vocab_size`.
    Raises `UserError` for a size too small or a corpus without text.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    if vocab_size < SMALLEST_VOCAB:
        raise UserError(f"vocab_size: {vocab_size} is below {SMALLEST_VOCAB}, the 256 bytes and two special tokens")
    if normalizer not in NORMALIZERS:
        raise UserError(f"normalizer: {normalizer!r} is not one of {', '.join(NORMALIZERS)}")
    tokenizer = Tokenizer(models.BPE())
    if normalizer == "nfkc":
        tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    characters = _Counter()
    tokenizer.train_from_iterator(characters.count(_pieces(texts)), trainer=trainer)
    if not characters.total:
        raise UserError("there is no text to train a tokenizer on")
    output.parent.mkdir(parents=True, exist_ok=True)
    temp = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        tokenizer.save(str(temp))
        os.replace(temp, output)
    finally:
        temp.unlink(missing_ok=True)
    return tokenizer.get_vocab_size()


def write_companions(folder: Path) -> list[Path]:
    """Write what makes a folder with a `train_bpe` tokenizer.json one that `AutoTokenizer` opens: start, end, padding.

    `<|endoftext|>` is before and after a document, as in GPT-NeoX. Returns the files.
    """
    end, padding = SPECIAL_TOKENS
    tokens = {"bos_token": end, "eos_token": end, "pad_token": padding}
    # A text comes back as it was; no length is the tokenizer's affair.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    written = []
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", tokens)):
        written.append(folder / name)
        write_atomically(written[-1], json.dumps(content, indent=2) + "\n")
    return written


class _Counter:
    """Counts the characters that pass through."""

    total = 0

    def count(self, texts: Iterator[str]) -> Iterator[str]:
        for text in texts:
            self.total += len(text)
            yield text


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Long documents cut up, at line ends where possible: the trainer spreads whole sequences over cores."""
    for text in texts:
        start = 0
        while len(text) - start > PIECE:
            cut = text.rfind("\n", start, start + PIECE) + 1
            end = cut if cut > start else start + PIECE
            yield text[start:end]
            start = end
        yield text[start:]
