"""Reading a model's config.json field by field: one that no reader takes, and transformers reads, is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.convert.parts.class_fields import fields_of
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments.rope_kinds import rope_problem

logger = get_logger(__name__)

REQUIRED = object()
# Kinds of scaled positions with the length of the model's first texts; where it is missing: max_position_embeddings.
_WITH_LENGTH, _LENGTH = ("llama3", "yarn", "longrope"), "original_max_position_embeddings"


class Fields:
    """The fields of one config.json.

    A family's `read` takes what it knows; `finish` then decides about the rest. `where` names the file.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._seen = {"vocab_size"}  # taken from the tensors' side
        self.where = where

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field; where it is missing or null, `default`, which should be that of transformers' class."""
        self._seen.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise UserError(f"{self.where}: {name} is missing")
        return default

    def take_or_null(self, name: str, default: Any) -> Any:
        """The value of a field, null included, where null differs from a missing field."""
        self._seen.add(name)
        return self._values.get(name, default)

    def only(self, name: str, value: Any) -> None:
        """Refuse a field with another value than the only one that can be expressed."""
        self.choose(name, {value: value}, value)

    def choose(self, name: str, choices: Mapping[Any, Any], default: Any = REQUIRED) -> Any:
        """`choices` of the field's value. Raises `UserError` naming a value that is not among them."""
        value = self.take(name, default)
        if value not in choices:
            known = ", ".join(map(str, choices))
            raise UserError(f"{self.where}: {name}: {value!r} cannot be expressed here (known: {known})")
        return choices[value]

    def rotary(
        self, theta: str, fraction: str | None = None, fraction_default: float = 1.0, base_default: float = 10000.0
    ) -> dict[str, Any]:
        """`rotary_emb_base`, `rotary_pct`, `rope_scaling` from `rope_parameters`, or from transformers 4's fields.

        `theta`, `fraction`: the older names of the base and of the rotated fraction; then their defaults. Raises
        `UserError` for a scaling that cannot be expressed.
        """
        rope = {"rope_theta": self.take(theta, None), **self.take("rope_parameters", {})}
        self.take("rope_theta", None)
        scaling = dict(self.take("rope_scaling", {}))
        pct = rope.pop("partial_rotary_factor", None)
        older = [self.take(name, None) for name in ("partial_rotary_factor", *([fraction] if fraction else []))]
        kinds = {str(part.pop(key)) for part in (rope, scaling) for key in ("rope_type", "type") if key in part}
        kind = next(iter(sorted(kinds - {"default"})), "default")
        kind = "longrope" if kind == "su" else kind  # as Phi-3's first files called it
        base = rope.pop("rope_theta", None) or base_default
        fractions = [value for value in (pct, *older) if value is not None]
        keys = {"rotary_emb_base": float(base), "rotary_pct": float(fractions[0] if fractions else fraction_default)}
        scaled = {name: value for name, value in (scaling | rope).items() if value is not None}
        scaled.pop("finetuned", None)  # how it was made
        if kind == "default" and not scaled:
            return keys
        if kind in _WITH_LENGTH:
            scaled = {_LENGTH: self.take("max_position_embeddings"), **scaled}
            scaled[_LENGTH] = self.take(_LENGTH, scaled[_LENGTH])  # next to the scaling, it wins in transformers too
        scaled = {"rope_type": kind, **scaled}
        if problem := rope_problem(scaled):
            raise UserError(f"{self.where}: rotary positions scaled as {kind!r} cannot be expressed: {problem}")
        return {**keys, "rope_scaling": scaled}

    def finish(self) -> None:
        """Raise `UserError` for fields that no rule has taken and that change what transformers computes.

        Those that its class of this model does not read are named in one warning, unless it knows them: what decides
        is the comparison of logits with that class. Where it has no such class, every field is refused.
        """
        left = {name: value for name, value in self._values.items() if name not in self._seen and value is not None}
        theirs = fields_of(str(self._values.get("model_type"))) if left else None
        refused = {name: value for name, value in left.items() if theirs is None or theirs.honours(name, value)}
        if refused:
            raise UserError(
                f"{self.where}: fields that are not known here, and might change the model: {_listed(refused)}"
            )
        unread = {name: value for name, value in left.items() if theirs is not None and name not in theirs.declared}
        if unread:
            logger.warning(f"{self.where}: left out, since {theirs.name} does not read it either: {_listed(unread)}")


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value!r}" for name, value in sorted(fields.items()))
