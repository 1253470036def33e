"""`train_impl: rm`: golden numbers, TRL's `RewardTrainer`, and which token a reward is read at."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import RewardTrainer

from megatron.data.sample import Sample
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives import Labels
from megatron.objectives.rm import RewardModel, reward_loss
from tests.convert.helpers import VOCAB
from tests.objectives.twins import Twins, trainer

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(("z_loss", "expected"), [(0.0, 0.474077), (0.01, 0.486577)])
def test_golden_numbers(z_loss: float, expected: float) -> None:
    loss = reward_loss(torch.tensor([1.0]), torch.tensor([0.5]), z_loss=z_loss)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("margins", [None, [0.5, -0.25]])
def test_loss_and_gradients_are_those_of_trl(margins: list[float] | None) -> None:
    twins = Twins("rm", RewardModel(PostConfig(rm_center_coefficient=0.3)))
    tokens = torch.randint(VOCAB, (4, 13), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(4, 13)
    ends = torch.tensor([12, 7, 9, 12])  # the token that has the label; the reward is read where it is predicted
    mask[torch.arange(4), ends] = 1
    margin = torch.zeros(4) if margins is None else torch.tensor(margins).repeat_interleave(2)
    loss, metrics = twins.loss(tokens, mask, [1 / 2], margin=margin)
    loss.backward()

    def model(**inputs):
        """transformers' class would read at the last token that is not padding."""
        hidden = twins.theirs.base_model(inputs["input_ids"]).last_hidden_state
        rows = torch.cat((torch.arange(0, 4, 2), torch.arange(1, 4, 2)))  # TRL has all chosen before all rejected
        return SimpleNamespace(logits=twins.theirs.score(hidden[rows, ends[rows] - 1]))

    trl = trainer(args=SimpleNamespace(center_rewards_coefficient=0.3))
    inputs = {"input_ids": tokens[:, :-1], "attention_mask": torch.ones(4, 12)}
    inputs |= {} if margins is None else {"margin": margin[::2]}
    expected = RewardTrainer.compute_loss(trl, model, inputs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert twins.gradient_difference() < 1e-5
    reported = {name: values[0] for name, values in trl._metrics["train"].items()}
    accuracy, difference, chosen, rejected = metrics.tolist()
    assert (accuracy, difference) == (reported["accuracy"], pytest.approx(reported["margin"], rel=1e-5))
    assert (chosen + rejected) / 2 == pytest.approx(reported["mean_reward"], rel=1e-4)


def sample(labelled: list[int], answers: list[int] | None = None, length: int = 6) -> Sample:
    labels = np.full(6, -100)
    labels[labelled] = 5
    return Sample(np.arange(6), labels=labels, length=length, answers=None if answers is None else np.array(answers))


def test_an_answer_has_one_token_with_a_label() -> None:
    objective = RewardModel()
    fine = [sample([5]), sample([2, 5], [0, 0, 0, 1, 1, 1]), sample([], length=1), sample([2], [0, 0, 0, -1, -1, -1])]
    assert [objective.problem(one) for one in fine] == [None] * 4
    for wrong, count in (
        (sample([3, 5]), "2 tokens"),
        (sample([]), "0 tokens"),
        (sample([1, 2], [0, 0, 0, 1, 1, 1]), "2 tokens"),
        (sample([0]), "0 tokens"),
        (Sample(np.arange(6), length=6), "every token"),
    ):
        problem = objective.problem(wrong)
        assert problem is not None and problem.startswith(count), problem
        assert "--for-rm" in problem


def test_answers_may_share_a_row_and_be_less_than_there_is_room_for() -> None:
    values = torch.linspace(-1, 2, 32)
    out = SimpleNamespace(rewards=lambda places: values[places], with_balance=lambda loss: loss)
    mask, answers = torch.zeros(2, 16), torch.full((2, 16), -1)
    answers[0, :5], answers[0, 5:12] = 0, 1
    answers[1, :4], answers[1, 4:] = 2, 3
    mask[0, 3] = mask[0, 9] = mask[1, 2] = mask[1, 15] = 1
    extras = {
        "answers": answers,
        "answer_tokens": torch.tensor([1.0, 1, 1, 1, 0, 0]),
        "margin": torch.tensor([0.5, 0.5, 0, 0, 0, 0]),
    }
    labels = Labels(torch.zeros(2, 16, dtype=torch.int64), mask, torch.tensor([0.5]), extras)
    loss, metrics = RewardModel().loss(out, labels)  # type: ignore[arg-type]
    chosen, rejected = values[[3, 18]], values[[9, 31]]
    assert loss.item() == pytest.approx(reward_loss(chosen, rejected, torch.tensor([0.5, 0.0])).mean().item())
    assert metrics.tolist() == pytest.approx([0.0, (chosen - rejected).mean(), chosen.mean(), rejected.mean()])
