"""Tokenizers that run on the `tokenizers` library: tokenizer.json files and folders, GPT-2's vocabulary and merges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import UserError
from megatron.files import refuse_lfs_pointer
from megatron.tokenizer.base import TOKENIZERS, Tokenizer, required_file
from megatron.tokenizer.byte_counts import byte_level_counts, sentence_piece_counts
from megatron.tokenizer.fast import Recipe
from megatron.tokenizer.hub import fetch

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

# GPT-NeoX takes `<|endoftext|>` whenever a vocabulary has it, so data made with it does too: it comes before what the
# files around declare (an instruct tokenizer's eos is the end of a turn, not of a document).
NEOX_EOD = "<|endoftext|>"
KNOWN_EODS = ("</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")
KNOWN_PADS = ("<|padding|>", "<pad>", "<|pad|>", "[PAD]", "<PAD>", "<|finetune_right_pad_id|>")
# What describes a tokenizer, apart from tokenizer.json, in a Hugging Face folder.
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Truncation and padding stored in the file are switched off: a document is encoded whole. The file's own template
    (for example a begin-of-text token) applies, as in GPT-NeoX.
    """

    def __init__(
        self, name: str, backend: tokenizers.Tokenizer, files: dict[str, Path], eod: int | None, pad: int | None
    ) -> None:
        """`files` as `Tokenizer.files` returns them."""
        backend.no_truncation()
        backend.no_padding()
        self.name, self.backend, self.eod, self.pad = name, backend, eod, pad
        self._files = files

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`. Special tokens written in the text become their ids."""
        return self.backend.encode(text).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` for many texts, on all cores of the process and without computing offsets."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]

    def recipe(self) -> Recipe | None:
        """Its tokenizer.json, and the ids that the template puts around a text (None for a template that does more)."""
        bare, whole = (self.backend.encode("a", add_special_tokens=template).ids for template in (False, True))
        starts = range(len(whole) - len(bare) + 1)
        at = next((i for i in starts if whole[i : i + len(bare)] == bare), None)
        if at is None:
            return None
        added = tuple(token.content for token in self.backend.get_added_tokens_decoder().values())
        return Recipe(self.backend.to_str(), tuple(whole[:at]), tuple(whole[at + len(bare) :]), added)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ids outside the vocabulary are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def id_map(self) -> dict[int, str]:
        """The model's vocabulary and the added tokens."""
        return {i: token for token, i in self.backend.get_vocab(with_added_tokens=True).items()}

    def byte_counts(self) -> np.ndarray | None:
        """By its decoder: GPT-2's bytes or SentencePiece's pieces; None for another (WordPiece)."""
        added = self.backend.get_added_tokens_decoder()
        ends = {i for i in (self.eod, self.pad) if i is not None}
        special = {i for i, token in added.items() if token.special} | ends
        if (decoder := self.backend.decoder) is None:
            return None
        description = decoder.__getstate__().decode()
        if '"ByteLevel"' in description:
            return byte_level_counts(self.vocab_size, self._ids, added.keys(), special)
        if '"▁"' in description:
            return sentence_piece_counts(self.vocab_size, self._ids, special | self._unknown())
        return None

    def _unknown(self) -> set[int]:
        """The id of what is not in the vocabulary, if it has one."""
        model = json.loads(self.backend.model.__getstate__())
        name = model.get("unk_token")
        return {i for i in (self.backend.token_to_id(name) if name else model.get("unk_id"),) if i is not None}

    def files(self) -> dict[str, Path]:
        """The files it was read from."""
        return dict(self._files)

    def declared_id(self, role: str) -> int | None:
        """From tokenizer_config.json, else special_tokens_map.json."""
        token_ids = (self.backend.token_to_id(token) for token in _read_roles(self._home(), role))
        return next((i for i in token_ids if i is not None), None)

    def _home(self) -> Path | None:
        """The folder whose JSON files describe this tokenizer."""
        return next((path.parent for name, path in self._files.items() if name in COMPANIONS), None)

    def export(self, folder: Path) -> list[Path]:
        """Write a folder that `transformers.AutoTokenizer` opens with the same ids, end and padding tokens."""
        written = super().export(folder)
        whole, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if whole not in written:
            self.backend.save(str(whole))
            written.append(whole)
        if config not in written:
            names = {"eos_token": self.eod, "pad_token": self.pad}
            tokens = {name: self.backend.id_to_token(i) for name, i in names.items() if i is not None}
            config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}, indent=2) + "\n")
            written.append(config)
        return written


