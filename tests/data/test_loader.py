"""The loader: a step depends on nothing but the samples consumed before it, and holds what the rules say."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.batch import StepBatch
from megatron.data.bounds import document_bounds
from megatron.data.collate import CollateRules
from megatron.data.copies import copy_ahead
from megatron.data.loader import StepLoader, rank_samples
from megatron.data.order.mixture import Mixture
from megatron.data.order.phases import Phase
from megatron.data.sample import Sample
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.layers import documents
from tests.data.corpus import write
from tests.data.packing_cases import packing

pytestmark = pytest.mark.cpu

RULES = CollateRules(seq_length=4)
EOD = 0


class Seq:
    """Sample i is the number i, over and over."""

    def __init__(self, length: int = 64, slow: float = 0.0) -> None:
        self.length, self.slow = length, slow

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self.length
        time.sleep(self.slow * (index % 3))
        return Sample(np.full(5, index))


class One:
    """A dataset of one given sample."""

    def __init__(self, *tokens: int, starts: list[int] | None = None, labels: list[int] | None = None) -> None:
        self.sample = Sample(
            np.asarray(tokens),
            None if starts is None else np.asarray(starts, dtype=np.int64),
            None if labels is None else np.asarray(labels),
        )

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return self.sample


def only(dataset: One, **rules: object) -> object:
    """The single step of a dataset of one sample, as the rules make it."""
    loader = StepLoader(dataset, micro_batch=1, gas=1, rules=CollateRules(len(dataset.sample.tokens) - 1, **rules))
    (batch,) = loader.steps()
    return batch


def numbers(batch: object) -> list[list[int]]:
    return batch.tokens[..., 0].tolist()


def global_batches(dataset: object, consumed: int, steps: int, *, micro: int, gas: int, dp: int, workers: int = 0):
    """The samples of each step, put together from all ranks in the order of the global batch."""
    loaders = [
        StepLoader(dataset, micro_batch=micro, gas=gas, rules=RULES, dp_rank=r, dp_size=dp, num_workers=workers)
        for r in range(dp)
    ]
    iterators = [loader.steps(consumed) for loader in loaders]
    for _ in range(steps):
        batches = [next(iterator) for iterator in iterators]
        assert len({(batch.step, batch.consumed) for batch in batches}) == 1
        yield torch.cat([torch.stack([batch.tokens[m] for batch in batches]).flatten(0, 1) for m in range(gas)])


def test_ranks_take_slices_of_each_micro_batch() -> None:
    def rank(r: int) -> list[list[int]]:
        loader = StepLoader(Seq(), micro_batch=2, gas=2, rules=RULES, dp_rank=r, dp_size=3)
        return numbers(next(loader.steps(12)))

    assert rank(0) == [[12, 13], [18, 19]]
    assert rank(1) == [[14, 15], [20, 21]]
    assert rank(2) == [[16, 17], [22, 23]]


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_ranks_divide_the_step(consumed: int, micro: int, gas: int, dp: int) -> None:
    layout = {"micro_batch": micro, "gas": gas, "dp_size": dp}
    ranks = [rank_samples(consumed, dp_rank=r, **layout) for r in range(dp)]
    in_order = np.stack(ranks, axis=1).reshape(-1)
    assert in_order.tolist() == list(range(consumed, consumed + micro * gas * dp))


def test_resume_with_accumulation() -> None:
    """Micro 1, gas 4: after three steps the next micro-batch is sample 12."""
    loader = StepLoader(Seq(), micro_batch=1, gas=4, rules=RULES)
    straight = loader.steps(0)
    for _ in range(3):
        next(straight)
    resumed = next(loader.steps(12))
    assert numbers(resumed) == numbers(next(straight)) == [[12], [13], [14], [15]]
    assert (resumed.step, resumed.consumed) == (3, 12)
    assert next(loader.steps(12, step=7)).step == 7


def test_resume_at_another_layout_and_batch() -> None:
    before = list(global_batches(Seq(), 0, 3, micro=1, gas=2, dp=4))
    assert before[-1][:, 0].tolist() == list(range(16, 24))
    (after,) = global_batches(Seq(), 24, 1, micro=1, gas=4, dp=2)
    assert after[:, 0].tolist() == list(range(24, 32))
    (larger,) = global_batches(Seq(), 24, 1, micro=2, gas=4, dp=2)
    assert larger[:, 0].tolist() == list(range(24, 40))


def corpus(folder: Path) -> Mixture:
    rng = np.random.RandomState(3)
    sources = []
    for name in "ab":
        documents = [rng.randint(1, 500, rng.randint(1, 30)).tolist() for _ in range(40)]
        packed = packing("packed", IndexedDataset(write(folder / name, documents)), 4)
        sources.append(packed.dataset(packed.segments(60, 5)))
    return Mixture(sources, [Phase.constant([0.7, 0.3])], 64)


@pytest.mark.parametrize(
    ("micro", "gas", "dp", "workers"),
    [(8, 1, 1, 0), (1, 8, 1, 2), (1, 1, 8, 1), (2, 2, 2, 3), (4, 1, 2, 0), (1, 2, 4, 2)],
)
def test_the_stream_does_not_depend_on_the_layout(tmp_path: Path, micro: int, gas: int, dp: int, workers: int) -> None:
    dataset = corpus(tmp_path)
    expected = torch.from_numpy(np.stack([dataset[i].tokens[:-1] for i in range(64)])).view(8, 8, 4)
    found = list(global_batches(dataset, 0, 8, micro=micro, gas=gas, dp=dp, workers=workers))
    assert torch.equal(torch.stack(found), expected)
    (later,) = global_batches(dataset, 40, 1, micro=micro, gas=gas, dp=dp, workers=workers)
    assert torch.equal(later, expected[5])


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_order_with_uneven_workers(workers: int) -> None:
    loader = StepLoader(Seq(slow=0.002), micro_batch=1, gas=1, rules=RULES, num_workers=workers)
    assert [numbers(batch)[0][0] for batch in loader.steps(3)] == list(range(3, 64))


def test_incomplete_tail_is_dropped() -> None:
    loader = StepLoader(Seq(10), micro_batch=4, gas=1, rules=RULES)
    assert loader.num_steps() == 2
    assert [batch.consumed for batch in loader.steps()] == [0, 4]
    assert list(loader.steps(8)) == []
    assert list(loader.steps(100)) == []


def test_a_failing_worker_is_raised_in_the_loop() -> None:
    class Broken(Seq):
        def __getitem__(self, index: int) -> Sample:
            if index == 5:
                raise OSError("disk gone")
            return super().__getitem__(index)

    loader = StepLoader(Broken(), micro_batch=1, gas=1, rules=RULES, num_workers=2)
    seen = []
    with pytest.raises(OSError, match="disk gone"):
        for batch in loader.steps():
            seen.append(batch.consumed)
    assert seen == [0, 1, 2, 3, 4]


def test_workers_end_with_the_iterator_and_run_a_bounded_way_ahead() -> None:
    class Counting(Seq):
        reads = 0

        def __getitem__(self, index: int) -> Sample:
            Counting.reads += 1
            return super().__getitem__(index)

    def workers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]

    deadline = time.monotonic() + 10
    while workers() and time.monotonic() < deadline:  # those of other tests
        time.sleep(0.01)
    steps = StepLoader(Counting(), micro_batch=1, gas=1, rules=RULES, num_workers=2).steps()
    next(steps)
    assert workers()
    time.sleep(0.1)
    assert Counting.reads <= 4
    steps.close()
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not workers()


def test_arrays_of_a_step() -> None:
    batch = only(One(1, 2, 3, 4, 5))
    assert batch.tokens.tolist() == [[[1, 2, 3, 4]]]
    assert batch.targets.tolist() == [[[2, 3, 4, 5]]]
    assert batch.mask.tolist() == [[[1.0, 1.0, 1.0, 1.0]]]
    assert batch.positions.tolist() == [[[0, 1, 2, 3]]]
    assert batch.doc_ids is batch.bounds is None
    assert batch.trained == 4
    assert (batch.tokens.dtype, batch.mask.dtype, batch.positions.dtype) == (torch.int64, torch.float32, torch.int64)
    assert batch.tokens.is_contiguous()
    assert batch.positions.is_contiguous()


def test_labels_move_with_the_targets() -> None:
    """Prompt "ab", answer "cd": exactly two trained positions, with targets c and d."""
    batch = only(One(1, 2, 3, 4, 9, starts=[0], labels=[-100, -100, 3, 4, -100]))
    assert batch.mask.tolist() == [[[0.0, 1.0, 1.0, 0.0]]]
    assert batch.trained == 2
    assert batch.targets[batch.mask > 0].tolist() == [3, 4]


def test_eod_mask_loss_looks_at_the_input() -> None:
    batch = only(One(1, EOD, 2, 3, EOD), eod=EOD, eod_mask_loss=True)
    assert batch.mask.tolist() == [[[1.0, 0.0, 1.0, 1.0]]]
    with pytest.raises(UserError, match="eod_mask_loss"):
        CollateRules(4, eod_mask_loss=True)


def test_positions_restart_at_documents() -> None:
    """[A A A eod B B B]: B's positions begin at 0, and eod still belongs to A."""
    batch = only(One(5, 5, 5, EOD, 6, 6, 6, 6), eod=EOD, intra_document_masking=True)
    assert batch.positions.tolist() == [[[0, 1, 2, 3, 0, 1, 2]]]
    assert batch.doc_ids.tolist() == [[[0, 0, 0, 0, 1, 1, 1]]]
    assert batch.mask.tolist() == [[[1.0] * 7]]


