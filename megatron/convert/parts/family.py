"""What a model family is: a table of names and transforms, its config.json both ways, and what it cannot express."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.transforms import Copy, Transform

if TYPE_CHECKING:
    from megatron.convert.parts.fields import Fields
    from megatron.neox_arguments.schema_model import ModelConfig

WORD_EMBEDDINGS = "0.word_embeddings.weight"


@dataclass(frozen=True)
class Rule:
    """One of our parameters (by canonical name) and the Hugging Face tensors it becomes.

    `also`: other ways in which files or the running model have it, which are read but not written.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = field(default_factory=Copy)
    also: tuple[Rule, ...] = ()

    def among(self, names: Container[str]) -> Rule:
        """The way in which these names have it; the first when none has it whole."""
        return next((way for way in (self, *self.also) if all(name in names for name in way.theirs)), self)


@dataclass(frozen=True)
class Constant:
    """A tensor that the Hugging Face model has and ours does without: zero biases, unit norms."""

    theirs: str
    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class TokenIds:
    """Special ids for config.json, each a number, a list of numbers or None; see tokenizer/model_tokens.py."""

    bos: Any = None
    eos: Any = None
    pad: Any = None


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    Attributes:
        architecture: the class name in config.json.
        table: every tensor of a model of this config, ours and theirs.
        config: config.json from (model, vocabulary size, special ids); architecture fields only.
        unsupported: features of the config that this architecture cannot express, one phrase each.
        readers: the inverse of `config`: our flat keys from the fields of a config.json, by its `model_type`. A reader
            takes every field that changes what is computed (the rest is refused), with the defaults of transformers'
            class. {}: models of this family can be written only.
    """

    architecture: str
    table: Callable[[ModelConfig], list[Rule | Constant]]
    config: Callable[[ModelConfig, int, TokenIds], dict[str, Any]]
    unsupported: Callable[[ModelConfig], list[str]]
    readers: Mapping[str, Callable[[Fields], dict[str, Any]]] = field(default_factory=dict)


def common_fields(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    """The fields of config.json that every architecture has."""
    return {
        "vocab_size": vocab_size,
        "use_cache": True,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": not model.no_weight_tying,
    }
