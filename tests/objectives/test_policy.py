"""Objectives on the model's own completions: golden numbers, and TRL's trainers for loss and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from megatron.data.answers import trained_places
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives import Labels
from megatron.objectives.advantages import group_relative, leave_one_out, moving_baseline
from megatron.objectives.policy import Grpo, Reinforce, Rloo, full_kl, kl_estimate

pytestmark = pytest.mark.cpu

NAN = float("nan")


def test_advantages() -> None:
    rewards = np.array([[1.0, 2.0, 6.0]])
    assert leave_one_out(rewards).tolist() == [[-3.0, -1.5, 4.5]]
    np.testing.assert_allclose(group_relative(rewards), [[-0.755900, -0.377950, 1.133851]], atol=1e-6)
    np.testing.assert_allclose(group_relative(rewards, "none"), [[-2.0, -1.0, 3.0]])
    # One without a reward changes nothing for the others, and a prompt of one has nothing to compare with.
    failed = np.array([[1.0, NAN, 2.0, 6.0], [5.0, NAN, NAN, NAN]])
    assert leave_one_out(failed).tolist() == [[-3.0, 0.0, -1.5, 4.5], [0.0] * 4]
    np.testing.assert_allclose(group_relative(failed)[0], [-0.755900, 0, -0.377950, 1.133851], atol=1e-6)
    assert not group_relative(np.full((2, 3), NAN)).any()


def test_the_moving_baseline_is_the_mean_of_the_prompts_before() -> None:
    found, means = moving_baseline(np.array([[1.0, 3.0], [4.0, 4.0], [NAN, 0.0]]), [])
    assert found.tolist() == [[1.0, 3.0], [2.0, 2.0], [0.0, -3.0]] and means == [2.0, 4.0, 0.0]
    assert len(moving_baseline(np.ones((1, 2)), [0.0] * 100)[1]) == 100


@pytest.mark.parametrize(("kind", "value"), [("abs", 0.2), ("mse", 0.02), ("kl", 0.2), ("k3", 0.018731)])
def test_estimates_of_the_divergence(kind: str, value: float) -> None:
    assert float(kl_estimate(kind, torch.tensor(0.2))) == pytest.approx(value, abs=1e-6)


def test_the_full_divergence_is_what_the_estimates_estimate() -> None:
    torch.manual_seed(0)
    model, reference = torch.randn(2, 5, dtype=torch.float64).log_softmax(dim=-1)
    full = torch.nn.functional.kl_div(reference, model, reduction="sum", log_target=True)
    assert full_kl(model, reference) == pytest.approx(float(full))
    for kind in ("kl", "k3"):
        mean = (model.exp() * kl_estimate(kind, model - reference)).sum()
        assert float(mean) == pytest.approx(float(full))


# -- against TRL ---------------------------------------------------------------------------------------

ROWS, PROMPT, COMPLETION = 6, 3, 5


class Output:
    """What stands for a network's output."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs = logprobs

    def at_temperature(self, temperature: float) -> Output:
        return self

    def token_loss(self, targets: Tensor, places: Tensor) -> Tensor:
        losses = -self.logprobs.reshape(-1)
        return torch.zeros_like(losses).index_copy(0, places, losses[places])

    def with_balance(self, loss: Tensor) -> Tensor:
        return loss


