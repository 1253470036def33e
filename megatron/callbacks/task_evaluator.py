"""lm-evaluation-harness on the model that is being trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.evaluator import used_as_model
from megatron.checkpoint.rng import random_state, restore_random_state
from megatron.cluster.evaluation_jobs import FOLDER
from megatron.inference.evaluation_team import evaluation_team
from megatron.inference.exported_text import as_exported
from megatron.inference.inputs import batch_size
from megatron.inference.live import live_stage
from megatron.inference.lockstep import Stopped
from megatron.inference.team import Control, Team
from megatron.log import get_logger, result
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.inference.tasks import Tasks
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

SPLIT = "eval_tasks"


@CALLBACKS.register(
    "task_evaluator",
    phase="score",
    idle={"eval_tasks": None, "eval_suite": None},
    keys=(
        "eval_interval",
        "eval_tasks_path",
        "eval_num_fewshot",
        "eval_task_limit",
        "eval_chat_template",
        "eval_system_instruction",
        "eval_batch_size",
    ),
    loses="eval_tasks are not evaluated while training",
)
class TaskEvaluator(Callback):
    """Runs `eval_tasks` and `eval_suite` before the first step of a run, every `eval_interval` steps and at the end.

    The model is the one that trains: its layers run forward, each data-parallel copy takes a part of the requests.
    Random states are as before afterwards. What fails is logged and has no result; the run continues. What ends the run
    (memory, a rank that dies) loses no step: the checkpoint of the step is complete.
    """

    def __init__(self, context: RunContext, interval: int) -> None:
        assert context.tokenizer is not None
        self.args, self.interval, self.tokenizer = context.args, interval, context.tokenizer
        self.folder = None if context.folder is None else context.folder / FOLDER
        self.control = Control(context.state)
        self.exported = as_exported(self.tokenizer, self.args.tokenizer.model_tokens)
        self.tasks: Tasks | None = None  # on rank 0
        self._evaluated_at = -1
        before = random_state()
        self.control.on_rank_zero(self._load)
        restore_random_state(before)

    @classmethod
    def build(cls, context: RunContext) -> TaskEvaluator | None:
        interval = context.args.training.eval_interval
        return cls(context, interval) if interval > 0 and context.args.generation.eval_jobs is None else None

    def _load(self) -> None:
        """Now, so that an unknown name does not end a run that has trained for a while."""
        from megatron.inference.tasks import Tasks

        if self.args.generation.eval_chat_template:
            self.exported.require_chat_template("eval_chat_template")
        self.tasks = Tasks(self.args.generation)

    def loaded(self, trainer: Trainer) -> None:
        self._evaluated_at = -1  # a run that went back comes to the same steps again
        if trainer.step == 0:
            self._evaluate(trainer)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if due(trainer.step, self.interval):
            self._evaluate(trainer)

    def end(self, trainer: Trainer) -> None:
        if trainer.step >= (trainer.args.training.train_iters or 0):
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        if self._evaluated_at == trainer.step:
            return
        trainer.settle()
        self._evaluated_at, metrics = trainer.step, {}
        with used_as_model(trainer):
            stage = live_stage(trainer.engine, self.args, self.control, trainer.stopping)
            seed = self.args.training.seed
            team = evaluation_team(self.control, stage, self.exported, batch=batch_size(self.args), seed=seed)
            team.run(lambda: metrics.update(self._lead(team, trainer.step)))
            metrics = self.control.broadcast(metrics)
        if metrics:
            trainer.call("evaluated", SPLIT, metrics)

    def _lead(self, team: Team, step: int) -> dict[str, float]:
        """Rank 0's part: the metrics; none when the evaluation was stopped or nothing of it worked."""
        # The harness takes seconds to import: only rank 0 does, and only in runs that use it.
        from megatron.inference.evaluate import write_results
        from megatron.inference.harness import HarnessModel
        from megatron.inference.tasks import flat_metrics, table

        assert self.tasks is not None
        info = {"iteration": step, "precision": self.args.optimizer.precision, "neox_args": self.args.to_dict()}
        logger.info(f"Running evaluation harness at iteration {step}: {', '.join(self.tasks.names)}")
        try:
            model = HarnessModel(team, self.tokenizer, self.exported, info)
            results = self.tasks.run(model, may_fork=False)
            result(f"Evaluation results at iteration {step}\n{table(results)}")
            if self.folder is not None:
                write_results(results, Path(self.folder, f"iteration_{step}.json"))
            return flat_metrics(results)
        except Stopped:
            logger.info(f"the evaluation at iteration {step} was stopped: it has no results")
        except Exception as error:  # a full disk, for instance: evaluations are no reason to end a run
            if team.broken:
                raise
            logger.warning(f"the evaluation at iteration {step} failed: {type(error).__name__}: {error}")
        return {}
