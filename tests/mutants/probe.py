"""What a few steps at a layout do to every tensor, as each rank has it.

A trace holds, by canonical name, the rank's part of the gradient that reached the optimizer and of every weight, and
its losses and norms. tests/mutants/compare.py joins the parts and compares them with those of one rank alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.layers.moe.balancing import moe_layers
from megatron.mpu.sharding import ParamSpec, zeros
from megatron.training import partition_comm
from megatron.training.engine import StepOut
from tests.training.models import ADAM
from tests.training.test_precision import fp16_allowed
from tests.training.tiny import Layout, build, step_batch, whole_state

BETA = ADAM["optimizer"]["params"]["betas"][0]

Arrays = dict[str, np.ndarray]


@dataclass
class Step:
    """One step on one rank: its tensor-parallel parts, experts of all expert-parallel ranks.

    `gradients` are unclipped, as far as the reported norm is right.
    """

    loss: float
    norm: float
    tokens: int
    votes: int  # as a binary number
    gradients: Arrays
    weights: Arrays


@dataclass
class Trace:
    """A few steps on one rank, the weights before them, and what comes behind them, which no rank has a part of: the
    mean loss of an evaluation, how many tokens went to each expert, a text."""

    first: Arrays
    specs: dict[str, ParamSpec]
    steps: list[Step] = field(default_factory=list)
    outputs: Arrays = field(default_factory=dict)


class Probe:
    """An engine in a rank, and the trace of what it does. Building it is collective, as is every step."""

    def __init__(self, rank: int, keys: dict[str, Any], layout: Layout) -> None:
        # The tiny models have about ten buckets.
        with fp16_allowed(), mock.patch.multiple(partition_comm, ELEMENTS=3000, ELEMENTS_PER_RANK=0):
            self.engine, self.args, self.lr = build(rank, {**keys, **ADAM}, layout)
        self.engine.votes = lambda: (rank == layout.world - 1, False)
        self.start()

    def start(self) -> None:
        """Begin a trace with the state as it is."""
        state = _read(self.engine)
        # Without what cannot be sent, the functions that fill them.
        specs = {name: replace(p.spec, init=zeros) for name, p in self.engine.params().items()}
        self.trace = Trace(_arrays(state, "weight"), specs)
        self._moments = _arrays(state, "exp_avg")
        for layer in moe_layers(self.engine.module).values():
            layer.load.take()

    def train(self, *numbers: int) -> None:
        """Steps that leave no trace."""
        for number in numbers:
            self._take(number)

    def _take(self, number: int) -> StepOut:
        return self.engine.train_batch(step_batch(number, self.args, self.engine.state), self.lr(number))

    def step(self, number: int) -> None:
        out = self._take(number)
        norm, limit = float(out.grad_norm), self.args.optimizer.gradient_clipping
        state, before = _read(self.engine), self._moments
        # Adam's first moment gives the gradient back, whoever keeps which part of it.
        self._moments = _arrays(state, "exp_avg")
        gradients = {}
        if np.isfinite(norm):  # else the step is skipped
            factor = (1 - BETA) * min(1.0, limit / (norm + 1e-6))
            gradients = {name: (value - BETA * before.get(name, 0.0)) / factor for name, value in self._moments.items()}
        weights, votes = _arrays(state, "weight"), sum(2**i * vote for i, vote in enumerate(out.votes))
        self._count_assignments(number)
        self.trace.steps.append(Step(float(out.loss), norm, out.trained_tokens, votes, gradients, weights))

    def _count_assignments(self, number: int) -> None:
        """How many tokens went to each expert, and how many to none."""
        for block, layer in moe_layers(self.engine.module).items():
            counts = layer.load.take()
            if (group := self.engine.state.group("data")) is not None:
                dist.all_reduce(counts, group=group)
            self.trace.outputs[f"assignments in block {block} in step {number}"] = counts[:-3].numpy().copy()

    def evaluate(self) -> None:
        evaluated = self.engine.eval_batch(step_batch(99, self.args, self.engine.state))
        self.trace.outputs["evaluated loss"] = np.array([evaluated.loss])


def _read(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Weights and moments by name: each replica's own weights, but for what only exists in shares."""
    found = whole_state(engine)
    for name, p in engine.params().items():
        if p.dtype == torch.float32 and p.shape == found[name]["weight"].shape:
            found[name]["weight"] = p.detach().clone()
    return found


def _arrays(state: dict[str, dict[str, Tensor]], key: str) -> Arrays:
    return {name: values[key].numpy().copy() for name, values in state.items() if key in values}
