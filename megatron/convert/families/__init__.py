"""The model families: one file each, both ways. A file in this folder registers what it has; nothing else names it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.family import Family
from megatron.convert.parts.fields import Fields
from megatron.errors import UserError, nearest
from megatron.registry import Registry, import_entries

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

FAMILIES: Registry[Family] = Registry(
    "architecture", wants="a Family of megatron.convert.parts.family", fits=lambda entry: isinstance(entry, Family)
)
"""`Family`s by the name of `--architecture`. The table names every parameter of our model once and every tensor of
theirs once; `unsupported` names whatever of the configuration would be lost; transformers knows the architecture (or
the plugin registers its classes with AutoConfig and AutoModelForCausalLM). Without `--architecture` the first that can
express a model is taken: `FIRST`, then Deepy's others, then those of plugins.
"""
FIRST = ("neox", "llama", "mistral")  # the usual names, before others that fit as well
_NEAREST = 4  # families whose reasons an error lists when none fits


def choose_family(model: ModelConfig, name: str | None, among: Collection[str] = ()) -> Family:
    """The family called `name`, or the first that can express the model; `among`: of these only, () of all.

    Raises `UserError` naming every feature that stands in the way; without a name, those of the nearest families.
    """
    if name is not None:
        family = FAMILIES[name]
        if reasons := family.refusals(model):
            raise UserError(f"{family.architecture} cannot express this model: {'; '.join(reasons)}")
        return family
    refusals: list[tuple[str, list[str]]] = []
    for candidate in sorted(FAMILIES, key=lambda one: one not in FIRST):
        if among and candidate not in among:
            continue
        reasons = FAMILIES[candidate].refusals(model)
        if not reasons:
            return FAMILIES[candidate]
        refusals.append((candidate, reasons))
    refusals.sort(key=lambda one: len(one[1]))
    lines = [f"\n  {name}: {'; '.join(reasons)}" for name, reasons in refusals[:_NEAREST]]
    if farther := [name for name, _ in refusals[_NEAREST:]]:
        lines.append(f"\n  more reasons against {', '.join(farther)} (give --architecture NAME to list them)")
    raise UserError(f"no Hugging Face architecture known here can express this model:{''.join(lines)}")


def read_config(values: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """(name of the family, our keys) of a config.json. Raises `UserError` naming what is unknown or not expressible."""
    kind = values.get("model_type")
    readers = {name: FAMILIES[name].readers for name in FAMILIES}
    found = [name for name, own in readers.items() if kind in own]
    if not found:
        known = sorted({each for own in readers.values() for each in own})
        hint = nearest(str(kind), known)
        raise UserError(f"{where}: model_type: {kind!r} is not known here.{hint} Known: {', '.join(known)}")
    if len(found) > 1:
        raise UserError(f"{where}: model_type: {kind!r} is read by several families: {', '.join(found)}")
    fields = Fields(values, where)
    keys = readers[found[0]][kind](fields)
    fields.finish()
    return found[0], keys


import_entries(__name__, __path__)
