"""Reads whole optimizer steps, in order, ahead of the training loop.

The batch of a step is a pure function of the dataset and the samples consumed before it. Nothing is replayed on
resume, and neither ranks, micro-batches nor workers change what a step holds.

Workers are threads: reading is a copy out of a memory-mapped file, during which numpy releases the lock. Threads need
no second import of torch and no copies between processes; an error in a worker is raised in the loop at its step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from megatron.data.batch import StepBatch
from megatron.data.collate import CollateRules, allocate, fill
from megatron.data.sample import SampleDataset


class StepLoader:
    """Steps of one data-parallel rank.

    Args:
        dataset: gives a `Sample` for each number in `[0, len)`.
        micro_batch: sequences per micro-batch and rank.
        gas: micro-batches per step (gradient accumulation).
        dp_rank, dp_size: this rank among the data-parallel ones.
        rules: how samples become arrays.
        num_workers: background threads; 0 reads when the step is asked for.
        pin_memory: return page-locked memory.
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
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} of dp_size {dp_size}")
        self.dataset, self.rules = dataset, rules
        self.micro_batch, self.gas, self.dp_rank, self.dp_size = micro_batch, gas, dp_rank, dp_size
        self.num_workers, self.pin_memory = num_workers, pin_memory

    @property
    def train_batch_size(self) -> int:
        """Samples that a step takes over all ranks."""
        return self.micro_batch * self.gas * self.dp_size

    def num_steps(self, consumed: int = 0) -> int:
        """Whole steps after `consumed` samples; an incomplete last one is dropped."""
        return max(0, len(self.dataset) - consumed) // self.train_batch_size

    def read(self, consumed: int, step: int) -> StepBatch:
        """The step that begins after `consumed` samples."""
        numbers = rank_samples(
            consumed, micro_batch=self.micro_batch, gas=self.gas, dp_rank=self.dp_rank, dp_size=self.dp_size
        )
        arrays = allocate(self.rules, self.gas, self.micro_batch)
        for micro, row_numbers in enumerate(numbers.tolist()):
            for row, number in enumerate(row_numbers):
                fill(arrays, micro, row, self.dataset[number], self.rules)
        batch = StepBatch.from_arrays(arrays, step, consumed)
        return batch.pin_memory() if self.pin_memory else batch

    def steps(self, consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
        """The steps after `consumed` samples, while a whole step is left.

        `step` numbers the first one; by default as if all steps before had this size.
        """
        first = consumed // self.train_batch_size if step is None else step
        positions = ((consumed + k * self.train_batch_size, first + k) for k in range(self.num_steps(consumed)))
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
