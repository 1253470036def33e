"""What a model family is: a table of names and transforms, its config fields, and what it cannot express."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.transforms import Copy, Transform
from megatron.errors import UserError
from megatron.registry import Registry, added

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

WORD_EMBEDDINGS = "0.word_embeddings.weight"
FIRST = ("neox", "llama", "mistral")  # the usual names, before others that fit as well
_NEAREST = 4  # families whose reasons an error lists when none fits


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
    """Special ids for config.json and generation_config.json; None where the tokenizer has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    Attributes:
        architecture: the class name in config.json.
        table: every tensor of a model of this config, ours and theirs.
        config: config.json from (model, vocabulary size, special ids); architecture fields only.
        unsupported: features of the config that this architecture cannot express, one phrase each.
    """

    architecture: str
    table: Callable[[ModelConfig], list[Rule | Constant]]
    config: Callable[[ModelConfig, int, TokenIds], dict[str, Any]]
    unsupported: Callable[[ModelConfig], list[str]]


FAMILIES: Registry[Family] = Registry(
    "architecture", wants="a Family of megatron.convert.parts.family", fits=lambda entry: isinstance(entry, Family)
)
"""`Family`s by the name of `--architecture`. The table names every parameter of our model once and every tensor of
theirs once; `unsupported` names whatever of the configuration would be lost; transformers knows the architecture (or
the plugin registers its classes with AutoConfig and AutoModelForCausalLM). Without `--architecture` the first that can
express a model is taken: `FIRST`, then Deepy's others, then those of plugins.
"""


def choose_family(model: ModelConfig, name: str | None, among: Collection[str] = ()) -> Family:
    """The family called `name`, or the first that can express the model; `among`: of these only, () of all.

    Raises `UserError` naming every feature that stands in the way; without a name, those of the nearest families.
    """
    if name is not None:
        family = FAMILIES[name]
        if reasons := family.unsupported(model):
            raise UserError(f"{family.architecture} cannot express this model: {'; '.join(reasons)}")
        return family
    refusals: list[tuple[str, list[str]]] = []
    for candidate in _in_order():
        if among and candidate not in among:
            continue
        reasons = FAMILIES[candidate].unsupported(model)
        if not reasons:
            return FAMILIES[candidate]
        refusals.append((candidate, reasons))
    refusals.sort(key=lambda one: len(one[1]))
    lines = [f"\n  {name}: {'; '.join(reasons)}" for name, reasons in refusals[:_NEAREST]]
    if farther := [name for name, _ in refusals[_NEAREST:]]:
        lines.append(f"\n  more in the way of {', '.join(farther)} (--architecture with a name lists it)")
    raise UserError(f"no Hugging Face architecture known here can express this model:{''.join(lines)}")


def _in_order() -> list[str]:
    """Families as they are tried: `FIRST`, Deepy's others, those of plugins; each group as it was registered."""
    plugged = added(FAMILIES.kind)
    return sorted(FAMILIES, key=lambda one: (one in plugged, FIRST.index(one) if one in FIRST else len(FIRST)))


# Keys that few architectures have, and the value that says nothing.
_RARE: dict[str, Any] = {
    "scale_embedding": False,
    "use_bias_in_head": False,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rotary_emb_base_local": None,
    "embedding_dropout": None,
}


def common_refusals(model: ModelConfig, expressed: Collection[str] = ()) -> list[str]:
    """What no family of this package expresses, and rare keys that are not among those `expressed` by this one."""
    same = {"query_pre_attn_scalar": model.head_dim, "embedding_dropout": model.hidden_dropout}
    reasons = [
        f"{key}: {getattr(model, key)} (it has no such thing)"
        for key, nothing in _RARE.items()
        if key not in expressed and getattr(model, key) not in (nothing, same.get(key))
    ]
    if model.use_qk_layernorm:
        reasons.append("use_qk_layernorm (one norm for queries and keys)")
    if model.use_mup:
        reasons.append("use_mup (its multipliers have no place)")
    kinds = {"dense", "none"} | ({"moe"} if "moe_num_experts" in expressed else set())
    if other := sorted(set(model.layer_mlps or ()) - kinds):
        reasons.append(f"feed-forwards of kind {' and '.join(other)}")
    if any(kind not in ("global", "flash", "local") for kind in model.attention_config or ()):
        reasons.append("attention_config with other kinds than attention")
    return reasons


def pre_norm_refusals(model: ModelConfig) -> list[str]:
    """For families with norms before attention and feed-forward, and none on queries and keys."""
    reasons = []
    if model.norm_placement != "pre":
        reasons.append(f"norm_placement: {model.norm_placement}")
    if model.use_separate_qk_norms:
        reasons.append("use_separate_qk_norms (it has no norms on queries and keys)")
    return reasons


def rotary_refusals(model: ModelConfig) -> list[str]:
    """For families with rotary positions only; all of those may be scaled (`rope.py`)."""
    return [] if model.pos_emb == "rotary" else [f"pos_emb: {model.pos_emb} (it has rotary positions only)"]


def output_bias_refusals(model: ModelConfig) -> list[str]:
    """For families in which the four attention projections have biases together or not at all."""
    if model.use_bias_in_attn_linear and not model.use_bias_in_attn_output:
        return ["use_bias_in_attn_output: false (its output projection has a bias when the others have)"]
    return []


def width_refusals(model: ModelConfig) -> list[str]:
    """For families whose heads together are as wide as the model."""
    if model.num_attention_heads * model.head_dim != model.hidden_size:
        return [f"head_dim: {model.head_dim} (its heads are hidden_size / num_attention_heads wide)"]
    return []
