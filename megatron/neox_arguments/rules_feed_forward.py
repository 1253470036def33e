"""Rules about the width of the feed-forward layer, which one key names in two ways.

With a gated activation, `intermediate_size` is the width built (GPT-NeoX's SLURM fork, Hugging Face's config.json, most
others) or what GPT-NeoX takes a third of (its LLaMA files write 32768 for 11008). `gated_width_rule` says which; unset,
the shapes of the checkpoint that the run starts from do, else the ratio to hidden_size where it leaves no doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.formulas import gated_width, round_up

# Widths of published gated models, as multiples of hidden_size: 2.4 (DeepSeek-V2) to 5.8 (Qwen2.5-1.5B), 6.4 for
# Mistral Small; Gemma, with geglu, has up to 8. So up to WIDEST only the final width makes such a model, and from
# NARROWEST x 3 on only a third of it.
WIDEST = 6.0
NARROWEST = 2.4
_WIDE_GATES = ("geglu",)


class Readings(NamedTuple):
    """The two widths that an `intermediate_size` can mean."""

    final: int
    two_thirds: int


def readings(values: Mapping[str, Any]) -> Readings | None:
    """The widths that a config's flat values can mean; None when they leave no choice, `gated_width_rule` aside."""
    given, multiple = values["intermediate_size"], values["mlp_multiple_of"]
    if not given or min(given, multiple) < 1 or not is_gated(values["activation"]):
        return None
    both = Readings(round_up(given, multiple), gated_width(given, multiple))
    return None if both.final == both.two_thirds else both


def llama_width(values: Mapping[str, Any]) -> int:
    """The width that LLaMA's models have: 8/3 x hidden_size, rounded up; also that of GPT-NeoX's mlp_type: llama."""
    return round_up(values["hidden_size"] * 8 // 3, values["mlp_multiple_of"])


def feed_forward(draft: Draft) -> None:
    """ffn_width: the width built, after the gated rule and rounding; tensor-parallel ranks must divide it."""
    given, factor, multiple = draft["intermediate_size"], draft["expansion_factor"], draft["mlp_multiple_of"]
    width = given or int((factor or 4) * draft["hidden_size"])
    gated = is_gated(draft["activation"])
    both = readings(draft.values)
    rule = draft.get_given("gated_width_rule")
    if rule is None and both is not None and set(draft["layer_mlps"]) != {"none"}:
        rule = _choose(draft, both)
    rule = rule or ("final" if given else "two_thirds")
    draft.set("gated_width_rule", rule, "by intermediate_size and hidden_size")
    thirds = gated and rule == "two_thirds"
    if thirds and not (given or factor or draft.is_set("gated_width_rule")) and "dense" in draft["layer_mlps"]:
        draft.note(
            f"intermediate_size is not set: with {draft['activation']}, GPT-NeoX and Deepy build a third of 4 x "
            f"hidden_size, {gated_width(width, multiple)}. LLaMA's models have 8/3 x hidden_size: for those set "
            f"intermediate_size: {llama_width(draft.values)} and gated_width_rule: final"
        )
    built = gated_width(width, multiple) if thirds else round_up(width, multiple)
    if built < 1:
        draft.fail("expansion_factor", f"{factor:g} of hidden_size {draft['hidden_size']} is no width")
    draft.set("ffn_width", built, f"{'two-thirds rule on ' if thirds else ''}{width}, a multiple of {multiple}")
    tensor = draft["model_parallel_size"]
    if built % tensor and set(draft["layer_mlps"]) != {"none"}:
        draft.fail(
            "model_parallel_size",
            f"the feed-forward width {built} cannot be split over {tensor} tensor-parallel ranks;"
            f" mlp_multiple_of: {tensor} would round it to {round_up(built, tensor)}",
        )


def _choose(draft: Draft, both: Readings) -> str:
    """The reading of `intermediate_size` that makes a model as there are; says so, or fails when both or none do."""
    given, hidden, gate = draft["intermediate_size"], draft["hidden_size"], draft["activation"]
    final, thirds = (f"{width / hidden:.3g} x hidden_size" for width in both)
    if "dense" not in draft["layer_mlps"]:
        rule, why = "final", "experts have it as it is, in GPT-NeoX too"
    elif both.final <= WIDEST * hidden:
        rule, why = "final", f"{final}, as gated models have; the other reading, {both.two_thirds}, is {thirds}"
    elif both.two_thirds >= NARROWEST * hidden and gate not in _WIDE_GATES:
        rule = "two_thirds"
        why = f"{thirds}, as gated models have, read as GPT-NeoX does; the other reading, {both.final}, is {final}"
    else:
        draft.fail(
            "intermediate_size",
            f"{given} with {gate} can mean a feed-forward width of {both.final} ({final}; gated_width_rule: final) or "
            f"of {both.two_thirds} ({thirds}; gated_width_rule: two_thirds, as GPT-NeoX); hidden_size {hidden} does "
            "not tell which. Set gated_width_rule",
        )
    built = getattr(both, rule)
    draft.note(
        f"intermediate_size {given} with {gate}: the feed-forward width is {built} (gated_width_rule: {rule}): {why}. "
        "Set gated_width_rule to silence this"
    )
    return rule
