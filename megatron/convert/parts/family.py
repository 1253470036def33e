"""What a model family is: a table of names and transforms, its config.json both ways, and what it cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.transforms import Copy, Transform
from megatron.model.head import REWARD

if TYPE_CHECKING:
    from megatron.convert.parts.fields import Fields
    from megatron.neox_arguments.schema_model import ModelConfig

WORD_EMBEDDINGS = "0.word_embeddings.weight"
CLASSIFIER, CLASSIFIER_WEIGHT = "ForSequenceClassification", "score.weight"


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

    def rules(self, model: ModelConfig) -> list[Rule | Constant]:
        """`table`, with the head of a reward model in the place of the output matrix."""
        if model.output_head == "vocabulary":
            return self.table(model)
        body = self.table(replace(model, no_weight_tying=False, use_bias_in_head=False))
        return [*body, Rule(f"{model.num_layers + 4}.{REWARD}", (CLASSIFIER_WEIGHT,))]

    def class_of(self, model: ModelConfig) -> str:
        """The class in transformers: `architecture`, or its sister with one number for a text."""
        if model.output_head == "vocabulary":
            return self.architecture
        return re.sub(r"(ForCausalLM|LMHeadModel)$", CLASSIFIER, self.architecture)

    def refusals(self, model: ModelConfig) -> list[str]:
        """What the architecture cannot express of the model."""
        reasons = self.unsupported(model)
        if model.output_head == "vocabulary":
            return reasons
        import transformers

        missing = not hasattr(transformers, name := self.class_of(model))
        return [*reasons, *([f"train_impl: rm (transformers has no {name})"] if missing else [])]


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
