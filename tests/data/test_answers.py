"""What a batch carries besides tokens: pairs of rows, answers, numbers per token and per answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megatron.data.answers import trained_places
from megatron.data.collate import CollateRules
from megatron.data.copies import copy_ahead
from megatron.data.loader import StepLoader
from megatron.data.order.mixture import ReadOnce
from megatron.data.sample import IGNORE, Item, Sample
from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan

pytestmark = pytest.mark.cpu

READS = ("answers", "reference", "reward")


class Items:
    """A dataset of given items."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]


def side(number: int, first_trained: int, reward: float) -> Sample:
    """A row of five tokens whose reference of token t is number + t / 10."""
    tokens = np.full(5, number)
    labels = np.where(np.arange(5) >= first_trained, tokens, IGNORE)
    extras = {"reference": number + np.arange(5) / 10, "reward": np.array([reward])}
    return Sample(tokens, np.array([0]), labels, length=5, extras=extras)


def pairs(count: int) -> Items:
    return Items([(side(10 * i, 2, i), side(10 * i + 1, 3, -i)) for i in range(count)])


def packed(number: int) -> Sample:
    """A row of two pairs, answers of one token each, the last one not trained."""
    tokens = np.full(5, number)
    labels = np.where(np.arange(5) < 4, tokens, IGNORE)
    rewards = np.array([1.0, 2.0, 3.0, 4.0]) + number
    return Sample(tokens, labels=labels, answers=np.array([-1, 0, 1, 2, 3]), extras={"reward": rewards})


def test_an_item_of_two_rows_stays_together_at_any_split() -> None:
    """Numbers of samples count pairs, and rows 2i and 2i + 1 are one, whatever is a micro-batch."""
    found = []
    for micro, gas, dp in ((4, 1, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)):
        loaders = [
            StepLoader(pairs(8), micro_batch=micro, gas=gas, rules=CollateRules(4), dp_rank=r, dp_size=dp, rows=2)
            for r in range(dp)
        ]
        assert loaders[0].num_steps() == 2
        batches = [next(loader.steps(consumed=4)) for loader in loaders]
        assert batches[0].tokens.shape == (gas, 2 * micro, 4) and batches[0].answers is None and not batches[0].extras
        found.append(torch.cat([batch.tokens[m, :, 0] for m in range(gas) for batch in batches]).tolist())
    assert found == [[40, 41, 50, 51, 60, 61, 70, 71]] * 4


def test_a_row_is_an_answer_and_its_numbers_move_with_the_targets() -> None:
    (batch,) = StepLoader(pairs(4), micro_batch=2, gas=2, rules=CollateRules(4, reads=READS), rows=2).steps()
    assert batch.answers[:, :, 0].tolist() == batch.answers[:, :, 3].tolist() == [[0, 1, 2, 3]] * 2
    assert list(batch.answered) == [4, 4]
    # Tokens 2.. of the first and 3.. of the second are trained, so targets 1.. and 2..
    assert batch.extras["answer_tokens"].tolist() == [[3, 2, 3, 2]] * 2
    assert torch.equal(batch.mask[0, :2], torch.tensor([[0.0, 1, 1, 1], [0.0, 0, 1, 1]]))
    torch.testing.assert_close(batch.extras["reference"][0, 1], torch.tensor([1.1, 1.2, 1.3, 1.4]))
    assert batch.extras["reward"].tolist() == [[0, 0, 1, -1], [2, -2, 3, -3]]
    assert {x.dtype for x in batch.extras.values()} == {torch.float32}


