"""Every mutant is seen by a comparison of all tensors with one rank's, and the clean tree raises nothing.

The mutants of one model, layout and scenario are run in one call, one after the other, and then the clean tree.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutants import (
    buckets,
    data_parallel,
    experts,
    pipeline,
    precision,
    recurrent,
    resume,
    tensor_parallel,
    texts,
)
from tests.mutants.compare import Comparison, Difference
from tests.mutants.registry import MUTANTS, Mutant
from tests.mutants.scenarios import alone, run
from tests.training.models import MODELS
from tests.training.tiny import BATCH, Layout

pytestmark = pytest.mark.cpu

# Importing them fills the registry.
PROVIDERS = (buckets, data_parallel, experts, pipeline, precision, recurrent, resume, tensor_parallel, texts)


# Where the clean tree is compared besides the layouts of mutants.
LAYOUTS = [
    Layout(tp=2, micro=1, sequence_parallel=True),
    Layout(pp=2, micro=1),
    Layout(dp=2, zero=2),
    Layout(dp=2, zero=3),
]
FOUR_RANKS = [
    ("neox-tied", Layout(pp=2, dp=2, zero=1)),
    ("rpe", Layout(pp=2, tp=2, micro=1, sequence_parallel=True)),
    ("moe-all", Layout(pp=2, dp=2, ep=2)),
    ("moe", Layout(dp=2, tp=2, ep=2, micro=1, sequence_parallel=True)),
    ("gemma3", Layout(dp=2, tp=2, micro=1, zero=3, sequence_parallel=True)),
    ("mamba-hybrid", Layout(pp=2, dp=2, zero=1)),
    ("moe", Layout(dp=2, tp=2, ep=2, micro=1, sequence_parallel=True, engine="native")),
    ("gemma3", Layout(dp=2, tp=2, micro=1, sequence_parallel=True, engine="native")),
    ("rpe", Layout(dp=2, tp=2, micro=1, sequence_parallel=True, engine="native")),
    ("documents", Layout(dp=4, micro=1, engine="native")),
    ("moe-all", Layout(dp=4, ep=4, micro=1, engine="native")),
]
RESUMED = [
    ("moe", Layout(pp=2, dp=2, ep=2)),
    ("moe", Layout(dp=2, tp=2, ep=2, engine="native")),
    ("neox-tied", Layout(dp=2, tp=2, engine="native")),
    ("mup", Layout(dp=2, engine="native")),
    ("rpe", Layout(pp=2, dp=2, zero=1)),
]


class Place(NamedTuple):
    """One call."""

    model: str
    layout: Layout
    scenario: str

    def __str__(self) -> str:
        return f"{self.model}-{self.layout.name}-{self.scenario}"


def places_of(one: Mutant) -> Iterator[Place]:
    """Where a mutant is run: at its layout, with each engine that can. The layers are the same in both: mistakes
    between tensor-parallel ranks are made on one, but for steps that are skipped."""
    scenario = "steps" if one.scenario == "step" else one.scenario
    if "deepspeed" in one.engines:
        yield Place(one.model, one.layout, scenario)
    own = one.layout.dp > 1 or one.layout.tp == 1 or one.scenario == "overflow"
    if "native" in one.engines and one.layout.pp == 1 and one.layout.zero < 3 and own:
        yield Place(one.model, replace(one.layout, engine="native"), scenario)


PLACES: dict[Place, list[str]] = {}
for one in MUTANTS.values():
    for place in places_of(one):
        PLACES.setdefault(place, []).append(one.name)


CASES = [(name, place) for place, names in PLACES.items() for name in names]


MORE = [
    *(Place(model, layout, "steps") for model in MODELS if MODELS[model]["precision"] == "fp32" for layout in LAYOUTS),
    *(Place(model, layout, "steps") for model, layout in FOUR_RANKS),
    *(Place(model, layout, "resumed") for model, layout in RESUMED),
]


@functools.cache
def found(place: Place) -> dict[str, list[Difference]]:
    """The differences that each mutant of a place makes, and those of the clean tree as ""."""
    keys: dict[str, Any] = MODELS[place.model]
    # In half precision the same micro-batches, or their products round otherwise.
    micro = place.layout.micro if "precision" in keys and keys["precision"] != "fp32" else BATCH
    reference, names = alone(place.scenario, keys, micro), PLACES.get(place, [])
    runs = run(place.scenario, keys, place.layout, [(MUTANTS[name].scenario, MUTANTS[name].patch) for name in names])
    compared = (Comparison(reference, ranks, keys, place.layout).differences() for ranks in runs)
    return dict(zip((*names, ""), compared, strict=True))


def report(name: str, place: Place, differences: list[Difference]) -> str:
    return "\n".join([f"{name} at {place}:", *map(str, differences[:10]), f"{len(differences)} in all"])


@pytest.mark.parametrize(("name", "place"), CASES, ids=str)
def test_mutant_is_seen(name: str, place: Place) -> None:
    differences = found(place)[name]
    assert differences, f"{name} at {place}: nothing differs"
    shown = [difference.what for difference in differences]
    assert any(fnmatchcase(what, MUTANTS[name].shows) for what in shown), report(name, place, differences)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_nothing_is_seen_on_the_clean_tree(place: Place) -> None:
    differences = found(place)[""]
    assert not differences, report("the clean tree", place, differences)


@pytest.mark.full
@pytest.mark.parametrize("place", [place for place in MORE if place not in PLACES], ids=str)
def test_nothing_is_seen_at_more_layouts(place: Place) -> None:
    differences = found(place)[""]
    assert not differences, report("the clean tree", place, differences)


def test_the_table_of_reported_faults_names_mutants() -> None:
    rows = [line.split("|") for line in (Path(__file__).parent / "README.md").read_text().splitlines() if "#" in line]
    named = {name for row in rows if len(row) > 3 for name in re.findall(r"`(\w+)`", row[3])}
    assert len(named) > 20 and named <= set(MUTANTS), named - set(MUTANTS)