def test_borders_of_the_dataset_count_without_eod() -> None:
    batch = only(One(5, 5, 6, 6, 7, starts=[2, 4]), intra_document_masking=True)
    assert batch.doc_ids.tolist() == [[[0, 0, 1, 1]]]
    assert batch.positions.tolist() == [[[0, 1, 0, 1]]]


def test_turns_of_a_labelled_chat_stay_together() -> None:
    chat = One(5, EOD, 6, EOD, 7, EOD, 8, starts=[4], labels=[-100] * 7)
    batch = only(chat, eod=EOD, intra_document_masking=True)
    assert batch.doc_ids.tolist() == [[[0, 0, 0, 0, 1, 1]]]


def test_packed_documents_get_their_own_numbers(tmp_path: Path) -> None:
    """Against the stream itself: a new document number exactly where an item begins."""
    documents = [[10 * d + i for i in range(1, 1 + size)] for d, size in enumerate([3, 5, 2, 4], start=1)]
    packed = packing("packed", IndexedDataset(write(tmp_path / "x", documents)), 6)
    dataset = packed.dataset(packed.segments(8, 1))
    rules = CollateRules(6, intra_document_masking=True)
    for batch in StepLoader(dataset, micro_batch=1, gas=1, rules=rules).steps():
        tokens, ids, positions = (x[0, 0].tolist() for x in (batch.tokens, batch.doc_ids, batch.positions))
        for i in range(1, 6):
            begins = tokens[i] % 10 == 1
            assert ids[i] == ids[i - 1] + begins
            assert positions[i] == (0 if begins else positions[i - 1] + 1)


