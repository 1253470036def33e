"""Reward models: GPT-NeoX's files, Deepy's and transformers' `AutoModelForSequenceClassification`, every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megatron.convert.families import choose_family
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from megatron.convert.neox.rewrite import rewrite
from megatron.convert.pairs import Place, reference_of
from megatron.errors import UserError
from tests.checkpoint.neox_files import write_neox
from tests.convert.families.mamba_cases import MAMBA
from tests.convert.helpers import LLAMA, NEOX, VOCAB, full_tensors, hugging_face, resolved, write_checkpoint
from tests.convert.test_faces import call  # noqa: F401 (a fixture)

pytestmark = pytest.mark.cpu

PAD = 3
CASES = {
    "llama": {**LLAMA, "num_kv_heads": 2, "train_impl": "rm"},
    "neox": {**NEOX, "gpt_j_residual": True, "no_weight_tying": False, "train_impl": "rm"},
}
TOKENS = torch.randint(PAD + 1, VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
TOKENS[1, 15:], TOKENS[2, 7:] = PAD, PAD  # what is read is each text's last token


def saved_by_transformers(folder: Path, architecture: str):
    """(resolved arguments, random reward model, its tensors); `folder` has it, with a padding token."""
    args = resolved(**CASES[architecture])
    model, theirs = hugging_face(args, architecture)
    model.config.pad_token_id = PAD
    model.save_pretrained(folder)
    return args, model, theirs


@torch.no_grad()
def rewards(model) -> torch.Tensor:
    found = model(input_ids=TOKENS).logits[:, 0]
    assert found.std() > 0.1
    return found


def check_copy(folder: Path, model, theirs, difference: float = 0.0) -> None:
    """Transformers opens the folder, finds every tensor as it was, and computes the same."""
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(model).__name__]
    written = load_file(folder / "model.safetensors")
    assert sorted(written) == sorted(theirs)
    for name, tensor in theirs.items():
        assert (written[name] - tensor).abs().max() <= difference, name
    copy = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (rewards(copy) - rewards(model)).abs().max() <= 10 * difference


@pytest.mark.parametrize("architecture", CASES)
def test_there_and_back_at_two_ranks(tmp_path, architecture):
    _, model, theirs = saved_by_transformers(tmp_path / "hf", architecture)
    made = import_model(str(tmp_path / "hf"), tmp_path / "ours", tp=2)
    assert made.largest_difference < 1e-5
    for rank in range(2):
        (head,) = torch.load(made.folder / f"layer_06-model_{rank:02d}-model_states.pt").items()
        assert head[0] == "rm_linear.weight"
        assert torch.equal(head[1], theirs["score.weight"].chunk(2, 1)[rank])
    done = export(made.folder, tmp_path / "back", tokenizer=False)
    assert done.architecture == type(model).__name__
    assert done.largest_difference < 1e-5
    check_copy(tmp_path / "back", model, theirs)


@pytest.mark.parametrize(("architecture", "form"), [("llama", "pipe"), ("neox", "whole")])
def test_files_of_gpt_neox_at_two_ranks(tmp_path, call, architecture, form):  # noqa: F811
    _, model, theirs = saved_by_transformers(tmp_path / "hf", architecture)
    folder = write_neox(tmp_path / "neox" / "global_step9", theirs, CASES[architecture], tp=2, form=form)
    code, out, error = call("tools/ckpts/verify.py", folder, tmp_path / "hf")
    assert code == 0, error
    assert float(out.split("fp32: ")[1].split()[0]) < 1e-5
    config = tmp_path / "run.yml"
    config.write_text(json.dumps({**CASES[architecture], "vocab_size": VOCAB}))
    made = rewrite(folder, tmp_path / "one rank", tp=1, config_files=[str(config)])
    code, out, error = call("tools/ckpts/inspect_checkpoints.py", made)
    assert code == 0, error
    assert "6.rm_linear.weight" in out and "[1, 32]" in out and "split dim 1" in out
    export(made, tmp_path / "back", tokenizer=False, pad_token_id=PAD)
    check_copy(tmp_path / "back", model, theirs, difference=1e-7)  # biases of row-parallel layers are sums of shares


def test_a_language_model_may_be_what_its_network_and_tokenizer_come_from(tmp_path):
    """`--reference` of the published model that the reward model began from."""
    args = resolved(**CASES["llama"])
    folder = write_checkpoint(tmp_path / "ours", args, full_tensors(args, "llama", hugging_face(args, "llama")[1]))
    published, _ = hugging_face(resolved(**{**CASES["llama"], "train_impl": "normal"}), "llama")
    published.save_pretrained(tmp_path / "published")
    reference = reference_of(Place(str(tmp_path / "published"), "--reference").folder())
    done = export(folder, tmp_path / "hf", tokenizer=False, pad_token_id=PAD, reference=reference)
    assert done.architecture == "LlamaForSequenceClassification"


def test_what_is_no_reward_model_for_transformers_is_refused(tmp_path, call):  # noqa: F811
    args, _, theirs = saved_by_transformers(tmp_path / "hf", "llama")
    folder = write_checkpoint(tmp_path / "ours", args, full_tensors(args, "llama", theirs))
    with pytest.raises(UserError, match=r"--pad-token-id: .*no padding token"):
        export(folder, tmp_path / "no", tokenizer=False)
    with pytest.raises(UserError, match=r"train_impl: rm \(transformers has no MambaForSequenceClassification\)"):
        choose_family(resolved(**{**MAMBA, "train_impl": "rm"}).model, "mamba")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config["id2label"] = {"0": "LABEL_0", "1": "LABEL_1"}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json: 2 labels"):
        import_model(str(tmp_path / "hf"), tmp_path / "no")
    code, _, error = call(
        "tools/ckpts/convert_neox_to_raw_llama.py", "--input_dir", folder, "--output_dir", tmp_path / "no"
    )
    assert code == 2 and "train_impl: rm" in error, error
    assert not (tmp_path / "no").exists()
