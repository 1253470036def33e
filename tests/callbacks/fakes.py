"""A trainer around an engine that does what the test asks for: callbacks are tested without DeepSpeed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.rewinds import Rewind, Rewinding
from megatron.data.batch import StepBatch
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.objectives import OBJECTIVES
from megatron.training.callback import Callback
from megatron.training.engine import EvalOut, StepOut
from megatron.training.trainer import Trainer
from tests.checkpoint import fake_engine

KEYS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "seq_length": 8,
    "make_vocab_size_divisible_by": 8,
    "train_batch_size": 4,
    "train_iters": 10,
    "lr_decay_style": "constant",
    "warmup": 0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
}


def out(
    loss: float = 2.0, norm: float | None = 1.0, *, skipped: bool = False, tokens: int = 32, **more: Any
) -> StepOut:
    """What a step reports."""
    grad_norm = None if norm is None else torch.tensor(norm)
    return StepOut(torch.tensor(loss), grad_norm, torch.tensor(skipped), tokens, **more)


def evaluated(total: float, tokens: int = 32) -> EvalOut:
    """What a batch with this summed loss comes to."""
    return EvalOut(torch.tensor([total]), (tokens,), tokens)


class LoopEngine(fake_engine.FakeEngine):
    """Reports the given steps one by one (then ordinary ones); evaluates to `eval_loss` per token."""

    def __init__(self, state: ParallelState, outs: Iterable[StepOut] = (), eval_loss: float = 3.0) -> None:
        super().__init__(state, seed=1)
        self.outs, self.eval_loss = iter(outs), eval_loss
        self.before_update: Any = None
        self.votes: Any = tuple
        self.evaluated: list[int] = []
        self.objective = OBJECTIVES["normal"]()

    def train_batch(self, batch: Any, lr: float) -> StepOut:
        result = next(self.outs, None) or out()
        if self.before_update is not None and result.grad_norm is not None:
            self.before_update()
        if not result.skipped:
            self.step()
        return dataclasses.replace(result, votes=tuple(self.votes()))

    def averaged(self) -> Any:
        return contextlib.nullcontext()

    def param_norms(self) -> dict[str, torch.Tensor]:
        return {name: weight.norm() for name, weight in self.masters.items()}

    def not_finite(self) -> list[str]:
        return [name for name, weight in self.masters.items() if not weight.isfinite().all()]

    def eval_batch(self, batch: Any) -> EvalOut:
        self.evaluated.append(batch.consumed)
        return evaluated(self.eval_loss * 32)


def batches(consumed: int = 0, step: int | None = None) -> Any:
    """Batches that only know their place."""
    none = torch.empty(0, dtype=torch.int64)
    while True:
        yield StepBatch(none, none, none, none, None, step or 0, consumed, 0)
        consumed += KEYS["train_batch_size"]


def args_of(**keys: Any) -> NeoXArgs:
    """The derived configuration of a small run."""
    return derive(NeoXArgs.from_saved({**KEYS, **keys}), Facts(vocab_size=fake_engine.VOCAB, num_devices=1))


def trainer_of(
    callbacks: Sequence[Callback], outs: Iterable[StepOut] = (), state: ParallelState | None = None, **keys: Any
) -> Trainer:
    """A trainer of ten steps that has started; `run()` does the rest."""
    engine: Any = LoopEngine(state or ParallelState.single("cpu"), outs)
    args = args_of(**keys)
    trainer = Trainer(args, engine.state, batches, callbacks, lambda step: args.optimizer.lr)
    trainer.engine = engine
    trainer.call("start")
    return trainer


class GoesBack(Callback):
    """Leaves the loop, once, when step `at` is settled."""

    def __init__(self, at: int) -> None:
        self.at = at

    def settled(self, trainer: Trainer, step: Any) -> None:
        if step.step == self.at:
            self.at = -1
            raise Rewinding([Rewind(0, step.step, step.step, step.step)])


def run_and_go_back(trainer: Trainer, to: int) -> None:
    """`trainer.run`, and again from step `to` when a `GoesBack` of its callbacks leaves it."""
    with pytest.raises(Rewinding):
        trainer.run()
    trainer.abandon()
    trainer.step, trainer.consumed = to, to * KEYS["train_batch_size"]
    trainer.run()


class Log(Callback):
    """Remembers what was logged, evaluated and saved."""

    def __init__(self) -> None:
        self.logged_: list[tuple[int, dict[str, float]]] = []
        self.evaluated_: list[tuple[int, str, dict[str, float]]] = []
        self.saved_: list[int] = []

    def logged(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        self.logged_.append((step, metrics))

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        self.evaluated_.append((trainer.step, split, metrics))

    def saved(self, trainer: Trainer, path: str) -> None:
        self.saved_.append(trainer.step)


def wandb_rows(record: Path) -> list[dict[str, Any]]:
    """The rows of history in W&B's file of an offline run: records in blocks of 32 KiB, headers of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole, rows = record.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if at + 7 + size > len(content):
            break  # it is being written
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete; 2 and 3 are parts of what 4 ends
            one = wandb_internal_pb2.Record.FromString(whole)
            if one.WhichOneof("record_type") == "history":
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item
                }
                rows.append(items)
            whole = b""
    return rows
