"""The training data of runs that learn from completions: drawn from the model before the step that trains on them.

What a step trains on depends on the weights, the seed and the samples consumed before it, not on the layout: rank 0
deals prompts to the copies of the model, all ranks learn all completions, and each takes its rows of the global batch.
Nothing is drawn twice: a resumed run goes on behind the completions of its checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron.callbacks.evaluator import used_as_model
from megatron.checkpoint.rng import random_state, restore_random_state
from megatron.data.batch import StepBatch
from megatron.data.collate import allocate, complete, fill, untrained
from megatron.data.loader import rank_samples
from megatron.data.sample import IGNORE, Sample
from megatron.errors import StopRequested, UserError
from megatron.inference.data_servers import DataServers
from megatron.inference.json_service import judge_at
from megatron.inference.live import live_stage
from megatron.inference.reward_model import RewardModel
from megatron.inference.rewards import REWARDS, Judge, judge_with
from megatron.inference.rollouts import Asked, Completed, Sampler, read_asked
from megatron.inference.stage import Stage
from megatron.inference.team import Control
from megatron.log import get_logger
from megatron.model.head import LMOutput
from megatron.mpu.random import stable_seed
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.objectives.policy import FULL, PolicyObjective
from megatron.run.data import collate_rules
from megatron.run.other_models import OtherModels
from megatron.training.callback import Callback, due
from megatron.training.setup import Process, build_objective

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

FILE = "rollouts.jsonl"
MOST_FAILURES = 10
"""Steps in a row without a reward after which a run ends."""
NOTHING = Completed([0], [], None)
"""In the place of a completion that a data server did not give."""
_NEW_RUN = "start a new run from these weights (finetune: true, another save), of which they are the reference"


class Rollouts(Callback):
    """`batches` in place of those of a data set. Built on every rank, collectively.

    Raises `UserError` for prompts that cannot be read.
    """

    def __init__(self, process: Process, folder: Path | None, others: OtherModels) -> None:
        self.args, self.state = process.args, process.state
        objective = build_objective(process.args)
        assert isinstance(objective, PolicyObjective)
        self.objective = objective
        # A prompt may end with that token, and a completion begins behind it.
        self.rules = replace(collate_rules(process.args, process.tokenizer), eod_mask_loss=False, reads=objective.reads)
        self.control, self.plan = Control(process.state), BatchPlan.of(process.args)
        self.sampler = Sampler(process.args, process.tokenizer, self.control, _judge(process.args))
        self.options = process.args.post
        self.reward_model: RewardModel | None = None
        if self.options.reward_model is not None:
            model, batch = others.find("reward_model"), self.options.rollout_batch_size
            self.reward_model = RewardModel(model, process.args, process.tokenizer, self.control, batch)
        self.file = None if folder is None or process.state.rank else folder / FILE
        self.prompts: list[Asked] = []
        self.held_out: list[Asked] = []  # prompts of validation, on rank 0
        self.servers: DataServers | None = None
        self.digest = ""
        if process.args.data.dataset_impl == "online":
            data = process.args.data
            self.servers = DataServers(
                data.online_dataserver_ips,
                data.online_dataserver_ports,
                self.options.reward_timeout,
                process.tokenizer.vocab_size,
            )
        else:
            self.digest = self.control.on_rank_zero(lambda: self._read(process))
        self._trainer: Trainer | None = None
        self._completed: list[list[Completed]] = []
        self._asked: int | None = None  # the number of the next completion; None: not known of this run
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))  # an epoch, and its prompts
        self._kept_reference: bool | None = None  # by the run that goes on; None: it begins to learn from completions
        self._began = False
        self._baseline: list[float] = []
        self._failed = self._failures = 0
        self._sums: dict[str, list[float]] = {}

    def _read(self, process: Process) -> str:
        """On rank 0, which deals them: the prompts. Their digest."""
        self.prompts = read_asked(process.args, process.tokenizer)
        if self.options.rollout_valid_prompts is not None:
            self.held_out = read_asked(process.args, process.tokenizer, "rollout_valid_prompts")
        logger.info(f"rollouts: {self.options.rollouts_per_prompt} of each of {len(self.prompts):,} prompts an epoch")
        return sha256(json.dumps([asked.tokens for asked in self.prompts]).encode()).hexdigest()

    # -- hooks --------------------------------------------------------------------------------------

    def start(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self.objective.reference:
            trainer.engine.keep_reference()  # before a checkpoint is loaded, which may have one

    def loaded(self, trainer: Trainer) -> None:
        self._take_reference(trainer)
        if trainer.step == 0:
            self._validate(trainer)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if due(trainer.step, self.args.training.eval_interval):
            self._validate(trainer)

    def end(self, trainer: Trainer) -> None:
        last = trainer.step >= (self.args.training.train_iters or 0)
        if last and not due(trainer.step, self.args.training.eval_interval):
            self._validate(trainer)

    def _take_reference(self, trainer: Trainer) -> None:
        """The weights of the moment, where the run begins to learn from completions; else those that it has kept."""
        if not self.objective.reference:
            return
        if trainer.step == 0 or self._kept_reference is None:
            trainer.engine.keep_reference()  # it begins here, whatever run these weights are from
        elif not self._kept_reference:
            raise UserError(
                f"kl_div_beta: {self.options.kl_div_beta} needs the weights that the run began with, which it has not "
                f"kept (kl_div_beta was 0); set kl_div_beta: 0, or {_NEW_RUN}"
            )
        elif self.args.checkpoint.no_load_optim and not self._began:
            raise UserError(
                "no_load_optim: the weights that the run began with (kl_div_beta) are kept with the optimizer's state "
                f"(not with no_save_optim); leave no_load_optim out, set kl_div_beta: 0, or {_NEW_RUN}"
            )
        self._began = True

    def state_dict(self) -> dict[str, Any]:
        kept = [[asdict(one) for one in group] for group in self._completed]
        return {
            "prompts": self.digest,
            "reference": self.objective.reference,
            "asked": self._asked,
            "baseline": self._baseline,
            "failed": self._failed,
            "completed": kept if self._trainer and self._trainer.step % self.options.rollout_steps else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["prompts"] != self.digest and not self.args.checkpoint.allow_config_changes:
            raise UserError(
                "rollout_prompts: not the prompts that this run began with; give those, or allow_config_changes: true"
            )
        self._baseline, self._failed = list(state["baseline"]), state["failed"]
        self._asked, self._kept_reference = state.get("asked"), state.get("reference", True)
        self._completed = [[Completed(**one) for one in group] for group in state["completed"]]

    # -- the batches --------------------------------------------------------------------------------

    def batches(self, consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
        """See `Batches`. Each is made when it is asked for, with the weights of that moment; none any more when the run
        is to stop.

        All steps of a group (rollout_steps) train on what its first step drew. Where that one is skipped, or began
        before a change of rollout_steps, the next one draws; a group that is skipped whole takes its prompts along.
        """
        step = self.plan.whole_steps(consumed) if step is None else step
        size, group = self.plan.batch_size(step), self.options.rollout_steps
        if self._asked is None:
            self._asked = consumed // size // group * size
        gas = size // ((self.args.training.train_micro_batch_size_per_gpu or 1) * self.state.dp_size)
        while True:
            behind = step % group
            if self.plan.skips(step):
                if behind == 0:
                    self._completed = []
                if behind == group - 1 and not self._completed:
                    self._asked += size
                arrays = untrained(self.rules, gas, self.args.training.train_micro_batch_size_per_gpu or 1)
                yield StepBatch.from_arrays(arrays, step, consumed)
            else:
                if behind == 0 or not self._completed:
                    if not self._roll_out(self._asked, step, size):
                        return
                    self._asked += size
                yield self._batch(gas, step, consumed)
            step, consumed = step + 1, consumed + size

    def _roll_out(self, first: int, step: int, size: int) -> bool:
        """The completions numbered from `first` on, of one global batch, on every rank; False when asked to stop."""
        began = time.monotonic()
        with self._as_model() as trainer:
            if self.servers is None:
                rows = self._write(trainer, lambda: self._turns(first, size))
                sizes = [self.options.rollouts_per_prompt] * (size // self.options.rollouts_per_prompt)
            else:
                rows, sizes = self._fetch(trainer, self.servers, step, size)
            if rows is not None and self.objective.reference:
                with trainer.engine.as_reference():
                    rows = _with_reference(rows, self.sampler.compare(self._stage(trainer), rows))
        if rows is None:
            trainer.request_stop("stopped while completions were written", StopRequested.exit_code)
            return False
        ends = np.cumsum(sizes).tolist()
        self._completed = [rows[end - count : end] for count, end in zip(sizes, ends, strict=True)]
        self._report(trainer, step, size, time.monotonic() - began)
        return True

    def _write(self, trainer: Trainer, asked: Callable[[], Sequence[tuple[int, Asked]]]) -> list[Completed] | None:
        """Completions of numbered prompts with their rewards, on every rank; None when asked to stop."""
        rows = self.sampler.write(self._stage(trainer), asked)
        if rows is None or self.reward_model is None:
            return rows
        rewards = self.reward_model.judge(rows)
        return [replace(one, reward=reward) for one, reward in zip(rows, rewards, strict=True)]

    def _validate(self, trainer: Trainer) -> None:
        """Complete each prompt that is held out, and report the means."""
        if self.options.rollout_valid_prompts is None:
            return
        trainer.settle()
        with used_as_model(trainer):
            # Numbers below 0: no completion of the training has their draws.
            rows = self._write(trainer, lambda: [(-1 - i, asked) for i, asked in enumerate(self.held_out)])
        if judged := [one for one in rows or () if one.reward is not None and self._fits(one)]:
            trainer.call("evaluated", "validation", _means(judged))

    def _stage(self, trainer: Trainer) -> Stage:
        """Of the weights of the moment."""
        return live_stage(trainer.engine, self.args, self.control, trainer.stopping)

    def _fetch(
        self, trainer: Trainer, servers: DataServers, step: int, size: int
    ) -> tuple[list[Completed] | None, list[int]]:
        """Completions of data servers, and how many of them each prompt has. What does not fit is left out."""
        groups = self.control.on_rank_zero(lambda: servers.fetch("train", step, size))
        rows = [one if self._fits(one) else NOTHING for group in groups for one in group]
        return _with_logprobs(rows, self.sampler.compare(self._stage(trainer), rows)), list(map(len, groups))

    def _turns(self, first: int, size: int) -> list[tuple[int, Asked]]:
        """The prompts of the completions with these numbers."""
        each = self.options.rollouts_per_prompt
        return [(number, self._prompt(number // each)) for number in range(first, first + size)]

    def _prompt(self, turn: int) -> Asked:
        """The prompts of each epoch in an order of its own."""
        epoch, place = divmod(turn, len(self.prompts))
        if self._order[0] != epoch:
            random = np.random.default_rng(stable_seed("prompts", self.args.training.seed, epoch))
            self._order = epoch, random.permutation(len(self.prompts))
        return self.prompts[self._order[1][place]]

    @contextmanager
    def _as_model(self) -> Iterator[Trainer]:
        """Inside, the model writes texts; random states of the training are as before afterwards."""
        assert self._trainer is not None
        trainer = self._trainer
        trainer.settle()
        before = random_state()
        with trainer.engine.evaluating(), trainer.progress.during("rollouts"):
            yield trainer
        restore_random_state(before)

    def _batch(self, gas: int, step: int, consumed: int) -> StepBatch:
        """This rank's rows of the completions."""
        micro = self.args.training.train_micro_batch_size_per_gpu or 1
        rewards = self._rewards()
        advantages, baseline = self.objective.advantages(rewards, self._baseline)
        if (step + 1) % self.options.rollout_steps == 0:
            self._baseline = baseline
        known = zip(self._completed, advantages, strict=True)
        rows = [(one, value) for group, values in known for one, value in zip(group, values, strict=False)]
        rows += [(NOTHING, 0.0)] * (gas * micro * self.state.dp_size - len(rows))
        arrays = allocate(self.rules, gas, micro)
        numbers = rank_samples(0, micro_batch=micro, gas=gas, dp_rank=self.state.dp_rank, dp_size=self.state.dp_size)
        for (at, row), number in np.ndenumerate(numbers):
            fill(arrays, at, row, self._sample(*rows[number]), self.rules)
        complete(arrays)
        batch = StepBatch.from_arrays(arrays, step, consumed)
        return self._with_distributions(batch) if FULL in self.objective.reads else batch

    def _with_distributions(self, batch: StepBatch) -> StepBatch:
        """With the reference's log-probabilities of the whole vocabulary, on the last stage."""
        temperature, found = self.objective.temperature, []

        def distributions(out: LMOutput) -> Tensor:
            return out.at_temperature(temperature).logits().log_softmax(dim=-1)

        with self._as_model() as trainer, trainer.engine.as_reference():
            stage, here = live_stage(trainer.engine, self.args), batch.to(self.state.device)
            for micro, tokens in enumerate(here.tokens):
                documents = None if here.doc_ids is None else here.doc_ids[micro]
                out = stage.run(tokens, here.positions[micro], then=distributions, doc_ids=documents)
                found.append(tokens.new_zeros(0) if out is None else out[: len(tokens)])
        return replace(batch, extras={**batch.extras, FULL: torch.stack(found)})

    def _rewards(self) -> np.ndarray:
        """Of all completions, float64 [prompts, most of a prompt], NaN where there is none."""
        widest = max(map(len, self._completed), default=1)
        found = np.full((len(self._completed), widest), np.nan)
        for row, group in enumerate(self._completed):
            for column, one in enumerate(group):
                if one.reward is not None and self._fits(one):
                    found[row, column] = one.reward - self.objective.penalty(one.logprobs, one.reference)
        return found

    def _fits(self, one: Completed) -> bool:
        return bool(one.tokens) and len(one.prompt) + len(one.tokens) <= self.rules.seq_length + 1

    def _sample(self, one: Completed, advantage: float) -> Sample:
        size = self.rules.seq_length + 1
        text, begin = [*one.prompt, *one.tokens][:size], len(one.prompt)
        end = len(text) if one.reward is not None and self._fits(one) else begin

        def place(values: Sequence[float] | float | None) -> np.ndarray:
            found = np.zeros(size, np.float32)
            if values is not None and end > begin:
                found[begin:end] = values
            return found

        tokens = np.zeros(size, np.int64)
        tokens[: len(text)] = text
        labels = np.full(size, IGNORE)
        labels[begin:end] = tokens[begin:end]
        extras = {
            "advantage": place(float(advantage)),
            "old": place(one.logprobs),
            "reference": place(one.reference),
        }
        return Sample(tokens, np.zeros(1, np.int64), labels, len(text), extras=extras)

    # -- reports ------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, step: int, size: int, seconds: float) -> None:
        rows = [one for group in self._completed for one in group]
        judged = [one for one in rows if one.reward is not None and self._fits(one)]
        self._failed += size - len(judged)
        self._failures = 0 if judged else self._failures + 1
        if self._failures >= MOST_FAILURES:
            raise UserError(f"{MOST_FAILURES} steps in a row had no completion with a reward; see the warnings above")
        spreads = [np.std(known) for group in self._completed if len(known := _known(group)) > 1]
        values = {
            **{f"rollout/{name}": value for name, value in _means(judged).items()},
            "rollout/reward_std": float(np.mean(spreads)) if spreads else None,
            "rollout/seconds": seconds,
        }
        if not any(name in trainer.metrics for name in values):
            self._sums.clear()
        for name, value in values.items():
            if value is not None:
                self._sums.setdefault(name, []).append(value)
        trainer.metrics |= {name: float(np.mean(known)) for name, known in self._sums.items()}
        trainer.metrics["rollout/failed"] = float(self._failed)
        if self.file is not None and self.options.rollout_log > 0:
            _append(self.file, step, judged[: self.options.rollout_log])