class Batch:
    """Completions of different lengths with random log-probabilities."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.logprobs = (-3 * torch.rand(ROWS, COMPLETION)).requires_grad_()
        self.old = self.logprobs.detach() + 0.3 * torch.randn(ROWS, COMPLETION)
        self.reference = self.logprobs.detach() + 0.3 * torch.randn(ROWS, COMPLETION)
        self.mask = (torch.arange(COMPLETION) < torch.tensor([5, 3, 1, 4, 2, 5])[:, None]).float()
        self.advantage = torch.randn(ROWS)

    def ours(self, objective: Any, micro: int) -> tuple[float, Tensor]:
        """Loss and gradient, in micro-batches of so many rows."""
        counts = {"tokens": float(self.mask.sum()), "rows": float(ROWS)}
        weights = torch.tensor([ROWS / micro / counts[name] for name in objective.counts])
        total, self.logprobs.grad = 0.0, None
        for at in range(0, ROWS, micro):
            rows = slice(at, at + micro)
            extras = {"advantage": self.advantage[rows, None] * self.mask[rows]}
            extras |= {"old": self.old[rows] * self.mask[rows], "reference": self.reference[rows] * self.mask[rows]}
            extras["trained_places"] = torch.from_numpy(trained_places(self.mask[rows].reshape(1, -1).numpy() > 0))[0]
            out = Output(self.logprobs[rows])
            targets = torch.zeros(micro, COMPLETION, dtype=torch.int64)
            loss, metrics = objective.loss(out, Labels(targets, self.mask[rows], weights, extras))
            assert len(metrics) == len(objective.metrics) and not metrics.requires_grad
            (loss * micro / ROWS).backward()
            total += loss.item() * micro / ROWS
        assert self.logprobs.grad is not None
        return total, self.logprobs.grad

    def theirs(self, trainer: Any, old: str, **options: Any) -> tuple[float, Tensor]:
        """`trainer._compute_loss`, on the same numbers."""
        self.logprobs.grad = None
        defaults = {"beta": 0.0, "importance_sampling_level": "token", "off_policy_mask_threshold": None}
        defaults |= {
            "top_entropy_quantile": 1.0,
            "use_vllm": False,
            "aux_loss_enabled": False,
            "_entropy_bonus_enabled": False,
        }
        one = SimpleNamespace(
            **defaults | {"epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": 16} | options,
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, *a, **k: x, gather_for_metrics=lambda x: x
            ),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *a, **k: (self.logprobs, torch.zeros(ROWS, COMPLETION), None),
        )
        ids = torch.zeros(ROWS, PROMPT, dtype=torch.int64)
        given = self.old if old == "old_per_token_logps" else (self.old * self.mask).sum(dim=1)
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": torch.ones_like(ids),
            "completion_ids": torch.zeros(ROWS, COMPLETION, dtype=torch.int64),
            "completion_mask": self.mask,
            "advantages": self.advantage,
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
            old: given,
        }
        loss = trainer._compute_loss(one, None, inputs)
        loss.backward()
        assert self.logprobs.grad is not None
        return loss.item(), self.logprobs.grad


def same(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_grpo_is_that_of_trl(kind: str, beta: float) -> None:
    keys = {"kl_div_beta": beta, "kl_impl": "k3", "grpo_loss": kind, "grpo_epsilon_high": 0.28, "rollout_tokens": 16}
    batch, objective = Batch(), Grpo(PostConfig(**keys))
    theirs = batch.theirs(GRPOTrainer, "old_per_token_logps", loss_type=kind, beta=beta, epsilon_high=0.28)
    theirs = theirs[0], theirs[1].clone()
    for micro in (6, 2, 1):
        same(batch.ours(objective, micro), theirs)


def test_rloo_is_that_of_trl() -> None:
    batch, objective = Batch(), Rloo(PostConfig(kl_div_beta=0.05))
    theirs = batch.theirs(RLOOTrainer, "old_logps")
    theirs = theirs[0], theirs[1].clone()
    for micro in (6, 2):
        same(batch.ours(objective, micro), theirs)
    assert objective.penalty([-1.0, -2.0], [-1.5, -2.5]) == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["abs", "mse", "kl"])
def test_reinforce_is_the_formula(kind: str) -> None:
    """GPT-NeoX's loss, but a mean over tokens where that divides by the rows once more."""
    batch, objective = Batch(), Reinforce(PostConfig(kl_div_beta=0.3, kl_impl=kind))
    difference = batch.logprobs - batch.reference
    kl = {"abs": difference.abs(), "mse": difference**2 / 2, "kl": difference}[kind]
    loss = ((-batch.logprobs * batch.advantage[:, None] + 0.3 * kl) * batch.mask).sum() / batch.mask.sum()
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    for micro in (6, 3):
        same(batch.ours(objective, micro), (loss.item(), gradient))
