"""Records some steps with torch's profiler, and the GPU's memory with torch's snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import profiler

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.log import get_logger
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

_EVENTS = 100_000  # allocations and releases that a snapshot remembers, the latest


@CALLBACKS.register(
    "profiler",
    phase="measure",
    settings={"stacks": True},
    idle={"profile": False, "memory_profiling": False},
    keys=("profile_step_start", "profile_step_stop", "memory_profiling_path"),
)
class Profiler(Callback):
    """Records the steps after `profile_step_start` up to `profile_step_stop`. Every rank writes its own files:

    * `profile`: `rank<N>.<time>.pt.trace.json` (Chrome's format: Perfetto and TensorBoard show it) in
      `tensorboard_dir`, else in `profile/` of the run folder; with a GPU the same steps are those of an outer
      `nsys profile --capture-range=cudaProfilerApi`, each in an NVTX range. `stacks`: the Python lines of each
      operation, which make a trace several times larger.
    * `memory_profiling` (GPU): `mem_snapshot_rank<N>.pickle` for pytorch.org/memory_viz in `memory_profiling_path`,
      else in the same folder; all allocations since before the model was built, written after the last of these steps,
      or when an error ends the run before.

    Args:
        steps: completed steps before the first recorded one, and after the last.
        folder: of the traces; None records none.
        memory_folder: of the snapshots; None writes none.
    """

    def __init__(
        self,
        steps: tuple[int, int],
        folder: Path | None,
        memory_folder: Path | None,
        rank: int,
        gpu: bool,
        stacks: bool = True,
    ) -> None:
        self.first, self.last = steps
        self.folder, self.memory_folder, self.rank, self.gpu, self.stacks = folder, memory_folder, rank, gpu, stacks
        self._profile: profiler.profile | None = None
        self._began = False
        if gpu and memory_folder is not None:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    @classmethod
    def build(cls, context: RunContext, stacks: bool = True) -> Profiler:
        options, gpu = context.args.logging, context.state.device.type == "cuda"
        named = options.tensorboard_dir
        folder = Path(named) if named else (context.folder or Path()) / "profile"
        memory = Path(options.memory_profiling_path) if options.memory_profiling_path else folder
        if not gpu and options.profile:
            logger.info("profile: there is no GPU, the traces show the work of the CPU")
        if not gpu and options.memory_profiling:
            logger.info("memory_profiling: there is no GPU, no memory snapshot is written")
        return cls(
            (options.profile_step_start, options.profile_step_stop),
            folder if options.profile else None,
            memory if options.memory_profiling and gpu else None,
            context.state.rank,
            gpu,
            stacks,
        )

    def loaded(self, trainer: Trainer) -> None:
        if self._began:
            return  # the run has gone back: what was chosen holds
        self._began = True
        end = trainer.args.training.train_iters or 0
        if trainer.step >= self.last or self.first >= end:
            if trainer.state.rank == 0:
                logger.warning(
                    f"profiler: this run makes the steps {trainer.step + 1} to {end}, none of which "
                    f"profile_step_start {self.first} and profile_step_stop {self.last} choose"
                )
            self.last = trainer.step
        self.first = max(self.first, trainer.step)

    def before_step(self, trainer: Trainer) -> None:
        if not self.first - 1 <= trainer.step < self.last:
            return
        if self.folder is not None and self._profile is None:
            self._start(trainer.step < self.first)
        if self.gpu and self.folder is not None and trainer.step >= self.first:
            if trainer.step == self.first:
                torch.cuda.cudart().cudaProfilerStart()
            torch.cuda.nvtx.range_push(f"step {trainer.step + 1}")

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self._profile is not None:
            if self.gpu and trainer.step > self.first:
                torch.cuda.nvtx.range_pop()
            self._profile.step()
        if trainer.step == self.last:
            trainer.settle()
            self._finish()

    def end(self, trainer: Trainer) -> None:
        self._finish()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        try:
            self._finish()
        except (OSError, RuntimeError) as another:  # a GPU or a disk that gave out
            logger.warning(f"profiler: what was recorded cannot be written: {another}")

    def _start(self, warm_up: bool) -> None:
        """Start recording; one step of `warm_up`, where there is one, keeps the profiler's own start out of it."""
        activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if self.gpu else [])]
        self._profile = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(wait=0, warmup=1, active=self.last - self.first, repeat=1),
            on_trace_ready=profiler.tensorboard_trace_handler(str(self.folder), f"rank{self.rank}"),
            record_shapes=True,
            profile_memory=True,
            with_stack=self.stacks,
            with_flops=True,
        )
        self._profile.start()
        if not warm_up:
            self._profile.step()

    def _finish(self) -> None:
        """Write what was recorded, once."""
        if self._profile is not None:
            self._profile.stop()  # writes the trace, unless the last step has done so
            self._profile = None
            self.last = -1  # a run that goes back does not record them again
            if self.gpu:
                torch.cuda.cudart().cudaProfilerStop()
            logger.info(f"profiler: traces are in {self.folder}, one per rank")
        if self.memory_folder is not None:
            self.memory_folder.mkdir(parents=True, exist_ok=True)
            path = self.memory_folder / f"mem_snapshot_rank{self.rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            logger.info(f"profiler: memory snapshots are in {self.memory_folder}, one per rank")
            self.memory_folder = None
