"""`train_impl: dpo`: golden numbers, and TRL's trainers as reference for every loss and its gradient."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.sample import IGNORE, Item, Sample
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives import dpo
from megatron.objectives.dpo import LOSSES, DPOObjective, pairs_of
from megatron.training.engine_step import packed_documents
from tests.model.networks import VOCAB, build, logits, tiny

pytestmark = pytest.mark.cpu

PAIRS, SEQUENCE = 3, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "cdpo": {"dpo_label_smoothing": 0.1},
    "robust": {"dpo_label_smoothing": 0.1},
    "sigmoid_norm": {"dpo_beta": 5.0},
    "hinge": {"dpo_beta": 0.3},
    "ipo": {},
    "apo_zero": {},
    "apo_down": {},
    "simpo": {"dpo_beta": 2.0, "dpo_simpo_gamma": 0.7},
    "orpo": {"dpo_sft_loss_weight": 0.0},
}


def options(kind: str, **more: Any) -> PostConfig:
    return PostConfig(dpo_loss_type=kind, **{**OPTIONS[kind], **more})  # type: ignore[arg-type]


def one_loss(options: PostConfig, sums: list[float], reference: list[float], tokens: list[int]) -> float:
    """That of one pair."""
    one, other, counts = (torch.tensor(values, dtype=torch.float64) for values in (sums, reference, tokens))
    pairs, _ = pairs_of(one, other, counts)
    return LOSSES[options.dpo_loss_type](pairs, options).item()


@pytest.mark.parametrize(
    ("kind", "more", "sums", "reference", "tokens", "expected"),
    [
        ("sigmoid", {}, [-3, -4], [-3.5, -3.5], [9, 9], 0.64440),
        ("sigmoid", {}, [-3, -4], [-3, -4], [9, 9], 0.693147),
        ("cdpo", {}, [-3, -4], [-3.5, -3.5], [9, 9], 0.654397),
        ("robust", {}, [-3, -4], [-3.5, -3.5], [9, 9], 0.631897),
        ("sigmoid", {}, [-1, -7], [0, 0], [1, 1], 0.437488),
        ("hinge", {"dpo_beta": 0.1}, [-1, -7], [0, 0], [1, 1], 0.4),
        ("ipo", {}, [-1, -7], [0, 0], [1, 1], 1.0),
        ("sigmoid_norm", {}, [-3, -4], [-3.5, -3.5], [4, 8], 0.330458),
    ],
)
def test_golden_numbers(kind, more, sums, reference, tokens, expected) -> None:
    """Those of other trainers' tests and of the papers' formulas, worked out by hand in fp64."""
    assert one_loss(options(kind, **more), sums, reference, tokens) == pytest.approx(expected, rel=2e-5)


class Items:
    """Pairs of answers of different lengths behind prompts, with a reference; the last pair trains nothing."""

    def __init__(self, packed: bool = False) -> None:
        self.packed = packed

    def __len__(self) -> int:
        return PAIRS + 1

    def _side(self, pair: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(10 * pair + side)
        length = 5 + (3 * pair + 2 * side) % 4
        tokens = rng.integers(VOCAB, size=length)
        labels = np.where(np.arange(length) < 2 + pair % 2, IGNORE, tokens)
        return tokens, labels if pair < PAIRS else np.full(length, IGNORE), -3 * rng.random(length)

    def __getitem__(self, pair: int) -> Item:
        sides = [self._side(pair, side) for side in (0, 1)]
        return self._row(sides, [0, 1]) if self.packed else tuple(self._row([side], None) for side in sides)

    def _row(self, sides: Any, numbers: list[int] | None) -> Sample:
        starts = np.cumsum([0, *(len(side[0]) for side in sides)])
        pad = SEQUENCE + 1 - starts[-1]
        tokens, labels, reference = (np.concatenate(parts) for parts in zip(*sides, strict=True))
        answers = None if numbers is None else np.repeat([*numbers, -1], [*np.diff(starts), pad])
        return Sample(
            np.pad(tokens, (0, pad)),
            starts[:-1],
            np.pad(labels, (0, pad), constant_values=IGNORE),
            int(starts[-1]),
            answers,
            {"reference": np.pad(reference, (0, pad), constant_values=7.0)},
        )


def read(packed: bool = False, micro: int = PAIRS + 1) -> Any:
    rules = CollateRules(SEQUENCE, intra_document_masking=True, reads=("answers", "trained_places", "reference"))
    rows = 1 if packed else 2
    return StepLoader(Items(packed), micro_batch=micro, gas=(PAIRS + 1) // micro, rules=rules, rows=rows).read(0, 0)


def ours(options: PostConfig, packed: bool = False, micro: int = PAIRS + 1) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(loss, metrics, gradients) of the network over the pairs."""
    network, batch, objective = build(tiny(intra_document_masking=True)), read(packed, micro), DPOObjective(options)
    network.objective = objective
    pairs, chosen_tokens = objective.count(batch)
    assert pairs == PAIRS
    passes = len(batch.tokens)
    weights = torch.tensor([passes / pairs, passes / chosen_tokens])
    total, metrics = torch.zeros(()), torch.zeros(len(objective.metrics))
    for micro_batch, documents in enumerate(packed_documents(batch)):
        inputs = (batch.tokens[micro_batch], batch.positions[micro_batch], documents)
        loss, found = network(inputs, objective.labels(batch, micro_batch, weights))
        (loss / passes).backward()
        total, metrics = total + loss.detach() / passes, metrics + found / passes
    return total, metrics, [p.grad for p in network.parameters()]