def test_answers_of_packed_rows_are_numbered_through_a_micro_batch() -> None:
    one = Sample(np.full(5, 9), answers=np.array([-1, 0, 0, 1, 1]), extras={"reward": np.array([8.0, 9.0])})
    loader = StepLoader(
        Items([packed(0), packed(1), one, one]), micro_batch=2, gas=2, rules=CollateRules(4, reads=READS)
    )
    (batch,) = loader.steps()
    assert batch.answers[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.answers[1].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert list(batch.answered) == [8, 4]
    assert batch.extras["reward"].tolist() == [[1, 2, 3, 4, 2, 3, 4, 5], [8, 9, 8, 9, 0, 0, 0, 0]]
    assert batch.extras["answer_tokens"].tolist() == [[1, 1, 1, 0, 1, 1, 1, 0], [2, 2, 2, 2, 0, 0, 0, 0]]


def test_only_what_is_read_is_there_and_travels_with_the_batch() -> None:
    (batch,) = StepLoader(pairs(1), micro_batch=1, gas=1, rules=CollateRules(4, reads=("reference",)), rows=2).steps()
    assert batch.answers is None and set(batch.extras) == {"reference"}
    (batch,) = StepLoader(pairs(1), micro_batch=1, gas=1, rules=CollateRules(4, reads=READS), rows=2).steps()
    names = {"reference", "reward", "answer_tokens"}
    assert set(batch.extras) == names and names | {"answers", "tokens"} <= set(batch.tensors())
    moved = batch.to("meta")
    assert moved.answers.is_meta and all(x.is_meta for x in moved.extras.values())

    class Copies:
        start = staticmethod(lambda batch: batch.to("meta"))
        arrive = staticmethod(lambda batch: None)

    (copied,) = copy_ahead(iter([batch]), Copies())
    assert copied.extras["reward"].is_meta


def test_samples_with_and_without_an_extra_are_refused() -> None:
    items = Items([packed(0), Sample(np.full(5, 9), answers=np.array([-1, 0, 0, 1, 1]))])
    with pytest.raises(UserError, match="some samples have reward"):
        list(StepLoader(items, micro_batch=2, gas=1, rules=CollateRules(4, reads=READS)).steps())
    wrong = Items([Sample(np.full(5, 9), extras={"reward": np.ones(3)})])
    with pytest.raises(ValueError, match="reward has 3 values for 5 tokens and 1 answers"):
        list(StepLoader(wrong, micro_batch=1, gas=1, rules=CollateRules(4, reads=READS)).steps())
    with pytest.raises(ValueError, match="item 0 is 2 samples, expected 1"):
        list(StepLoader(pairs(1), micro_batch=1, gas=1, rules=CollateRules(4)).steps())


def test_a_padded_evaluation_has_pairs_that_train_nothing() -> None:
    padded = ReadOnce(pairs(1), 1, 2)  # type: ignore[arg-type]
    (batch,) = StepLoader(padded, micro_batch=2, gas=1, rules=CollateRules(4, reads=READS), rows=2).steps()
    assert batch.extras["answer_tokens"].tolist() == [[3, 2, 0, 0]] and batch.extras["reward"][0, 2:].tolist() == [0, 0]


def test_what_is_left_out_or_cut_into_short_rows_keeps_its_answers() -> None:
    plan = BatchPlan(((0, 1),), tokens_per_sample=4, skip=((1, 2),), lengths=((0, 2),))
    rules = CollateRules(4, reads=READS)
    batch, skipped = StepLoader(pairs(2), micro_batch=1, gas=1, rules=rules, rows=2, plan=plan).steps()
    assert skipped.trained == 0 and skipped.tokens.shape == (1, 2, 4)
    assert batch.answers.tolist() == [[[0, 0], [0, 0], [1, 1], [1, 1]]]
    assert batch.extras["reference"].shape == batch.tokens.shape and batch.extras["answer_tokens"].tolist() == [[3, 2]]


@pytest.mark.parametrize("size", [6, 1000])
def test_places_of_trained_targets(size: int) -> None:
    """All of them and no other, in rows as wide as the fullest one needs."""
    rng = np.random.default_rng(size)
    trained = rng.random((4, size)) < np.array([[0.3], [0.0], [0.1], [0.2]])
    places = trained_places(trained)
    assert places.shape == (4, min(size, 384))
    for one, there in zip(trained, places, strict=True):
        count = one.sum()
        assert there[:count].tolist() == np.flatnonzero(one).tolist()
        assert len(set(there[count:].tolist())) == 1 and not one[there[count:]].any()
    assert trained_places(np.ones((2, 5), bool)).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert trained_places(np.zeros((2, 5), bool)).shape == (2, 0)
