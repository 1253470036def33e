"""Prompts with the answers to others: who gets whose, and where they are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.mismatched import Mismatched
from megatron.data.order.mixture import ReadOnce
from megatron.data.sample import IGNORE, Provenance, Sample
from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan

pytestmark = pytest.mark.cpu

SEQ = 7


class Texts:
    """Text i: i + 1 tokens of prompt, 100 + i, then 3 of answer, 200 + i; the second of those is not trained."""

    rows = 1

    def __init__(self, count: int, labelled: bool = True) -> None:
        self.count, self.labelled = count, labelled

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        prompt = index % 5 + 1
        tokens, labels = np.zeros(SEQ + 1, np.int64), np.full(SEQ + 1, IGNORE)
        tokens[: prompt + 3] = [100 + index] * prompt + [200 + index] * 3
        labels[[prompt, prompt + 2]] = 200 + index
        extras = {"reward": np.array([index - 1.5], np.float32)}
        return Sample(tokens, np.zeros(1, np.int64), labels if self.labelled else None, prompt + 3, extras=extras)

    def locate(self, index: int) -> Provenance:
        return Provenance(("some/texts",), index, ())

    def digest(self) -> str:
        return "texts"


def seen(sample: Sample) -> tuple[list[int], list[int]]:
    """What is in a row, and what of it is trained."""
    assert sample.labels is not None and sample.length is not None
    assert not sample.tokens[sample.length :].any() and (sample.labels[sample.length :] == IGNORE).all()
    trained = sample.labels >= 0
    assert (sample.labels[trained] == sample.tokens[trained]).all()
    return sample.tokens[: sample.length].tolist(), np.flatnonzero(trained).tolist()


def test_a_batch_of_three_exchanges_its_answers_in_a_circle() -> None:
    data = Mismatched(Texts(6), BatchPlan.constant(3))
    assert [data.partner(i) for i in range(6)] == [1, 2, 0, 4, 5, 3]
    assert seen(data[0]) == ([100, 201, 201, 201], [1, 3])
    assert seen(data[2]) == ([102] * 3 + [200] * 3, [3, 5])
    assert data[2].extras["reward"] == 0.5  # of the prompt's own text; nothing reads it


class WithLongPrompt(Texts):
    """The last text has one token of answer."""

    def __getitem__(self, index: int) -> Sample:
        if index < self.count - 1:
            return super().__getitem__(index)
        return Sample(np.arange(1, 9), labels=np.array([IGNORE] * 7 + [8]), length=8)


class WithoutAnswer(Texts):
    """Nothing of the last text is trained."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return replace(sample, labels=np.full(SEQ + 1, IGNORE)) if index == self.count - 1 else sample


def test_an_answer_is_cut_where_it_does_not_fit() -> None:
    data = Mismatched(WithLongPrompt(5), BatchPlan.constant(5))
    assert seen(data[4]) == ([1, 2, 3, 4, 5, 6, 7, 200], [7])
    assert seen(data[3]) == ([103] * 4 + [8], [4])


def test_what_fills_a_batch_up_takes_no_part() -> None:
    """Also a text without an answer, and one that has no other in its batch."""
    data = Mismatched(ReadOnce(Texts(6), 6, 8), BatchPlan.constant(4))
    assert [data.partner(i) for i in range(6)] == [1, 2, 3, 0, 5, 4]
    assert seen(data[5]) == ([105, 204, 204, 204], [1, 3])
    alone = Mismatched(ReadOnce(Texts(5), 5, 8), BatchPlan.constant(4))
    for padding in (data[6], data[7], alone[4], alone[7], Mismatched(WithoutAnswer(3), BatchPlan.constant(3))[1]):
        assert isinstance(padding, Sample) and padding.length == 1 and seen(padding)[1] == []


def test_no_division_of_the_batch_changes_the_exchange() -> None:
    plan = BatchPlan(((0, 4), (1, 8)))
    data, rules = Mismatched(Texts(20), plan), CollateRules(SEQ)

    def rows(micro: int, ranks: int) -> list[list[int]]:
        found: list[list[int]] = []
        for rank in range(ranks):
            loader = StepLoader(data, micro_batch=micro, gas=1, rules=rules, dp_rank=rank, dp_size=ranks, plan=plan)
            found += [row for step in loader.steps() for row in step.tokens.flatten(0, 1).tolist()]
        return sorted(found)

    assert rows(4, 1) == rows(2, 2) == rows(1, 4)
    assert len(rows(1, 1)) == 20
    # A run that goes on after 4 samples counts its steps from there.
    assert Mismatched(Texts(20), BatchPlan.constant(3), begin=4).partner(6) == 4


def test_what_cannot_be_exchanged_is_named() -> None:
    with pytest.raises(UserError, match="train_batch_size: 1 "):
        Mismatched(Texts(4), BatchPlan.constant(1))[0]
    with pytest.raises(UserError, match=r"some/texts: .*without labels.*train_label_data_paths"):
        Mismatched(Texts(4, labelled=False), BatchPlan.constant(2))[0]
