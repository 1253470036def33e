"""The mutants: mistakes that real trainers have shipped, one each, made in our own code for a moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tests.training.tiny import Layout

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One mistake and the run that shows it.

    * `patch()`: a context in which the mistake is made, entered on every rank; its docstring says which one it is.
    * `model`, `layout`: of the run, see tests/training/models.py.
    * `shows`: what must be among the first differences: "gradient of 2.attention.dense.weight".
    * `scenario`: what is done, see tests/mutants/scenarios.py; of the clean tree, "steps" where it is "step".
    * `engines`: those that have the code in which it is made.
    """

    name: str
    patch: Patch
    model: str
    layout: Layout
    shows: str
    scenario: str
    engines: tuple[str, ...]


MUTANTS: dict[str, Mutant] = {}


def mutant(
    model: str, layout: Layout, shows: str, scenario: str = "step", engines: str = "deepspeed native"
) -> Callable[[Patch], Patch]:
    """Register the function under its name."""

    def register(patch: Patch) -> Patch:
        name = patch.__name__
        assert name not in MUTANTS and patch.__doc__, name
        MUTANTS[name] = Mutant(name, patch, model, layout, shows, scenario, tuple(engines.split()))
        return patch

    return register
