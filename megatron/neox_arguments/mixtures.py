"""Mixtures by name: sources, their weights over time and validation sets as one mapping, from a file of its own.

    mixture:
      sources:
        web: web_text_document                                # a data path, or a mapping
        code: {path: code_text_document, max_epochs: 4}
        # of pairs: {path: x_chosen_document, rejected: x_rejected_document, labels: ..., rejected_labels: ...}
      weights: {web: 3, code: 1}                              # or by phase: [[0, {web: 1}], [5000, {web: 3, code: 1}]]
      valid_sets:
        news: {path: news_text_document, tags: [english]}

`parse` reads such a mapping, `interpolate` makes one of several, `rules_mixture` turns it into the flat data keys.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.errors import nearest
from megatron.neox_arguments.coerce import WrongValue, check_path, coerce_type, describe, thaw

COMPANIONS = {
    "labels": "{}_label_data_paths",
    "rejected": "neg_{}_data_paths",
    "rejected_labels": "neg_{}_label_data_paths",
    "rewards": "{}_reward_data_paths",
}
"""What may belong to a token file, and the flat keys with it: of train, valid or test, one for each data path."""

SOURCE_KEYS: dict[str, Any] = {
    "path": str,
    **dict.fromkeys(COMPANIONS, str | None),
    "max_epochs": float | None,
    "max_tokens": int | None,
    "holdout": int | None,
}
"""What a source of a mixture may have; all but the path is optional."""

SET_KEYS: dict[str, Any] = {"path": str, **dict.fromkeys(COMPANIONS, str | None), "tags": tuple[str, ...]}
"""What a validation set may have; all but the path is optional."""

_KEYS = ("sources", "weights", "valid_sets")
_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*")


class MixtureFault(ValueError):
    """What is wrong, and `place`: the keys that lead to it inside the mapping, joined by dots."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class NamedMixture:
    """A mixture as people think of it: everything by the name of the source.

    `phases` are (first step, weights); a source without a weight has 0. Constant weights are one phase from step 0.
    """

    sources: dict[str, dict[str, Any]]
    phases: list[tuple[int, dict[str, float]]]
    valid_sets: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_value(self) -> dict[str, Any]:
        """The mapping that `parse` reads as this."""
        weights: Any = [[step, weights] for step, weights in self.phases]
        if len(self.phases) == 1:
            weights = self.phases[0][1]
        value = {"sources": self.sources, "weights": weights, "valid_sets": self.valid_sets}
        return {name: thaw(part) for name, part in value.items() if part}

    def shares_at(self, step: int) -> dict[str, float]:
        """The weights at a step, adding up to 1."""
        weights = next(weights for start, weights in reversed(self.phases) if start <= step)
        total = math.fsum(weights.values())
        return {name: weight / total for name, weight in weights.items()}


def parse(value: Any) -> NamedMixture:
    """The mixture of a mapping. Raises `MixtureFault`."""
    if not isinstance(value, Mapping):
        raise MixtureFault("", f"expected a mapping with sources and weights, got {describe(value)}")
    for name in value:
        if name not in _KEYS:
            hint = nearest(str(name), [*_KEYS, "interpolate"])
            raise MixtureFault(str(name), f"unknown key {name!r} in a mixture.{hint}")
    sources = parse_named(value.get("sources"), SOURCE_KEYS, "sources")
    if not sources:
        raise MixtureFault("sources", "a mixture needs sources: {name: path}")
    phases = _phases(value.get("weights"), sources)
    return NamedMixture(sources, phases, parse_named(value.get("valid_sets"), SET_KEYS, "valid_sets"))


