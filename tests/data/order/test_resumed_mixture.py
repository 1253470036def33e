"""A run that goes on: what it has read stays, what is to come may change, and a resume changes nothing."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.data_plan import DataPlan
from megatron.data.order.datasets import plan_datasets
from megatron.data.order.phases import Progress
from megatron.data.order.saved_order import SavedOrder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import write

pytestmark = pytest.mark.cpu

BATCH = 4
PACKINGS = ("packed", "pack_until_overflow", "unpacked", "best_fit")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four sources of 40 to 100 samples of 8; every document is one number, and no two are the same."""
    folder = tmp_path_factory.mktemp("sources")
    found = {}
    for number, (name, documents) in enumerate({"a": 60, "b": 45, "c": 30, "d": 25}.items()):
        first = 1 + 1000 * number
        found[name] = write(folder / name, [[first + d] * (5 + (d * 7 + number) % 23) for d in range(documents)])
    return found


def config(paths: dict[str, str], names: str = "abc", weights: Any = None, **more: Any) -> DataConfig:
    weights = weights if weights is not None else (1.0,) * len(names)
    return DataConfig(train_data_paths=tuple(paths[name] for name in names), train_data_weights=weights, **more)


def plan_of(
    data: DataConfig, steps: int, order: SavedOrder | None = None, done: Progress | None = None, **more: Any
) -> DataPlan:
    progress = done or Progress(BATCH)
    samples = progress.samples_at(steps)
    return plan_datasets(data, seq_length=8, seed=3, train_samples=samples, progress=progress, saved=order, **more)


def saved(plan: DataPlan) -> SavedOrder:
    """As it comes back from a checkpoint."""
    return SavedOrder.read(json.loads(json.dumps(plan.state())))


def read(plan: DataPlan, first: int = 0, end: int | None = None) -> list[list[int]]:
    train = plan.build().train
    return [train[i].tokens.tolist() for i in range(first, end if end is not None else plan.roles["train"].samples)]


def sources(plan: DataPlan) -> list[str]:
    train = plan.build().train
    return [train.locate(i).path[0] for i in range(plan.roles["train"].samples)]


CHANGING = ((0, (3.0, 1.0, 0.0)), (5, (1.0, 1.0, 0.0)), (9, (1.0, 0.0, 2.0)))


