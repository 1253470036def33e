"""`eval.py`: the tasks of lm-evaluation-harness on a checkpoint, and the file with their results."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.find import Checkpoint
from megatron.errors import DeepyError, UserError
from megatron.files import write_atomically
from megatron.inference.build import build_stage
from megatron.inference.evaluation_team import evaluation_team
from megatron.inference.exported_text import as_exported
from megatron.inference.harness import HarnessModel
from megatron.inference.inputs import batch_size, check_requests, inherit_tokens, requested_checkpoint
from megatron.inference.tasks import Tasks, flat_metrics, table
from megatron.inference.team import Control
from megatron.log import get_logger, result
from megatron.neox_arguments import NeoXArgs
from megatron.training.setup import Process

logger = get_logger(__name__)

# Takes metrics by name and the checkpoint's step.
Report = Callable[[dict[str, float], int], None]


def evaluate(process: Process, report: Report) -> int:
    """Evaluate `eval_tasks` on the checkpoint and return the exit code. The same call on every rank.

    `report` is given the results on rank 0. Raises `DeepyError` when all is written and a task failed.
    """
    args, state, tokenizer = process.args, process.state, process.tokenizer
    control = Control(state)
    prepared: list[Tasks] = []

    def inputs() -> Checkpoint:
        check_requests(args.generation, "eval")
        checkpoint = requested_checkpoint(args)
        prepared.append(Tasks(args.generation))
        prepared[0].require()
        return checkpoint

    # Before the weights are read: an unknown task or a missing download shows at once.
    checkpoint = control.on_rank_zero(inputs)
    logger.info(f"evaluating {checkpoint.path}")
    stage = build_stage(args, state, tokenizer, checkpoint)
    exported = as_exported(tokenizer, inherit_tokens(args, checkpoint))
    if args.generation.eval_chat_template:
        exported.require_chat_template("eval_chat_template")
    team = evaluation_team(control, stage, exported, batch=batch_size(args), seed=args.training.seed)
    info = {"checkpoint": str(checkpoint.path), "precision": args.optimizer.precision, "neox_args": args.to_dict()}
    failed: dict[str, str] = {}

    def lead() -> None:
        from lm_eval.loggers.utils import add_env_info

        results = prepared[0].run(HarnessModel(team, tokenizer, exported, info))
        failed.update(results["failed"])
        add_env_info(results)
        result(f"Evaluation results of {checkpoint.path}\n{table(results)}")
        write_results(results, stamped(results_prefix(args)), "eval_results_prefix: ")
        report({f"eval/{name}": value for name, value in flat_metrics(results).items()}, checkpoint.manifest.step)

    team.run(lead)
    if failed := control.broadcast(failed):
        raise DeepyError(f"no results of {', '.join(failed)}, see above; the results of all other tasks are written")
    return 0


def results_prefix(args: NeoXArgs) -> str:
    """`eval_results_prefix`; without one the folder `eval_results` of the run that is evaluated, or "", the current
    folder, where no file can be added to it."""
    if args.generation.eval_results_prefix:
        return args.generation.eval_results_prefix
    run = Path(args.checkpoint.load or args.checkpoint.save or "")
    return f"{run}/eval_results/" if run.is_dir() and os.access(run, os.W_OK) else ""


def stamped(prefix: str) -> Path:
    """`[<prefix>_]eval_results_<month-day-year-hour-minute-second>.json`; a prefix that ends in / is a folder."""
    name = f"eval_results_{time.strftime('%m-%d-%Y-%H-%M-%S')}.json"
    return Path(f"{prefix}{'' if prefix.endswith('/') else '_'}{name}" if prefix else name)


def write_results(results: Mapping[str, Any], path: Path, key: str = "") -> None:
    """Write a file of results, complete or not at all; raises `UserError`, beginning with `key`, if that cannot be."""
    from lm_eval.utils import handle_non_serializable

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        write_atomically(path, text + "\n")
    except OSError as error:
        raise UserError(f"{key}{path} cannot be written: {error}") from error
    logger.info(f"results written to {path}")
