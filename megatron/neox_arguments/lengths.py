"""Lengths as people write them: a share (`0.1`), `500 steps`, `2B tokens`; and plain counts (`300B`, `1e21`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_FORM = re.compile(r"(\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?) ?([kmbt]?)(?: ?(step|token)s?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Length:
    """A part of a schedule: a share of it, or a number of steps or tokens."""

    number: float
    unit: Literal["share", "steps", "tokens"]

    @classmethod
    def parse(cls, value: float | str) -> Length:
        """A plain number is a share. Raises `ValueError` with what is expected."""
        found = _match(value)
        unit = "share" if found.unit == "" else f"{found.unit}s"
        if unit == "share" and not 0 <= found.number <= 1:
            advice = f": for {found.number:g} steps write {found.number:g} steps" if found.number > 1 else ""
            raise ValueError(f"is a fraction, between 0 and 1, not {found.number:g}{advice}")
        if unit == "steps" and found.number != int(found.number):
            raise ValueError(f"is no whole number of steps: {value}")
        return cls(found.number, unit)  # type: ignore[arg-type]


def in_steps(value: float | str, of: float) -> float:
    """A share of `of` steps, or a text that names steps, in steps: what rules leave of a length."""
    found = Length.parse(value)
    return found.number * of if found.unit == "share" else found.number


def cycle_ends(cycles: int | tuple[float | str, ...], steps: int) -> tuple[float, ...]:
    """Where cycles end (`lr_cycles`) in a schedule of `steps`: those before the end, and the end."""
    if isinstance(cycles, int):
        return tuple(steps * (index + 1) / cycles for index in range(cycles))
    ends = (in_steps(end, steps) for end in cycles)
    return (*(end for end in ends if end < steps), float(steps))


@dataclass(frozen=True)
class _Match:
    number: float
    unit: str


def _match(value: float | str, such_as: str = "'500 steps' or '2B tokens'") -> _Match:
    if not isinstance(value, str):
        return _Match(float(value), "")
    found = _FORM.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"is a number, {such_as}, not {value!r}")
    number = float(found[1].replace("_", "")) * _FACTORS[found[2].lower()]
    if not math.isfinite(number):
        raise ValueError(f"is not finite: {value}")
    return _Match(number, (found[3] or "").lower())


def parse_count(value: float | str, unit: str = "") -> float:
    """A count, above 0, as `300B`, `3e11` or `300_000_000_000`, perhaps with its unit. Raises `ValueError`."""
    found = _match(value, "such as 300K or 2B")
    if found.unit not in ("", unit):
        raise ValueError(f"is a number{f' of {unit}s' if unit else ''}, not {value!r}")
    if found.number <= 0:
        raise ValueError(f"must be above 0, is {value}")
    return found.number
