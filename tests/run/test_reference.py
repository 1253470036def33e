"""The pass of the reference model: what it computes is the model at step 0, at any layout, and once."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint.find import open_checkpoint
from megatron.data.reference import ReferenceStore, StoreWriter
from megatron.data.sample import Sample
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import MachineError
from megatron.run.read_ahead import RowsWriter
from megatron.run.reference import weights_of
from tests.data.corpus import write
from tests.distributed import run_distributed
from tests.training import runs
from tests.training.runs import Faults, Report, corpus
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

PROBE = {"train_impl": "reference_probe", "lr_decay_iters": 20, "checkpoint_factor": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpus(tmp_path_factory.mktemp("corpus"))


def train(rank: int, world: int, *arguments: Any) -> Report:
    """The objective is registered in ranks alone: this process has other tests."""
    from tests.run import reference_probe  # noqa: F401

    return runs.train(rank, world, *arguments)


def run(keys: dict[str, Any], layout: Layout | None = None) -> Report:
    layout = layout or Layout()
    return run_distributed(train, layout.world, {**PROBE, **keys}, layout, Faults(), timeout=110)[0]


def metric(report: Report, name: str) -> list[float]:
    assert not report.error
    return [metrics[f"train/{name}"] for _, metrics in report.logged]


def stored(root: Path) -> dict[str, bytes]:
    """The files of rows and keys of a store, by name."""
    (folder,) = root.glob("reference-*")
    return {path.name: path.read_bytes() for end in ("rows", "keys") for path in folder.glob(f"*.{end}")}


def table(root: Path) -> dict[bytes, np.ndarray]:
    (folder,) = root.glob("reference-*")
    found = {}
    for path in folder.glob("*.keys"):
        numbers = path.read_bytes()
        values = np.fromfile(path.with_suffix(".rows"), np.float32).reshape(-1, 16)
        found |= {numbers[8 * i : 8 * i + 8]: row for i, row in enumerate(values)}
    return found


def rows(root: Path) -> int:
    return sum(len(content) // 8 for name, content in stored(root).items() if name.endswith(".keys"))


def test_it_is_the_model_that_the_run_begins_with(data: str, tmp_path: Path) -> None:
    """Also for validation and test; a row that is read again, in a later pass over a set, is there once."""
    keys = {"data_path": data, "save": str(tmp_path), "eval_iters": 2, "eval_interval": 2, "train_iters": 3}
    report = run({**keys, "pack_impl": "unpacked"})
    distance = metric(report, "distance")
    assert distance[0] < 1e-6 < 1e-4 < distance[1] < distance[2]
    assert {split for _, split, metrics in report.evaluated if metrics["distance"] > 1e-4} == {"validation", "test"}
    assert rows(tmp_path) == 3 * 8 + 6 + 6


def test_hugging_face_models_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    keys = []
    for name, weight in (("base", 1.0), ("tuned", 1.5), ("moved", 1.0)):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        save_file({"model.norm.weight": torch.full((8,), weight)}, folder / "model.safetensors")
        keys.append(weights_of(open_checkpoint(folder)))
    assert keys[0] != keys[1] and keys[0] == keys[2]


def test_rows_serve_the_same_texts_with_other_labels(data: str, tmp_path: Path) -> None:
    """Each token is compared with the reference's own log-probability of it, also one that the first run did not
    train."""
    texts = IndexedDataset(data)
    keys = {"train_data_paths": [data], "train_iters": 2, "pack_impl": "unpacked", "eod_mask_loss": False}
    keys["reference_path"] = str(tmp_path / "store")
    before: dict[str, bytes] = {}
    for odd in (0, 1):
        labels = [
            [int(token) if i % 2 == odd else -100 for i, token in enumerate(texts.get(n))] for n in range(len(texts))
        ]
        path = write(tmp_path / f"labels{odd}", labels, np.int32)
        found = run({**keys, "train_label_data_paths": [path]})
        assert metric(found, "distance")[0] < 1e-6 < 1e-4 < metric(found, "distance")[1]
        assert not before or stored(tmp_path / "store") == before
        before = stored(tmp_path / "store")


def train_without_room(rank: int, world: int, *arguments: Any) -> Report:
    with mock.patch("megatron.run.read_ahead.free_bytes", lambda root: 1000):
        return train(rank, world, *arguments)


def test_a_full_disk(data: str, tmp_path: Path) -> None:
    """Known before the pass, or said when it comes."""
    keys = {**PROBE, "data_path": data, "save": str(tmp_path), "train_iters": 2}
    report = run_distributed(train_without_room, 1, keys, Layout(), Faults(), timeout=110)[0]
    assert report.exit_code == 6 and f"{16 * (4 * 16 + 8)} bytes; 1000 are free in {tmp_path}" in report.error
    assert not list(tmp_path.glob("reference-*/*.rows"))
    (tmp_path / "name.rows").symlink_to("/dev/full")
    with pytest.raises(MachineError, match=f"{tmp_path}: No space left"):
        StoreWriter(tmp_path, "name").add(1, np.zeros(1 << 14, np.float32))


def test_a_pair_with_one_text_too_short_to_score(tmp_path: Path) -> None:
    """The row of the other is its own."""
    short, other = (Sample(np.arange(3), np.zeros(1, np.int64), length=length) for length in (1, 3))
    pairs: Any = [(short, other), (other, short)]
    for number, values in ((0, [[1.0, 1.0], [2.0, 3.0]]), (1, [[2.0, 3.0], [1.0, 1.0]])):
        folder = tmp_path / str(number)
        writer = RowsWriter(folder, {}, "rows")
        writer.write(pairs, [number], torch.tensor(values), rows=2)
        writer.close()
        found = ReferenceStore(folder, 2).find(other)
        assert found is not None and found.tolist() == [2.0, 3.0]


LAYOUTS = {
    "tensor and sequence parallel": (Layout(tp=2, sequence_parallel=True), {}),
    "pipeline, data parallel": (Layout(pp=2, dp=2), {"gradient_accumulation_steps": 2}),
    "native engine, ZeRO-3": (Layout(dp=2), {"engine": "native", "zero_optimization": {"stage": 3}}),
    "ZeRO-3": (Layout(dp=2), {"zero_optimization": {"stage": 3}}),
}


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return run({"data_path": data, "reference_path": str(folder), "train_iters": 2}), folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_the_same_at_every_layout(data: str, tmp_path: Path, alone: tuple[Report, Path], name: str) -> None:
    """What one rank wrote serves all layouts, and each layout writes the same."""
    (layout, more), (reference, folder) = LAYOUTS[name], alone
    before = stored(folder)
    keys = {"data_path": data, "train_iters": 2, **more}
    found = run({**keys, "reference_path": str(folder)}, layout)
    assert metric(found, "distance")[0] < 1e-6 and stored(folder) == before
    found = run({**keys, "reference_path": str(tmp_path)}, layout)
    assert metric(found, "distance")[0] < 1e-6
    assert metric(found, "reference") == pytest.approx(metric(reference, "reference"), rel=1e-6)
    assert rows(tmp_path) == rows(folder)


def test_a_run_that_stops_and_goes_on(data: str, tmp_path: Path) -> None:
    """It reads what is there, and compares with step 0 and not with its checkpoint."""
    straight = run({"data_path": data, "save": str(tmp_path / "a"), "train_iters": 4})
    stopped = {"data_path": data, "save": str(tmp_path / "b"), "train_iters": 4}
    first = run({**stopped, "exit_interval": 2})
    before = stored(tmp_path / "b")
    second = run(stopped)
    assert stored(tmp_path / "b") == before
    assert len(list(tmp_path.glob("b/reference-*/whole-*"))) == 1  # nothing was looked through again
    for name in ("distance", "reference"):
        assert metric(first, name) + metric(second, name) == metric(straight, name)
    assert second.state == straight.state


def test_an_interrupted_pass_goes_on(data: str, tmp_path: Path) -> None:
    """Rows without a key, and half a row, are as good as none; the others are kept."""
    keys = {"data_path": data, "save": str(tmp_path), "train_iters": 2}
    whole = run({**keys, "callbacks": {"checkpointer": False}})
    (folder,) = tmp_path.glob("reference-*")
    (content,), (numbers,) = folder.glob("*.rows"), folder.glob("*.keys")
    content.write_bytes(content.read_bytes()[: 7 * 16 * 4 + 10])
    numbers.write_bytes(numbers.read_bytes()[: 9 * 8])
    again = run({**keys, "callbacks": {"checkpointer": False}})
    assert metric(again, "reference") == metric(whole, "reference")
    sizes = sorted(len(content) // (4 * 16) for name, content in stored(tmp_path).items() if name.endswith(".rows"))
    assert sizes == [7, 9]


@pytest.fixture(scope="module")
def base(data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("base"))
    assert not run({"train_impl": "normal", "data_path": data, "save": folder, "train_iters": 2}).error
    return folder


def test_adapters_are_off_in_the_pass(data: str, base: str, tmp_path: Path) -> None:
    """Also where it is made again beside trained adapters: the store of a checkpoint's run was lost."""
    keys = {"data_path": data, "load": base, "finetune": True, "lora_r": 4, "save": str(tmp_path), "train_iters": 4}
    first = run({**keys, "exit_interval": 2, "lr_decay_style": "constant"}, Layout(tp=2))
    assert metric(first, "distance")[0] < 1e-6 < 1e-5 < metric(first, "distance")[1]
    before = table(tmp_path)
    (folder,) = tmp_path.glob("reference-*")
    shutil.rmtree(folder)
    second = run({**keys, "lr_decay_style": "constant"}, Layout(dp=2))
    assert second.steps == [3, 4] and metric(second, "distance")[0] > 1e-5
    again = table(tmp_path)
    assert len(again) == 16 and all(np.abs(row - before[key]).max() < 1e-6 for key, row in again.items())


