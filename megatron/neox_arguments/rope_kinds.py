"""Kinds of scaled rotary positions: values of `rope_scaling`. Names are those of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeKind:
    """The numbers of one `rope_type`.

    Attributes:
        required: fields that it must have.
        optional: fields that it may have.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


ROPE_KINDS: dict[str, RopeKind] = {
    "linear": RopeKind(("factor",)),
    "dynamic": RopeKind(("factor",)),
    "llama3": RopeKind(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": RopeKind(
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": RopeKind(
        ("short_factor", "long_factor", "original_max_position_embeddings"), ("factor", "attention_factor")
    ),
}


# A factor for every rotated pair.
_LISTS = ("short_factor", "long_factor")


def rope_problem(scaling: Mapping[str, Any], pairs: int | None = None) -> str | None:
    """What is wrong with a value of `rope_scaling`, in words; None when it can be used.

    `pairs`: rotated pairs of a head, where they are known.
    """
    kind = scaling.get("rope_type")
    if kind not in ROPE_KINDS:
        return f"rope_type {kind!r} is not available; use {', '.join(ROPE_KINDS)}"
    numbers = {name: value for name, value in scaling.items() if name != "rope_type"}
    required, known = set(ROPE_KINDS[kind].required), {*ROPE_KINDS[kind].required, *ROPE_KINDS[kind].optional}
    if missing := sorted(required - numbers.keys()):
        return f"{kind} lacks {', '.join(missing)}"
    if unknown := sorted(numbers.keys() - known):
        return f"{kind} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}"
    if not isinstance(numbers.pop("truncate", True), bool):
        return "truncate must be true or false"
    for name, factors in ((name, numbers.pop(name)) for name in _LISTS if name in numbers):
        if not isinstance(factors, list | tuple) or not all(map(_positive, factors)):
            return f"{name} must be a list of positive numbers"
        if pairs is not None and len(factors) != pairs:
            return f"{name} has {len(factors)} numbers; a head has {pairs} rotated pairs"
    if wrong := [name for name, value in numbers.items() if not _positive(value)]:
        return f"{', '.join(wrong)} must be positive numbers"
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        return "low_freq_factor must be below high_freq_factor"
    return None


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
