"""Known faults of conversion (1, 2, 31, 32, 33): every form of model a converter may get wrong, at every layout of the
checkpoint, against `transformers` on random weights."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.convert.hf.check import check_pair
from megatron.convert.hf.export_hf import export
from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts
from tests.convert.helpers import LLAMA, NEOX, VOCAB, full_tensors, hugging_face, resolved, write_checkpoint
from tests.inference.models import make_checkpoint
from tests.neox_args.helpers import derived
from tests.training import tiny

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("neox", {"rotary_pct": pct, "gpt_j_residual": parallel, "no_weight_tying": untied})
    for pct, parallel, untied in itertools.product((0.25, 1.0), (True, False), (True, False))
] + [("llama", {"no_weight_tying": untied, "num_kv_heads": heads}) for untied in (True, False) for heads in (4, 2, 1)]


CASES = [(*form, tp) for form, tp in itertools.product(FORMS, (1, 2)) if form[1].get("num_kv_heads", 4) % tp == 0]


@pytest.mark.parametrize(("architecture", "keys", "tp"), CASES, ids=str)
def test_the_copy_is_complete_and_computes_the_same(tmp_path: Path, architecture: str, keys: dict, tp: int) -> None:
    """33: norm x rotary share x parallel residual x tied x tensor parallel. Nothing is missing, left over or a default
    of transformers (32), biases are neither doubled nor halved (2), the vocabulary is the real one (31)."""
    args = resolved(**{**(NEOX if architecture == "neox" else LLAMA), **keys})
    model, theirs = hugging_face(args, architecture)
    folder = write_checkpoint(tmp_path / "ckpt", args, full_tensors(args, architecture, theirs), tp)
    assert export(folder, tmp_path / "hf", tokenizer=False, architecture=architecture).largest_difference < 1e-5
    copy, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert copy.config.vocab_size == copy.get_input_embeddings().weight.shape[0] == VOCAB
    assert copy.config.intermediate_size == (96 if architecture == "neox" else 80)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, copy.get_parameter(name)), name
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, copy.eval()(tokens).logits)
    again = tmp_path / "again"
    export(folder, again, tokenizer=False, architecture=architecture)
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_more_ranks_than_key_value_heads_are_refused(tmp_path: Path) -> None:
    """1: 2 key/value heads over 4 ranks. A sentence, and no file."""
    with pytest.raises(UserError, match="num_kv_heads 2 .*4 tensor-parallel"):
        derived(tmp_path, num_kv_heads=2, model_parallel_size=4, facts=Facts(num_devices=4))
    args = resolved(**LLAMA, num_kv_heads=2)
    tensors = full_tensors(args, "llama", hugging_face(args, "llama")[1])
    with pytest.raises(UserError, match="2 cannot be split"):
        write_checkpoint(tmp_path / "ckpt", args, tensors, tp=4)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("layout", [tiny.Layout(), tiny.Layout(pp=2), tiny.Layout(tp=2, pp=2)], ids=lambda x: x.name)
@pytest.mark.parametrize("keys", [{**tiny.NEOX, "num_kv_heads": 4}, tiny.LLAMA], ids=["neox", "llama, tied"])
def test_checkpoints_of_every_pipeline_convert(tmp_path: Path, layout: tiny.Layout, keys: dict) -> None:
    """33: pipeline 0/1 and 2, written by the engine itself."""
    folder = make_checkpoint(tmp_path / "run", {**keys, "save": "run"}, layout)
    assert export(folder, tmp_path / "hf", tokenizer=False).largest_difference < 1e-5
    assert check_pair(folder, tmp_path / "hf").ok


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint and its copy."""
    args = resolved(**LLAMA, num_kv_heads=2)
    folder = write_checkpoint(
        tmp_path / "ckpt", args, full_tensors(args, "llama", hugging_face(args, "llama")[1]), tp=2
    )
    export(folder, tmp_path / "hf", tokenizer=False)
    return folder, tmp_path / "hf"


def test_the_check_can_be_rerun_on_any_pair(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """33: on what was exported long ago, or by somebody else."""
    checkpoint, folder = pair

    def check(output: Path) -> tuple[Any, str, str]:
        tool = str(ROOT / "tools/ckpts/convert_neox_to_hf.py")
        given = ["--input_dir", str(checkpoint), "--output_dir", str(output), "--check-only"]
        monkeypatch.setattr(sys, "argv", [tool, *given])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(tool, run_name="__main__")
        return end.value.code, *capsys.readouterr()

    code, out, _ = check(folder)
    assert code == 0 and "largest logit difference in fp32:" in out
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].flip(0)}, folder / "model.safetensors", {"format": "pt"})
    code, out, _ = check(folder)
    assert code == 2 and "first after" in out
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    code, _, err = check(folder)
    assert code == 2 and name in err and "Traceback" not in err
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 72}))
    code, _, err = check(folder)
    assert code == 2 and f"has vocab_size 72, {checkpoint} has {VOCAB} tokens" in err
    code, _, err = check(folder.parent / "nowhere")
    assert code == 2 and "not a Hugging Face folder" in err


def test_padding_of_the_vocabulary_is_not_in_any_file(pair: tuple[Path, Path]) -> None:
    """31: rows beyond the real vocabulary would be loaded as tokens."""
    _, folder = pair
    sizes = {tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items() if "embed" in name}
    assert sizes == {(VOCAB, 32)}
