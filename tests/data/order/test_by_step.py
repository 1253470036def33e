"""Steps that read a forget set between others: each source in its own order, nothing twice, nothing left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron.data.order.by_step import KIND, SourceCounts, documents_of
from megatron.data.order.data_plan import DataPlan
from megatron.data.order.datasets import plan_datasets
from megatron.data.order.phases import Progress
from megatron.data.order.saved_order import SavedOrder
from megatron.data.sample import Sample
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.forget_steps import FORGET, RETAIN, SOURCES, TRAIN, ForgetSteps
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import write

pytestmark = pytest.mark.cpu

END = 20
STAGES = ((0, 2), (4, 6))  # a batch that grows
EVERY_3 = ForgetSteps(3, 3)
EVERY_2 = ForgetSteps(2, 2)
DIFFERENCE = ForgetSteps(3, 3, sources=(FORGET, RETAIN))
BURSTS = ForgetSteps(4, 6, 2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A source for each role; every document is one number, and no two are the same."""
    folder = tmp_path_factory.mktemp("sources")
    documents = {TRAIN: 90, FORGET: 12, RETAIN: 30}
    return {
        name: write(folder / name, [[1 + 1000 * i + d] * (5 + (d * 7) % 23) for d in range(documents[name])])
        for i, name in enumerate(SOURCES)
    }


def planned(
    paths: dict[str, str],
    forget: ForgetSteps | None,
    done: tuple[int, int] = (0, 0),
    order: SavedOrder | None = None,
    **keys: Any,
) -> DataPlan:
    batches, order = BatchPlan(STAGES, forget=forget), order or SavedOrder()
    counts = SourceCounts(batches, done[0], order.taken or {TRAIN: done[1]}, END)
    names = () if forget is None else forget.sources
    return plan_datasets(
        DataConfig(train_data_paths=(paths[TRAIN],), **keys),
        seq_length=8,
        seed=3,
        train_samples=counts.before(END, TRAIN),
        progress=Progress(STAGES[-1][1], *done, (0, 0), batches),
        saved=order,
        counts=counts,
        unlearning={name: {"path": paths[name]} for name in names},
    )


def saved(plan: DataPlan, step: int) -> SavedOrder:
    """As it comes back from the checkpoint after `step` steps."""
    return SavedOrder.read(json.loads(json.dumps(plan.state(step))))


def read(plan: DataPlan, first: int, end: int) -> list[tuple[str, list[int]]]:
    """Source and tokens of the samples of some steps."""
    train, counts = plan.build().train, plan.counts
    assert train is not None and counts is not None
    found = []
    for index in range(counts.total(first), counts.total(end)):
        sample = train[index]
        (kind,) = set(sample.extras[KIND].tolist())
        assert train.locate(index).path[0] == SOURCES[int(kind)]
        found.append((SOURCES[int(kind)], sample.tokens.tolist()))
    return found


def of(samples: Sequence[tuple[str, Any]], source: str) -> list[Any]:
    return [tokens for name, tokens in samples if name == source]


@pytest.mark.parametrize("forget", [EVERY_3, DIFFERENCE, BURSTS], ids=["interleaved", "difference", "interval"])
def test_each_step_reads_its_sources_in_their_order(paths: dict[str, str], forget: ForgetSteps) -> None:
    plan = planned(paths, forget)
    samples = read(plan, 0, END)
    batches = [(step, next(b for first, b in reversed(STAGES) if first <= step)) for step in range(END)]
    expected = [
        name
        for step, batch in batches
        for name in ((TRAIN,) if not forget.is_one(step) else forget.sources)
        for _ in range(batch)
    ]
    assert [name for name, _ in samples] == expected and len(plan.build().train) == len(expected)
    for name in dict.fromkeys(expected):  # as if each were read alone
        role = plan.roles[name]
        alone = role.sources[role.drawn[0]].dataset()
        assert of(samples, name) == [alone[i].tokens.tolist() for i in range(expected.count(name))]


def test_given_references_are_of_what_is_forgotten_alone(paths: dict[str, str]) -> None:
    """Those of the other sources are nowhere."""
    texts = IndexedDataset(paths[FORGET])
    write(f"{paths[FORGET]}_base", [(texts.get(i)[1:] / -4).tolist() for i in range(len(texts))], np.float32)
    keys = {"ga_dataset": paths[FORGET], "pack_impl": "unpacked", "precompute_model_name": "base"}
    train = planned(paths, DIFFERENCE, **keys).build().train
    assert train is not None
    for index in range(len(train)):
        sample = train[index]
        assert isinstance(sample, Sample) and sample.length is not None
        known = np.where(np.arange(9) < sample.length, sample.tokens / -4, 0) * (
            sample.extras[KIND] == SOURCES.index(FORGET)
        )
        assert sample.extras["reference"][1:].tolist() == known[1:].tolist()


@pytest.mark.parametrize("step", [1, 3, 4, 5, 13])
def test_a_resume_reads_what_a_straight_run_reads(paths: dict[str, str], step: int) -> None:
    for forget in (DIFFERENCE, BURSTS):
        plan = planned(paths, forget)
        assert plan.counts is not None
        again = planned(paths, forget, (step, plan.counts.total(step)), saved(plan, step))
        assert read(again, step, END) == read(plan, step, END)
        assert again.state(END) == plan.state(END)


@pytest.mark.parametrize(
    ("before", "after"), [(EVERY_3, EVERY_2), (EVERY_3, None), (None, EVERY_2), (DIFFERENCE, EVERY_2)], ids=str
)
def test_a_change_of_the_steps_reads_on_in_every_source(
    paths: dict[str, str], before: ForgetSteps | None, after: ForgetSteps | None
) -> None:
    plan = planned(paths, before)
    assert plan.counts is not None
    past = read(plan, 0, 10)
    order, done = saved(plan, 10), (10, len(past))
    then = read(planned(paths, after, done, order), 10, END)
    for name in {name for name, _ in then}:
        role = planned(paths, after, done, order).roles[name]
        alone = role.sources[role.drawn[0]].dataset()
        count = len(of(past, name))
        assert of([*past, *then], name) == [alone[i].tokens.tolist() for i in range(count + len(of(then, name)))]
    taken = planned(paths, after, done, order).state(END)["taken"]
    assert taken == {name: len(of([*past, *then], name)) for name in SOURCES if of([*past, *then], name)}


def test_forget_data_that_was_read_cannot_be_replaced(paths: dict[str, str]) -> None:
    plan = planned(paths, EVERY_3)
    assert plan.counts is not None
    done = (10, plan.counts.total(10))
    with pytest.raises(UserError, match=r"/retain: documents"):
        planned({**paths, FORGET: paths[RETAIN]}, EVERY_3, done, saved(plan, 10))


def test_documents_are_found_in_the_samples_that_hold_them(paths: dict[str, str]) -> None:
    train = planned(paths, DIFFERENCE).build().train
    assert train is not None
    for name in SOURCES:
        wanted = {paths[name]: range(2, 4)}
        holds = [
            index
            for index in range(len(train))
            if train.locate(index).path[0] == name and {2, 3} & {piece.document for piece in train.locate(index).pieces}
        ]
        assert holds and set(holds) <= set(train.may_hold(wanted).tolist())
        assert all(train.locate(i).path[0] == name for i in train.may_hold(wanted).tolist())


def test_documents_of_a_sample_are_answers() -> None:
    sample = Sample(np.arange(9), np.array([0, 1, 4]))
    answers = documents_of(sample)
    assert answers is not None and answers.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]  # none is without a target
    assert documents_of(replace(sample, starts=None)) is None
