"""Tokenizers of the `tiktoken` library, by name (`cl100k_base`) or from a `.tiktoken` file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import UserError
from megatron.tokenizer.alphabet import byte_alphabet
from megatron.tokenizer.base import TOKENIZERS, Tokenizer
from megatron.tokenizer.byte_counts import byte_level_counts
from megatron.tokenizer.ragged import Ragged

if TYPE_CHECKING:
    import numpy as np
    import tiktoken


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding; special tokens written in a text become their ids, as in GPT-NeoX."""

    name = "TiktokenTokenizer"

    def __init__(self, encoding: tiktoken.Encoding, files: dict[str, Path]) -> None:
        """`files` is empty for an encoding known by name."""
        self.encoding, self._files = encoding, files
        self._tokens: dict[str, int] = encoding._special_tokens
        self.eod = self._tokens.get("<|endoftext|>", self._tokens.get("<|end_of_text|>"))
        self.pad = self._tokens.get("<|padding|>")

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`."""
        return self.encoding.encode(text, allowed_special="all")

    def encode_exactly(self, texts: Sequence[str]) -> Ragged:
        """The ids of each text."""
        return Ragged.join([self.encoding.encode_to_numpy(text, allowed_special="all") for text in texts])

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary are left out."""
        known = self._ids
        return self.encoding.decode([int(i) for i in ids if i in known])

    def id_map(self) -> dict[int, str]:
        """Ranks in GPT-2's byte alphabet (so that it equals the map of the same vocabulary as tokenizer.json)."""
        alphabet = byte_alphabet()
        ranks = self.encoding._mergeable_ranks
        plain = {i: "".join(alphabet[byte] for byte in token) for token, i in ranks.items()}
        return plain | {i: token for token, i in self._tokens.items()}

    def byte_counts(self) -> np.ndarray:
        """The lengths of the tokens, which are bytes."""
        return byte_level_counts(self.vocab_size, self._ids, (), set(self._tokens.values()))

    def files(self) -> dict[str, Path]:
        """The .tiktoken file and its description; none for an encoding known by name."""
        return dict(self._files)


@TOKENIZERS.register("TiktokenTokenizer")
def tiktoken_tokenizer(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """`vocab_file` is an encoding's name, or a .tiktoken file with a description `<file>.json` next to it.

    The description is `{"pat_str": <split pattern>, "special_tokens": {<token>: <id>}}`; a .tiktoken file holds
    neither, and a guessed pattern would give different ids without a word.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise UserError("TiktokenTokenizer needs tiktoken: pip install tiktoken") from error
    if not vocab_file:
        raise UserError(f"vocab_file is not set: TiktokenTokenizer needs a .tiktoken file or one of {_names()}")
    path = Path(vocab_file).expanduser()
    if path.exists():
        return _from_file(path)
    if vocab_file not in tiktoken.list_encoding_names():
        raise UserError(f"vocab_file: {vocab_file!r} is neither a file nor an encoding of tiktoken ({_names()})")
    try:
        return TiktokenTokenizer(tiktoken.get_encoding(vocab_file), {})
    # tiktoken downloads through requests, whose errors are OSErrors.
    except OSError as error:
        raise UserError(
            f"vocab_file: cannot download {vocab_file} ({error}). Give a .tiktoken file instead."
        ) from error


def _from_file(path: Path) -> TiktokenTokenizer:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    description = Path(f"{path}.json")
    if not description.exists():
        raise UserError(
            f"vocab_file: {path} needs {description.name} next to it, holding "
            '{"pat_str": <split pattern>, "special_tokens": {<token>: <id>}}'
        )
    try:
        meant = json.loads(description.read_text(encoding="utf-8"))
        pattern, special = meant["pat_str"], meant["special_tokens"]
        ranks = load_tiktoken_bpe(str(path))
        encoding = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"vocab_file: {path} with {description.name}: {error!r}") from error
    return TiktokenTokenizer(encoding, {path.name: path, description.name: description})


def _names() -> str:
    import tiktoken

    return ", ".join(tiktoken.list_encoding_names())
