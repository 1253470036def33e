"""The callbacks of a run, from its configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.callbacks.checkpointer import Checkpointer
from megatron.callbacks.console import Console
from megatron.callbacks.evaluator import Batches, Evaluator, NamedSet
from megatron.callbacks.experts import ExpertLoad
from megatron.callbacks.flops import Flops, device_peak
from megatron.callbacks.health import ReplicaCheck, SkippedSteps
from megatron.callbacks.meter import Meter
from megatron.callbacks.run_folder import RunStatus, run_folder
from megatron.callbacks.stopping import ExitInterval, StopOnSignal
from megatron.callbacks.tensor_norms import TensorNorms
from megatron.callbacks.trackers import JsonLines, TensorBoard, Tracker, Trackers, WeightsAndBiases
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.formulas import flops_per_token
from megatron.training.callback import Callback


def step_flops(args: NeoXArgs, state: ParallelState, vocab_size: int) -> Flops:
    """FLOPs of one optimizer step and the peak of this device."""
    tokens = args.training.train_batch_size * args.model.seq_length
    return Flops(
        per_step=flops_per_token(args.model, vocab_size) * tokens,
        world_size=state.topology.world_size,
        peak=device_peak(state.device, args.logging.peak_theoretical_tflops),
        recompute_factor=4 / 3 if args.model.checkpoint_policy == "full" else 1.0,
    )


def default_callbacks(
    args: NeoXArgs,
    state: ParallelState,
    vocab_size: int,
    valid: Batches | None,
    test: Batches | None,
    sets: Sequence[NamedSet] = (),
) -> list[Callback]:
    """All callbacks in the order in which their hooks run. The same on every rank but for who writes.

    Order matters: norms and loads of experts come before the meter that logs them; the streak of skipped steps is known
    before a checkpoint is due; evaluation comes before the checkpoint of the same step, so that a resumed run does not
    repeat it; what shows and stores comes after what there is to be shown, at the end of the run as well; the status is
    written last.
    """
    training, logging = args.training, args.logging
    health = SkippedSteps(args.optimizer.max_skipped_steps)
    meter = Meter(logging.log_interval, step_flops(args, state, vocab_size))
    experts = [ExpertLoad(meter, args.model)] if "moe" in args.model.layer_mlps else []
    callbacks: list[Callback] = [
        *experts,
        TensorNorms(meter, gradients=logging.log_grad_norm, parameters=logging.log_param_norm),
        health,
        meter,
        ReplicaCheck(training.replica_check_interval),
        ExitInterval(training.exit_interval or 0),
        Evaluator(training.eval_interval, training.eval_iters, valid, test, sets),
    ]
    if args.checkpoint.save:
        callbacks.append(Checkpointer(Path(args.checkpoint.save), config_texts(args), health))
    callbacks.append(StopOnSignal())
    folder = run_folder(args)
    if state.rank == 0:
        callbacks.append(Console())
    callbacks.append(Trackers(build_trackers(args, folder, state.rank)))
    if state.rank == 0 and folder is not None:
        callbacks.append(RunStatus(folder))
    return callbacks


def build_trackers(args: NeoXArgs, folder: Path | None, rank: int) -> list[Tracker]:
    """The trackers of this rank: rank 0 has all that the configuration asks for, and metrics.jsonl whenever there is a
    run folder; the others have W&B with `wandb_init_all_ranks`.
    """
    trackers: list[Tracker] = []
    if rank == 0 and folder is not None:
        trackers.append(JsonLines(folder / "metrics.jsonl"))
    if rank == 0 and args.logging.tensorboard_dir:
        trackers.append(TensorBoard(args.logging.tensorboard_dir))
    if args.logging.use_wandb and (rank == 0 or args.logging.wandb_init_all_ranks):
        trackers.append(WeightsAndBiases(args, str(folder) if folder else None, rank))
    return trackers


def config_texts(args: NeoXArgs) -> dict[str, str]:
    """name -> text of the YAML files that the values came from, as far as they can be read from here."""
    files = {source.rsplit(":", 1)[0] for source in args.sources.values() if ":" in source}
    return {
        os.path.basename(path): Path(path).read_text(encoding="utf-8")
        for path in sorted(files)
        if path.endswith((".yml", ".yaml", ".json")) and os.path.isfile(path)
    }