@TOKENIZERS.register("HFTokenizer")
def hf_tokenizer(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """A tokenizer.json (`vocab_file`), or a Hugging Face folder holding one or vocab.json and merges.txt."""
    path = required_file(vocab_file, "vocab_file", "HFTokenizer", "a tokenizer.json or a folder with one")
    return _from_path("HFTokenizer", path)


@TOKENIZERS.register("GPT2BPETokenizer")
def gpt2_bpe(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """GPT-2's byte-level BPE from vocab.json (`vocab_file`) and merges.txt (`merge_file`).

    As in GPT-NeoX, `<|endoftext|>` in a text is one id, that of the end of document.
    """
    what = "GPT-2's vocab.json; for a tokenizer.json set tokenizer_type: HFTokenizer"
    vocab = required_file(vocab_file, "vocab_file", "GPT2BPETokenizer", what)
    merges = required_file(merge_file, "merge_file", "GPT2BPETokenizer", "GPT-2's merges.txt")
    backend = _byte_level_bpe(vocab, merges)
    pad = backend.token_to_id("<|padding|>")
    files = {"vocab.json": vocab, "merges.txt": merges}
    return LibraryTokenizer("GPT2BPETokenizer", backend, files, backend.token_to_id(NEOX_EOD), pad)


@TOKENIZERS.register("HFGPT2Tokenizer")
def hf_gpt2(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """GPT-2 as `transformers` has it, plus `<|padding|>` (vocabulary 50258).

    `vocab_file` is a folder, a tokenizer.json, or (with `merge_file`) a vocab.json; unset, `gpt2` comes from the Hub.
    """
    name = "HFGPT2Tokenizer"
    if vocab_file is None:
        instead = "Set vocab_file to a folder with GPT-2's tokenizer.json, or vocab_file and merge_file."
        path = fetch("openai-community/gpt2", "tokenizer.json", key="vocab_file", instead=instead)
        tokenizer = _from_path(name, path)
    elif merge_file:
        vocab = required_file(vocab_file, "vocab_file", name, "GPT-2's vocab.json")
        merges = required_file(merge_file, "merge_file", name, "GPT-2's merges.txt")
        tokenizer = _from_vocab_and_merges(name, vocab, merges)
    else:
        tokenizer = _from_path(name, required_file(vocab_file, "vocab_file", name, "a folder or tokenizer.json"))
    if tokenizer.backend.token_to_id("<|padding|>") is None:
        tokenizer.backend.add_special_tokens(["<|padding|>"])
        # The file on disk lacks the token, so an export has to write the tokenizer out instead of copying it.
        tokenizer._files = {k: v for k, v in tokenizer.files().items() if k != "tokenizer.json"}
    tokenizer.pad = tokenizer.backend.token_to_id("<|padding|>")
    return tokenizer


def _from_path(name: str, path: Path) -> LibraryTokenizer:
    whole = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not whole.exists():
        vocab, merges = path / "vocab.json", path / "merges.txt"
        if vocab.exists() and merges.exists():
            return _from_vocab_and_merges(name, vocab, merges)
        hint = " It has a tokenizer.model: use SPMTokenizer." if (path / "tokenizer.model").exists() else ""
        raise UserError(f"vocab_file: {path} holds neither tokenizer.json nor vocab.json and merges.txt.{hint}")
    backend = _load_json(whole)
    # Only a file that kept its usual name belongs to the files around it.
    parent = whole.parent if whole.name == "tokenizer.json" else None
    files = {"tokenizer.json": whole, **_companions(parent)}
    return LibraryTokenizer(name, backend, files, _find_eod(backend, parent), _find_pad(backend, parent))


def _from_vocab_and_merges(name: str, vocab: Path, merges: Path) -> LibraryTokenizer:
    backend = _byte_level_bpe(vocab, merges)
    files = {"vocab.json": vocab, "merges.txt": merges, **_companions(vocab.parent)}
    return LibraryTokenizer(name, backend, files, _find_eod(backend, vocab.parent), _find_pad(backend, vocab.parent))


def _load_json(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    refuse_lfs_pointer(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # The library raises bare Exception for whatever is wrong inside the file.
    except Exception as error:
        hint = (
            " A vocab.json needs tokenizer_type GPT2BPETokenizer and merge_file."
            if path.name != "tokenizer.json"
            else ""
        )
        raise UserError(f"vocab_file: {path} is no tokenizer.json of the tokenizers library: {error}.{hint}") from error


def _byte_level_bpe(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    refuse_lfs_pointer(vocab)
    refuse_lfs_pointer(merges)
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:
        raise UserError(f"vocab_file {vocab} with merge_file {merges}: not a BPE vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if backend.token_to_id(NEOX_EOD) is not None:
        backend.add_special_tokens([NEOX_EOD])
    return backend


def _companions(folder: Path | None) -> dict[str, Path]:
    return {name: folder / name for name in COMPANIONS if folder and (folder / name).exists()}


def _find_eod(backend: tokenizers.Tokenizer, folder: Path | None) -> int | None:
    declared = _read_roles(folder, "eos_token")
    token_ids = (backend.token_to_id(token) for token in (NEOX_EOD, *declared))
    found = next((i for i in token_ids if i is not None), None)
    if found is None:
        found = _declared_eos_id(backend, folder)
    return found if found is not None else _first_special(backend, KNOWN_EODS)


def _find_pad(backend: tokenizers.Tokenizer, folder: Path | None) -> int | None:
    token_ids = (backend.token_to_id(token) for token in ("<|padding|>", *_read_roles(folder, "pad_token")))
    found = next((i for i in token_ids if i is not None), None)
    return found if found is not None else _first_special(backend, KNOWN_PADS)


def _first_special(backend: tokenizers.Tokenizer, names: Sequence[str]) -> int | None:
    """The first of `names` that the file declares special (an ordinary word piece `</s>` would not count)."""
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return next((special[name] for name in names if name in special), None)


def _read_roles(folder: Path | None, role: str) -> list[str]:
    """The token that the JSON files in `folder` give a role such as `eos_token`, if any."""
    found = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(folder, name).get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found.append(token)
    return found


def _declared_eos_id(backend: tokenizers.Tokenizer, folder: Path | None) -> int | None:
    """`eos_token_id` of the model's own config, when it is an id that the vocabulary has."""
    for name in ("config.json", "generation_config.json"):
        eos = _read_json(folder, name).get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if isinstance(eos, int) and backend.id_to_token(eos) is not None:
            return eos
    return None


def _read_json(folder: Path | None, name: str) -> dict[str, Any]:
    path = folder / name if folder else None
    if path is None or not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