@pytest.mark.parametrize("pack_impl", PACKINGS)
@pytest.mark.parametrize("kind", ["constant", "phases", "capped", "redistributed"])
def test_a_resume_at_any_step_reads_what_a_straight_run_reads(paths: dict[str, str], pack_impl: str, kind: str) -> None:
    more = {
        "constant": {"weights": (0.5, 0.3, 0.2)},
        "phases": {"weights": CHANGING},
        "capped": {"weights": CHANGING, "train_data_max_epochs": 2.0},
        "redistributed": {
            "weights": CHANGING,
            "train_data_max_epochs": (None, 0.2, 0.3),
            "train_data_on_cap": "redistribute",
        },
    }[kind]
    data = config(paths, pack_impl=pack_impl, **more)
    straight = plan_of(data, 14)
    expected = read(straight)
    for step in range(0, 15, 2):
        again = plan_of(data, 14, saved(straight), Progress(BATCH, step, step * BATCH))
        assert read(again) == expected
        assert saved(again) == saved(straight)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_change_of_the_future_leaves_the_past(paths: dict[str, str], data: st.DataObject) -> None:
    """Random packings, weights, stops, new sources, new phases, caps and lengths, one after the other."""
    packing = {"pack_impl": data.draw(st.sampled_from(PACKINGS))}
    number, cap = st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([None, 0.05, 0.1, 0.3, 1.0])

    def weights(count: int) -> tuple[float, ...]:
        return tuple(data.draw(st.lists(number, min_size=count, max_size=count).filter(lambda found: sum(found) > 0)))

    def planned(steps: int, order: SavedOrder | None = None, done: Progress | None = None) -> DataPlan:
        caps = tuple(data.draw(st.lists(cap, min_size=len(names), max_size=len(names))))
        capped = {"train_data_max_epochs": caps, "train_data_on_cap": "redistribute"} if any(caps) else {}
        try:
            return plan_of(config(paths, names, tuple(pairs), **packing, **capped), steps, order, done)
        except UserError as error:  # the caps leave too little: without them it goes on
            if not str(error).startswith("train_data_max_epochs: the "):
                raise
            return plan_of(config(paths, names, tuple(pairs), **packing), steps, order, done)

    names, steps = "ab", data.draw(st.integers(2, 6))
    pairs: list[tuple[int, tuple[float, ...]]] = [(0, weights(2))]
    plan = planned(steps)
    for new in ("c", "d"):
        before, past = plan, read(plan)
        done, more = data.draw(st.integers(1, steps)), data.draw(st.integers(1, 5))
        names = names + new
        pairs = [(step, (*old, 0.0)) for step, old in pairs if step < done]
        pairs.append((done + data.draw(st.integers(0, 2)), weights(len(names))))
        steps = max(steps, done) + more
        plan = planned(steps, saved(before), Progress(BATCH, done, done * BATCH))
        assert read(plan, 0, done * BATCH) == past[: done * BATCH]
        role = plan.roles["train"]
        train = plan.build().train
        taken = Counter(train.locate(i).path[0] for i in range(role.samples)) if len(role.drawn) > 1 else Counter()
        for one in role.sources:
            assert one.most is None or taken[one.source.name] <= max(one.most, used_before(before, done, one))
        # A resume in between changes nothing.
        again = data.draw(st.integers(done, steps))
        caps = tuple(one.source.max_epochs for one in role.sources)
        order = [one.source.name for one in role.sources]
        capped = packing | ({"train_data_on_cap": "redistribute"} if any(caps) else {})
        resumed = config(
            paths, "".join(order), tuple((step, reorder(old, names, order)) for step, old in pairs), **capped
        )
        resumed = replace(resumed, train_data_max_epochs=caps if any(caps) else None)
        assert read(plan_of(resumed, steps, saved(plan), Progress(BATCH, again, again * BATCH))) == read(plan)


def reorder(weights: tuple[float, ...], names: str, order: list[str]) -> tuple[float, ...]:
    return tuple(weights[names.index(name)] for name in order)


def used_before(plan: DataPlan, steps: int, source: Any) -> int:
    """What a run has drawn of a source, as its plan says: a new cap does not undo it. One more for each phase: the
    planning counts each up to the last whole sample."""
    train = plan.build().train
    taken = sum(
        train.locate(i).path[0] in (source.source.name, source.source.data.prefix) for i in range(steps * BATCH)
    )
    return taken + len(plan.roles["train"].phases)


def test_nothing_repeats_when_weights_change_or_sources_are_added(paths: dict[str, str]) -> None:
    """Known-faults' wish 5. All four sources together have more tokens than are read: none may come twice."""
    plan = plan_of(config(paths, "ab", (1.0, 1.0)), 6)
    plan = plan_of(
        config(paths, "abc", ((0, (1.0, 1.0, 0.0)), (6, (0.2, 0.2, 0.6)))), 14, saved(plan), Progress(BATCH, 6, 24)
    )
    plan = plan_of(
        config(paths, "dabc", ((0, (0.0, 1.0, 1.0, 0.0)), (6, (0.0, 0.2, 0.2, 0.6)), (10, (1.0, 1.0, 0.0, 0.0)))),
        18,
        saved(plan),
        Progress(BATCH, 10, 40),
    )
    train = plan.build().train
    size = {
        (one.source.name, d): int(n) for one in plan.roles["train"].sources for d, n in enumerate(one.source.data.sizes)
    }
    seen: Counter[tuple[str, int]] = Counter()
    for i in range(len(train)):
        found = train.locate(i)
        pieces = [*found.pieces[:-1], replace(found.pieces[-1], length=found.pieces[-1].length - 1)]  # but the target
        for piece in pieces:
            seen[found.path[0], piece.document] += piece.length
    assert all(seen[key] <= size[key] for key in seen)
    assert {name for name, _ in seen} == set("abcd")
    starts = [(train.locate(i).path[0], train.locate(i).sample) for i in range(len(train))]
    assert len(set(starts)) == len(starts)
    assert sources(plan)[40:44].count("d") == 2  # at its rate at once


