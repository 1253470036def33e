"""Metrics in Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.cluster.tracker_id import tracker_id
from megatron.errors import UserError
from megatron.home import installs
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs

logger = get_logger(__name__)

LATE_STEP = "evaluated_iteration"


@CALLBACKS.register(
    "wandb",
    phase="report",
    idle={"use_wandb": False},
    keys=(
        "wandb_project",
        "wandb_group",
        "wandb_run_name",
        "wandb_tags",
        "wandb_team",
        "wandb_host",
        "wandb_init_all_ranks",
    ),
)
class WeightsAndBiases(Tracker):
    """Writes metrics to Weights & Biases: one run per run folder, or with `wandb_init_all_ranks` one a rank in a group.

    `WANDB_MODE=offline` works as everywhere; `wandb_host` is passed only when set, so that WANDB_BASE_URL works too.
    Steps that are trained again are not sent again: W&B takes steps in ascending order only.
    """

    keeps_first = True
    _late_row = -1

    def __init__(self, args: NeoXArgs, directory: str | None, rank: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"use_wandb is set: {installs('wandb')}") from error
        self._late_names: set[str] = set()
        log = args.logging
        group, name = log.wandb_group, log.wandb_run_name
        if log.wandb_init_all_ranks:
            group, name = group or name or "ranks", f"{name or 'rank'}-{rank}"
        host = {"base_url": log.wandb_host} if args.is_set("wandb_host") else {}
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        of_rank = f"wandb-{rank}" if log.wandb_init_all_ranks else "wandb"
        run_id = tracker_id(Path(directory) if directory else None, of_rank, "WANDB_RUN_ID")
        try:
            self._run = wandb.init(
                project=log.wandb_project,
                group=group,
                name=name,
                tags=list(log.wandb_tags or ()) or None,
                entity=log.wandb_team,
                config=args.to_dict(),
                dir=directory,
                id=run_id,
                resume="allow",
                settings=wandb.Settings(**host, silent=True),  # else half a screen of its own
            )
        except (wandb.errors.Error, ValueError) as error:  # no key, a wrong one, no way to the server; a tag too long
            raise UserError(f"use_wandb: {error} (WANDB_MODE=offline needs neither a key nor a network)") from error
        later = f"offline, to send it later: wandb sync {Path(self._run.dir).parent}"
        logger.info(f"W&B: {later if self._run.offline else self._run.url}")
        self.stored = self._run.step - 1  # -1 for a new run
        if self._run.step:
            logger.info(f"W&B has steps before {self._run.step} of this run; those trained again are not sent")

    @classmethod
    def build(cls, context: RunContext) -> WeightsAndBiases | None:
        args, rank = context.args, context.state.rank
        if rank != 0 and not args.logging.wandb_init_all_ranks:
            return None
        return cls(args, str(context.folder) if context.folder else None, rank)

    def write(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def write_texts(self, texts: Sequence[tuple[str, str]], step: int) -> None:
        import wandb

        table = wandb.Table(columns=["step", "prompt", "text"], data=[[step, *pair] for pair in texts])
        self._run.log({"samples": table}, step=step)

    def write_late(self, metrics: dict[str, float], step: int) -> None:
        """W&B takes no step that is past, and a metric once a step: these have a row and an axis of their own."""
        if self._late_row < 0:
            self._run.define_metric(LATE_STEP, hidden=True)
        for name in metrics.keys() - self._late_names:
            self._run.define_metric(name, step_metric=LATE_STEP)
        self._late_names |= metrics.keys()
        self._late_row = max(self._run.step, self._late_row + 1)
        self._run.log({**metrics, LATE_STEP: step}, step=self._late_row)

    def close(self) -> None:
        self._run.finish()
