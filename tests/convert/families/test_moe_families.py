"""Families with mixtures of experts: either naming of them, one matrix in memory at a time, fields of config.json."""

from __future__ import annotations

import weakref
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file

from megatron.convert.families import FAMILIES, read_config
from megatron.convert.hf.import_hf import import_model
from megatron.convert.parts.family import TokenIds
from megatron.convert.parts.transforms import PerExpert
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.errors import UserError
from tests.convert.families.moe_cases import FOUND, MIXTRAL, PUBLISHED, QWEN3_MOE
from tests.convert.helpers import hugging_face, resolved

pytestmark = pytest.mark.cpu


def _files(folder):
    return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.rglob("layer_*.pt"))}


@pytest.mark.parametrize(("architecture", "keys"), FOUND)
def test_files_with_the_names_of_the_running_model_are_read_too(tmp_path, architecture, keys):
    """transformers keeps a layer's experts in two tensors; its files have three matrices for each by default."""
    model, theirs = hugging_face(resolved(**keys), architecture)
    model.save_pretrained(tmp_path / "one_by_one")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = load_file(tmp_path / "fused/model.safetensors")
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 48, 32)
    assert len(theirs) == len(load_file(tmp_path / "one_by_one/model.safetensors")) > len(fused)
    for name in ("one_by_one", "fused"):
        done = import_model(str(tmp_path / name), tmp_path / "out" / name, tp=2)
        assert done.largest_difference < 1e-5
    found = [_files(tmp_path / "out" / name) for name in ("one_by_one", "fused")]
    assert found[0].keys() == found[1].keys() and found[0]
    for file, tensors in found[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[1][file][name]), (file, name)


def test_one_matrix_of_an_expert_is_in_memory_next_to_the_parameter(tmp_path, monkeypatch):
    hugging_face(resolved(**MIXTRAL), "mixtral")[0].save_pretrained(tmp_path / "hf")
    alive, most, read = set(), [], HuggingFaceFolder.tensor

    def watched(folder, name):
        tensor = read(folder, name).clone()
        if ".experts." in name:
            alive.add(name)
            weakref.finalize(tensor, alive.discard, name)
            most.append(len(alive))
        return tensor

    monkeypatch.setattr(HuggingFaceFolder, "tensor", watched)
    import_model(str(tmp_path / "hf"), tmp_path / "out", check=False)
    assert len(most) == 2 * 4 * 3 and max(most) == 1


def test_a_matrix_of_another_shape_is_named():
    parts = [torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(4, 2)]
    with pytest.raises(ValueError, match=r"expert 1 .*\[4, 2\].*\[3, 2\]"):
        PerExpert(2, (3, 3)).load(parts)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmoe/1B-7B", {"clip_qkv": 8.0}, "clip_qkv: 8.0"),
        ("mixtral/8x7B", {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1"),
        ("mixtral/8x7B", {"num_experts": 4}, "num_experts and num_local_experts differ"),
        ("qwen3-moe/30B-A3B", {"mlp_only_layers": list(range(48))}, "no layer has experts"),
        ("qwen3-moe/30B-A3B", {"use_sliding_window": True}, "max_window_layers: 48 with use_sliding_window"),
        ("qwen3-moe/30B-A3B", {"is_causal": False}, "not known here.*is_causal: False"),
    ],
)
def test_what_cannot_be_expressed_is_named(name, changes, message):
    with pytest.raises(UserError, match=message):
        read_config({**deepcopy(PUBLISHED[name]), **changes}, "config.json")


def test_which_layers_have_experts():
    """Every `decoder_sparse_step`-th, the first of them being layer step - 1, without `mlp_only_layers`."""
    fields = {**deepcopy(PUBLISHED["qwen3-moe/30B-A3B"]), "decoder_sparse_step": 3, "mlp_only_layers": [5, 7]}
    family, keys = read_config(fields, "config.json")
    assert keys["moe_layers"] == [2, *range(8, 48, 3)]
    model = resolved(**QWEN3_MOE, moe_layers=[0]).model
    written = FAMILIES[family].config(model, 67, TokenIds())
    assert written["mlp_only_layers"] == [1] and written["decoder_sparse_step"] == 1


def test_the_coefficient_of_balance_is_of_all_layers_there_and_of_one_here():
    _, keys = read_config(deepcopy(PUBLISHED["mixtral/8x7B"]), "config.json")
    assert keys["moe_aux_loss_coeff"] == 0.02 / 32
    for layers in (3, 7, 56, 94):
        fields = {**deepcopy(PUBLISHED["mixtral/8x7B"]), "num_hidden_layers": layers, "router_aux_loss_coef": 0.001}
        coefficient = read_config(fields, "config.json")[1]["moe_aux_loss_coeff"]
        model = resolved(**{**MIXTRAL, "num_layers": layers, "moe_aux_loss_coeff": coefficient}).model
        assert FAMILIES["mixtral"].config(model, 67, TokenIds())["router_aux_loss_coef"] == 0.001
