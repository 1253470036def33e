"""The lines a person watches, in GPT-NeoX's format so that existing grep scripts keep working."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.live_line import shows_live_line
from megatron.log import DETAIL, clock, get_logger, result
from megatron.neox_arguments.callback_key import choose_callbacks
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)


def training_line(metrics: dict[str, float], step: int, total: int, more: Sequence[str] = ()) -> str:
    """One training line: GPT-NeoX's fields in its order, then ours, then the metrics `more` as far as they are logged.

    `iteration.*lm_loss` and `iteration\\s+[0-9]+/\\s*[0-9]+ ... lm_loss:\\s*` match it, as in NeoX's logs.
    """
    parts = [
        f" samples/sec: {metrics['runtime/samples_per_sec']:.3f}",
        f"iteration {step:8d}/{total:8d}",
        f"elapsed time per iteration (ms): {metrics['runtime/iteration_time'] * 1000:.1f}",
        f"learning rate: {metrics['train/learning_rate']:.3E}",
        f"approx flops per GPU: {metrics['runtime/flops_per_sec_per_gpu'] / 1e12:.1f}TFLOPS",
    ]
    if "runtime/model_flops_utilization" in metrics:
        parts.append(f"MFU: {metrics['runtime/model_flops_utilization']:.2%}")
        parts.append(f"HFU: {metrics['runtime/hardware_flops_utilization']:.2%}")
    if "train/lm_loss" in metrics:
        parts.append(f"lm_loss: {metrics['train/lm_loss']:.6E}")
    if "train/loss_scale" in metrics:
        parts.append(f"loss scale: {metrics['train/loss_scale']:.1f}")
    parts += [
        f"number of skipped iterations: {int(metrics['train/skipped']):3d}",
        f"number of nan iterations: {int(metrics['train/nan']):3d}",
        f"tokens/sec: {metrics['runtime/tokens_per_sec']:.1f}",
        f"grad norm: {metrics['train/grad_norm']:.3f}",
        *(f"{name}: {metrics[name]:.6g}" for name in more if name in metrics),
    ]
    return " | ".join(parts) + " |"


def evaluation_line(metrics: dict[str, float], split: str, step: int, total: int) -> str:
    """One line of an evaluation, as GPT-NeoX writes it: `lm_loss value: `, and at the end of training no iteration, so
    that the last line with `iteration.*lm_loss` of a run that has ended is its last training line."""
    end = f"the end of training for {'test' if split == 'test' else 'val'} data"
    values = " | ".join(f"{name} value: {value:.6E}" for name, value in metrics.items())
    return f" {split} results at {f'iteration {step}' if step < total else end} | {values} |"


def start_line(args: NeoXArgs, step: int) -> str:
    """The line that says which run a log is of, where it is stored, and where it starts."""
    save, total = args.checkpoint.save, args.training.train_iters
    name = args.logging.wandb_run_name or (Path(save).name if save else "without a name")
    return f"run {name} starts at iteration {step} of {total}, save: {save or 'nothing is stored'}"


@CALLBACKS.register("console", phase="report", loses="no line of training or evaluation is printed")
class Console(Callback):
    """Prints training and evaluation lines on rank 0, and where checkpoints are.

    Args:
        metrics: names of further metrics that the training line shows.
        show: whether training lines are printed; else they are in the log file alone (a live line stands for them).
    """

    def __init__(self, metrics: Sequence[str] = (), show: bool = True) -> None:
        self.metrics, self.show = metrics, show
        self._told = False  # how long the run takes
        self._memory_shown = False

    @classmethod
    def build(cls, context: RunContext) -> Console | None:
        if context.state.rank != 0:
            return None
        metrics = [name for one in choose_callbacks(context.args) for name in one.row.get("console", ())]
        if trains_on_rollouts(context.args.get):
            metrics += ["rollout/reward", "rollout/length"]
        return cls(metrics, show=not shows_live_line(context))

    def loaded(self, trainer: Trainer) -> None:
        logger.log(DETAIL, start_line(trainer.args, trainer.step))

    def logged(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        names = [*(f"train/{name}" for name in trainer.engine.objective.metrics), *self.metrics]
        total = trainer.args.training.train_iters
        result(training_line(metrics, step, total, names), show=self.show)
        if not self._told and step > trainer.progress.first and step < total:
            self._told = True
            left = clock((total - step) * metrics["runtime/iteration_time"])
            logger.log(DETAIL, f"at this speed the other {total - step:,} steps take {left}")

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        result(evaluation_line(metrics, split, trainer.step, trainer.args.training.train_iters or 0), show=self.show)
        if not self.show:
            values = ", ".join(f"{name} {value:.5g}" for name, value in metrics.items())
            logger.info(f"{split} at step {trainer.step}: {values}")

    def sampled(self, trainer: Trainer, texts: Sequence[tuple[str, str]]) -> None:
        for prompt, text in texts:
            result(f" sample at iteration {trainer.step} | {prompt!r} -> {text!r}")

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if not self._memory_shown:
            self._memory_shown = True
            logger.log(DETAIL, memory_line(trainer))

    def saved(self, trainer: Trainer, path: str) -> None:
        logger.info(f"saved checkpoint {path}")

    def end(self, trainer: Trainer) -> None:
        reason = trainer.stop_reason or "train_iters reached"
        logger.info(f"training ends at iteration {trainer.step}: {reason}")


def memory_line(trainer: Trainer) -> str:
    """Memory of this rank after the first step: the device's peak, or the process's on a CPU."""
    import torch

    device = trainer.state.device
    if device.type == "cuda":
        mib = [
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_reserved(device),
        ]
        allocated, peak, reserved, peak_reserved = (x / 2**20 for x in mib)
        return (
            f"[Rank {trainer.state.rank}] (after {trainer.step} iterations) memory (MB) | allocated: {allocated:.1f} | "
            f"max allocated: {peak:.1f} | reserved: {reserved:.1f} | max reserved: {peak_reserved:.1f}"
        )
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"[Rank {trainer.state.rank}] (after {trainer.step} iterations) memory (MB) | max resident: {peak:.1f}"
