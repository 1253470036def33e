"""What `parameter_groups` says of parameters by name: an ordered list of rules, of which later ones win."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron.errors import UserError, nearest

_FIELDS = ["match", "weight_decay", "lr_mult", "freeze"]


@dataclass(frozen=True)
class ParameterRule:
    """One entry of `parameter_groups`. What is None is left to earlier rules and the other keys.

    Attributes:
        match: shell patterns (`*`, `?`, `[ab]`) of canonical names; `*` also matches dots.
        weight_decay: in place of the key `weight_decay`, also where nothing decays by default.
        lr_mult: times the learning rate of the schedule.
        freeze: whether the parameters are not trained at all.
    """

    match: tuple[str, ...]
    weight_decay: float | None = None
    lr_mult: float | None = None
    freeze: bool | None = None

    def fits(self, name: str) -> bool:
        """Whether it speaks of the parameter with this canonical name."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)


def parse_rules(value: Sequence[Mapping[str, Any]] | None) -> tuple[ParameterRule, ...]:
    """The rules of the key `parameter_groups`. Raises `UserError` naming the entry (from 0), field and value."""
    return tuple(_parse(entry, f"entry {index}") for index, entry in enumerate(value or ()))


def _parse(entry: Mapping[str, Any], where: str) -> ParameterRule:
    for name in entry:
        if name not in _FIELDS:
            raise UserError(f"{where}: {name!r} is not known.{nearest(name, _FIELDS)} Fields: {', '.join(_FIELDS)}")
    patterns = entry.get("match")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(one, str) for one in patterns):
        raise UserError(f"{where}: match must be a pattern of parameter names or a list of them, is {patterns!r}")
    if len(entry) == 1:
        raise UserError(f"{where}: says nothing of {', '.join(patterns)}; add weight_decay, lr_mult or freeze")
    numbers = {name: _number(entry[name], f"{where}: {name}") for name in ("weight_decay", "lr_mult") if name in entry}
    freeze = entry.get("freeze")
    if "freeze" in entry and not isinstance(freeze, bool):
        raise UserError(f"{where}: freeze must be true or false, is {freeze!r}")
    return ParameterRule(tuple(patterns), freeze=freeze, **numbers)


def _number(value: Any, where: str) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)  # YAML reads 1e-4 as text
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise UserError(f"{where} must be a number of 0 or more, is {value!r}")
    return number


def check_matches(rules: Iterable[ParameterRule], names: Sequence[str], where: str) -> None:
    """Every pattern matches a parameter. Raises `UserError` naming the pattern and names near it.

    Args:
        names: canonical names of the whole model.
        where: the place at which the key was set, for the message.
    """
    check_patterns([pattern for rule in rules for pattern in rule.match], names, f"{where}parameter_groups")


def check_patterns(patterns: Iterable[str], names: Sequence[str], where: str) -> None:
    """Each matches one of the names. Raises `UserError` naming the first that does not, and names near it."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"{where}: {pattern!r} matches no parameter of this model; near it: "
                f"{', '.join(_near(pattern, names))} (patterns are of whole names, `*` stands for anything)"
            )


def _near(pattern: str, names: Sequence[str], most: int = 3) -> list[str]:
    """The names that have most in common with a pattern."""
    bare = pattern.replace("*", "").strip(".")
    inside = [name for name in names if bare and bare in name]
    if inside:
        return inside[:most]
    from difflib import SequenceMatcher  # slow to import, and only a message needs it

    likeness = {name: SequenceMatcher(None, bare, name).ratio() for name in names}
    return sorted(names, key=lambda name: -likeness[name])[:most]
