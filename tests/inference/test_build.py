"""A stage from a checkpoint: only its own weights, never the whole model, and only if model and tokenizer fit."""

from __future__ import annotations

import logging
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import find_checkpoint, open_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.errors import UserError
from megatron.inference.build import build_stage
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.inference.models import GPT_LLAMA, GPT_NEOX, VOCAB, Layout, Letters, inference_args, make_checkpoint

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("neox"), {**GPT_NEOX, "tokenizer_type": "CharLevelTokenizer"})


def one_rank(layout: Layout, rank: int) -> ParallelState:
    """The state of a rank that never talks to the others: building needs no communication."""
    return ParallelState(
        Topology({"pipe": layout.pp, "data": layout.dp, "model": layout.tp}), rank, torch.device("cpu")
    )


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_holds_its_shard_and_its_part_of_one_parameter_on_the_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int
):
    layout = Layout(pp=2, tp=2)
    alive, most, original = set(), [], CheckpointReader.local_weight

    def local_weight(self, *arguments):
        value = original(self, *arguments)
        assert value.untyped_storage().nbytes() == value.numel() * value.itemsize  # and not a part of the whole
        alive.add(id(value))
        weakref.finalize(value, alive.discard, id(value))
        most.append(len(alive))
        return value

    monkeypatch.setattr(CheckpointReader, "local_weight", local_weight)
    args, state = inference_args(GPT_NEOX, layout), one_rank(layout, rank)
    stage = build_stage(args, state, Letters(), open_checkpoint(folder))
    assert max(most) == 1 and not alive
    reader = CheckpointReader(open_checkpoint(folder))
    held = {name: p for layer in stage.layers for name, p in named_parameters(layer)}
    first = {name for name in reader.names() if name.startswith(("0.", "2."))}
    assert set(held) == (first if state.is_first_stage else set(reader.names()) - first)
    for name, p in held.items():
        expected = p.spec.local_shape(2)
        assert tuple(p.shape) == expected and p.untyped_storage().nbytes() == p.numel() * 4, name
        assert not p.requires_grad


def test_another_vocabulary_is_refused_with_the_tokenizer_it_was_trained_with(folder: Path):
    class Smaller(Letters):
        @property
        def vocab_size(self) -> int:
            return VOCAB - 1

    args = inference_args(GPT_NEOX, Layout(), VOCAB - 1)
    with pytest.raises(UserError, match=r"\b67 tokens, letters .*\b66; .*CharLevelTokenizer"):
        build_stage(args, ParallelState.single(), Smaller(), open_checkpoint(folder))


def test_another_tokenizer_of_the_same_size_is_reported(folder: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        build_stage(inference_args(GPT_NEOX, Layout()), ParallelState.single(), Letters(), open_checkpoint(folder))
    assert "trained with tokenizer_type: CharLevelTokenizer" in caplog.text


def test_another_architecture_is_refused_by_its_keys(folder: Path, tmp_path: Path):
    """The message names the config to use: the file that a run's checkpoint has, else that of the manifest."""
    copy, args = Path(shutil.copytree(folder, tmp_path / folder.name)), inference_args(GPT_LLAMA, Layout())
    checkpoint = open_checkpoint(copy)
    for named in ("configs/resolved.yml", "manifest.json"):
        with pytest.raises(UserError, match=rf"(?s)norm: 'layernorm' .*now 'rmsnorm'.*{copy / named}\).*load={copy}\."):
            build_stage(args, ParallelState.single(), Letters(), checkpoint)
        (copy / "configs/resolved.yml").unlink(missing_ok=True)  # a converted checkpoint has none


def test_an_older_checkpoint_than_the_newest_is_reported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(folder, tmp_path / folder.name)
    (tmp_path / "global_step99").mkdir()
    args = inference_args(GPT_NEOX, Layout())
    with caplog.at_level(logging.WARNING):
        build_stage(args, ParallelState.single(), Letters(), find_checkpoint(tmp_path))
    assert "global_step99 (no manifest.json)" in caplog.text
