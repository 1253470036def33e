"""The datasets of a config: splits, lists, mixtures, the table, and orders that survive a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data.order.data_plan import DataPlan
from megatron.data.order.datasets import build_datasets, epoch_samples, plan_datasets
from megatron.data.order.phases import Progress
from megatron.data.order.saved_order import SavedOrder
from megatron.data.packing.samples import PackedSamples
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import GOLDEN, write
from tests.data.packing_cases import packing

pytestmark = pytest.mark.cpu


def numbered(prefix: Path, first: int, documents: int = 30, size: int = 7) -> str:
    """Documents of one repeated token each, counting up from `first`: a token says where it is from."""
    return write(prefix, [[first + d] * (size + d % 3) for d in range(documents)])


def documents_in(dataset: PackedSamples) -> set[int]:
    return {int(token) for i in range(len(dataset)) for token in dataset[i].tokens}


def reread(plan: DataPlan) -> SavedOrder:
    """The order as it comes back from a checkpoint."""
    return SavedOrder.read(json.loads(json.dumps(plan.state())))


def tokens_of(dataset: object, samples: int) -> list[list[int]]:
    return [dataset[i].tokens.tolist() for i in range(samples)]


def test_golden_order_through_the_config(tmp_path: Path) -> None:
    config = DataConfig(data_path=write(tmp_path / "x", GOLDEN), split="1")
    datasets = build_datasets(config, seq_length=8, seed=1234, train_samples=6)
    assert datasets.train[0].tokens.tolist() == [10, 10, 10, 10, 20, 21, 22, 23, 24]
    assert datasets.train[3].tokens.tolist() == [7, 8, 9, 7, 8, 9, 40, 41, 42]
    assert datasets.valid is None
    assert datasets.test is None


def test_split_shares_no_document(tmp_path: Path) -> None:
    config = DataConfig(data_path=numbered(tmp_path / "x", 1), split="8,1,1")
    datasets = build_datasets(config, seq_length=4, seed=1, train_samples=200, valid_samples=20, test_samples=10)
    train, valid, test = (documents_in(part) for part in (datasets.train, datasets.valid, datasets.test))
    assert train == set(range(1, 25))
    assert valid == set(range(25, 28))
    assert test == set(range(28, 31))


def test_the_table(tmp_path: Path) -> None:
    first, second = numbered(tmp_path / "a", 1, 30), numbered(tmp_path / "b", 100, 10)
    config = DataConfig(train_data_paths=(first, second), train_data_weights=(3.0, 1.0), valid_data_paths=(second,))
    plan = plan_datasets(config, seq_length=4, seed=1, train_samples=80, valid_samples=8)
    rows = plan.table()
    assert [(row.role, row.prefix, row.documents, row.weight, row.samples) for row in rows] == [
        ("train", first, 30, 0.75, 60),
        ("train", second, 10, 0.25, 20),
        ("valid", second, 10, 1.0, 8),
    ]
    assert rows[0].tokens == IndexedDataset(first).num_tokens
    assert rows[0].epochs == pytest.approx(60 * 4 / rows[0].tokens)


def test_lists_are_blended_from_their_own_orders(tmp_path: Path) -> None:
    first, second = numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 100)
    config = DataConfig(train_data_paths=(first, second), train_data_weights=(89.0, 11.0))
    train = build_datasets(config, seq_length=4, seed=7, train_samples=20).train
    expected = [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]  # the golden blend
    assert [int(train[i].tokens[0] >= 100) for i in range(20)] == expected
    packed = packing("packed", IndexedDataset(first), 4)
    alone = packed.dataset(packed.segments(18, 7))
    assert np.array_equal(train[11].tokens, alone[9].tokens)


def test_a_single_listed_source_is_asked_for_the_margin(tmp_path: Path) -> None:
    """NeoX asks for half a percent more, which here is one epoch more and another order."""
    prefix = write(tmp_path / "x", [[1] * 101, [2] * 100])  # 50 samples of 4 in an epoch
    listed = plan_datasets(DataConfig(train_data_paths=(prefix,)), seq_length=4, seed=1, train_samples=50)
    split = plan_datasets(DataConfig(data_path=prefix, split="1"), seq_length=4, seed=1, train_samples=50)
    assert listed.roles["train"].sources[0].segments[0].epochs == 2
    assert split.roles["train"].sources[0].segments[0].epochs == 1


def test_weights_by_documents_golden(tmp_path: Path) -> None:
    paths = (numbered(tmp_path / "a", 1, 10), numbered(tmp_path / "b", 100, 90))
    config = DataConfig(train_data_paths=paths, weight_by_num_documents=True, weighted_sampler_alpha=0.3)
    plan = plan_datasets(config, seq_length=4, seed=1, train_samples=10)
    assert [row.weight for row in plan.table()] == pytest.approx([0.8232, 0.1768], abs=5e-5)


def test_weight_zero_reads_nothing(tmp_path: Path) -> None:
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 100), numbered(tmp_path / "c", 200))
    config = DataConfig(train_data_paths=paths, train_data_weights=(0.0, 1.0, 1.0))
    datasets = build_datasets(config, seq_length=4, seed=1, train_samples=20)
    assert min(documents_in(datasets.train)) >= 100
    assert [row.samples for row in datasets.plan.table()] == [0, 10, 10]


def test_labels_travel(tmp_path: Path) -> None:
    data = write(tmp_path / "x", GOLDEN)
    labels = write(tmp_path / "l", [[-100] * len(document) for document in GOLDEN], np.int32)
    config = DataConfig(train_data_paths=(data,), train_label_data_paths=(labels,))
    train = build_datasets(config, seq_length=8, seed=1, train_samples=3).train
    assert set(train[0].labels.tolist()) == {-100}
    with pytest.raises(UserError, match="train_label_data_paths has 2 entries for 1"):
        plan_datasets(replace(config, train_label_data_paths=(labels, labels)), seq_length=8, seed=1, train_samples=3)


def test_a_run_made_longer_keeps_its_past(tmp_path: Path) -> None:
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 100))
    config = DataConfig(
        train_data_paths=paths, train_data_weights=(3.0, 1.0), valid_data_paths=(numbered(tmp_path / "v", 200),)
    )
    counts = {"seq_length": 4, "seed": 5, "valid_samples": 8}
    short = build_datasets(config, train_samples=60, **counts)
    state = reread(short.plan)
    longer = build_datasets(config, train_samples=400, saved=state, **counts)
    assert len(longer.train) == 400
    assert tokens_of(longer.train, 60) == tokens_of(short.train, 60)
    again = build_datasets(config, train_samples=400, saved=reread(longer.plan), **counts)
    assert tokens_of(again.train, 400) == tokens_of(longer.train, 400)
    assert tokens_of(again.valid, 8) == tokens_of(short.valid, 8)
    # A seed that was changed in the config does not disturb what was begun, nor does asking for less.
    other = build_datasets(config, train_samples=30, saved=state, **{**counts, "seed": 6})
    assert tokens_of(other.train, 30) == tokens_of(short.train, 30)
    fresh = build_datasets(config, train_samples=400, **counts)
    assert tokens_of(fresh.train, 60) != tokens_of(short.train, 60)


def test_no_token_comes_again_before_the_first_segment_is_used_up(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [list(range(100 * d, 100 * d + 50)) for d in range(20)])
    config = DataConfig(data_path=prefix, split="1")
    short = plan_datasets(config, seq_length=10, seed=1, train_samples=40)
    longer = build_datasets(config, seq_length=10, seed=1, train_samples=150, saved=reread(short)).train
    first = [token for i in range(99) for token in longer[i].tokens[:-1].tolist()]
    assert len(set(first)) == len(first) == 990


def test_data_that_changed_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    paths = (numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 100))
    config = DataConfig(train_data_paths=paths, train_data_weights=(3.0, 1.0))
    counts = {"seq_length": 4, "seed": 5, "train_samples": 40, "progress": Progress(1, 10, 10)}
    state = replace(reread(plan_datasets(config, **counts)), remedy="set data: restart")
    with pytest.raises(UserError, match=r"b: .* 1 sources(.|\n)*weight 0 (.|\n)*data: restart"):
        plan_datasets(DataConfig(train_data_paths=paths[:1]), saved=state, **counts)
    with pytest.raises(UserError, match=r"train_data_weights: (.|\n)*0 to 9: a 0\.75 .*\b0\.5\b.* b 0\.25 .*\b0\.5\b"):
        plan_datasets(replace(config, train_data_weights=(1.0, 1.0)), saved=state, **counts)
    with pytest.raises(UserError, match=r"/a: .*\bseq_length\b(.|\n)*/b: .*\bseq_length\b"):
        plan_datasets(config, saved=state, **{**counts, "seq_length": 5})
    numbered(tmp_path / "a", 1, 31)
    with pytest.raises(UserError, match=r"/a: .*\bdocuments\b"):
        plan_datasets(config, saved=state, **counts)


def test_a_replaced_file_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    """Documents of one length have the same index whatever is in them; the checkpoint knows a sample of the tokens."""
    a, b = (write(tmp_path / name, [[first + d] * 9 for d in range(30)]) for name, first in (("a", 0), ("b", 500)))
    labels = write(tmp_path / "a_labels", [[d] * 9 for d in range(30)], np.int32)
    data = DataConfig(train_data_paths=(a, b), train_label_data_paths=(labels, None), train_data_weights=(1.0, 1.0))
    counts = {"seq_length": 4, "seed": 5, "train_samples": 40, "progress": Progress(1, 10, 10)}
    state = reread(plan_datasets(data, **counts))
    # The same files, in another order and elsewhere, are the same data.
    swapped = replace(data, train_data_paths=(b, a), train_label_data_paths=(None, labels))
    assert plan_datasets(swapped, saved=state, **counts).roles["train"].sources
    for path in (f"{a}.bin", f"{labels}.bin"):
        whole = Path(path).read_bytes()
        changed = whole[:20] + bytes([77]) + whole[21:]
        Path(path).write_bytes(changed)
        expected, found = (rf"{len(whole)} bytes .*\b{zlib.crc32(content)}\b" for content in (whole, changed))
        with pytest.raises(UserError, match=rf"{re.escape(path)} was replaced: expected {expected}.* found {found}"):
            plan_datasets(data, saved=state, **counts)
        Path(path).write_bytes(whole)
    # A checkpoint from before contents were recorded is resumed as it was then.
    role = state.roles["train"]
    older = replace(role, sources=tuple(replace(source, files=None) for source in role.sources))
    write(tmp_path / "a", [[900 + d] * 9 for d in range(30)])
    assert plan_datasets(data, saved=replace(state, roles={"train": older}), **counts).roles["train"].sources


def test_a_moved_dataset_continues(tmp_path: Path) -> None:
    config = DataConfig(data_path=numbered(tmp_path / "a", 1), split="1")
    state = reread(plan_datasets(config, seq_length=4, seed=5, train_samples=9))
    moved = DataConfig(data_path=numbered(tmp_path / "elsewhere" / "a", 1), split="1")
    assert plan_datasets(moved, seq_length=4, seed=5, train_samples=9, saved=state).roles["train"].sources


def test_missing_and_unusable_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = numbered(tmp_path / "x", 1, 7)
    counts = {"seq_length": 4, "seed": 1, "train_samples": 10}
    with pytest.raises(UserError, match="data_path, train_data_paths or mixture"):
        plan_datasets(DataConfig(), **counts)
    with pytest.raises(UserError, match="data_path and train_data_paths .*`split`"):
        plan_datasets(DataConfig(data_path=prefix, train_data_paths=(prefix,)), **counts)
    with pytest.raises(UserError, match=rf"'0,1' .*\btrain\b.* 7 documents of {re.escape(prefix)}\b"):
        plan_datasets(DataConfig(data_path=prefix, split="0,1"), **counts)
    with pytest.raises(UserError, match=r"x \(train, 7 documents\): 55 tokens .*\b65 tokens"):
        plan_datasets(DataConfig(data_path=prefix, split="1"), **{**counts, "seq_length": 64})
    with caplog.at_level(logging.WARNING):
        plan = plan_datasets(DataConfig(data_path=prefix, split="949,50,1"), valid_samples=5, **counts)
    assert list(plan.roles) == ["train"]
    assert re.search(rf"'949,50,1' .*\bvalid none .*\b7 documents of {re.escape(prefix)}\b", caplog.text)


def test_a_damaged_source_stops_the_run(tmp_path: Path) -> None:
    """Never a partial mix: the second of two sources is one byte short."""
    first, second = numbered(tmp_path / "a", 1), numbered(tmp_path / "b", 100)
    tokens = Path(f"{second}.bin").read_bytes()
    Path(f"{second}.bin").write_bytes(tokens[:-1])
    with pytest.raises(UserError, match=rf"b\.bin.*{len(tokens)} bytes.*{len(tokens) - 1}"):
        plan_datasets(DataConfig(train_data_paths=(first, second)), seq_length=4, seed=1, train_samples=4)


@pytest.mark.parametrize(("shared", "name"), [(True, "index_cache"), (False, f"index_cache.{os.uname().nodename}")])
def test_index_folder_per_node(tmp_path: Path, shared: bool, name: str) -> None:
    config = DataConfig(data_path=numbered(tmp_path / "x", 1), split="1", use_shared_fs=shared)
    build_datasets(config, seq_length=4, seed=1, train_samples=4)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [name]


@pytest.mark.parametrize("warmup", [True, False])
def test_warmup_is_asked_for(tmp_path: Path, warmup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    monkeypatch.setattr(IndexedDataset, "warm_up", lambda data: touched.append(data.prefix))
    prefix = numbered(tmp_path / "x", 1)
    config = DataConfig(data_path=prefix, split="1", mmap_warmup=warmup)
    build_datasets(config, seq_length=4, seed=1, train_samples=4)
    assert touched == ([prefix] if warmup else [])


def test_epoch_samples(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1] * 6, [2] * 3])
    assert epoch_samples(DataConfig(data_path=prefix, split="1"), 4) == 2
    assert epoch_samples(DataConfig(data_path=prefix, split="1"), 4, epochs=2) == 4
    assert epoch_samples(DataConfig(train_data_paths=(prefix, prefix)), 4) == 4


def test_planning_and_building_need_no_torch(tmp_path: Path) -> None:
    prefix = numbered(tmp_path / "x", 1)
    code = (
        "import sys\n"
        "from megatron.data.order.datasets import build_datasets\n"
        "from megatron.neox_arguments.schema_data import DataConfig\n"
        f"data = build_datasets(DataConfig(data_path={prefix!r}, split='1'), seq_length=4, seed=1, train_samples=4)\n"
        "assert len(data.train) >= 4 and data.plan.table()\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
