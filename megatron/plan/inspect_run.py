"""The data of a run, opened from its configuration alone, to be looked at: any sample, any step, on any machine.

Plans as `--prepare` and the run itself do, so a resumed run is seen in the order that its checkpoint keeps.
Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.start import Start, decide_start
from megatron.data.collate import CollateRules
from megatron.data.order.by_step import ByStep
from megatron.data.order.data_plan import SET, DataPlan
from megatron.data.order.role_order import RoleOrder
from megatron.data.sample import SampleDataset
from megatron.data.tokens.pairs import SIDES
from megatron.data.view.content import View, sample_view
from megatron.data.view.origin import Origin, origin_of
from megatron.errors import UserError, nearest
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.derive import Facts, check_trainable, derive
from megatron.neox_arguments.problems import Problems
from megatron.plan.refusals import check_data_plan, warn_of_unknown_ranks
from megatron.run.data import collate_rules, resolve_epochs
from megatron.tokenizer import Tokenizer, build_tokenizer

LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Steps:
    """Which samples a step takes. `known` are (step, samples consumed before it), ascending from where the run
    started. Other steps take what `plan` says, by default `batch` each, where that leads to what is known."""

    batch: int
    known: tuple[tuple[int, int], ...] = ((0, 0),)
    plan: BatchPlan | None = None

    def samples(self, step: int) -> range:
        """The samples of a step. Raises `UserError` where the batch size changed at an unknown step."""
        first, consumed, plan = self._piece(bisect_right([at for at, _ in self.known], step) - 1, f"step {step}")
        begin = consumed + plan.samples(step) - plan.samples(first)
        return range(begin, begin + plan.batch_size(step))

    def step_of(self, sample: int) -> int:
        """The step that takes a sample."""
        first, consumed, plan = self._piece(bisect_right([at for _, at in self.known], sample) - 1, f"sample {sample}")
        return plan.whole_steps(plan.samples(first) + sample - consumed)

    def _piece(self, i: int, asked: str) -> tuple[int, int, BatchPlan]:
        if i < 0:
            step, samples = self.known[0]
            raise UserError(
                f"{asked}: this run started at step {step}, after {samples} samples (init_from); earlier steps "
                "belong to the run that it started from."
            )
        (first, consumed), plan = self.known[i], self.plan or BatchPlan.constant(self.batch)
        if i + 1 < len(self.known):
            end, after = self.known[i + 1]
            if plan.samples(end) - plan.samples(first) == after - consumed:
                return first, consumed, plan
            batch, rest = divmod(after - consumed, end - first)
            if rest:
                raise UserError(
                    f"between the checkpoints of steps {first} and {end} the batch size changed "
                    f"({after - consumed} samples in {end - first} steps), at a step that is not recorded. "
                    "Ask by sample number instead."
                )
            plan = BatchPlan.constant(max(batch, 1))
        return first, consumed, plan


@dataclass(frozen=True)
class Place:
    """Where a sample is: `step` counts from 0 (for validation data: the batch), `row` in the global batch.

    `rank` and `micro_batch`: the data-parallel rank that reads it, and in which of its micro-batches.
    """

    step: int
    row: int
    rank: int
    micro_batch: int


@dataclass(frozen=True)
class RoleData:
    """The samples of one role: `count` of them are read by the run."""

    name: str
    plan: RoleOrder
    dataset: SampleDataset
    count: int
    steps: Steps
    micro: int
    ranks: int

    def place(self, sample: int) -> Place:
        """See `Place`; as `loader.rank_samples` deals samples out."""
        step = self.steps.step_of(sample)
        row = sample - self.steps.samples(step).start
        return Place(step, row, row // self.micro % self.ranks, row // (self.micro * self.ranks))

    def samples_of(self, steps: range) -> Iterator[int]:
        """The samples of some steps. Raises `UserError`, before giving any, when the run does not reach them all."""
        for step in (steps.start, steps.stop - 1):
            if step < 0 or self.steps.samples(step).stop > self.count:
                raise UserError(
                    f"step {step}: the run has steps 0..{self.last_step} of {self.name} "
                    "(train_iters and train_batch_size decide it)."
                )
        return (sample for step in steps for sample in self.steps.samples(step))

    @property
    def last_step(self) -> int:
        """The last whole step."""
        last = self.steps.step_of(self.count - 1)
        return last if self.steps.samples(last).stop <= self.count else last - 1

    def check(self, sample: int) -> int:
        """The number, when the run reads such a sample."""
        if not 0 <= sample < self.count:
            raise UserError(
                f"sample {sample}: the run reads samples 0..{self.count - 1} of {self.name} "
                f"(steps 0..{self.last_step})."
            )
        return sample

    def origin(self, sample: int) -> Origin:
        """Where a sample comes from."""
        return origin_of(self.plan, self.dataset, sample)


@dataclass(frozen=True)
class RunData:
    """The data of a run. `validation` is how many batches a validation takes."""

    args: NeoXArgs
    tokenizer: Tokenizer
    plan: DataPlan
    roles: Mapping[str, RoleData]
    rules: CollateRules
    validation: int
    start: str

    def role(self, name: str) -> RoleData:
        """The role of that name: train, valid, test, or `valid/` and the name of a validation set."""
        if name not in self.roles:
            names = list(self.roles)
            raise UserError(f"the run has no data called {name!r}, but {', '.join(names)}.{nearest(name, names)}")
        return self.roles[name]

    def views(self, role: RoleData, sample: int) -> dict[str, View]:
        """The rows of a sample, to be shown: one without a name, or those of a pair, chosen and rejected."""
        place, origin = role.place(role.check(sample)), role.origin(sample)
        batch = len(role.steps.samples(place.step))
        title = f"sample {sample} of {role.name}, {self.name_step(role, place.step)}, row {place.row} of {batch}"
        item = role.dataset[sample]
        if not isinstance(item, tuple):
            return {"": sample_view(item, origin, self.rules, title)}
        pieces = [(piece,) for piece in origin.pieces] or [()] * len(item)
        return {
            side: sample_view(row, replace(origin, pieces=held), self.rules, f"{title}, {side}")
            for side, row, held in zip(SIDES, item, pieces, strict=True)
        }

    def name_step(self, role: RoleData, step: int) -> str:
        """A step in words, also as the log counts it."""
        if role.name == "train":
            return f"step {step} (iteration {step + 1} of the log)"
        if role.name == "valid" and self.validation:
            return f"batch {step % self.validation} of validation {step // self.validation}"
        return f"batch {step}"


def open_run(args: NeoXArgs, ranks: int | None, problems: Problems | None = None) -> RunData:
    """Open the data of a loaded config, and build its sample index where it is missing.

    Args:
        ranks: how many a hostfile gives the run, None for the config's.
        problems: found when the config was loaded.

    Raises the `UserError` that the run would end with.
    """
    found = problems or Problems()
    args = derive(args, Facts(num_devices=ranks), found)
    check_trainable(args, found)
    found.raise_all()
    warn_of_unknown_ranks(args, ranks, "which samples a step takes")
    tokenizer = build_tokenizer(args.tokenizer)
    args = resolve_epochs(derive(args, Facts(tokenizer.vocab_size, ranks)), tokenizer)
    options, training = args.checkpoint, args.training
    start = decide_start(options, to_write=False)  # people also look at the runs of others
    plan = check_data_plan(args, tokenizer, start)
    train = Steps(training.train_batch_size, _known_steps(start, options.save, plan.start), BatchPlan.of(args))
    micro = training.train_micro_batch_size_per_gpu
    per_rank = micro * training.gradient_accumulation_steps
    roles = {}
    for name, dataset in plan.build().by_role().items():
        parts = list(dataset.sources) if isinstance(dataset, ByStep) else [name]
        role, count = plan.roles[parts[0]], len(dataset)
        if isinstance(dataset, ByStep):
            role = replace(role, sources=tuple(one for part in parts for one in plan.roles[part].sources))
        elif not name.startswith(SET):
            count = min(count, role.samples)
        steps = train if name == "train" else Steps(training.train_batch_size)
        roles[name] = RoleData(name, role, dataset, count, steps, micro, training.train_batch_size // per_rank)
    rules = collate_rules(args, tokenizer)
    return RunData(args, tokenizer, plan, roles, rules, training.eval_iters or 0, start.message)


def _known_steps(start: Start, save: str | None, begun: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Steps of the run's checkpoints, and samples consumed before them."""
    if start.checkpoint is None or not start.resumes:
        return (begun,)
    saved = [start.checkpoint]
    if start.kind == "resume" and save is not None:
        saved += [one for step, one in list_checkpoints(save).checkpoints.items() if step < start.step]
    return tuple(sorted({begun, *((one.manifest.step, one.manifest.consumed) for one in saved)}))
