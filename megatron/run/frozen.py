"""Hidden states of the model that a run began with, for objectives that hold some where they were (`ga_loss: rmu`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.callbacks.context import Batches
from megatron.checkpoint.rng import random_state, restore_random_state
from megatron.data.batch import StepBatch
from megatron.errors import UserError
from megatron.inference.live import live_stage
from megatron.model.head import LMOutput
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.forget_steps import RETAIN
from megatron.objectives.unlearn import FROZEN
from megatron.training.callback import Callback
from megatron.training.engine import Engine
from megatron.training.setup import build_objective
from megatron.training.trainer import Trainer


class FrozenStates(Callback):
    """Adds to batches the hidden states behind `Objective.inner_layer`, with the weights that the run began with, of
    the micro-batches to retain.

    The engine keeps these weights, of what is trained, beside the masters and in checkpoints, and exchanges them for
    the passes: there is no second model.
    """

    engine: Engine

    def __init__(self, args: NeoXArgs) -> None:
        self.args, self.plan = args, BatchPlan.of(args)
        self._resumed = self._began = False

    @classmethod
    def of(cls, args: NeoXArgs) -> FrozenStates | None:
        """None where the objective reads none."""
        return cls(args) if FROZEN in build_objective(args).reads else None

    def start(self, trainer: Trainer) -> None:
        self.engine = trainer.engine
        self.engine.keep_reference()  # before a checkpoint is loaded, which may have one

    def loaded(self, trainer: Trainer) -> None:
        if not self._resumed:
            self.engine.keep_reference()  # it begins here, whatever run these weights are from
        elif self.args.checkpoint.no_load_optim and not self._began:
            raise UserError(
                "no_load_optim: the weights that the run began with (ga_loss: rmu) are kept with the optimizer's "
                "state; leave it out, or begin a new run with finetune=true"
            )
        self._began = self._resumed = True

    def state_dict(self) -> dict[str, Any]:
        return {"layers": self._trained()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if lost := sorted(set(state.get("layers", ())) - set(self._trained())):
            raise UserError(
                f"ga_rmu_layers: blocks {', '.join(map(str, lost))} were trained so far, and of what is not trained "
                "the weights that the run began with are not kept; name them too, or begin a new run with finetune=true"
            )
        self._resumed = True

    def _trained(self) -> list[int]:
        """The blocks."""
        return list(self.args.post.ga_rmu_layers or range(self.args.model.num_layers or 0))

    def beside(self, batches: Batches) -> Batches:
        """The same batches with these states; each when it is asked for."""

        def steps(consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
            for batch in batches(consumed, step):
                yield self.told(batch)

        return steps

    def told(self, batch: StepBatch) -> StepBatch:
        """The batch of a step with the states [gas, b, s, h] on the last stage, where something is retained in it."""
        sources = self.plan.sources(batch.step)
        if RETAIN not in sources:
            return batch
        gas = len(batch.tokens) // len(sources)
        first = sources.index(RETAIN) * gas
        before, found = random_state(), []
        with self.engine.evaluating(), self.engine.as_reference():
            stage, here = live_stage(self.engine, self.args), batch.to(self.engine.state.device)
            for micro in range(first, first + gas):
                documents = None if here.doc_ids is None else here.doc_ids[micro]
                out = stage.run(here.tokens[micro], here.positions[micro], then=_inner, doc_ids=documents)
                found.append(None if out is None else out[: here.tokens[micro].numel()])
        restore_random_state(before)
        return replace(batch, extras={**batch.extras, FROZEN: self._place(found, first, here.tokens)})

    def _place(self, found: list[Tensor | None], first: int, tokens: Tensor) -> Tensor:
        if found[0] is None:
            return torch.zeros(*tokens.shape, 0, device=tokens.device)
        placed = found[0].new_zeros(*tokens.shape, found[0].shape[-1])
        for micro, states in enumerate(found, start=first):
            placed[micro] = states.view_as(placed[micro])
        return placed


def _inner(out: LMOutput) -> Tensor:
    return out.inner_hidden()
