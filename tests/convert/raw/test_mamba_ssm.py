"""mamba-ssm's own format: transformers takes its tensors as they are, so they are the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.convert.raw.mamba_ssm import export_mamba_ssm
from megatron.errors import UserError
from tests.convert.families import mamba_cases as mamba
from tests.convert.helpers import LLAMA, VOCAB, full_tensors, hugging_face, random_tensors, resolved, write_checkpoint

pytestmark = pytest.mark.cpu

TOOL = Path(__file__).parents[3] / "tools/ckpts/convert_neox_to_mamba_ssm.py"


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [(a, keys) for a, _, keys in mamba.CASES],
    ids=[f"{a}: {name}" for a, name, _ in mamba.CASES],
)
def test_tensors_and_config(tmp_path, architecture, keys):
    args = resolved(**keys)
    model, theirs = hugging_face(args, architecture)
    folder = write_checkpoint(tmp_path / "ckpt", args, full_tensors(args, architecture, theirs), tp=2)
    out = export_mamba_ssm(folder, tmp_path / "out")
    state = torch.load(out / "pytorch_model.bin", weights_only=True)
    other, _ = hugging_face(args, architecture, seed=1)
    renamed = {name.replace("backbone.embedding.", "backbone.embeddings."): tensor for name, tensor in state.items()}
    other.load_state_dict(renamed)
    tokens = torch.randint(VOCAB, (1, 12))
    with torch.no_grad():
        assert torch.equal(other(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    config = json.loads((out / "config.json").read_text())
    sizes = (config["d_model"], config["n_layer"], config["vocab_size"], config["tie_embeddings"])
    assert sizes == (32, 2, VOCAB, not keys["no_weight_tying"])
    ssm = config["ssm_cfg"]
    assert ssm["layer"] == {"mamba": "Mamba1", "mamba2": "Mamba2"}[architecture]
    first = "backbone.layers.0.mixer."
    assert state[f"{first}conv1d.weight"].shape[2] == ssm["d_conv"]
    assert state[f"{first}out_proj.weight"].shape[1] == ssm["expand"] * 32
    assert ssm["bias"] == (f"{first}in_proj.bias" in state) and ssm["conv_bias"] == (f"{first}conv1d.bias" in state)


def test_the_command(tmp_path):
    args = resolved(**mamba.MAMBA)
    folder = write_checkpoint(tmp_path / "ckpt", args, random_tensors(args, "mamba"))
    command = [sys.executable, str(TOOL), "--input_dir", str(folder), "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "out"), done.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"--output_dir: {tmp_path}/out" in done.stderr


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("llama", LLAMA, "layers of global"),
        ("mamba", {**mamba.MAMBA, "rms_norm_epsilon": 1e-6}, "rms_norm_epsilon: 1e-06"),
    ],
)
def test_what_mamba_ssm_cannot_express_is_refused(tmp_path, architecture, keys, message):
    args = resolved(**keys)
    folder = write_checkpoint(tmp_path / "ckpt", args, random_tensors(args, architecture))
    with pytest.raises(UserError, match=message):
        export_mamba_ssm(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
