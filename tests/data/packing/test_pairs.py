"""Preference pairs and rewards: which are used, how much of them, what is in a row, what is trained, aligned items."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.order.datasets import build_datasets, plan_datasets
from megatron.data.order.phases import Progress
from megatron.data.packing.usable import kept_tokens
from megatron.data.sample import Sample
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.pairs import Pairs
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import write
from tests.data.packing_cases import WHOLE, packing

pytestmark = pytest.mark.cpu

SIZES = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=10)


def documents(sizes: list[tuple[int, int]], side: int) -> list[list[int]]:
    """Texts of pair i: a common start of two tokens 1000 + i, then tokens that no other text has."""
    base = itertools.count(1 + 500 * side)
    return [[1000 + i] * min(2, n[side]) + [next(base) for _ in range(n[side] - 2)] for i, n in enumerate(sizes)]


def files(
    folder: Path, sizes: list[tuple[int, int]], masks: list[list[list[bool]]] | None = None
) -> tuple[Pairs, Pairs | None]:
    sides = [documents(sizes, side) for side in (0, 1)]
    data = [IndexedDataset(write(folder / f"x{s}", sides[s], np.int32)) for s in (0, 1)]
    if masks is None:
        return Pairs(*data), None
    kept = [
        [[t if m else -100 for t, m in zip(*both)] for both in zip(sides[s], masks[s], strict=True)] for s in (0, 1)
    ]
    return Pairs(*data), Pairs(*(IndexedDataset(write(folder / f"l{s}", kept[s], np.int32)) for s in (0, 1)))


def expected_lengths(sizes: tuple[int, int], capacity: int, joined: bool) -> tuple[int, int]:
    """The largest length to which both texts are cut so that they fit, found by trying."""
    if not joined:
        return min(sizes[0], capacity), min(sizes[1], capacity)
    best = max(n for n in range(capacity + 1) if min(sizes[0], n) + min(sizes[1], n) <= capacity)
    return min(sizes[0], best), min(sizes[1], best)


@settings(max_examples=120, deadline=None)
@given(SIZES, st.integers(2, 9), st.integers(0, 99), st.booleans(), st.sampled_from(WHOLE), st.data())
def test_what_holds_for_every_pair(
    sizes: list[tuple[int, int]], seq: int, seed: int, chop: bool, name: str, draw: st.DataObject
) -> None:
    joined, capacity = name != "unpacked", seq + 1
    masks = None
    if draw.draw(st.booleans()):
        masks = [[draw.draw(st.lists(st.booleans(), min_size=n[s], max_size=n[s])) for n in sizes] for s in (0, 1)]
    kept = [expected_lengths(pair, capacity, joined) for pair in sizes]
    usable = {
        i
        for i, pair in enumerate(sizes)
        if min(kept[i]) > 1
        and (chop or kept[i] == pair)
        and (masks is None or all(any(masks[s][i][1 : kept[i][s]]) for s in (0, 1)))
    }
    with tempfile.TemporaryDirectory() as folder:
        data, labels = files(Path(folder), sizes, masks)
        found = packing(name, data, seq, labels=labels, allow_chopped=chop)
        if not usable:
            with pytest.raises(UserError, match="pair"):
                found.segments(1, seed)
            return
        dataset = found.dataset(found.segments(found.samples_per_epoch(), seed))
        seen: list[int] = []
        for index in range(found.samples_per_epoch()):
            item, pieces = dataset[index], dataset.locate(index).pieces
            rows = item if isinstance(item, tuple) else (item,)
            assert len(rows) == (1 if joined else 2)
            assert [piece.side for piece in pieces] == [0, 1] * (len(pieces) // 2)
            for a, b in zip(pieces[::2], pieces[1::2], strict=True):
                assert a.document == b.document and (a.length, b.length) == kept[a.document]
                seen.append(a.document)
            for row, held in zip(rows, [pieces] if joined else [[one] for one in pieces], strict=True):
                check_row(row, held, data, labels, capacity)
        if name != "pack_until_overflow":  # the passes of which have no end of their own
            assert sorted(seen) == sorted(usable)
        assert set(seen) <= usable
        assert found.left_out.cut == (sum(kept[i] != pair for i, pair in enumerate(sizes)) if chop else 0)
        if chop:
            assert found.left_out.cut_tokens == sum(sum(p) - sum(k) for p, k in zip(sizes, kept, strict=True))


def check_row(row: Sample, pieces: Any, data: Pairs, labels: Pairs | None, capacity: int) -> None:
    """Tokens, borders, numbers of answers and labels of a row, from the files."""
    texts = [data.sides[p.side].get(p.document)[: p.length].tolist() for p in pieces]
    ends = np.cumsum([len(text) for text in texts]).tolist()
    assert row.tokens.tolist() == [*itertools.chain(*texts), *[0] * (capacity - ends[-1])]
    assert row.length == ends[-1] <= capacity
    assert row.starts is not None and row.starts.tolist() == [0, *ends[:-1]]
    numbers = list(itertools.chain(*([k] * len(text) for k, text in enumerate(texts))))
    assert row.answers is not None and row.answers.tolist() == [*numbers, *[-1] * (capacity - ends[-1])]
    wanted: list[int] = []
    for piece, text in zip(pieces, texts, strict=True):
        if labels is not None:
            wanted += labels.sides[piece.side].get(piece.document)[: piece.length].tolist()
            continue
        other = data.sides[1 - piece.side].get(piece.document).tolist()
        same = len(list(itertools.takewhile(lambda both: both[0] == both[1], zip(text, other, strict=False))))
        wanted += [-100] * min(same, len(text) - 1) + text[min(same, len(text) - 1) :]
    assert row.labels is not None and row.labels.tolist() == [*wanted, *[-100] * (capacity - ends[-1])]


def test_a_pair_that_shares_a_row_is_cut_to_equal_lengths() -> None:
    sizes = np.array([[3, 20, 9, 4, 11], [20, 3, 9, 4, 30]], np.int32)
    assert kept_tokens(sizes, 11).T.tolist() == [[3, 8], [8, 3], [5, 5], [4, 4], [5, 5]]
    assert kept_tokens(sizes, 11, rows=2).T.tolist() == [[3, 11], [11, 3], [9, 9], [4, 4], [11, 11]]


@pytest.mark.parametrize("pack_impl", WHOLE)
def test_rewards_stay_with_their_texts(tmp_path: Path, pack_impl: str) -> None:
    """Of a text with a reward, the part that does not fit is lost and no other text; margins belong to both sides."""
    sizes = [(9, 4), (3, 3), (5, 8)]
    data, _ = files(tmp_path, sizes)
    rewards = IndexedDataset(write(tmp_path / "r", [[1], [-1], [2]], np.float32))
    value = {0: 1.0, 1: -1.0, 2: 2.0}
    for texts, name in ((data.sides[0], "reward"), (data, "margin")):
        found = packing(pack_impl, texts, 6, rewards=rewards)
        dataset = found.dataset(found.segments(3, 1))
        read = []
        for index in range(3):
            item, pieces = dataset[index], dataset.locate(index).pieces
            rows = item if isinstance(item, tuple) else (item,)
            got = np.concatenate([row.extras[name] for row in rows])
            assert got.tolist() == [value[piece.document] for piece in pieces]
            assert all(piece.offset == 0 for piece in pieces)
            read += [piece.document for piece in pieces]
        assert set(read) == {0, 1, 2}


def config(tmp_path: Path, **more: Any) -> DataConfig:
    write(tmp_path / "c", documents([(5, 4)] * 6, 0), np.int32)
    write(tmp_path / "r", documents([(5, 4)] * 6, 1), np.int32)
    paths = {"train_data_paths": (str(tmp_path / "c"),), "neg_train_data_paths": (str(tmp_path / "r"),)}
    return DataConfig(dataset_impl="pairwise", pack_impl="unpacked", **{**paths, **more})


def test_a_run_on_pairs(tmp_path: Path) -> None:
    """Sources of pairs are mixed, held out and capped like others; the saved order tells when a side was replaced."""
    data = config(
        tmp_path, train_data_paths=(str(tmp_path / "c"),) * 2, neg_train_data_paths=(str(tmp_path / "r"),) * 2
    )
    data = DataConfig(**{**vars(data), "train_data_weights": (3.0, 1.0), "train_data_holdout": (0, 1)})
    built = build_datasets(data, seq_length=6, seed=1, train_samples=8, valid_samples=2, set_samples=2)
    assert built.train is not None and len(built.train) >= 8
    for index in range(8):
        chosen, rejected = built.train[index]  # type: ignore[misc]
        assert chosen.tokens[0] == rejected.tokens[0] >= 1000
    (held,) = built.valid_sets.values()
    assert [one.length for one in held[0]] == [5, 4] and [one.length for one in held[len(held) - 1]] == [5, 4]  # type: ignore[union-attr]
    assert built.plan.table()[0].tokens == 6 * 9
    names = {Path(path).name for path, *_ in built.plan.files}
    assert {"c.bin", "r.bin", "c.idx", "r.idx"} <= names


def test_an_empty_pair_fills_a_validation_set(tmp_path: Path) -> None:
    """A set is read in whole steps; the pairs that are missing in the last one train nothing."""
    data = config(tmp_path, valid_sets={"held": {"path": str(tmp_path / "c"), "rejected": str(tmp_path / "r")}})
    plan = plan_datasets(data, seq_length=6, seed=1, train_samples=8, set_samples=9, progress=Progress(batch=4))
    built = plan.build().valid_sets["held"]
    loader = StepLoader(built, micro_batch=4, gas=1, rules=CollateRules(6, reads=("answers",)), rows=2)
    first, last = loader.steps()
    assert first.tokens.shape == (1, 8, 6) and last.trained == first.trained // 2
    assert first.answers is not None and first.answers[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert last.extras["answer_tokens"].tolist() == [[3.0, 2.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("names", "change", "expected"),
    [
        (("c", "r"), {"r": [[1, 2]] * 5}, ("6", "5", "not pairs")),
        (("c", "r"), {"w": [[1.0]] * 5}, ("5 rewards", "6 documents")),
        (("c", "r"), {"w": [[1.0]] * 5 + [[1.0, 2.0]]}, ("item 5", "2 values")),
    ],
)
def test_files_that_do_not_belong_together(
    tmp_path: Path, names: tuple[str, str], change: dict[str, Any], expected: tuple[str, ...]
) -> None:
    data = config(tmp_path)
    for name, items in change.items():
        write(tmp_path / name, items, np.float32 if name == "w" else np.int32)
    if "w" in change:
        data = config(tmp_path, train_reward_data_paths=(str(tmp_path / "w"),))
    with pytest.raises(UserError) as caught:
        plan_datasets(data, seq_length=6, seed=1, train_samples=8)
    for part in (*expected, str(tmp_path / ("w" if "w" in change else "r"))):
        assert part in str(caught.value)


def test_labels_of_one_side_alone(tmp_path: Path) -> None:
    write(tmp_path / "l", documents([(5, 4)] * 6, 0), np.int32)
    data = config(tmp_path, train_label_data_paths=(str(tmp_path / "l"),))
    with pytest.raises(UserError, match="neg_train_label_data_paths"):
        plan_datasets(data, seq_length=6, seed=1, train_samples=8)


def test_unpacked_pairs_are_read_in_the_order_of_gpt_neox(tmp_path: Path) -> None:
    """Its order, as far as nothing is left out: samples i are numbered i modulo the pairs, and shuffled by the seed."""
    data, _ = files(tmp_path, [(5, 4)] * 7)
    found = packing("unpacked", data, 6)
    dataset = found.dataset(found.segments(17, 1234))
    order = np.arange(17) % 7
    np.random.RandomState(1234).shuffle(order)
    assert [dataset.locate(i).pieces[0].document for i in range(17)] == order.tolist()


@pytest.mark.parametrize("pack_impl", WHOLE)
def test_given_references_stay_with_their_tokens(tmp_path: Path, pack_impl: str) -> None:
    """Value j of a text is that of its token j + 1; GPT-NeoX's files have more of them than a short text needs."""
    write(tmp_path / "c", documents([(5, 4), (3, 3), (9, 8)], 0), np.int32)
    write(tmp_path / "r", documents([(5, 4), (3, 3), (9, 8)], 1), np.int32)
    for name in ("c", "r"):
        texts = [IndexedDataset(tmp_path / name).get(i).tolist() for i in range(3)]
        write(tmp_path / f"{name}_base", [[-float(t) for t in text[1:]] + [7.0] * 9 for text in texts], np.float32)
    data = DataConfig(
        dataset_impl="pairwise",
        pack_impl=pack_impl,
        train_data_paths=(str(tmp_path / "c"),),
        neg_train_data_paths=(str(tmp_path / "r"),),
        precompute_model_name="base",
    )
    built = build_datasets(data, seq_length=11, seed=1, train_samples=3).train
    assert built is not None
    for index in range(3):
        item = built[index]
        for row in item if isinstance(item, tuple) else (item,):
            real = np.arange(12) < (row.length or 0)
            first = np.isin(np.arange(12), row.starts)
            assert row.extras["reference"].tolist() == np.where(real & ~first, -row.tokens, 0).tolist()
    write(tmp_path / "r_base", [[0.5]] * 2, np.float32)
    with pytest.raises(UserError, match=r"r_base has 2 items .* 3 documents"):
        build_datasets(data, seq_length=11, seed=1, train_samples=3)