def test_bounds_of_documents_are_known_before_the_device_is_asked() -> None:
    """As the model would find them itself, then filled up."""
    rng = np.random.default_rng(0)
    for begins in (0.0, 0.02, 0.3, 1.0):
        ids = (rng.random((3, 2, 40)) < begins).cumsum(-1)
        bounds, longest = document_bounds(ids)
        found = [documents.document_bounds(torch.from_numpy(micro)) for micro in ids]
        assert longest == tuple(length for _, length in found)
        needed = max(len(starts) for starts, _ in found)
        assert bounds.dtype == np.int32 and needed <= bounds.shape[1] <= max(16, 1.25 * needed)
        for row, (starts, _) in zip(bounds, found, strict=True):
            assert row[: len(starts)].tolist() == starts.tolist() and (row[len(starts) :] == ids[0].size).all()


def test_steps_have_few_numbers_of_bounds() -> None:
    """So that the next step finds the memory and the compiled code of one before."""
    ids = np.arange(4096).reshape(1, 1, -1)
    sizes = [document_bounds(np.minimum(ids, n))[0].shape[1] for n in range(0, 4095, 3)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 33
    assert all(size % 4 == 0 for size in sizes)  # each micro-batch's begin at whole 16 bytes


def test_ids_beyond_the_vocabulary() -> None:
    with pytest.raises(UserError, match=r"\bid 9\b.*\b9 entries"):
        only(One(1, 2, 9), vocab_size=9)
    assert only(One(1, 2, 9), vocab_size=10).tokens.tolist() == [[[1, 2]]]
    with pytest.raises(UserError, match="id -3"):
        only(One(1, -3, 2), vocab_size=10)


def test_a_sample_of_the_wrong_length() -> None:
    loader = StepLoader(One(1, 2, 3), micro_batch=1, gas=1, rules=RULES)
    with pytest.raises(ValueError, match=r"3 tokens, expected seq_length \+ 1 = 5"):
        next(loader.steps())


def test_moving_a_batch() -> None:
    batch = only(One(1, 2, 3), eod=EOD, intra_document_masking=True)
    moved = batch.to("meta")
    assert moved.tokens.device.type == moved.doc_ids.device.type == "meta"
    assert (moved.step, moved.consumed) == (batch.step, batch.consumed)


class Copying:
    """A device on which a copy has its numbers once it has arrived."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.sources: dict[int, StepBatch] = {}

    def start(self, batch: StepBatch) -> StepBatch:
        self.events.append(("start", batch.step))
        self.sources[batch.step] = batch
        return dataclasses.replace(batch, tokens=torch.full_like(batch.tokens, -1))

    def arrive(self, batch: StepBatch) -> None:
        self.events.append(("arrive", batch.step))
        batch.tokens.copy_(self.sources[batch.step].tokens)


def test_each_batch_is_copied_while_the_one_before_it_is_used() -> None:
    loader = StepLoader(Seq(12), micro_batch=2, gas=2, rules=RULES)
    copying, found = Copying(), []
    for batch in copy_ahead(loader.steps(), copying):
        copying.events.append(("use", batch.step))
        found.append(numbers(batch))
    assert found == [numbers(batch) for batch in loader.steps()] and len(found) == 3
    order = {event: i for i, event in enumerate(copying.events)}
    assert len(order) == len(copying.events) == 9
    for step in range(3):
        assert order["start", step] < order["arrive", step] < order["use", step]
    for step in range(2):
        # Its copy runs during the step before, which does not wait for it.
        assert order["arrive", step] < order["start", step + 1] < order["use", step]


def test_a_loader_ends_with_whoever_copies_its_batches() -> None:
    ended = []

    def steps() -> Iterator[StepBatch]:
        try:
            yield from StepLoader(Seq(12), micro_batch=2, gas=2, rules=RULES).steps()
        finally:
            ended.append(True)

    batches = copy_ahead(steps(), Copying())
    next(batches)
    assert not ended
    del batches
    gc.collect()
    assert ended
    assert list(copy_ahead(iter(()), Copying())) == []
