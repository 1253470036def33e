"""Rows: what is read from source is what is registered, and counts what is built."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron
from megatron.errors import UserError
from megatron.layers.activations import Activation
from megatron.mpu.sharding import ParamSpec, ones, parameter
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import norm_parameters, position_parameters
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.optimizer_params import optimizer_params
from megatron.neox_arguments.schema_train import OptimizerConfig
from megatron.optim.groups import parameter_groups
from megatron.optim.matrices import WholeMatrices
from megatron.optim.optimizers import build_optimizer
from megatron.plan.memory import moments
from megatron.registry import Registry
from megatron.rows import FOLDERS, read_rows, row, rows
from tests.model.networks import tiny
from tests.plugins.helpers import remembered

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Tables of this file's are not the library's."""
    with remembered():
        yield


def registry(kind: str) -> Registry:
    package = importlib.import_module("megatron." + FOLDERS[kind].replace("/", "."))
    return next(one for one in vars(package).values() if isinstance(one, Registry) and one.kind == kind)


@pytest.mark.parametrize("kind", FOLDERS)
def test_rows_read_from_source_are_those_at_run_time(kind: str) -> None:
    table = registry(kind)
    ours = {name: table.row(name) for name in table}
    assert {name: found.values for name, found in rows(kind).items()} == ours
    assert len(ours) >= 1 and all(found.doc for found in rows(kind).values())
    for found in rows(kind).values():
        file, line = found.place.rsplit(":", 1)
        assert ".register(" in Path(file).read_text().splitlines()[int(line) - 1]


def test_every_kind_is_named_by_a_key() -> None:
    named = {info.registry for info in all_keys().values()}
    assert named >= set(FOLDERS)
    assert all((Path(megatron.__file__).parent / folder / "__init__.py").is_file() for folder in FOLDERS.values())


@pytest.mark.parametrize("name", rows("norm"))
def test_the_row_of_a_norm_counts_what_is_built(name: str) -> None:
    norm = registry("norm")[name](24, eps=1e-5, state=ParallelState.single())
    assert norm_parameters(tiny(norm=name), 24) == sum(p.numel() for p in norm.parameters())


@pytest.mark.parametrize("name", rows("pos_emb"))
def test_the_row_of_a_position_scheme_counts_what_is_built(name: str) -> None:
    model = tiny(pos_emb=name)
    scheme = registry("pos_emb")[name]
    made = [make(model, ParallelState.single()) for make in (scheme.at_embedding, scheme.shared) if make is not None]
    assert position_parameters(model) == sum(p.numel() for module in made for p in module.parameters())


@pytest.mark.parametrize("name", rows("optimizer.type"))
def test_the_row_of_an_optimizer_counts_the_tensors_it_keeps(name: str) -> None:
    for momentum in (0.0, 0.9):
        state = ParallelState.single()
        weight = parameter(ParamSpec(shape=(3,), init=ones), state)
        whole = row("optimizer.type", name).get("matrices")
        matrices = WholeMatrices(state, every=whole == "all") if whole else None
        groups = parameter_groups([weight], weight_decay=0.0, matrices=matrices)
        optimizer = build_optimizer(name, groups, 0.1, optimizer_params(name, {"params": {"momentum": momentum}}))
        weight.grad = torch.ones(3)
        optimizer.step()
        kept = [value for value in optimizer.state[weight].values() if getattr(value, "shape", None) == weight.shape]
        stated = row("optimizer.type", name)["moments"]
        if not isinstance(stated, int):
            stated = stated.get("always", 0) + stated["momentum"] * (momentum > 0)
        assert len(kept) == stated


@pytest.mark.parametrize(
    ("kind", "name", "field", "count"),
    [
        ("norm", "rmsnorm", "vectors", lambda: norm_parameters(tiny(norm="rmsnorm"), 24)),
        ("pos_emb", "rotary", "table", lambda: position_parameters(tiny(pos_emb="rotary"))),
        ("optimizer.type", "lion", "moments", lambda: moments(OptimizerConfig(optimizer_type="lion"))),
    ],
)
def test_a_row_of_ours_without_its_size_is_refused_with_its_line(monkeypatch, kind, name, field, count) -> None:
    stated = rows(kind)[name]
    count()
    without = {key: value for key, value in stated.values.items() if key != field}
    monkeypatch.setitem(rows(kind), name, replace(stated, values=without))
    with pytest.raises(UserError, match=rf"{re.escape(stated.place)}: .*'{name}'.* {field}="):
        count()


def test_a_field_may_be_an_attribute_of_the_entry() -> None:
    table: Registry = Registry("thing", fields=("gated", "size"))
    table.register("plain")(torch.sin)
    table.register("gate")(Activation(torch.sin, gated=True))
    table.register("both", gated=False, size=3)(Activation(torch.sin, gated=True))
    assert [table.row(name) for name in table] == [{}, {"gated": True}, {"gated": False, "size": 3}]


@pytest.mark.parametrize(
    "source",
    ["NORMS.register(name)(f)\n", "NORMS.register('a', vectors=1 + n)(f)\n", "NORMS.register('a', **more)(f)\n"],
)
def test_a_row_that_is_not_literal_is_refused_with_its_line(source: str) -> None:
    with pytest.raises(UserError, match=r"^norms/x\.py:2: "):
        list(read_rows("norms/x.py", "# a comment\n" + source))


def test_a_keyword_that_the_registry_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match=r"test_rows\.py:\d+: norm: .*'vector'.*'vectors'"):
        registry("norm").register("other", vector=1)


def test_an_unknown_name_lists_the_choices_and_the_nearest() -> None:
    with pytest.raises(UserError, match=r"norm: 'rmsnrm' .*'rmsnorm'.*: layernorm, "):
        row("norm", "rmsnrm")
