"""Encoders of other libraries that do the work of a tokenizer.json faster, each behind one method.

None of them is trusted: `exact.choose_encoder` takes one only after it gave the ids of the `tokenizers` library. What
they need of a tokenizer is its `Recipe`. Measured on technical English with GPT-2's vocabulary, MB per CPU second:
gigatoken 150-200, fastokens 80-120, tiktoken 8, tokenizers 2.4.
"""

from __future__ import annotations

import itertools
import json
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron.registry import Registry
from megatron.tokenizer.alphabet import byte_alphabet
from megatron.tokenizer.ragged import Ragged
from megatron.tokenizer.young import NEW_IN_17, NORMALIZED_ANEW, Characters

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# From texts to ids, by the tokenizer's own library.
Own = Callable[[Sequence[str]], Ragged]


class UnsuitableError(Exception):
    """This tokenizer.json has something that an encoder cannot do; the message names it."""


@dataclass(frozen=True)
class Recipe:
    """What a fast encoder is made of.

    `tokenizer_json`: the content of such a file. `head` and `tail`: the ids that its template puts around every text
    (added here, so that encoders need not know templates). `added`: the tokens it finds in a text unchanged.
    """

    tokenizer_json: str
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    added: tuple[str, ...] = ()


class FastEncoder(ABC):
    """Texts to ids, the head and tail of the recipe included. Pickles as its recipe."""

    name: ClassVar[str]

    def __init__(self, recipe: Recipe) -> None:
        """Raises `ImportError` without the library, and whatever it raises for a file it does not understand."""
        self.recipe = recipe
        self._load()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.recipe,)

    def encode(self, texts: Sequence[str], own: Own) -> Ragged:
        """The ids of each text. `own` does the texts that this encoder is known to get wrong."""
        rows, left = self._encode(texts)
        if left:
            head, tail = len(self.recipe.head), len(self.recipe.tail)
            whole = own([texts[i] for i in left]).rows()
            parts = rows.rows()
            for i, row in zip(left, whole):
                parts[i] = row[head : len(row) - tail]
            rows = Ragged.join(parts)
        return rows.frame(self.recipe.head, self.recipe.tail)

    @abstractmethod
    def _load(self) -> None:
        """Make the library's own object."""

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, list[int]]:
        """The ids of each text, without head and tail; and the numbers of the texts that are left to another."""


FAST: Registry[type[FastEncoder]] = Registry(
    "encoder",
    wants="a subclass of megatron.tokenizer.fast.FastEncoder",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, FastEncoder),
)
"""Encoders other than the tokenizers library: subclasses of `FastEncoder` that give its ids or leave a text to it."""


@FAST.register("gigatoken")
class Gigatoken(FastEncoder):
    """gigatoken, on the calling thread.

    Its tables are those of Unicode 17; the tokenizers library has those of 16, and older ones for normalisation. Texts
    with characters that are in one of them only are left to that library.

    It remembers every word it has met, for ever: 5 GB after 600 MB of words that never repeat, 60 MB after 200 MB of
    manuals (measured). So it starts again when the process has grown by `ROOM` since it last did.
    """

    name = "gigatoken"
    ROOM = 256 << 20  # bytes of resident memory
    LOOK_EVERY = 8 << 20  # characters between two looks at it
    UNSEEN = 128 << 20  # characters between two fresh starts where resident memory cannot be read

    def _load(self) -> None:
        # The package's own batch call returns an `awkward` array, whose import alone costs 0.2 s; per text is faster.
        from gigatoken.gigatoken_rs import load_hf_json

        self._encoder: Any = None  # the old one goes first: never two in memory
        self._encoder = load_hf_json(self.recipe.tokenizer_json.encode("utf-8"))
        plain = re.search(r'"normalizer"\s*:\s*null', self.recipe.tokenizer_json) is not None
        self._young = Characters(NEW_IN_17 if plain else NEW_IN_17 + NORMALIZED_ANEW)
        self._start, self._characters, self._looked_at = resident_bytes(), 0, 0

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, list[int]]:
        self._keep_small()
        encode = self._encoder.encode
        utf8 = {i: text.encode("utf-8") for i, text in enumerate(texts) if not text.isascii()}
        left: list[int] = []
        if self._young.may_occur_in(list(utf8.values())):
            left = [i for i in utf8 if self._young.occur_in(texts[i])]
        ragged = Ragged.join([encode(utf8.get(i, text)) for i, text in enumerate(texts)])
        self._characters += sum(map(len, texts))
        return ragged, left

    def _keep_small(self) -> None:
        """Start again when it is time. Nobody else may hold the encoder then: it would stay in memory, and count."""
        if self._characters - self._looked_at >= self.LOOK_EVERY:
            self._looked_at = self._characters
            now = resident_bytes()
            if self._characters >= self.UNSEEN if now is None else now - (self._start or 0) > self.ROOM:
                self._load()


