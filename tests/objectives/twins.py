"""Our network and transformers' with the same weights, for objectives to be compared with TRL's trainers."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.convert.families import FAMILIES
from megatron.model.gpt import gpt_layers
from megatron.model.sequential import SequentialModel
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.objectives import Labels, Objective
from tests.convert.helpers import LLAMA, VOCAB, full_tensors, hugging_face, resolved

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.kto import KTOTrainer  # it says that it may change; its version is pinned

__all__ = ["KTOTrainer", "Twins", "trainer"]

KEYS = {**LLAMA, "num_kv_heads": 2}


class Twins:
    """`ours` and `theirs`, one tiny LLaMA; of a reward model with `train_impl: rm`."""

    def __init__(self, train_impl: str, objective: Objective) -> None:
        args = resolved(**KEYS, train_impl=train_impl)
        state = ParallelState.single()
        self.theirs, stored = hugging_face(args, "llama")
        self.objective, self._model = objective, args.model
        layers = gpt_layers(args.model, vocab_size=VOCAB, padded_vocab_size=VOCAB, state=state)
        self.ours = SequentialModel(layers, objective, None, state)
        tensors = full_tensors(args, "llama", stored)
        with torch.no_grad():
            for name, parameter in named_parameters(self.ours):
                parameter.copy_(tensors[name])

    def loss(self, tokens: Tensor, mask: Tensor, weights: list[float], **extras: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts [b, s + 1], each with one answer, of which the mask [b, s + 1] says what is trained."""
        rows, inputs = len(tokens), tokens.shape[1] - 1
        answers = torch.arange(rows)[:, None].expand(rows, inputs)
        extras = {"answers": answers, "answer_tokens": mask[:, 1:].sum(1), **extras}
        labels = Labels(tokens[:, 1:], mask[:, 1:], torch.tensor(weights), extras)
        positions = torch.arange(inputs).expand(rows, inputs)
        return self.ours((tokens[:, :-1], positions), then=lambda out: self.objective.loss(out, labels))

    def gradient_difference(self) -> float:
        """The largest of all parameters, relative to the largest gradient of each."""
        theirs = {name: p.grad for name, p in self.theirs.named_parameters()}
        ours = {name: p.grad for name, p in named_parameters(self.ours)}
        found = 0.0
        for rule in FAMILIES["llama"].rules(self._model):
            expected = rule.transform.load([theirs[name] for name in rule.theirs])
            found = max(found, float((ours[rule.ours] - expected).abs().max() / expected.abs().max()))
        assert max(float(p.abs().max()) for p in ours.values()) > 1e-3
        return found


def trainer(**values: Any) -> Any:
    """What TRL's methods ask of their trainer, on one process."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    nothing = {"accelerator": accelerator, "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0}
    return SimpleNamespace(model=SimpleNamespace(training=True), _tp_size=1, **nothing, **values)