def log_probabilities(network: Any, batch: Any) -> Tensor:
    """[rows, s], from whole logits, 0 where nothing is trained."""
    out = logits(network, batch.tokens[0], batch.positions[0], packed_documents(batch)[0])
    logp = out.log_softmax(-1).gather(2, batch.targets[0].unsqueeze(2)).squeeze(2)
    return logp * batch.mask[0]


class Accelerator:
    device = "cpu"

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather


def trl_dpo(kind: str, options: PostConfig, logp: Tensor, reference: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """TRL's DPO trainer on log-probabilities [2 pairs, s], chosen rows first."""
    from trl.trainer.dpo_trainer import DPOTrainer

    class Model:
        training = True

        def __call__(self, **inputs: Any) -> Any:
            return SimpleNamespace(log_probs=logp, **dict.fromkeys(("entropy", "mean_logits"), logp), is_top1=mask > 0)

    trainer = SimpleNamespace(
        model=Model(),
        accelerator=Accelerator(),
        ld_alpha=None,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        beta=options.dpo_beta,
        label_smoothing=options.dpo_label_smoothing,
        loss_types=[kind],
        loss_weights=[1.0],
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    chosen, rejected = reference.sum(1).chunk(2)
    completion = torch.nn.functional.pad(mask, (1, 0)).long()  # TRL shifts it
    inputs = {
        "input_ids": completion,
        "attention_mask": completion,
        "completion_mask": completion,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    return loss, trainer._metrics["train"]


def trl(kind: str, options: PostConfig, logp: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """TRL's loss by our name of it."""
    if kind == "cdpo":  # a mixture of both preferences
        swapped = [torch.cat(x.chunk(2)[::-1]) for x in (logp, reference, mask)]
        kept, flipped = (trl_dpo("sigmoid", options, *x)[0] for x in ((logp, reference, mask), swapped))
        return (1 - options.dpo_label_smoothing) * kept + options.dpo_label_smoothing * flipped
    means = (logp.sum(1) / mask.sum(1)).chunk(2)
    if kind == "simpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        gamma, smoothing = options.dpo_simpo_gamma, options.dpo_label_smoothing
        keys = {"beta": options.dpo_beta, "simpo_gamma": gamma, "label_smoothing": smoothing, "alpha": 0.0}
        trainer: Any = SimpleNamespace(loss_type="simpo", accelerator=Accelerator(), **keys)
        return CPOTrainer.cpo_loss(trainer, *means)[0].mean()
    if kind == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        trainer = SimpleNamespace(beta=options.dpo_beta, accelerator=Accelerator())
        return -ORPOTrainer.odds_ratio_loss(trainer, *means)[0].mean()
    return trl_dpo(kind, options, logp, reference, mask)[0]


def theirs(kind: str, options: PostConfig) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of the same network over the same pairs."""
    network, batch = build(tiny(intra_document_masking=True)), read()
    order = torch.tensor([*range(0, 2 * PAIRS, 2), *range(1, 2 * PAIRS, 2)])
    reference = (batch.extras["reference"][0] * batch.mask[0])[order]
    loss = trl(kind, options, log_probabilities(network, batch)[order], reference, batch.mask[0][order])
    loss.backward()
    return loss.detach(), [p.grad for p in network.parameters()]


def assert_same(mine: tuple[Tensor, list[Tensor]], reference: tuple[Tensor, list[Tensor]]) -> None:
    assert mine[0].item() == pytest.approx(reference[0].item(), rel=1e-5)
    norm = torch.stack([g.norm() for g in reference[1]]).norm()
    assert norm > 1e-4
    for one, other in zip(mine[1], reference[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * norm.item())


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradients_are_those_of_trl(kind: str) -> None:
    """One micro-batch of rows, and packed rows, each a micro-batch."""
    reference = theirs(kind, options(kind))
    for packed, micro in ((False, PAIRS + 1), (True, 1)):
        loss, _, gradients = ours(options(kind), packed, micro)
        assert_same((loss, gradients), reference)


def test_metrics_are_those_of_trl() -> None:
    _, metrics, _ = ours(options("sigmoid"), micro=2)
    found = dict(zip(DPOObjective.metrics, metrics.tolist(), strict=True))
    network, batch = build(tiny(intra_document_masking=True)), read()
    order = torch.tensor([*range(0, 2 * PAIRS, 2), *range(1, 2 * PAIRS, 2)])
    logp, mask = log_probabilities(network, batch)[order].detach(), batch.mask[0][order]
    reference = (batch.extras["reference"][0] * batch.mask[0])[order]
    theirs = trl_dpo("sigmoid", options("sigmoid"), logp, reference, mask)[1]
    names = {
        "chosen_rewards": "rewards/chosen",
        "rejected_rewards": "rewards/rejected",
        "reward_acc": "rewards/accuracies",
        "margins": "rewards/margins",
        "chosen_pos": "logps/chosen",
        "chosen_neg": "logps/rejected",
    }
    assert {mine: found[mine] for mine in names} == pytest.approx({a: theirs[b][0] for a, b in names.items()}, rel=1e-5)
    chosen, rejected = reference.sum(1).chunk(2)
    assert (found["ref_pos"], found["ref_neg"]) == pytest.approx((chosen.mean().item(), rejected.mean().item()))
    nll = -logp[:PAIRS].sum() / mask[:PAIRS].sum()
    assert found["chosen_nll"] == pytest.approx(nll.item(), rel=1e-5)


def test_the_loss_of_chosen_answers_is_added_per_token() -> None:
    plain, metrics, _ = ours(options("sigmoid"))
    with_sft, _, _ = ours(options("sigmoid", dpo_sft_loss_weight=0.5), micro=1)
    assert with_sft.item() == pytest.approx(plain.item() + 0.5 * metrics[-1].item(), rel=1e-5)
    assert DPOObjective(options("orpo", dpo_sft_loss_weight=None)).sft_weight == 1.0


@pytest.mark.parametrize("kind", ["sigmoid", "simpo", "orpo"])
def test_without_a_reference_none_is_read(kind: str) -> None:
    chosen = options(kind, dpo_reference_free=kind == "sigmoid")
    assert DPOObjective(chosen).reads == ("answers", "trained_places")
    network, batch = build(tiny(intra_document_masking=True)), read()
    del batch.extras["reference"]
    labels = DPOObjective(chosen).labels(batch, 0, torch.ones(2))
    network.objective = DPOObjective(chosen)
    _, metrics = network((batch.tokens[0], batch.positions[0], packed_documents(batch)[0]), labels)
    assert metrics[6:8].tolist() == [0, 0]


@pytest.mark.parametrize("kind", LOSSES)
def test_pairs_without_tokens_add_nothing(kind: str) -> None:
    """Neither to the loss nor, as NaN, to a gradient."""
    network, batch = build(tiny(intra_document_masking=True)), read(micro=1)
    network.objective = objective = DPOObjective(options(kind))
    labels = objective.labels(batch, PAIRS, torch.ones(2))
    loss, metrics = network((batch.tokens[PAIRS], batch.positions[PAIRS], packed_documents(batch)[PAIRS]), labels)
    loss.backward()
    assert loss.item() == 0 and not metrics.any() and all(not p.grad.any() for p in network.parameters())


def _shifted(values: Tensor, labels: Any) -> Tensor:
    return _sums(values, SimpleNamespace(**{**_fields(labels), "mask": labels.mask.roll(-1, -1)}))


def _unmasked(values: Tensor, labels: Any) -> Tensor:
    return _sums(values, SimpleNamespace(**{**_fields(labels), "mask": torch.ones_like(labels.mask)}))


def _fields(labels: Any) -> dict[str, Any]:
    return {"answers": labels.answers, "extras": labels.extras}


_sums, _split = dpo.sum_trained, dpo.split_pairs
MISTAKES: dict[str, Any] = {
    "the mask is one off": ("sum_trained", _shifted),
    "padding and prompts are in the sums": ("sum_trained", _unmasked),
    "means in place of sums": (
        "sum_trained",
        lambda values, labels: _sums(values, labels) / labels.extras["answer_tokens"].clamp(min=1),
    ),
    "chosen and rejected are swapped": ("split_pairs", lambda values: _split(values)[::-1]),
    "halves in place of neighbours": ("split_pairs", lambda values: values.chunk(2, -1)),
    None: ("sum_trained", _sums),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str | None) -> None:
    name, patch = MISTAKES[mistake]
    reference = theirs("sigmoid", options("sigmoid"))
    with mock.patch.object(dpo, name, patch), pytest.raises(AssertionError) if mistake else nullcontext():
        loss, _, gradients = ours(options("sigmoid"))
        assert_same((loss, gradients), reference)