def test_a_run_made_longer_takes_its_first_weights(data: str, base: str, tmp_path: Path) -> None:
    keys = {"data_path": data, "load": base, "finetune": True, "seed": 5}
    straight = run({**keys, "save": str(tmp_path / "a"), "train_iters": 4})
    keys |= {"save": str(tmp_path / "b")}
    first = run({**keys, "train_iters": 2})
    assert metric(first, "distance")[0] < 1e-6 and rows(tmp_path / "b") == 16
    second = run({**keys, "train_iters": 4})
    # The order of a run that was made longer is its own, but every sample of 16 is in both.
    assert rows(tmp_path / "b") == 32 and second.steps == [3, 4]
    assert metric(second, "distance")[0] > 1e-4
    assert metric(first, "reference") == metric(straight, "reference")[:2]

    one, other = table(tmp_path / "a"), table(tmp_path / "b")
    both = one.keys() & other.keys()
    assert len(both) >= 16 and all(np.abs(one[key] - other[key]).max() < 1e-6 for key in both)


def test_what_cannot_be_made_again(data: str, base: str, tmp_path: Path) -> None:
    """A lost folder is made again from the checkpoint that the run began with; new weights are lost with it."""
    for load in ({"load": base, "finetune": True}, {}):
        save = tmp_path / str(len(load))
        keys = {"data_path": data, "save": str(save), "train_iters": 3, **load}
        straight = run({**keys, "save": str(tmp_path / "straight"), "reference_path": str(tmp_path / "x")})
        run({**keys, "exit_interval": 1})
        (folder,) = save.glob("reference-*")
        shutil.rmtree(folder)
        again = run(keys)
        if load:
            assert metric(again, "reference") == metric(straight, "reference")[1:]
        else:
            assert again.exit_code == 2 and str(folder) in again.error and "new weights" in again.error
        shutil.rmtree(tmp_path / "straight")


