"""GPT-NeoX's own checkpoints to Hugging Face: the tensors they were made from, bit for bit (known-faults 2, 31-33)."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron.convert.hf.check import check_pair
from megatron.convert.hf.export_hf import export
from megatron.errors import UserError
from tests.checkpoint.neox_files import write_neox
from tests.convert import helpers
from tests.convert.helpers import LLAMA, NEOX, hugging_face, resolved

pytestmark = pytest.mark.cpu

TOKENS = 512  # of the tokenizer of characters
CASES = {
    "neox": ("neox", {**NEOX, "gpt_j_residual": False}, "legacy"),
    "llama": ("llama", {**LLAMA, "num_kv_heads": 2}, "new"),
}


@pytest.fixture(params=CASES)
def source(request, tmp_path, monkeypatch):
    """(folder of GPT-NeoX's at two ranks, its YAML file, the tensors of the Hugging Face model it was made from)."""
    architecture, keys, names = CASES[request.param]
    monkeypatch.setattr(helpers, "VOCAB", TOKENS)
    keys = {**keys, "tokenizer_type": "CharLevelTokenizer", "model_parallel_size": 2, "train_batch_size": 2}
    theirs = hugging_face(resolved(**{**keys, "model_parallel_size": 1, "train_batch_size": 1}), architecture)[1]
    folder = write_neox(tmp_path / "neox" / "global_step9", theirs, keys, tp=2, names=names)
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(keys))
    return folder, file, theirs


def test_the_tool_gives_back_the_model(source, tmp_path, monkeypatch, capsys):
    folder, file, theirs = source
    flags = ["--input_dir", folder.parent, "--config_file", file, "--output_dir", tmp_path / "hf"]
    tool = Path(__file__).resolve().parents[3] / "tools/ckpts/convert_neox_to_hf.py"
    for more, expected in (
        ((), "logit difference between Deepy and transformers"),
        (("--check-only",), "largest logit"),
    ):
        monkeypatch.setattr(sys, "argv", [tool.name, *map(str, flags), *more])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(tool), run_name="__main__")
        assert not end.value.code and expected in capsys.readouterr().out
    written = load_file(tmp_path / "hf/model.safetensors")
    assert sorted(written) == sorted(theirs) and all(torch.equal(written[name], t) for name, t in theirs.items())
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == TOKENS  # without padding


def test_the_config_copied_into_the_checkpoint_is_enough(source, tmp_path):
    folder, file, _ = source
    with pytest.raises(UserError, match="global_step.*--config_file"):
        export(folder, tmp_path / "hf")
    (folder / "configs").mkdir()
    file.rename(folder / "configs" / file.name)
    assert export(folder, tmp_path / "hf").largest_difference < 1e-5
    assert check_pair(folder, tmp_path / "hf").ok


def test_a_config_of_another_model_is_refused(source, tmp_path):
    folder, file, _ = source
    other = tmp_path / "other.yml"
    other.write_text(file.read_text().replace("num_layers: 2", "num_layers: 3"))
    with pytest.raises(UserError, match="num_layers: 2 .*checkpoint, 3 .*config"):
        export(folder, tmp_path / "hf", config_files=[str(other)])
    assert not (tmp_path / "hf").exists()


def test_it_can_be_inspected(source, monkeypatch, capsys):
    folder, file, _ = source
    tool = Path(__file__).resolve().parents[3] / "tools/ckpts/inspect_checkpoints.py"
    monkeypatch.setattr(sys, "argv", [tool.name, str(folder), "--config_file", str(file)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(tool), run_name="__main__")
    out = capsys.readouterr().out
    assert not end.value.code and re.search(r"step 9, 0 samples, .*tp 2\b", out)
    line = next(line for line in out.splitlines() if line.startswith("0.word_embeddings.weight"))
    assert "[512, 32]" in line and "split dim 0 padded to 512" in line
