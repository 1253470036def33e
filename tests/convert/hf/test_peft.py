"""Adapters of whole runs against PEFT: its logits on the exported base, its merged weights, and back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.checkpoint.find import find_checkpoint, open_checkpoint
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.peft import export_adapters
from megatron.convert.hf.peft_import import import_adapters
from megatron.errors import UserError
from tests.training.runs import Report, corpus, run
from tests.training.test_grow import logits
from tests.training.tiny import LLAMA, NEOX, Layout

pytestmark = pytest.mark.cpu

LORA: dict[str, Any] = {"lora_r": 3, "lora_alpha": 24.0, "optimizer": {"type": "Adam", "params": {"lr": 0.03}}}
DORA = {"use_dora": True, "use_rslora": True}
TOKENS = torch.tensor([[7, 100, 3, 188, 0, 55, 121, 64]])
MHA = {**NEOX, "num_kv_heads": None, "norm": "layernorm", "activation": "gelu", "intermediate_size": 48}


def _base(folder: Path, keys: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(keys, `save` folder) of a model that was trained a little."""
    keys = {**keys, "data_path": corpus(folder / "text"), "train_iters": 2, "checkpoint_factor": 2}
    assert run({**keys, "save": str(folder / "base")})[0].error == ""
    return keys, str(folder / "base")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return _base(tmp_path_factory.mktemp("llama"), LLAMA)


def _adapt(base: str, keys: dict[str, Any], save: Path, layout: Layout | None = None, **more: Any) -> list[Report]:
    given = {**keys, **LORA, "load": base, "finetune": True, "save": str(save), "train_iters": 4, **more}
    return run(given, layout)


def _transformers(base: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) < 1e-5 * float(other.abs().max())


def test_a_run_keeps_its_adapters_apart_and_goes_on_at_any_layout(llama, tmp_path):
    """Straight = stopped at one layout and resumed at another; what is saved is small, and the message when the base is
    missing names it."""
    keys, base = llama
    straight = _adapt(base, keys, tmp_path / "straight", **DORA)[0]
    assert straight.error == "" and straight.steps == [1, 2, 3, 4]
    first = _adapt(base, keys, tmp_path / "save", Layout(tp=2, pp=2), exit_interval=2, **DORA)
    assert {one.error for one in first} == {""}
    again = _adapt(base, keys, tmp_path / "save", Layout(dp=2, zero=3), **DORA)
    assert again[0].steps == [3, 4]
    assert [*first[0].loss, *again[0].loss] == pytest.approx(straight.loss, rel=1e-5)
    manifest = open_checkpoint(tmp_path / "save" / "global_step4").manifest
    assert manifest.base is not None and manifest.base.path == f"{base}/global_step2"
    assert manifest.parameters and all(".lora." in name for name in manifest.parameters)
    found = logits(tmp_path / "straight" / "global_step4")
    assert _close(logits(tmp_path / "save" / "global_step4"), found) and not _close(
        logits(Path(base, "global_step2")), found
    )
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    lost = tmp_path / "lost"
    shutil.copytree(tmp_path / "save", lost)
    file = lost / "global_step4" / "manifest.json"
    file.write_text(file.read_text().replace(f"{base}/global_step2", f"{tmp_path}/gone/global_step2"))
    with pytest.raises(UserError, match=rf"{tmp_path}/gone/global_step2.*lora_base=FOLDER"):
        logits(lost / "global_step4")
    more = {**DORA, "train_iters": 5}
    assert re.search(r"gone/global_step2.*lora_base", _adapt(base, keys, lost, **more)[0].error)
    report = _adapt(base, keys, lost, lora_base=str(moved / "global_step2"), **more)[0]
    assert report.error == "" and report.steps == [5]
    (moved / "global_step2" / "manifest.json").write_text(json.dumps({}))
    assert "moved" in _adapt(base, keys, lost, lora_base=str(moved / "global_step2"), **more)[0].error