@FAST.register("fastokens")
class Fastokens(FastEncoder):
    """fastokens. Its memory is bounded (370 MB after 200 MB of words that never repeat, measured).

    What is a space to it is so to the tokenizers library, but for one character, which Unicode itself has moved. Texts
    with that are left to the library.
    """

    name = "fastokens"
    MOVED = "\u180e"  # MONGOLIAN VOWEL SEPARATOR, no space any more since Unicode 6.3

    def _load(self) -> None:
        import fastokens

        _refuse_patterns(self.recipe, r"\\[wWbB]|\[:|\\[pP]\{\^?[A-Z][a-z]{2}")
        self._encoder = fastokens.Tokenizer.from_json_str(self.recipe.tokenizer_json)

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, list[int]]:
        ids, offsets = self._encoder.encode_batch_flat(list(texts))
        left = [i for i, text in enumerate(texts) if self.MOVED in text]
        return Ragged(np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))), left


@FAST.register("tiktoken")
class Tiktoken(FastEncoder):
    """tiktoken, for byte-level BPE whose merges are in the order of their ids (as in every vocabulary trained)."""

    name = "tiktoken"

    def _load(self) -> None:
        import tiktoken

        _refuse_patterns(self.recipe, r"\\[wWbB]|\[:")
        content = json.loads(self.recipe.tokenizer_json)
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        for token in content["added_tokens"]:
            if token["single_word"] or token["lstrip"] or token["rstrip"]:
                raise UnsuitableError(f"added token {token['content']!r} takes its surroundings into account")
        if content["normalizer"] is not None:
            raise UnsuitableError(f"the file has a normalizer ({content['normalizer']['type']})")
        self._encoder = tiktoken.Encoding(
            "from tokenizer.json",
            pat_str=_pattern(content["pre_tokenizer"]),
            mergeable_ranks=_ranks(content["model"], special),
            special_tokens=special,
        )

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, list[int]]:
        return Ragged.join([self._encoder.encode_to_numpy(text, allowed_special="all") for text in texts]), []


def _refuse_patterns(recipe: Recipe, unlike: str) -> None:
    """Raise `UnsuitableError` when a regular expression of the file has something that matches `unlike`.

    That is what a library reads in another way than the tokenizers library: of `\\w` alone hundreds of characters are
    on one side only. Ids show it in few texts, those with a token over the border of two words; so no trial would.
    """
    for quoted in re.findall(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")', recipe.tokenizer_json):
        if found := re.search(unlike, json.loads(quoted)):
            raise UnsuitableError(f"its pattern has {found[0]}, which is not the same characters to every library")


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """The split pattern of GPT-2's kind of pre-tokenizer: ByteLevel, or one Split before a ByteLevel without one."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        raise UnsuitableError("the file puts a space before every text")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        split = steps[0]
        if split["behavior"] == "Isolated" and not split["invert"] and "Regex" in split["pattern"]:
            return split["pattern"]["Regex"]
    raise UnsuitableError(f"its way of cutting text into words ({' + '.join(map(str, kinds))}) has no single pattern")


def _ranks(model: dict[str, Any], special: dict[str, int]) -> dict[bytes, int]:
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise UnsuitableError(f"the model is {model['type']}, not a byte-level BPE")
    bytes_of = {char: byte for byte, char in byte_alphabet().items()}
    vocab = {token: i for token, i in model["vocab"].items() if token not in special}
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    made = [vocab.get(left + right, -1) for left, right in merges]
    if any(later <= earlier for earlier, later in itertools.pairwise(made)):
        raise UnsuitableError("the merges are not in the order of their ids")
    try:
        return {bytes(bytes_of[char] for char in token): i for token, i in vocab.items()}
    except KeyError as error:
        raise UnsuitableError(f"the vocabulary has a token that is not made of bytes (character {error})") from error


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM, None where the system does not show it."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None
