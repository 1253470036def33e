"""What a config's data keys name: sources, their names and cuts, validation sets, folders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.order.data_plan import DataPlan
from megatron.data.order.datasets import build_datasets, epoch_samples, plan_datasets
from megatron.data.order.phases import Progress
from megatron.data.order.sources import head, named_paths, names_of, tail
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import write

pytestmark = pytest.mark.cpu


def numbered(prefix: Path, first: int, documents: int = 30, size: int = 10) -> str:
    return write(prefix, [[first + d] * size for d in range(documents)])


def plan_of(data: DataConfig, **more: Any) -> DataPlan:
    counts = {"seq_length": 4, "seed": 1, "train_samples": 20, "set_samples": 16, "progress": Progress(4)}
    return plan_datasets(data, **{**counts, **more})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 60), st.data())
def test_head_and_tail(sizes: list[int], tokens: int, data: st.DataObject) -> None:
    array = np.asarray(sizes, dtype=np.int32)
    first = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(first + 1, len(sizes)))
    _, stop = head(array, (first, end), tokens)
    assert first < stop <= end
    assert stop == first + 1 or sum(sizes[first:stop]) <= tokens
    assert stop == end or sum(sizes[first : stop + 1]) > tokens
    start, last = tail(array, (first, end), tokens)
    assert last == end and first <= start < end
    assert start == first or sum(sizes[start:end]) >= tokens
    assert start == end - 1 or sum(sizes[start + 1 : end]) < tokens


def test_names(tmp_path: Path) -> None:
    assert names_of(["x/a", "y/a", "b", "z/a"]) == ["a", "a-2", "b", "a-3"]
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 50))
    data = DataConfig(train_data_paths=paths, train_data_names=("books", "code"))
    assert [row.name for row in plan_of(data).table()] == ["books", "code"]
    train = build_datasets(data, seq_length=4, seed=1, train_samples=10).train
    assert {train.locate(i).path for i in range(10)} == {("books", paths[0]), ("code", paths[1])}


def test_relative_paths_start_from_data_root(tmp_path: Path) -> None:
    numbered(tmp_path / "in" / "a", 1)
    numbered(tmp_path / "in" / "v", 50)
    elsewhere = numbered(tmp_path / "b", 90)
    root = str(tmp_path / "in")
    data = DataConfig(
        data_root=root, train_data_paths=("a", elsewhere), valid_data_paths=("v",), valid_sets={"x": {"path": "v"}}
    )
    assert [row.prefix for row in plan_of(data, valid_samples=4).table()] == [
        f"{root}/a",
        elsewhere,
        f"{root}/v",
        f"{root}/v",
    ]
    assert named_paths(data, ["train", "valid"]) == [f"{root}/a", elsewhere, f"{root}/v", f"{root}/v"]
    assert plan_of(DataConfig(data_root=root, data_path="a", split="1")).table()[0].prefix == f"{root}/a"
    with pytest.raises(UserError, match=f"{root}/nothing"):
        plan_of(DataConfig(data_root=root, train_data_paths=("nothing",)))


def test_only_the_first_documents(tmp_path: Path) -> None:
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 50))
    rows = plan_of(DataConfig(train_data_paths=paths, train_data_max_tokens=(75, None))).table()
    assert [(row.documents, row.tokens) for row in rows] == [(7, 70), (30, 300)]
    rows = plan_of(DataConfig(train_data_paths=paths, train_data_max_tokens=200)).table()
    assert [row.tokens for row in rows] == [200, 200]
    datasets = build_datasets(
        DataConfig(train_data_paths=paths[:1], train_data_max_tokens=75), seq_length=4, seed=1, train_samples=40
    )
    assert {int(token) for i in range(40) for token in datasets.train[i].tokens} == set(range(1, 8))


def test_simulated_epoching_cuts_every_source_alike(tmp_path: Path) -> None:
    """A run of 80 tokens stands for one of 800: a tenth of every source, so that each repeats as often as there."""
    paths = (numbered(tmp_path / "a", 1, 40), numbered(tmp_path / "b", 50, 20))
    large = plan_of(DataConfig(train_data_paths=paths), train_samples=200)
    small = plan_of(DataConfig(train_data_paths=paths, target_budget=800, experiment_budget=80), train_samples=20)
    assert [row.tokens for row in small.table()] == [40, 20]
    assert [row.epochs for row in small.table()] == pytest.approx([row.epochs for row in large.table()])


def test_held_out_documents_are_a_validation_set(tmp_path: Path) -> None:
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 50))
    data = DataConfig(train_data_paths=paths, train_data_holdout=(5, None))  # 25 tokens: the last 3 documents
    plan = plan_of(data, train_samples=200)
    assert [(row.role, row.name, row.documents) for row in plan.table()] == [
        ("train", "a", 27),
        ("train", "b", 30),
        ("valid/a", "a", 3),
    ]
    datasets = plan.build()
    trained = {int(token) for i in range(200) for token in datasets.train[i].tokens}
    held = {int(token) for i in range(7) for token in datasets.valid_sets["a"][i].tokens}
    assert held == {28, 29, 30} and trained == {*range(1, 28), *range(50, 80)}
    with pytest.raises(UserError, match=r"train_data_holdout: a .*\b300 .*\b30 .*\b75\b"):
        plan_of(DataConfig(train_data_paths=paths, train_data_holdout=75))
    one = plan_of(DataConfig(data_path=paths[0], split="1", train_data_holdout=5))
    assert [(row.role, row.documents) for row in one.table()] == [("train", 27), ("valid/a", 3)]


def test_a_source_without_weight_is_validated_on(tmp_path: Path) -> None:
    paths = tuple(numbered(tmp_path / name, first) for name, first in (("a", 1), ("b", 50), ("c", 90)))
    weights = ((0, (1.0, 0.0, 0.0)), (3, (1.0, 0.0, 1.0)))
    data = DataConfig(train_data_paths=paths, train_data_weights=weights)
    plan = plan_of(data)
    assert [one.name for one in plan.sets] == ["b"]  # c comes in later
    assert epoch_samples(data, 4) == 74 + 74
    with pytest.raises(UserError, match="'b'.*train_data_names, valid_sets"):
        plan_of(DataConfig(train_data_paths=paths, train_data_weights=weights, valid_sets={"b": {"path": paths[2]}}))
    with pytest.raises(UserError, match="'b'.*train_data_names, valid_sets"):
        sets = {"x": {"path": paths[2], "tags": ["b"]}}
        plan_of(DataConfig(train_data_paths=paths, train_data_weights=weights, valid_sets=sets))


@pytest.mark.parametrize("pack_impl", ["packed", "pack_until_overflow", "unpacked", "best_fit"])
@pytest.mark.parametrize(("documents", "asked"), [(3, 16), (30, 16), (30, 400)])
def test_a_set_is_read_once_in_whole_steps(tmp_path: Path, pack_impl: str, documents: int, asked: int) -> None:
    train = numbered(tmp_path / "t", 1)
    path = write(tmp_path / "v", [[100 + d] * (5 + 5 * d % 9) for d in range(documents)])
    data = DataConfig(train_data_paths=(train,), valid_sets={"v": {"path": path}}, pack_impl=pack_impl)
    plan = plan_of(data, set_samples=asked, seq_length=12)
    (one,) = plan.sets
    there = plan.roles["valid/v"].sources[0].packing.samples_per_epoch()
    assert one.samples == min(there, asked) and one.steps == -(-one.samples // 4)
    dataset = plan.build().valid_sets["v"]
    assert len(dataset) == one.steps * 4
    found = [dataset.locate(i).pieces for i in range(len(dataset))]
    assert [bool(pieces) for pieces in found] == [True] * one.samples + [False] * (len(dataset) - one.samples)
    if pack_impl != "packed":  # there a document may lie in several samples
        times = Counter(piece.document for pieces in found for piece in pieces)
        assert set(times.values()) == {1} and (asked < there or len(times) == documents)
    assert len({pieces for pieces in found if pieces}) == one.samples
    rules = CollateRules(12, intra_document_masking=True)
    loader = StepLoader(dataset, micro_batch=2, gas=2, rules=rules)
    alone = StepLoader(dataset.source, micro_batch=1, gas=1, rules=rules)
    trained = sum(int(batch.mask.sum()) for batch in loader.steps())
    assert trained == sum(int(alone.read(i, i).mask.sum()) for i in range(one.samples)) > 0
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_set_is_the_same_in_runs_of_any_length_and_batch(tmp_path: Path) -> None:
    train, path = numbered(tmp_path / "t", 1), numbered(tmp_path / "v", 100)
    data = DataConfig(train_data_paths=(train,), valid_sets={"v": {"path": path}})
    short = plan_of(data, train_samples=8).build().valid_sets["v"]
    long = plan_of(data, train_samples=80, set_samples=40, progress=Progress(8)).build().valid_sets["v"]
    assert [short[i].tokens.tolist() for i in range(16)] == [long[i].tokens.tolist() for i in range(16)]


def test_sources_with_and_without_labels(tmp_path: Path) -> None:
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 50))
    labels = write(tmp_path / "l", [[-100] * 10 for _ in range(30)], np.int32)
    data = DataConfig(train_data_paths=paths, train_label_data_paths=(None, labels))
    train = build_datasets(data, seq_length=4, seed=1, train_samples=10).train
    assert {(train.locate(i).path[0], train[i].labels is None) for i in range(10)} == {("a", True), ("b", False)}
    assert IndexedDataset(paths[0]).num_tokens == 300


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_is_the_same_for_every_layout_across_phases(tmp_path: Path, workers: int) -> None:
    """Known-faults 5: other data-parallel sizes, micro-batches and workers, resumed at every step."""
    paths = tuple(numbered(tmp_path / name, first) for name, first in (("a", 1), ("b", 50), ("c", 90)))
    weights = ((0, (2.0, 1.0, 0.0)), (2, (1.0, 1.0, 1.0)), (5, (0.0, 1.0, 2.0)))
    data = DataConfig(train_data_paths=paths, train_data_weights=weights, train_data_max_epochs=5.0)
    train = plan_of(data, train_samples=7 * 8, progress=Progress(8)).build().train
    expected = [[train[i].tokens[:-1].tolist() for i in range(8 * k, 8 * k + 8)] for k in range(7)]
    for dp, micro in ((1, 8), (1, 2), (2, 2), (4, 1), (8, 1)):
        gas = 8 // (dp * micro)
        loaders = [
            StepLoader(
                train, micro_batch=micro, gas=gas, rules=CollateRules(4), dp_rank=rank, dp_size=dp, num_workers=workers
            )
            for rank in range(dp)
        ]
        for start in range(7):
            steps = zip(*(loader.steps(8 * start) for loader in loaders), strict=True)
            for k, ranks in enumerate(steps, start):
                got = [row for m in range(gas) for batch in ranks for row in batch.tokens[m].tolist()]
                assert got == expected[k]


def test_sets_among_the_sources_of_training_are_there_without_training(tmp_path: Path) -> None:
    """`train_iters: 0` validates what is loaded."""
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 50))
    data = DataConfig(train_data_paths=paths, train_data_weights=(1.0, 0.0), train_data_holdout=(2, None))
    plan = plan_of(data, train_samples=0)
    assert list(plan.roles) == ["valid/a", "valid/b"]
    assert list(plan_of(data, train_samples=0, set_samples=0).roles) == []
