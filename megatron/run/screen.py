"""What a person sees of a run: a block of short lines where it starts, another where it ends."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import join

import torch

from megatron.callbacks.context import RunContext
from megatron.cluster.status import run_folder
from megatron.data.order.data_plan import DataPlan
from megatron.data.order.table import SourceRow
from megatron.errors import UserError
from megatron.home import HOME
from megatron.log import get_logger, on_terminal
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.block_sizes import HEADLESS
from megatron.neox_arguments.formulas import parameter_count
from megatron.tables import count
from megatron.training.trainer import Trainer

logger = get_logger(__name__)

_WIDTH = 11  # of the names of lines
_SOURCES = 6  # that are shown of one role

Row = tuple[str, str]


def show_start(context: RunContext, plan: DataPlan, parameters: int, step: int) -> None:
    """Log, on rank 0, what is about to be trained on what, from which step on, and how long."""
    args, state = context.args, context.state
    if state.rank == 0:
        rows = [("run", _name(context)), ("model", _model(args, parameters, context.vocab_size))]
        rows += [("layout", _layout(args, state)), *(("data", line) for line in data_texts(plan.table()))]
        rows += [("steps", _steps(args, step)), ("learning", _learning(args))]
        _show(rows)


def show_end(trainer: Trainer) -> None:
    """Log, on rank 0, where everything of the run lies, and the commands that come next."""
    args = trainer.args
    folder = run_folder(args)
    if trainer.state.rank != 0 or folder is None:
        return
    checkpoint = folder / f"global_step{trainer.saved_step}"
    there = [("metrics", folder / "metrics.jsonl"), ("logs", Path(args.logging.log_dir or folder / "logs"))]
    if trainer.saved_step and args.checkpoint.save:
        there.insert(0, ("checkpoint", checkpoint))
    _show((name, str(path)) for name, path in there if path.exists())
    if trainer.saved_step and args.checkpoint.save and (folder / "resolved.yml").exists():
        report = _command("report", "tools/report.py", str(folder))
        for name, commands in (("report", [report]), ("next", next_commands(trainer, folder, checkpoint))):
            for number, command in enumerate(commands):  # each whole, to be pasted
                logger.info(f"{'' if number else name:{_WIDTH}}{command}")


def next_commands(trainer: Trainer, folder: Path, checkpoint: Path) -> list[str]:
    """What can be typed in the folder of this process: to go on, to try the model, to take it elsewhere."""
    args, config, total = trainer.args, str(folder / "resolved.yml"), trainer.args.training.train_iters or 0
    commands = []
    if args.model.output_head != "reward":
        commands.append(_command("generate", "deepy.py generate.py", str(folder), "text_gen_type=interactive"))
    if not _lacks_family(args):
        folders = ("--input_dir", str(checkpoint), "--output_dir", str(folder / "hf"))
        commands.append(_command("export", "tools/ckpts/convert_neox_to_hf.py", *folders))
    if trainer.step < total:
        commands.insert(0, _command("train", "deepy.py train.py", config))
    elif args.training.train_epochs is None:
        commands.append(_command("train", "deepy.py train.py", config, f"train_iters={2 * total}"))
    return commands


def _lacks_family(args: NeoXArgs) -> bool:
    """Whether no architecture of transformers can express the model."""
    from megatron.convert.families import choose_family

    try:
        choose_family(args.model, None)
    except UserError:
        return True
    return False


def _command(name: str, script: str, *words: str) -> str:
    """The command line of a sub-command of `deepy`; the script's (a path and words) in the current folder, where no
    `deepy` is installed beside this Python."""
    installed = shutil.which("deepy")
    if installed is not None and Path(installed).parent == Path(sys.executable).parent:
        return join(["deepy", name, *words])
    near, *more = script.split()
    path = HOME / near
    found = near if Path(near).exists() and Path(near).resolve() == path.resolve() else str(path)
    return join(["python", found, *more, *words])


def _show(rows: Iterable[Row]) -> None:
    """A line each; on a terminal folded to its width, elsewhere whole."""
    columns = max(40, os.get_terminal_size(sys.stderr.fileno()).columns) if on_terminal() else 10_000
    before = ""
    for name, text in rows:
        folded = textwrap.wrap(
            text,
            columns - 1,
            initial_indent=f"{'' if name == before else name:{_WIDTH}}",
            subsequent_indent=" " * _WIDTH,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for line in folded:
            logger.info(line)
        before = name


def _name(context: RunContext) -> str:
    save, name = context.args.checkpoint.save, context.args.logging.wandb_run_name
    where = f"checkpoints in {save}" if save else "no checkpoint is kept: `save` is not set"
    return f"{name or (context.folder.name if context.folder else 'without a name')}, {where}"


def _model(args: NeoXArgs, parameters: int, vocab: int) -> str:
    m = args.model
    heads = f", {m.num_attention_heads} heads" if set(m.attention_config) - set(HEADLESS) else ""
    active = parameter_count(m, vocab).active if "moe" in m.layer_mlps else None
    used = f", of which a token uses {count(active)}" if active else ""
    return (
        f"{count(parameters)} parameters{used}: {m.num_layers} layers of width {m.hidden_size}{heads}, "
        f"{m.seq_length} tokens a sample, vocabulary {vocab:,}"
    )


def _layout(args: NeoXArgs, state: ParallelState) -> str:
    axes = [f"{name} {width}" for name, width in state.topology.axes.items() if width > 1]
    world, cuda = state.topology.world_size, state.device.type == "cuda"
    device = torch.cuda.get_device_name(state.device) if cuda else "the CPU"
    shape = f" ({' x '.join(axes)})" if axes else ""
    o = args.optimizer
    engine = "DeepSpeed" if o.engine == "deepspeed" else "engine native"
    return f"{world} rank{'s' * (world > 1)}{shape} on {device}, {o.precision}, ZeRO {o.zero_stage}, {engine}"


def data_texts(rows: Sequence[SourceRow]) -> list[str]:
    """A line for each of the largest sources of the training data, one for all that is validated and tested with."""
    trained = sorted((row for row in rows if row.role == "train"), key=lambda row: -row.weight)
    share = (lambda row: f"{row.weight:.0%} ") if len(trained) > 1 else lambda row: ""
    lines = [
        f"{share(row)}{row.prefix}: {count(row.tokens)} tokens in {row.documents:,} documents, {row.epochs:.3g} epochs"
        for row in trained[:_SOURCES]
    ]
    if len(trained) > _SOURCES:
        rest = trained[_SOURCES:]
        lines.append(
            f"{sum(row.weight for row in rest):.0%} {len(rest)} more: {count(sum(r.tokens for r in rest))} tokens"
        )
    others = [row for row in rows if row.role != "train"]
    if others:
        more = f", and {len(others) - _SOURCES} more" if len(others) > _SOURCES else ""
        lines.append(", ".join(f"{row.role}: {count(row.tokens)} tokens" for row in others[:_SOURCES]) + more)
    return lines


def _steps(args: NeoXArgs, first: int) -> str:
    t, plan = args.training, BatchPlan.of(args)
    iters = t.train_iters or 0
    begins = f", from step {first:,}" if first else ""
    return f"{iters:,} of {t.train_batch_size} samples{plan.describe()}: {count(plan.tokens(iters))} tokens{begins}"


def _learning(args: NeoXArgs) -> str:
    s, o = args.schedule, args.optimizer
    warm = f" after {s.warmup_share * s.steps:g} steps of warm-up" if s.steps and s.warmup_share else ""
    end = "" if s.lr_decay_style == "constant" else f" to {s.min_lr:g}"
    return f"{o.optimizer_type}, rate {o.lr:g}, {s.lr_decay_style}{end}{warm}"
