"""Reads whole optimizer steps, in order, ahead of the training loop.

The batch of a step is a pure function of the dataset and the samples consumed before it. Nothing is replayed on
resume, and neither ranks, micro-batches nor workers change what a step holds.

Workers are threads: reading is a copy out of a memory-mapped file, during which numpy releases the lock. Threads need
no second import of torch and no copies between processes; an error in a worker is raised in the loop at its step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import numpy as np

from megatron.data.batch import StepBatch
from megatron.data.collate import CollateRules, allocate, complete, cut, fill, untrained
from megatron.data.sample import Sample, SampleDataset
from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan


class StepLoader:
    """Steps of one data-parallel rank.

    Args:
        dataset: gives a `Sample` for each number in `[0, len)`, or a tuple of `rows` of them.
        micro_batch: items of the dataset per micro-batch and rank.
        gas: micro-batches per step (gradient accumulation), where the plan does not say otherwise.
        dp_rank, dp_size: this rank among the data-parallel ones.
        rules: how samples become arrays.
        num_workers: background threads; 0 reads when the step is asked for.
        pin_memory: return page-locked memory.
        plan: samples of each step over all ranks, multiples of micro_batch * dp_size; by default always the same.
        rows: samples in an item; item i of a micro-batch is its rows from rows * i on. All else counts items.
        count: works out what the objective counts in a batch, `StepBatch.counts`.
        problem: why the objective can learn nothing from a sample; None where it can.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch: int,
        gas: int,
        rules: CollateRules,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        plan: BatchPlan | None = None,
        rows: int = 1,
        count: Callable[[StepBatch], Sequence[float]] | None = None,
        problem: Callable[[Sample], str | None] = lambda sample: None,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} of dp_size {dp_size}")
        self.dataset, self.rules = dataset, rules
        self.micro_batch, self.gas, self.dp_rank, self.dp_size = micro_batch, gas, dp_rank, dp_size
        self.num_workers, self.pin_memory, self.rows = num_workers, pin_memory, rows
        self.count, self.problem = count, problem
        self.plan = plan or BatchPlan.constant(micro_batch * gas * dp_size)

    def num_steps(self, consumed: int = 0, step: int = 0) -> int:
        """Whole steps after `step` ones and `consumed` samples; an incomplete last one is dropped."""
        left = max(0, len(self.dataset) - consumed)
        return self.plan.whole_steps(self.plan.samples(step) + left) - step

    def read(self, consumed: int, step: int) -> StepBatch:
        """The step of this number, which begins after `consumed` samples."""
        gas = self.plan.batch_size(step) // (self.micro_batch * self.dp_size)
        rows = self.rows * self.micro_batch
        if self.plan.skips(step):
            return StepBatch.from_arrays(untrained(self.rules, gas, rows), step, consumed)
        numbers = rank_samples(
            consumed, micro_batch=self.micro_batch, gas=gas, dp_rank=self.dp_rank, dp_size=self.dp_size
        )
        arrays = allocate(self.rules, gas, rows)
        for micro, items in enumerate(numbers.tolist()):
            samples = chain.from_iterable(self._samples(number) for number in items)
            for row, sample in enumerate(samples):
                fill(arrays, micro, row, sample, self.rules)
        if self.plan.lengths:
            cut(arrays, self.plan.seq_length(step))
        complete(arrays)
        batch = StepBatch.from_arrays(arrays, step, consumed)
        if self.count is not None:
            batch = replace(batch, counts=self.count(batch))
        return batch.pin_memory() if self.pin_memory else batch

    def _samples(self, number: int) -> tuple[Sample, ...]:
        """Those of one item."""
        item = self.dataset[number]
        samples = item if isinstance(item, tuple) else (item,)
        if len(samples) != self.rows:
            raise ValueError(f"item {number} is {len(samples)} samples, expected {self.rows}")
        for sample in samples:
            if why := self.problem(sample):
                found = self.dataset.locate(number)
                documents = ", ".join(dict.fromkeys(str(piece.document) for piece in found.pieces))
                raise UserError(f"{found.path[-1]}: document {documents}: {why}")
        return samples

    def steps(self, consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
        """The steps after `consumed` samples, while a whole step is left.

        `step` numbers the first one; by default as if all steps before were those of the plan.
        """
        first = self.plan.whole_steps(consumed) if step is None else step
        begin, steps = consumed - self.plan.samples(first), range(first, first + self.num_steps(consumed, first))
        positions = ((begin + self.plan.samples(k), k) for k in steps)
        if self.num_workers == 0:
            for position in positions:
                yield self.read(*position)
            return
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="loader")
        ahead: deque[Future[StepBatch]] = deque()
        try:
            for position in positions:
                ahead.append(pool.submit(self.read, *position))
                if len(ahead) > self.num_workers + 1:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def rank_samples(consumed: int, *, micro_batch: int, gas: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Sample numbers of one rank for the step that begins after `consumed` samples: int64 `[gas, micro_batch]`.

    The step covers `[consumed, consumed + micro_batch * gas * dp_size)`. Micro-batch m of all ranks is the m-th run of
    `micro_batch * dp_size` consecutive samples, and rank r takes the r-th slice of it, as in GPT-NeoX. So the samples
    of a step do not depend on how it is divided.
    """
    micro = np.arange(gas, dtype=np.int64)[:, None] * (micro_batch * dp_size)
    return consumed + micro + dp_rank * micro_batch + np.arange(micro_batch, dtype=np.int64)[None, :]