def test_a_change_of_the_adapters_is_refused(llama, tmp_path):
    keys, base = llama
    assert _adapt(base, keys, tmp_path / "save", exit_interval=2)[0].error == ""
    assert (
        "lora_alpha: 24.0 in the checkpoint, now 12.0"
        in _adapt(base, keys, tmp_path / "save", lora_alpha=12.0)[0].error
    )
    plain = run(
        {**keys, "load": base, **LORA, "override_lr_scheduler": True, "save": str(tmp_path / "other"), "train_iters": 4}
    )[0]
    assert "finetune=true" in plain.error
    whole = _adapt(base, keys, tmp_path / "whole", lora_save_base=True, exit_interval=2)[0]
    manifest = open_checkpoint(tmp_path / "whole" / "global_step2").manifest
    assert whole.error == "" and manifest.base is None and "0.word_embeddings.weight" in manifest.parameters


@pytest.mark.parametrize(
    ("keys", "more"),
    [(LLAMA, {}), (LLAMA, {**DORA, "lora_target_modules": ["query_key_value", "3.mlp.*"]}), (MHA, DORA)],
    ids=["lora", "dora-some", "neox-dora"],
)
def test_peft_computes_the_same(keys, more, tmp_path):
    keys, base = _base(tmp_path, keys)
    assert _adapt(base, keys, tmp_path / "save", **more)[0].error == ""
    ours = logits(tmp_path / "save" / "global_step4")
    export(base, tmp_path / "hf", tokenizer=False, check=False)
    export_adapters(tmp_path / "save", tmp_path / "adapter", base_model=str(tmp_path / "hf"))
    theirs = _transformers(tmp_path / "hf", tmp_path / "adapter")
    assert _close(theirs, ours) and not _close(_transformers(tmp_path / "hf"), ours)
    # Merged on export, and back from PEFT's folder.
    export(tmp_path / "save", tmp_path / "merged", tokenizer=False)
    assert _close(_transformers(tmp_path / "merged"), ours)
    import_adapters(tmp_path / "adapter", base, tmp_path / "back", iteration=7)
    back = find_checkpoint(tmp_path / "back").manifest
    assert _close(logits(tmp_path / "back" / "global_step7"), ours) and back.config["lora_r"] == 3


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_that_peft_made_are_read(dora, llama, tmp_path):
    """q and v alone, each with an A of its own, and one layer of another rank; then trained on."""
    keys, base = llama
    export(base, tmp_path / "hf", tokenizer=False, check=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    names = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=names, use_dora=dora, use_rslora=dora)
    torch.manual_seed(3)
    made = peft.get_peft_model(model, config)
    for name, p in made.named_parameters():
        if "lora_" in name:
            p.data += 0.3 * torch.randn(p.shape)
    made.save_pretrained(tmp_path / "adapter")
    theirs = _transformers(tmp_path / "hf", tmp_path / "adapter")
    folder = import_adapters(tmp_path / "adapter", base, tmp_path / "ours")
    assert _close(logits(folder), theirs)
    saved = open_checkpoint(folder).manifest.config
    more = {key: saved[key] for key in ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora", "use_dora")}
    report = run(
        {**keys, **more, "load": str(folder), "finetune": True, "save": str(tmp_path / "on"), "train_iters": 2}
    )[0]
    assert report.error == "" and report.steps == [1, 2]
    base_now = open_checkpoint(tmp_path / "on" / "global_step2").manifest.base
    assert base_now is not None and base_now.path == f"{base}/global_step2"


def test_what_cannot_be_read_is_named(llama, tmp_path):
    _, base = llama
    with pytest.raises(UserError, match=r"has no adapters.*convert_neox_to_hf"):
        export_adapters(base, tmp_path / "adapter")
    folder = tmp_path / "adapter"
    folder.mkdir()
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        import_adapters(folder, base, tmp_path / "ours")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "bias": "all"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="bias: 'all' is not supported"):
        import_adapters(folder, base, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