def parse_named(value: Any, schema: Mapping[str, Any], place: str) -> dict[str, dict[str, Any]]:
    """name -> mapping by `schema`, from a mapping whose values are such mappings or just a path."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise MixtureFault(place, f"expected a mapping {{name: path}}, got {describe(value)}")
    found: dict[str, dict[str, Any]] = {}
    for name, inner in value.items():
        here = ".".join(part for part in (place, str(name)) if part)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise MixtureFault(here, f"{name!r} is not a name: letters, digits and . _ + - / make one")
        given = {"path": inner} if isinstance(inner, str) else inner
        if not isinstance(given, Mapping) or not isinstance(given.get("path"), str):
            raise MixtureFault(here, f"expected a path or a mapping with a path, got {describe(inner)}")
        found[name] = {}
        for key, part in given.items():
            if key not in schema:
                raise MixtureFault(f"{here}.{key}", f"unknown key {key!r}.{nearest(str(key), list(schema))}")
            try:
                typed = coerce_type(part, schema[key])
                if key == "path" or key in COMPANIONS:
                    check_path(typed)
            except WrongValue as error:
                raise MixtureFault(f"{here}.{key}", f"{key}: {error}") from error
            if typed is not None:
                found[name][key] = thaw(typed)
    return found


def _phases(value: Any, sources: Mapping[str, Any]) -> list[tuple[int, dict[str, float]]]:
    if value is None:
        return [(0, dict.fromkeys(sources, 1.0))]
    if isinstance(value, Mapping):
        return [(0, _weights(value, sources, "weights"))]
    expected = "expected {source: number} or [[0, {source: number}], [step, {source: number}], ...]"
    if not isinstance(value, (list, tuple)) or not value:
        raise MixtureFault("weights", f"{expected}, got {describe(value)}")
    phases = []
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[1], Mapping):
            raise MixtureFault("weights", f"{expected}; {pair!r} is not [step, {{source: number}}]")
        try:
            phases.append((coerce_type(pair[0], int), _weights(pair[1], sources, "weights")))
        except WrongValue as error:
            raise MixtureFault("weights", f"the step of a phase: {error}") from error
    fault = check_steps([step for step, _ in phases])
    if fault:
        raise MixtureFault("weights", fault)
    return phases


def check_steps(steps: Sequence[int]) -> str | None:
    """What is wrong with the first steps of phases: they begin at 0 and rise."""
    if steps[0] != 0:
        return f"the first phase begins at step 0, not {steps[0]}"
    for step, following in itertools.pairwise(steps):
        if following <= step:
            return f"the phases must begin at rising steps; {following} comes after {step}"
    return None


def _weights(value: Mapping[Any, Any], sources: Mapping[str, Any], place: str) -> dict[str, float]:
    weights = dict.fromkeys(sources, 0.0)
    for name, weight in value.items():
        if name not in sources:
            hint = nearest(str(name), list(sources))
            raise MixtureFault(f"{place}.{name}", f"there is no source {name!r} in this mixture.{hint}")
        try:
            weights[name] = coerce_type(weight, float)
        except WrongValue as error:
            raise MixtureFault(f"{place}.{name}", f"the weight of {name}: {error}") from error
    if min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise MixtureFault(place, f"weights must not be negative and not all 0, are {weights}")
    return weights


def interpolate(parts: Sequence[tuple[NamedMixture, float]]) -> NamedMixture:
    """One mixture of several, each normalised and counted with its share; the shares add up to 1.

    What several have by one name is one source (or set), whose weights add up; it must be the same in all.
    Raises `MixtureFault`.
    """
    total = math.fsum(share for _, share in parts)
    if any(share < 0 for _, share in parts) or abs(total - 1) > 1e-6:
        raise MixtureFault("interpolate", f"the shares must not be negative and add up to 1, not {total:g}")
    sources: dict[str, dict[str, Any]] = {}
    sets: dict[str, dict[str, Any]] = {}
    for mixture, _ in parts:
        for merged, new in ((sources, mixture.sources), (sets, mixture.valid_sets)):
            for name, found in new.items():
                if merged.setdefault(name, found) != found:
                    raise MixtureFault("interpolate", f"{name} is {merged[name]} in one mixture, {found} in another")
    phases = []
    for step in sorted({step for mixture, _ in parts for step, _ in mixture.phases}):
        now = [(mixture.shares_at(step), share) for mixture, share in parts]
        weights = {name: math.fsum(share * found.get(name, 0.0) for found, share in now) for name in sources}
        phases.append((step, weights))
    return NamedMixture(sources, phases, sets)


def weight_phases(weights: Sequence[Any] | None) -> list[tuple[int, tuple[float, ...]]] | None:
    """`train_data_weights` as (first step, weights) pairs: constant ones are one pair from step 0."""
    if weights is None:
        return None
    if weights and isinstance(weights[0], (tuple, list)):
        return [(step, tuple(inner)) for step, inner in weights]
    return [(0, tuple(weights))]


def sets_in_training(weights: Sequence[Any] | None, holdout: Any) -> bool:
    """Whether sources of training hold validation sets: held-out documents, or all when no phase draws from them.

    Args:
        weights: `train_data_weights`.
        holdout: `train_data_holdout`.
    """
    if any(holdout) if isinstance(holdout, tuple) else holdout:
        return True
    columns = zip(*(inner for _, inner in weight_phases(weights) or ()), strict=False)  # refused elsewhere if unequal
    return any(not any(column) for column in columns)
