"""`eval.py`: the tasks of lm-evaluation-harness on a checkpoint, and the file with their results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.find import Checkpoint
from megatron.errors import UserError, nearest
from megatron.files import write_atomically
from megatron.inference.build import build_stage
from megatron.inference.exported_text import as_exported
from megatron.inference.harness import HarnessModel, evaluation_team
from megatron.inference.inputs import check_requests, inherit_tokens, requested_checkpoint
from megatron.inference.team import Control
from megatron.log import get_logger, result
from megatron.training.setup import Process

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = get_logger(__name__)

BOOTSTRAP = 10_000  # draws for the standard errors, as GPT-NeoX takes

# Takes metrics by name and the checkpoint's step.
Report = Callable[[dict[str, float], int], None]


def evaluate(process: Process, report: Report) -> int:
    """Evaluate `eval_tasks` on the checkpoint and return the exit code. The same call on every rank.

    `report` is given the results on rank 0.
    """
    args, state, tokenizer = process.args, process.state, process.tokenizer
    control = Control(state)
    prepared: list[Tasks] = []

    def inputs() -> Checkpoint:
        check_requests(args.generation, "eval")
        checkpoint = requested_checkpoint(args)
        prepared.append(Tasks(args.generation.eval_tasks or ()))
        return checkpoint

    # Before the weights are read: an unknown task or a missing download shows at once.
    checkpoint = control.on_rank_zero(inputs)
    logger.info(f"evaluating {checkpoint.path}")
    stage = build_stage(args, state, tokenizer, checkpoint)
    batch = args.training.train_micro_batch_size_per_gpu or 1
    exported = as_exported(tokenizer, inherit_tokens(args, checkpoint))
    team = evaluation_team(control, stage, exported, batch=batch, seed=args.training.seed)
    info = {"checkpoint": str(checkpoint.path), "precision": args.optimizer.precision, "neox_args": args.to_dict()}

    def lead() -> None:
        results = prepared[0].run(HarnessModel(team, tokenizer, exported, info))
        result(table(results))
        write_results(results, args.generation.eval_results_prefix)
        report(flat_metrics(results), checkpoint.manifest.step)

    team.run(lead)
    return 0


class Tasks:
    """The tasks that `eval_tasks` names, loaded with their data, zero-shot.

    A name is one of the harness's (task, group or tag, also with * and ?), a YAML file of a task, or a folder of such
    files.

    Raises:
        UserError: a name is not known, or the task or its data cannot be loaded.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.manager = self._manager()
        self.loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in self._expand():
            for part, found in self._load(name).items():
                self.loaded[part].update(found)
        for name, task in self.loaded["tasks"].items():
            if shots := task.get_config("num_fewshot"):
                logger.info(f"{name}: zero-shot, as GPT-NeoX evaluates (its own default is {shots} examples)")
            task.set_config(key="num_fewshot", value=0)

    def run(self, model: HarnessModel) -> dict[str, Any]:
        """The harness's results."""
        from lm_eval.evaluator import simple_evaluate

        manager = self.manager
        manager.load = lambda tasks: self.loaded  # type: ignore[method-assign]  # they are loaded: not once more
        results = simple_evaluate(
            model=model,
            tasks=self.names,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
            task_manager=manager,
        )
        assert results is not None  # rank 0 alone runs this
        return dict(results)

    def _manager(self) -> TaskManager:
        from lm_eval.tasks import TaskManager

        folders = [name for name in self.names if Path(name).is_dir()]
        # Reading the harness's 14,000 task files takes many seconds: only if one of them may be meant.
        theirs = any(not Path(name).exists() for name in self.names)
        if theirs:
            logger.info("reading the task files of lm-evaluation-harness")
        return TaskManager(include_path=folders or None, include_defaults=theirs)

    def _expand(self) -> list[str]:
        """Names with folders and patterns replaced by what they hold or match."""
        from lm_eval.tasks import TaskManager

        found: list[str] = []
        for name in self.names:
            if Path(name).is_dir():
                inside = TaskManager(include_path=name, include_defaults=False).all_subtasks
                if not inside:
                    raise UserError(f"eval_tasks: the folder {name} holds no task")
                found += inside
            elif Path(name).is_file() or name in self.manager.all_tasks:
                found.append(name)
            else:
                found += self._match_tasks(name)
        return list(dict.fromkeys(found))

    def _match_tasks(self, name: str) -> list[str]:
        matched = self.manager.match_tasks([name]) if any(c in name for c in "*?") else []
        if not matched:
            raise UserError(
                f"eval_tasks: there is no task {name!r}.{nearest(name, self.manager.all_tasks)} "
                "`lm-eval ls tasks` lists them; a YAML file or a folder of them can be given too"
            )
        return matched

    def _load(self, name: str) -> dict[str, Any]:
        try:
            return dict(self.manager.load([name]))
        # Whatever the harness, `datasets` and the network raise: there is no common class.
        except Exception as error:
            raise UserError(
                f"eval_tasks: {name} cannot be loaded: {type(error).__name__}: {error}\n"
                "Its data comes from the Hugging Face Hub unless it is in the cache (HF_HOME) already: load it once on "
                "a machine with a network, or name a task whose data is local."
            ) from error


def flat_metrics(results: dict[str, Any]) -> dict[str, float]:
    """Results for trackers: `eval/<task>_<metric>`, groups included; a filter's name is added unless it is none."""
    found = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        for name, value in values.items():
            metric, _, chosen = name.partition(",")
            if isinstance(value, float) and chosen:
                found[f"eval/{task}_{metric}" + (f"_{chosen}" if chosen != "none" else "")] = value
    return found


def table(results: dict[str, Any]) -> str:
    """Results for people: tasks, then groups."""
    from lm_eval.utils import make_table

    parts = [make_table(results)]
    if results.get("groups"):
        parts.append(make_table(results, "groups"))
    return "\n".join(parts)


def write_results(results: dict[str, Any], prefix: str) -> Path:
    """`[<prefix>_]eval_results_<month-day-year-hour-minute-second>.json`, complete or not at all.

    Raises:
        UserError: it cannot be written.
    """
    from lm_eval.utils import handle_non_serializable

    stamp = time.strftime("%m-%d-%Y-%H-%M-%S")
    path = Path(f"{prefix}_eval_results_{stamp}.json" if prefix else f"eval_results_{stamp}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        write_atomically(path, text + "\n")
    except OSError as error:
        raise UserError(f"eval_results_prefix: {path} cannot be written: {error}") from error
    logger.info(f"results written to {path}")
    return path