def _means(judged: Sequence[Completed]) -> dict[str, float]:
    """Of completions with a reward; nothing where there are none."""
    if not judged:
        return {}
    return {
        "reward": float(np.mean([one.reward for one in judged])),
        "length": float(np.mean([len(one.tokens) for one in judged])),
        "finished": float(np.mean([one.finished for one in judged])),
    }


def _judge(args: NeoXArgs) -> Judge:
    """Whoever gives the rewards of this run."""
    if args.post.reward_url is not None:
        return judge_at(args.post.reward_url, args.post.reward_timeout)
    return judge_with(REWARDS[args.post.reward] if args.post.reward is not None else lambda rollout: None)


def _with_logprobs(rows: Sequence[Completed], logprobs: Sequence[list[float]] | None) -> list[Completed] | None:
    return None if logprobs is None else [replace(a, logprobs=b) for a, b in zip(rows, logprobs, strict=True)]


def _with_reference(rows: Sequence[Completed], logprobs: Sequence[list[float]] | None) -> list[Completed] | None:
    return None if logprobs is None else [replace(a, reference=b) for a, b in zip(rows, logprobs, strict=True)]


def _known(group: Sequence[Completed]) -> list[float]:
    return [one.reward for one in group if one.reward is not None]


def _append(file: Path, step: int, completed: Sequence[Completed]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        for one in completed:
            line: Mapping[str, Any] = {"step": step, "text": one.text, "tokens": len(one.tokens), "reward": one.reward}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
