"""A damaged checkpoint is never used: an older one is taken, or the message says what to type.

Whole runs through `run.train`; the reference is the same run without damage, and zlib's checksum of the file.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from megatron.checkpoint.damage import find_damage
from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.checkpoint.starts import decide, put
from tests.distributed import run_distributed
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu


def flip(path: Path) -> tuple[int, int]:
    """Change one bit, which leaves the size; returns the CRC-32 before and after."""
    data = bytearray(path.read_bytes())
    before = zlib.crc32(data)
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    return before, zlib.crc32(data)


def typed(text: str) -> dict[str, Any]:
    """What `key=value` on the command line sets."""
    key, _, value = text.partition("=")
    return {key: yaml.safe_load(value)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a run on two tensor-parallel ranks that has saved steps 3 and 6 and is to take two more."""
    folder = tmp_path_factory.mktemp("run")
    keys = {"data_path": corpus(folder / "data"), "save": str(folder / "save"), "lr_decay_iters": 20}
    assert run(keys, Layout(tp=2))[0].steps == [1, 2, 3, 4, 5, 6]
    return {**keys, "train_iters": 8}


def copy(saved: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Path]:
    shutil.copytree(saved["save"], folder)
    return {**saved, "save": str(folder)}, folder


@pytest.mark.parametrize(
    ("file", "layout"),
    [
        ("optim_layer_02-model_01.pt", Layout(tp=2)),
        ("layer_05-model_00-model_states.pt", Layout(pp=2)),
        ("rng_rank_00001.pt", Layout(dp=2)),
        ("mp_rank_00_model_states.pt", Layout(tp=2)),
    ],
    ids=str,
)
def test_an_older_checkpoint_is_taken_on_all_ranks(
    tmp_path: Path, saved: dict[str, Any], file: str, layout: Layout
) -> None:
    keys, save = copy(saved, tmp_path / "save")
    whole = run({**keys, "iteration": 3, "load": str(save), "save": str(tmp_path / "whole")}, layout)
    flip(save / "global_step6" / file)
    for report, expected in zip(run(keys, layout), whole, strict=True):
        assert not report.error and report.steps == [4, 5, 6, 7, 8]
        assert report.loss == expected.loss and report.state == expected.state
    assert decide(save).step == 8


def without_threads(rank: int, world: int, folder: Path) -> str:
    """Checks a checkpoint where rank 1 cannot compute a checksum, as at the limit of its threads."""
    state = ParallelState.build(Topology({"pipe": 1, "data": 1, "model": world}), rank, torch.device("cpu"))
    refuse = mock.Mock(side_effect=RuntimeError("can't start new thread") if rank == 1 else lambda path: 0)
    with mock.patch("megatron.checkpoint.manifest.file_crc32", refuse), pytest.raises(Exception) as caught:
        find_damage(open_checkpoint(folder), state)
    return str(caught.value)


def test_a_rank_that_cannot_check_stops_all(saved: dict[str, Any]) -> None:
    """Else the others would wait for it until the time-out."""
    other, own = run_distributed(without_threads, 2, Path(saved["save"]) / "global_step6", timeout=60)
    assert "rank 1" in other and "can't start new thread" in other and own == "can't start new thread"


def test_without_checksums_it_is_used(tmp_path: Path, saved: dict[str, Any]) -> None:
    keys, save = copy(saved, tmp_path / "save")
    flip(save / "global_step6" / "optim_layer_02-model_01.pt")
    assert run({**keys, "checkpoint_checksums": False}, Layout(tp=2))[0].steps == [7, 8]


def test_a_run_whose_only_checkpoint_is_damaged_does_not_begin_again(tmp_path: Path, saved: dict[str, Any]) -> None:
    keys, save = copy(saved, tmp_path / "save")
    shutil.rmtree(save / "global_step3")
    before, after = flip(save / "global_step6" / "optim_layer_03-model_00.pt")
    reports = run(keys, Layout(tp=2))
    assert [(report.exit_code, report.steps) for report in reports] == [(2, []), (2, [])]
    error = reports[0].error
    assert re.search(rf"global_step6 \(optim_layer_03-model_00\.pt .*\b{after}\b.*\b{before}\)", error), error
    (advice,) = re.findall(r"\w+=true", error)
    report = run({**keys, **typed(advice), "train_iters": 1}, Layout(tp=2))[0]
    assert report.steps == [1]


@pytest.mark.parametrize("keys", [{}, {"load": "base"}, {"init_from": {"path": "base"}}], ids=str)
def test_incomplete_folders_are_no_place_for_a_new_run(tmp_path: Path, keys: dict[str, Any]) -> None:
    put(tmp_path / "base", 2)
    put(tmp_path / "save", 4)
    (tmp_path / "save/global_step4/mp_rank_00_model_states.pt").write_bytes(b"short")
    keys = {"load": tmp_path / "base"} if "load" in keys else {**keys}
    if "init_from" in keys:
        keys["init_from"] = {"path": str(tmp_path / "base")}
    with pytest.raises(UserError, match=r"global_step4 \(mp_rank_00_model_states.pt has 5 bytes, expected \d+\)"):
        decide(tmp_path / "save", **keys)


def test_what_a_message_advises_works(tmp_path: Path, saved: dict[str, Any]) -> None:
    """A tool that reads the damaged checkpoint names the file and another step; typed as it is, the run uses it."""
    _, save = copy(saved, tmp_path / "save")
    name = "layer_02-model_00-model_states.pt"
    before, after = flip(save / "global_step6" / name)
    reader = CheckpointReader(open_checkpoint(save / "global_step6"))
    with pytest.raises(UserError, match=rf"{name} .*\b{after}\b.*\b{before}\b") as caught:
        reader.weight("2.mlp.linear1.weight")
    advice, folder = re.findall(r"use (\S+) \(or name (\S+)\)", str(caught.value))[0]
    assert CheckpointReader(open_checkpoint(folder)).weight("2.mlp.linear1.weight").numel()
    start = decide(save, **typed(advice))
    assert (start.kind, start.step) == ("load", 3)
    # Until the run has saved: from then on the same command continues.
    put(save, 5, iteration=3)
    assert decide(save, iteration=3).step == 5


def test_a_manifest_that_was_edited(tmp_path: Path) -> None:
    """Fields that another file or the folder's name also knows."""
    for key, edited in (("step", 3), ("consumed", 41), ("files", {})):
        put(tmp_path / key, 2)
        put(tmp_path / key, 4)
        path = tmp_path / key / "global_step4/manifest.json"
        text = path.read_text()
        path.write_text(json.dumps({**json.loads(text), key: edited}))
        start = decide(tmp_path / key)
        assert start.step == 2 and "global_step4" in start.message


def test_latest_that_names_a_damaged_step_means_an_older_one_not_a_later(tmp_path: Path) -> None:
    for step in (2, 4, 9, 6):  # 9 is of a line that was abandoned
        put(tmp_path, step)
    flip(tmp_path / "global_step6/mp_rank_00_model_states.pt")
    assert decide(tmp_path).step == 4
