"""Small vocabularies, written with the libraries themselves or by hand."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("r", "l"), ("Ġwo", "rl")]
HOSTILE = [
    "hello world",
    "  hello\n\n\tworld  ",
    "I'll, you're HELLO'S",
    "naïve 中文 🤖 é\u0301",
    "x<|endoftext|>y",
    "\u00a0\u2003\x00\x7f",
    "1234567890" * 20,
]


def byte_tokens() -> list[str]:
    """The 256 byte tokens of GPT-2's alphabet, as the `tokenizers` library has them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def bpe_vocab(first: Sequence[str] = ()) -> dict[str, int]:
    """Token to id: `first`, the bytes, then one token per merge."""
    tokens = [*first, *byte_tokens(), *(a + b for a, b in MERGES)]
    return {token: i for i, token in enumerate(tokens)}


def write_gpt2(folder: Path, last: Sequence[str] = ("<|endoftext|>",)) -> tuple[Path, Path]:
    """vocab.json and merges.txt as GPT-2 has them, with `last` as the last tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = bpe_vocab()
    vocab |= {token: len(vocab) + i for i, token in enumerate(last)}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in MERGES)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


def byte_level(special: Sequence[str] = ("<|endoftext|>", "<|padding|>"), added: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE whose first ids are `special`, with `added` ordinary tokens after the vocabulary."""
    tokenizer = Tokenizer(models.BPE(vocab=bpe_vocab(special), merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    return tokenizer


def write_json(path: Path, tokenizer: Tokenizer | None = None, **others: dict) -> Path:
    """Save as tokenizer.json, with JSON files next to it (`tokenizer_config={...}`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(path))
    for name, content in others.items():
        (path.parent / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def write_tiktoken(path: Path, special: dict[str, int]) -> Path:
    """The vocabulary of `byte_level(special=())` in tiktoken's format, with its description."""
    alphabet = {char: byte for byte, char in enumerate(byte_tokens_in_byte_order())}
    ranks = sorted((i, bytes(alphabet[c] for c in token)) for token, i in bpe_vocab().items())
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in ranks))
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    path.with_name(path.name + ".json").write_text(json.dumps({"pat_str": pattern, "special_tokens": special}))
    return path


def byte_tokens_in_byte_order() -> list[str]:
    """The character that stands for each byte, asked of the library one byte at a time."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for code in range(0x800):
        if 0xD800 <= code < 0xE000:
            continue
        encoded = chr(code).encode()
        for byte, char in zip(encoded, pre.pre_tokenize_str(chr(code))[0][0]):
            found[byte] = char
    # Bytes that start longer sequences, or never occur in UTF-8: what is left of the alphabet in order.
    for code in (*range(0x800, 0xD800, 0x40), *range(0x10000, 0x110000, 0x1000)):
        for byte, char in zip(chr(code).encode(), pre.pre_tokenize_str(chr(code))[0][0]):
            found[byte] = char
    left = iter(sorted(set(byte_tokens()) - set(found.values())))
    return [found[byte] if byte in found else next(left) for byte in range(256)]
