"""Which tokens start, end and pad the texts of a model. Four facts that are often four different tokens:

* the end of a document, `Tokenizer.eod`: what separates the documents of training data;
* the model's own ids, in the config.json and generation_config.json of a published model: the key `model_tokens` keeps
  them as they are, from the import over every checkpoint to the export;
* the ends of turns of the chats that a run trained on: `model_tokens.trained_ends`;
* where generation stops: at each of these, and at `stop_tokens`.

An id is a number, a list of numbers (models with several ends) or null, as in these files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.errors import UserError
from megatron.files import read_json
from megatron.tokenizer.base import Tokenizer

BOS, EOS, PAD = "bos_token_id", "eos_token_id", "pad_token_id"
FIELDS = (BOS, EOS, PAD)
GENERATION = "generation_config.json"
TRAINED = "trained_ends"


@dataclass(frozen=True)
class ModelTokens:
    """The ids of one model.

    Attributes:
        config, generation: of its config.json and generation_config.json when it is exported: the fields of `FIELDS`
            that it has. What training added is among the ends.
        more_ends: other tokens that end its texts: what its tokenizer's files call eos, and the end of document.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    more_ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, stored: Mapping[str, Any] | None, pad: int | None = None) -> ModelTokens:
        """From the key `model_tokens`; without it, from the tokenizer's files and its end of document.

        `tokenizer`: None: nothing is known of it. `pad`: replaces what the model has.
        """
        known = dict(stored or {})
        end = tokenizer.declared_id("eos_token") if tokenizer is not None else None
        more = _list_of([end, tokenizer.eod]) if tokenizer is not None else []
        from_files = ids_in(read_generation(tokenizer)) if tokenizer is not None else None
        config = known.get("config")
        if config is None:
            config = {**_guess(tokenizer, more), **(from_files or {})}
        generation = known.get("generation", from_files)
        if generation is None:  # as transformers makes one of a config.json
            generation = {name: value for name, value in config.items() if value is not None}
        config, generation = dict(config), dict(generation)
        if trained := _list_of(known.get(TRAINED)):
            generation[EOS] = _add(generation.get(EOS, config.get(EOS)), trained)
            config[EOS] = _add(config.get(EOS), trained)
        if pad is not None:
            config[PAD] = generation[PAD] = pad
        return cls(config, generation, tuple(more))

    def exported_ends(self) -> frozenset[int]:
        """Where `transformers` stops in a text of the exported model."""
        return frozenset(_list_of(self.generation.get(EOS)))

    def ends(self) -> frozenset[int]:
        """Where generation stops: at all that is known to end a text."""
        return self.exported_ends() | frozenset([*_list_of(self.config.get(EOS)), *self.more_ends])


def ids_in(fields: Mapping[str, Any] | None, where: str = GENERATION) -> dict[str, Any] | None:
    """The fields of `FIELDS` in a config.json or generation_config.json, as they are there; None without such a file.

    Raises `UserError` naming `where` for what is no id.
    """
    if fields is None:
        return None
    found = {name: fields[name] for name in FIELDS if name in fields}
    for name, value in found.items():
        if not all(type(i) is int for i in _list_of(value)):
            raise UserError(f"{where}: {name}: {value!r} is no token id and no list of them")
    return found


def read_generation(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The generation_config.json next to the tokenizer's files, None without one. Raises `UserError`."""
    path = tokenizer.files().get(GENERATION)
    return None if path is None else read_json(path)


def inherit(given: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The key `model_tokens` of a run that begins with the weights of a checkpoint that has `saved`.

    What the run's own config says wins; what training has added stays.
    """
    if not saved:
        return dict(given) if given is not None else None
    return add_trained_ends({**saved, **(given or {})}, saved.get(TRAINED) or ())


def add_trained_ends(stored: Mapping[str, Any] | None, ends: Sequence[int]) -> dict[str, Any] | None:
    """The key `model_tokens` after training on texts whose turns end with `ends`."""
    known = _list_of((stored or {}).get(TRAINED))
    added = _list_of([*known, *ends])
    if added == known:
        return dict(stored) if stored is not None else None
    return {**(stored or {}), TRAINED: added}


def stop_ids(tokens: Sequence[str | int], tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of `stop_tokens`: ids, or texts of single tokens. Raises `UserError` for what is neither."""
    found = set()
    for token in tokens:
        if isinstance(token, int):
            if not 0 <= token < tokenizer.vocab_size:
                raise UserError(f"stop_tokens: id {token} is not among the {tokenizer.vocab_size} of the tokenizer")
            found.add(token)
            continue
        ids = [i for i, text in tokenizer.id_map().items() if text == token] or tokenizer.tokenize(token)
        if len(ids) != 1:
            raise UserError(
                f"stop_tokens: {token!r} is not one token of {tokenizer.describe()} but {len(ids)}; give a token's "
                "text, such as <|im_end|>, or its id"
            )
        found.add(ids[0])
    return frozenset(found)


def _guess(tokenizer: Tokenizer | None, ends: list[int]) -> dict[str, Any]:
    """For a model that nobody published: what the tokenizer's files declare; a text may begin after a document."""
    if tokenizer is None:
        return dict.fromkeys(FIELDS)
    bos, pad = tokenizer.declared_id("bos_token"), tokenizer.declared_id("pad_token")
    return {
        BOS: tokenizer.eod if bos is None else bos,
        EOS: _one_or_list(ends),
        PAD: tokenizer.pad if pad is None else pad,
    }


def _add(ids: Any, more: list[int]) -> Any:
    """A field with further ends in front; as it is when it has them."""
    known = _list_of(ids)
    new = [i for i in more if i not in known]
    return _one_or_list([*new, *known]) if new else ids


def _one_or_list(ids: list[int]) -> Any:
    return ids[0] if len(ids) == 1 else ids or None


def _list_of(ids: Any) -> list[Any]:
    """The ids of a field, each once, in order."""
    values = ids if isinstance(ids, (list, tuple)) else [ids]
    return list(dict.fromkeys(i for i in values if i is not None))