def test_the_order_of_the_list_does_not_matter_on_resume(paths: dict[str, str]) -> None:
    first = plan_of(config(paths, "abc", CHANGING), 12)
    turned = tuple((step, weights[::-1]) for step, weights in CHANGING)
    again = plan_of(config(paths, "cba", turned), 12, saved(first), Progress(BATCH, 3, 12))
    assert read(again) == read(first)


def test_what_is_past_cannot_be_changed(paths: dict[str, str]) -> None:
    state, done = saved(plan_of(config(paths, "abc", CHANGING), 12)), Progress(BATCH, 7, 28)
    with pytest.raises(UserError) as caught:
        plan_of(config(paths, "abc", ((0, (3.0, 1.0, 0.0)), (4, (1.0, 1.0, 0.0)))), 12, state, done)
    message = str(caught.value)
    assert re.search(r"steps 4 to 4: a 0\.75 .*\b0\.5\b.*, b 0\.25 .*\b0\.5\b", message)
    assert "steps 0" not in message and "steps 5" not in message and "c " not in message
    # What it tells to write is taken.
    (written,) = re.findall(r"\[\[.*\]\]", message)
    phases = tuple((step, tuple(weights)) for step, weights in json.loads(written))
    assert [step for step, _ in phases] == [0, 5, 7]
    plan_of(config(paths, "abc", phases), 12, state, done)
    with pytest.raises(
        UserError, match=r"mixture.weights: (.|\n)*write \[\[0, {a: 0.75, b: 0.25}\], \[5, {a: 0.5, b: 0.5}\]"
    ):
        named = replace(config(paths, "abc", (1.0, 1.0, 1.0)), mixture={"sources": {}})  # as rules_mixture leaves it
        plan_of(named, 12, state, done)
    # The future is free.
    plan_of(config(paths, "abc", (*CHANGING[:2], (7, (0.0, 0.0, 1.0)))), 12, state, done)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": "ac", "weights": ((0, (3.0, 0.0)), (5, (1.0, 0.0)))}, r"/b: .* 2 sources"),
        ({"labels": True}, r"/a .*\bno labels .*\bsome\b"),
        ({"train_data_max_tokens": (300, None, None)}, r"/a: .*\bdocuments\b"),
    ],
)
def test_what_was_read_must_be_there(
    paths: dict[str, str], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    state, done = saved(plan_of(config(paths, "abc", CHANGING), 12)), Progress(BATCH, 7, 28)
    change = dict(change)
    data = config(paths, change.pop("names", "abc"), change.pop("weights", CHANGING))
    if change.pop("labels", False):
        sizes = IndexedDataset(paths["a"]).sizes
        labels = write(tmp_path / "l", [[-100] * int(size) for size in sizes], np.int32)
        data = replace(data, train_label_data_paths=(labels, None, None))
    with pytest.raises(UserError, match=message):
        plan_of(replace(data, **change), 12, state, done)


def test_a_source_that_was_never_read_may_go_or_change(paths: dict[str, str]) -> None:
    """c is only to come in at step 9."""
    first = plan_of(config(paths, "abc", CHANGING), 12)
    done = Progress(BATCH, 7, 28)
    gone = plan_of(config(paths, "ab", ((0, (3.0, 1.0)), (5, (1.0, 1.0)))), 12, saved(first), done)
    assert read(gone, 0, 28) == read(first, 0, 28)
    other = plan_of(config(paths, "abd", CHANGING), 12, saved(first), done)
    assert read(other, 0, 36) == read(first, 0, 36)
    assert set(sources(other)[36:]) == {"a", "d"}


def test_steps_to_come_may_be_larger(paths: dict[str, str]) -> None:
    """After 7 steps of 4, steps take 8: the border at step 9 is 28 + 2 x 8 samples away."""
    first = plan_of(config(paths, "abc", CHANGING), 12)
    again = plan_of(config(paths, "abc", CHANGING), 12, saved(first), Progress(8, 7, 28))
    assert read(again, 0, 28) == read(first, 0, 28)
    assert "c" not in sources(again)[:44] and "c" in sources(again)[44:46]


def test_version_1_of_the_record_is_read(paths: dict[str, str]) -> None:
    """As checkpoints hold it that were made before weights could change."""
    data = config(paths, "ab", (3.0, 1.0))
    plan = plan_of(data, 10)
    role = plan.roles["train"]
    state = {
        "version": 1,
        "roles": {
            "train": [
                {
                    "prefix": one.source.data.prefix,
                    "key": one.key,
                    "weight": weight,
                    "segments": [{"epochs": s.epochs, "samples": s.samples, "seed": s.seed} for s in one.segments],
                }
                for one, weight in zip(role.sources, (0.75, 0.25), strict=True)
            ]
        },
    }
    done = Progress(BATCH, 6, 24)
    assert read(plan_of(data, 10, SavedOrder.read(state), done)) == read(plan)
    assert read(plan_of(replace(data), 30, SavedOrder.read(state), done), 0, 40) == read(plan)
    with pytest.raises(UserError, match="a 0.75 .* 0.5 now"):
        plan_of(config(paths, "ab", (1.0, 1.0)), 10, SavedOrder.read(state), done)
    with pytest.raises(UserError, match="version 4"):
        SavedOrder.read({**state, "version": 4})


def test_validation_data_may_change(paths: dict[str, str]) -> None:
    data = replace(config(paths, "ab"), valid_data_paths=(paths["c"], paths["d"]))
    first = plan_of(data, 6, valid_samples=8)
    done = Progress(BATCH, 3, 12)
    same = plan_of(data, 6, saved(first), done, valid_samples=20)
    assert [same.build().valid[i].tokens.tolist() for i in range(8)] == [
        first.build().valid[i].tokens.tolist() for i in range(8)
    ]
    other = plan_of(replace(data, valid_data_paths=(paths["d"],)), 6, saved(first), done, valid_samples=8)
    assert other.roles["valid"].samples == 8


def test_a_capped_source_is_read_epoch_by_epoch(paths: dict[str, str]) -> None:
    data = config(paths, "ab", (1.0, 1.0), train_data_max_epochs=(None, 3.0))
    plan = plan_of(data, 45)
    source = plan.roles["train"].sources[1]
    epoch = source.packing.samples_per_epoch()
    assert {segment.epochs for segment in source.segments} == {1} and len(source.segments) >= 2
    dataset = source.packing.dataset(source.segments)
    read = Counter(token for i in range(epoch) for token in dataset[i].tokens[:-1].tolist())
    size = {int(source.source.data.get(d)[0]): int(n) for d, n in enumerate(source.source.data.sizes)}
    assert all(read[token] <= size[token] for token in read)  # nothing twice
    assert sum(read.values()) > sum(size.values()) - 9  # and all but what does not fill a sample
    loose = plan_of(config(paths, "ab", (1.0, 1.0)), 45).roles["train"].sources[1]
    assert loose.segments[0].epochs > 1  # as GPT-NeoX shuffles


def test_a_cap_is_refused_before_training(paths: dict[str, str]) -> None:
    data = config(paths, "ab", (1.0, 1.0), train_data_max_epochs=1.0)
    with pytest.raises(UserError, match=r"b: \d+ samples (.|\n)*train_iters (\d+)") as caught:
        plan_of(data, 60)
    steps = int(str(caught.value).split("train_iters ")[1].split(".")[0])
    plan = plan_of(data, steps)
    train = plan.build().train
    assert len({(train.locate(i).path[0], train.locate(i).sample) for i in range(steps * BATCH)}) == steps * BATCH
    assert all(row.epochs <= 1.0 for row in plan.table())
    with pytest.raises(UserError):
        plan_of(data, steps + 1)


def test_one_file_is_capped_too(paths: dict[str, str]) -> None:
    data = DataConfig(data_path=paths["a"], split="1", train_data_max_epochs=1.0)
    assert plan_of(data, 10).roles["train"].sources[0].segments[0].epochs == 1
    with pytest.raises(UserError, match=r"a: 800 samples "):
        plan_of(data, 200)
