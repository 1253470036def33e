"""Whole runs that start from a checkpoint of a smaller model: `init_from` with `vocab: resize` and `layer_map`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.checkpoint.find import open_checkpoint
from megatron.inference.build import build_stage
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.tokenizer import build_tokenizer
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

OLD, MORE, LESS = 201, 212, 190
# So short a step that the weights of the first checkpoint are those that the run began with.
STILL = {"optimizer": {"type": "Adam", "params": {"lr": 1e-30}}, "min_lr": 0, "weight_decay": 0}


def words(folder: Path, size: int) -> dict[str, str]:
    """Keys of a tokenizer of words; a larger one has those of a smaller one with the same ids."""
    path = folder / f"{size}.json"
    tokens = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, size)}}
    Tokenizer(WordLevel(tokens, unk_token="w1")).save(str(path))
    return {"tokenizer_type": "HFTokenizer", "vocab_file": str(path)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """(keys, folder of checkpoints) of a trained model of two blocks."""
    folder = tmp_path_factory.mktemp("base")
    keys = {"data_path": corpus(folder / "text"), **words(folder, OLD), "train_iters": 3}
    save = folder / "save"
    assert run({**keys, "save": str(save)})[0].exit_code == 0
    return keys, save


def logits(folder: Path) -> torch.Tensor:
    """Of a checkpoint, for a few ids that all vocabularies have."""
    checkpoint = open_checkpoint(folder)
    args = for_inference(NeoXArgs.from_saved({**checkpoint.manifest.config, "model_parallel_size": 1}))
    tokenizer = build_tokenizer(args.tokenizer)
    stage = build_stage(
        derive(args, Facts(vocab_size=tokenizer.vocab_size, num_devices=1)),
        ParallelState.single(),
        tokenizer,
        checkpoint,
    )
    with torch.no_grad():
        tokens = torch.tensor([[7, 100, 3, 188, 0, 55, 121, 64]])
        return stage.run(tokens, torch.arange(8)[None], then=lambda out: out.logits())


def weights(step: Path, layer: int, tp_rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(step / f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt", weights_only=True)


def test_more_tokens_leave_the_logits_of_the_others(base, tmp_path, capsys):
    keys, folder = base
    save = tmp_path / "save"
    init = {"path": str(folder), "vocab": "resize", "layer_map": [0, 1], "optimizer": "reset", "step": "restart"}
    more = {**words(tmp_path, MORE), **STILL, "save": str(save), "init_from": init, "checkpoint_factor": 1}
    reports = run({**keys, **more, "train_iters": 1}, Layout(tp=2, dp=2, zero=1, micro=1))
    assert {report.error for report in reports} == {""} and reports[0].steps == [1]
    before, after = logits(folder / "global_step3"), logits(save / "global_step1")
    assert after.shape[-1] == MORE and before.shape[-1] == OLD
    torch.testing.assert_close(after[..., :OLD], before, rtol=1e-5, atol=1e-6)
    assert 0.001 < after[..., OLD:].std() < 10  # not zeros, not of another size
    shown = capsys.readouterr().out
    assert re.search(rf"word_embeddings\.weight: rows 0 to {OLD - 1} taken, {OLD} to {MORE - 1} new .*1234", shown)


def test_more_blocks_and_fewer_tokens_train_and_resume(base, tmp_path, capsys):
    """At a pipeline of two; cut rows may mean other tokens, which has its own key."""
    keys, folder = base
    keys = {**keys, **words(tmp_path, LESS), **STILL, "num_layers": 4, "save": str(tmp_path / "save")}
    init = {"path": str(folder), "vocab": "resize", "layer_map": [0, 0, 1, 1], "optimizer": "reset"}
    keys |= {"init_from": init, "checkpoint_factor": 1, "train_iters": 5, "allow_config_changes": True}
    layout = Layout(pp=2, engine="deepspeed")
    first = run({**keys, "exit_interval": 4}, layout)
    assert {report.error for report in first} == {""} and first[0].steps == [4]
    assert f"{LESS} to {OLD - 1} cut" in capsys.readouterr().out
    old, new = folder / "global_step3", tmp_path / "save" / "global_step4"
    for block, source in enumerate((2, 2, 3, 3), start=2):
        found, expected = weights(new, block), weights(old, source)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), block
    (name,) = (name for name in weights(new, 0) if name.startswith("word_embeddings"))
    assert torch.equal(weights(new, 0)[name][:LESS], weights(old, 0)[name][:LESS])
    again = run(keys, layout)
    assert {report.error for report in again} == {""} and again[0].steps == [5]


def test_without_the_flag_the_message_names_it(base, tmp_path):
    keys, folder = base
    init = {"path": str(folder), "optimizer": "reset"}
    larger = {**keys, **words(tmp_path, MORE), "train_iters": 5, "save": str(tmp_path / "save")}
    for start in ({"init_from": init}, {"load": str(folder), "finetune": True}):
        report = run({**larger, **start})[0]
        assert report.exit_code == 2 and re.search(
            rf"\[{OLD}, 32\].*\[{MORE}, 32\].*no `load`, no `finet", report.error
        )
        advised = re.search(r"init_from=(\{.*vocab: resize.*\})", report.error)
    assert run({**larger, "init_from": yaml.safe_load(advised[1])})[0].steps == [1, 2, 3, 4, 5]
    report = run({**keys, "num_layers": 3, "init_from": init, "train_iters": 5})[0]
    assert report.exit_code == 2 and "layer_map: [0, 0, 1]" in report.error
