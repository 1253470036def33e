"""Configuration changes since a checkpoint: which are refused, which are said."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import layout
from megatron.checkpoint.compare import SHAPELESS, check_config, compare_configs
from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.importing import specs_of
from megatron.convert.settings import saved_config
from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts, derive
from tests.convert import helpers

pytestmark = pytest.mark.cpu

SAVED = {
    "hidden_size": 16,
    "attention_config": ["global", "global"],
    "tokenizer_type": "HFTokenizer",
    "data_path": "a",
    "seed": 1,
    "rms_norm_epsilon": 1e-5,
    "lr": 1e-3,
    "train_batch_size": 8,
    "optimizer_type": "adam",
    "iteration": None,
}


def test_tuples_and_lists_are_the_same_and_new_keys_are_no_change():
    now = {**SAVED, "attention_config": ("global", "global"), "added_later": 3, "iteration": 4}
    assert compare_configs(SAVED, now) == ([], [])


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("rms_norm_epsilon", 1e-3, "architecture"),
        ("tokenizer_type", "CharLevelTokenizer", "tokenizer"),
        ("optimizer_type", "sgd", "optimizer"),
    ],
)
def test_breaking_changes_are_refused_unless_allowed(key, value, kind):
    now = {**SAVED, key: value}
    with pytest.raises(UserError, match=rf"{kind}: {key}: .*now.*\nRestore"):
        check_config(SAVED, now, path=Path("p/x"))
    assert "allow_config_changes" in check_config(SAVED, now, path=Path("p/x"), allow=True)[0]


@pytest.mark.parametrize("allow", [False, True])
def test_the_order_of_the_data_cannot_change_within_a_run(allow):
    with pytest.raises(
        UserError, match=r"data order: seed: 1 .*now 2\n.*init_from=\{path: a/b, data: restart\}"
    ) as error:
        check_config(SAVED, {**SAVED, "seed": 2}, path=Path("a/b"), allow=allow)
    assert "allow_config_changes" not in str(error.value)
    assert check_config(SAVED, {**SAVED, "data_path": "b"}, path=Path("p/x"))  # known by its content, wherever it is


BASE = {**helpers.LLAMA, "pos_emb": "rotary", "sliding_window_width": 4, "gpt_j_residual": True}
OTHER = {
    "bias_gelu_fusion": True,
    "final_logit_softcapping": 20.0,
    "scale_embedding": True,
    "layernorm_epsilon": 1e-3,
    "rms_norm_epsilon": 1e-3,
    "scalenorm_epsilon": 1e-3,
    "mlp_norm_epsilon": 1e-3,
    "gpt_j_residual": False,
    "rotary_pct": 0.5,
    "rotary_emb_base": 500.0,
    "rotary_emb_base_local": 50.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "query_pre_attn_scalar": 3.0,
    "attn_logit_softcapping": 20.0,
    "sliding_window_width": 2,
    "mup_embedding_mult": 2.0,
    "mup_rp_embedding_mult": 2.0,
}


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_what_may_be_allowed_changes_no_parameter(norm):
    """`allow_config_changes` is advised for these alone: another width would not fit the weights."""
    assert OTHER.keys() == SHAPELESS

    def shapes(**changes):
        args = helpers.resolved(**{**BASE, "norm": norm, **changes})
        return {name: spec.shape for name, spec in specs_of(args, helpers.VOCAB, 1).items()}

    usual = shapes()
    for key, value in OTHER.items():
        assert shapes(**{key: value}) == usual, key
    assert shapes(hidden_size=64) != usual


def test_other_changes_are_listed():
    messages = check_config(SAVED, {**SAVED, "lr": 2e-3, "train_batch_size": 16}, path=Path("p/x"))
    assert len(messages) == 2
    assert re.search(r"\blr: 0\.001 .*now 0\.002$", messages[0])
    assert re.search(r"\btrain_batch_size: 8 .*now 16$", messages[1])


def test_a_converted_checkpoint_has_no_settings_of_a_run_that_could_change():
    now = {**SAVED, "lr": 2e-3, "optimizer_type": "sgd"}
    assert not check_config(SAVED, now, path=Path("p/x"), finetune=True, trained=False)
    with pytest.raises(UserError, match="architecture: hidden_size"):
        check_config(SAVED, {**now, "hidden_size": 8}, path=Path("p/x"), finetune=True, trained=False)
    new = Manifest.empty(0)
    assert not new.trained and replace(new, consumed=8).trained and replace(new, optimizer=True).trained


def test_finetuning_takes_new_data_and_optimizer_but_not_another_architecture():
    now = {**SAVED, "data_path": "b", "optimizer_type": "sgd"}
    assert len(check_config(SAVED, now, finetune=True, path=Path("p/x"))) == 2
    with pytest.raises(UserError, match="architecture: hidden_size"):
        check_config(SAVED, {**now, "hidden_size": 8}, finetune=True, path=Path("p/x"))


def test_a_new_optimizer_without_its_old_state():
    assert check_config(SAVED, {**SAVED, "optimizer_type": "sgd"}, path=Path("p/x"), load_optim=False)


def test_norms_of_queries_and_keys_in_older_checkpoints(tmp_path: Path):
    """use_separate_qk_norms alone meant them once; the model of such a checkpoint is read with both keys."""
    keys = {**helpers.LLAMA, "norm": "rmsnorm", "use_qk_layernorm": True, "use_separate_qk_norms": True}
    args = helpers.resolved(**keys)
    tensors = {name: torch.ones(spec.shape) for name, spec in specs_of(args, helpers.VOCAB, 1).items()}
    made = helpers.write_checkpoint(tmp_path / "old", args, tensors)
    file = made / layout.MANIFEST
    stored = json.loads(file.read_text())
    assert stored["config"]["use_qk_layernorm"]
    stored["config"]["use_qk_layernorm"] = False
    file.write_text(json.dumps(stored))

    reader = CheckpointReader(open_checkpoint(made))
    saved = reader.manifest.config
    assert compare_configs(saved, args.to_dict()) == ([], [])
    assert saved_config(reader).model == args.model
    assert "2.attention.q_norm.scale" in specs_of(
        derive(saved_config(reader), Facts(vocab_size=helpers.VOCAB)), helpers.VOCAB, 1
    )
    with pytest.raises(UserError, match="architecture: use_qk_layernorm"):
        check_config(saved, {**args.to_dict(), "use_qk_layernorm": False}, path=made, trains=False)


@pytest.mark.parametrize(
    ("kinds", "wanted", "advice"),
    [
        (["global"] * 2, ["global"] * 4, "layer_map: [0, 0, 1, 1]"),
        (["local", "global"], ["local", "global"] * 2, "layer_map: [0, 1, 0, 1]"),
        (["local", "global"], ["local"] * 3 + ["global"], "layer_map"),
    ],
)
def test_a_deeper_model_is_advised_a_map_that_fits(kinds: list[str], wanted: list[str], advice: str) -> None:
    saved = {"num_layers": 2, "attention_config": kinds}
    with pytest.raises(UserError) as told:
        check_config(saved, {"num_layers": 4, "attention_config": wanted}, path=Path("there"))
    assert (advice in str(told.value)) == (advice != "layer_map")
