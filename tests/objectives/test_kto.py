"""`train_impl: kto`: golden numbers, TRL's `KTOTrainer`, and prompts with the answers to others."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives.kto import Kto, kto_loss
from tests.convert.helpers import VOCAB
from tests.objectives.twins import KTOTrainer, Twins, trainer

pytestmark = pytest.mark.cpu


def test_golden_numbers() -> None:
    loss = kto_loss(torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0]), 0.1, beta=0.1)
    assert loss.tolist() == pytest.approx([0.490001, 0.485004], abs=1e-6)


ROWS, TOKENS = 5, 13
REWARD = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_loss_and_gradients_are_those_of_trl(kind: str) -> None:
    options = PostConfig(kto_beta=0.3, kto_desirable_weight=0.7, kto_undesirable_weight=1.3, kto_loss_type=kind)
    twins = Twins("kto", Kto(options))
    draw = torch.Generator().manual_seed(2)
    tokens, mismatched = torch.randint(VOCAB, (2, ROWS, TOKENS), generator=draw)
    mask = (torch.rand(ROWS, TOKENS, generator=draw) > 0.4).float()  # prompts, padding, turns of users
    mask[:, -1] = 1
    reference, kl_reference = -4 - torch.rand(2, ROWS, TOKENS - 1, generator=draw)

    def model(input_ids, labels, **_):
        logits = twins.theirs(input_ids).logits[:, :-1]
        targets = labels[:, 1:]
        of_each = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        zero = torch.zeros_like(of_each)
        return SimpleNamespace(log_probs=of_each * (targets >= 0), entropy=zero, mean_logits=zero)

    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "completion_mask": mask,
        "KL_input_ids": mismatched,
        "KL_attention_mask": torch.ones_like(tokens),
        "KL_completion_mask": mask,
        "label": REWARD > 0,
        "ref_logps": (reference * mask[:, 1:]).sum(1),
        "ref_KL_logps": (kl_reference * mask[:, 1:]).sum(1),
    }
    trl = trainer(
        calculate_KL=kind == "kto",
        beta=0.3,
        loss_type=kind,
        desirable_weight=0.7,
        undesirable_weight=1.3,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
    )
    trl._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trl)
    expected = KTOTrainer._compute_loss(trl, model, batch, False)
    expected.backward()
    reported = {name: values[0] for name, values in trl._metrics["train"].items()}
    reported = {name: float(value) for name, value in reported.items()}

    weights = [1 / ROWS, 1 / 3, 1 / 2]
    extras = {"reward": REWARD, "reference": reference}
    if kind == "kto":
        with torch.no_grad():
            none = torch.zeros(ROWS)
            _, found = twins.loss(mismatched, mask, weights, reward=REWARD, reference=kl_reference, z0=none)
        assert found[0].item() == pytest.approx(reported["kl"], rel=1e-5)  # it is above 0 here
        extras["z0"] = found[0].clamp(min=0).expand(ROWS)
    loss, metrics = twins.loss(tokens, mask, weights, **extras)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert twins.gradient_difference() < 1e-5
    _, z0, accuracy, chosen, rejected = metrics.tolist()
    assert z0 == pytest.approx(reported["kl"], rel=1e-5)
    assert chosen == pytest.approx(reported["rewards/chosen"], rel=1e-5)
    assert rejected == pytest.approx(reported["rewards/rejected"], rel=1e-5)
    assert 0 < accuracy < 1

    shifted, unmasked = mask.roll(-1, -1), torch.ones_like(mask)
    matched = ((chosen * 3 / 0.3) + (rejected * 2 / 0.3)) / ROWS  # of answers to their own prompts
    mistakes = {
        "z0 of matched pairs": (mask, {"z0": torch.full((ROWS,), max(matched, 0.0))} if kind == "kto" else None),
        "the mask is one off": (shifted, {}),
        "padding and prompts are in the sums": (unmasked, {}),
        "good and bad are swapped": (mask, {"reward": -REWARD}),
        "means in place of sums": (mask, {"reference": reference / mask[:, 1:].sum(1, keepdim=True)}),
    }
    for mistake, (trained, changed) in mistakes.items():
        if changed is not None:
            wrong, _ = twins.loss(tokens, trained, weights, **{**extras, **changed})
            assert wrong.item() != pytest.approx(expected.item(), rel=1e-4), mistake