def test_dpo_on_files_of_pairs(tmp_path: Path) -> None:
    """It begins at log 2, where the model is the reference, and goes on after a stop as if it had not stopped, at
    another layout, with pairs in rows of their own and packed."""
    rng = np.random.RandomState(3)
    for side in ("chosen", "rejected"):
        texts = [[97 + i % 26] * 2 + rng.randint(97, 123, rng.randint(2, 6)).tolist() for i in range(30)]
        write(tmp_path / side, texts, np.uint16)
    keys: dict[str, Any] = {"train_impl": "dpo", "dataset_impl": "pairwise", "train_iters": 4, "dpo_beta": 5.0}
    for role in ("train", "valid"):
        keys |= {
            f"{side}_{role}_data_paths": [str(tmp_path / name)]
            for side, name in (("pos", "chosen"), ("neg", "rejected"))
        }
    for packed in ({"pack_impl": "unpacked"}, {"pack_impl": "best_fit", "intra_document_masking": True}):
        more = {**keys, **packed, "eval_iters": 1, "eval_interval": 2}
        save = tmp_path / packed["pack_impl"]
        straight = run({**more, "save": str(save / "a")})
        assert not straight.error and straight.loss[0] == pytest.approx(math.log(2), abs=1e-6)
        assert abs(straight.loss[3] - straight.loss[0]) > 1e-2
        first = run({**more, "save": str(save / "b"), "exit_interval": 2}, Layout(pp=2))
        second = run({**more, "save": str(save / "b")}, Layout(dp=2))
        assert first.loss + second.loss == pytest.approx(straight.loss, rel=1e-5)
        found = [metrics["lm_loss"] for _, split, metrics in [*first.evaluated, *second.evaluated]]
        assert found == pytest.approx([metrics["lm_loss"] for _, split, metrics in straight.evaluated], rel=1e-5)
