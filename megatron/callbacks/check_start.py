"""Looks once whether a run starts with sensible numbers: tokens, weights, first loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.data.batch import StepBatch
from megatron.log import get_logger
from megatron.mpu.sharding import ParamSpec, ones, spec_of, zeros
from megatron.training.callback import Callback
from megatron.training.late import LateNumbers

if TYPE_CHECKING:
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

# The first loss may be so far from ln(vocabulary), at least, or this part of it: logits of standard deviation s that
# know nothing add about s²/2.
NEAR, NEAR_PART = 1.0, 0.25
# The root mean square of an initial matrix, as a multiple of 1/sqrt(inputs); of an embedding, as it is. GPT-NeoX's
# recipes lie between 0.02 (wang_init at 80 layers) and 3 (normal, 0.02 at 20,000 inputs).
LEAST, MOST = 0.01, 10.0
SHOWN = 5


@CALLBACKS.register("check_start", phase="check", idle={"check_start": False})
class CheckStart(Callback):
    """Warns, with the numbers, when a start looks wrong: token ids outside the vocabulary in the first batch; weights
    that are all zero; and of a run that starts from nothing, a matrix whose values are implausibly small or large, or
    a first loss that is not near ln(vocabulary). After the first step it does nothing.
    """

    def __init__(self, vocab_size: int, fresh: bool) -> None:
        self.vocab_size, self.fresh = vocab_size, fresh
        self._first: int | None = None
        self._looked = False

    @classmethod
    def build(cls, context: RunContext) -> CheckStart:
        return cls(context.vocab_size, context.fresh)

    def loaded(self, trainer: Trainer) -> None:
        if self._first is not None:
            return  # the run has gone back: this is no start
        if trainer.state.tp_rank == trainer.state.dp_rank == 0:  # one rank of each stage, by its part of each weight
            self._look_at_weights(trainer.engine.params())
        self._first = trainer.step + 1
        trainer.batches = self._watched(trainer.batches)

    def _look_at_weights(self, params: Mapping[str, Parameter]) -> None:
        pieces = {name: getattr(p, "ds_tensor", p).detach() for name, p in params.items()}  # ZeRO-3 has a piece
        pieces = {name: piece for name, piece in pieces.items() if piece.numel()}
        squares = [
            torch.linalg.vector_norm(piece, dtype=torch.float32) ** 2 / piece.numel() for piece in pieces.values()
        ]
        roots = zip(pieces, map(math.sqrt, LateNumbers(squares).read()), strict=True)
        found = [problem for name, rms in roots if (problem := self._weight(spec_of(params[name]), rms))]
        if found:
            more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            logger.warning(f"{len(found)} parameters start with unlikely values: {'; '.join(found[:SHOWN])}{more}")

    def _weight(self, spec: ParamSpec, rms: float) -> str | None:
        """What is unlikely about a weight with this root mean square."""
        if rms == 0 and spec.init is not zeros and (spec.kind != "vector" or spec.init is ones):
            return f"{spec.name} is zero"
        if not self.fresh or spec.kind == "vector" or spec.init is zeros:
            return None
        unit = 1.0 if spec.kind == "embedding" else spec.shape[-1] ** -0.5
        if LEAST * unit <= rms <= MOST * unit:
            return None
        return f"{spec.name} {list(spec.shape)} has a root mean square of {rms:.3g}"

    def _watched(self, batches: Callable[..., Iterator[StepBatch]]) -> Callable[..., Iterator[StepBatch]]:
        def steps(*place: int) -> Iterator[StepBatch]:
            for batch in batches(*place):
                if not self._looked:
                    self._looked = True
                    self._look(batch)
                yield batch

        return steps

    def _look(self, batch: StepBatch) -> None:
        """Each data rank looks at its own part, before an id that no embedding has ends the step."""
        trained = batch.targets[batch.mask != 0] if batch.trained else batch.targets[:0]
        for what, ids in (("inputs", batch.tokens), ("targets", trained)):
            if not ids.numel():
                continue
            low, high = (int(number) for number in LateNumbers(list(ids.aminmax())).read())
            if low < 0 or high >= self.vocab_size:
                logger.warning(
                    f"the {what} of the first batch have ids from {low} to {high}, the vocabulary those from 0 to "
                    f"{self.vocab_size - 1}: the data is of another tokenizer"
                )

    def settled(self, trainer: Trainer, step: Settled) -> None:
        if step.step != self._first or not self.fresh or not step.trained_tokens or trainer.state.rank != 0:
            return
        if trainer.engine.objective.counts[0] != "tokens":
            return  # a loss of something else
        expected = math.log(self.vocab_size)
        if not abs(step.loss - expected) <= max(NEAR, NEAR_PART * expected):
            logger.warning(
                f"the loss of the first step is {step.loss:.4g}; of weights that know nothing it is about "
                f"ln({self.vocab_size}) = {expected:.4g}. Check init_method, the targets and the loss mask"
            )
