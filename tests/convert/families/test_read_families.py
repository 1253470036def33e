"""config.json of the families: published ones give the shipped configs; there and back; what is refused."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.convert.families import FAMILIES, read_config
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from megatron.convert.parts.family import TokenIds
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.formulas import parameter_count
from tests.convert.families import mamba_cases as mamba
from tests.convert.families import rwkv_cases as rwkv
from tests.convert.families.cases import FAMILY_CASES, OLMO
from tests.convert.families.published import PUBLISHED
from tests.convert.families.published_gemma_phi import REFUSED
from tests.convert.helpers import hugging_face, resolved
from tests.convert.hf.test_import_hf import tensors_in

pytestmark = pytest.mark.cpu

CONFIGS = Path(__file__).parents[3] / "configs"
CASES = [pytest.param(architecture, keys, id=f"{architecture}: {name}") for architecture, name, keys in FAMILY_CASES]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_shipped_one(name):
    """Every architecture key, through the model that is built; and transformers reads back what we write."""
    config = deepcopy(PUBLISHED[name])  # transformers changes what it is given
    family, keys = read_config(config, "config.json")
    facts = Facts(vocab_size=config["vocab_size"])
    shipped = derive(NeoXArgs.from_files([name], conf_dir=str(CONFIGS)), facts).model
    mine = resolved(**{**keys, "seq_length": shipped.seq_length, "train_micro_batch_size_per_gpu": 1}).model
    differing = {
        key: (value, getattr(mine, key)) for key, value in vars(shipped).items() if getattr(mine, key) != value
    }
    # kernels, memory and how a width was written are no matter of the architecture; "flash" is "global" there
    ignored = {
        "attention_config",
        "checkpoint_activations",
        "checkpoint_policy",
        "gated_width_rule",
        "intermediate_size",
        "moe_z_loss_coeff",  # of training
    }
    assert differing.keys() <= ignored, differing
    written = FAMILIES[family].config(shipped, config["vocab_size"], TokenIds())
    theirs, ours = (AutoConfig.for_model(**fields).to_dict() for fields in (config, written))
    # of files and generation, or written differently for the same model (the keys above have been compared)
    about = {"architectures", "dtype", "torch_dtype", "auto_map", "transformers_version", "task_specific_params"}
    about |= {"bos_token_id", "eos_token_id", "pad_token_id", "n_ctx", "use_mrope", "n_inner", "attention_bias"}
    about |= {"apply_residual_connection_post_layernorm", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn"}
    about |= {"d_model", "d_inner", "n_layer", "ssm_cfg", "rms_norm", "fused_add_norm", "norm_before_gate"}
    about |= {"cache_implementation", "sliding_window_pattern", "_sliding_window_pattern", "sliding_window_size"}
    about |= {"use_bidirectional_attention", "rope_local_base_freq", "hidden_activation"}
    about |= {"head_dim", "max_window_layers", "sliding_window", "rope_theta", "rope_scaling", "partial_rotary_factor"}
    assert {k: v for k, v in theirs.items() if k not in about} == {k: v for k, v in ours.items() if k not in about}


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_that_transformers_does_not_read_is_named_in_one_warning(name, caplog):
    with caplog.at_level("WARNING", logger="deepy"):
        found = read_config({**PUBLISHED[name], "colour": "red", "size": None}, "config.json")
    assert found == read_config(PUBLISHED[name], "config.json")
    (warning,) = warnings(caplog)[:1]
    assert warning.startswith("config.json: ") and "colour: 'red'" in warning and "size" not in warning
    # of generation, files and code; all else that a published config has is read, or known to transformers' class
    about = {"auto_map", "cache_implementation", "task_specific_params", "colour"}
    assert {
        part.split(": ")[0] for part in re.findall(r"(?:^|[:,] )(\w+: [^,{}]*)", warning.split("either: ")[1])
    } <= about


LEFTOVERS = {
    # EleutherAI/gpt-neox-20b
    "pythia/70M": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    # gpt2-medium, gpt2-large, gpt2-xl
    "gpt2/small": {"n_special": 0, "predict_special_tokens": True, "output_past": True},
    # SmolLM2 and its Instruct, code in the folder, and what transformers 4 and TRL leave
    "llama/llama3.2-1B": {
        "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": {"b": "c"}},
        "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}, "neftune_noise_alpha": None,
        "attn_implementation": "flash_attention_2", "gradient_checkpointing": False, "quantization_config": None,
        "sliding_window": None, "keys_to_ignore_at_inference": ["past_key_values"], "is_decoder": False,
        "tokenizer_class": "PreTrainedTokenizerFast", "use_cache": False, "id2label": {"0": "a"}, "pretraining_tp": 2,
    },
    # Phi-4-mini
    "phi3/phi4": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "mixtral/8x7B": {"attention_bias": False},
}  # fmt: skip
KINDS = {"pythia/70M": "gpt_neox"}  # whose config.json is not among the published ones here


def small(name: str) -> dict:
    """A small config.json of the same class."""
    kind = KINDS.get(name) or PUBLISHED[name]["model_type"]
    config = AutoConfig.for_model(
        kind, vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        **({} if kind in ("gpt2", "gpt_neox") else {"num_key_value_heads": 2, "head_dim": 8}), pad_token_id=0,
    )  # fmt: skip
    return config.to_dict()


def logits(fields: dict) -> torch.Tensor:
    """Of transformers' own model with these fields, random weights and a fixed text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**deepcopy(fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        return model(torch.arange(2, 26).view(1, 24)).logits


@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_published_models_leave_in_config_json_changes_nothing(name):
    fields, more = small(name), LEFTOVERS[name]
    assert read_config({**fields, **more}, "config.json") == read_config(fields, "config.json")
    plain = {k: v for k, v in more.items() if k not in ("auto_map", "attn_implementation") and k.isidentifier()}
    assert torch.equal(logits({**fields, **plain}), logits(fields))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("pythia/70M", {"is_causal": False}),
        ("llama/llama3.2-1B", {"is_causal": False}),
        ("gpt2/small", {"hidden_size": 64}),  # another name of n_embd
    ],
)
def test_a_field_that_transformers_reads_and_we_do_not_is_refused(name, more):
    fields = small(name)
    assert not torch.equal(logits({**fields, **more}), logits(fields))
    with pytest.raises(UserError, match=f"{next(iter(more))}: "):
        read_config({**fields, **more}, "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_config_has_as_many_parameters_as_transformers_builds(name):
    config = deepcopy(PUBLISHED[name])  # transformers changes what it is given
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    facts = Facts(vocab_size=config["vocab_size"])
    shipped = derive(NeoXArgs.from_files([name], conf_dir=str(CONFIGS)), facts).model
    assert parameter_count(shipped, config["vocab_size"]).total == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(("architecture", "keys"), CASES)
def test_there_and_back_is_bit_identical(tmp_path, architecture, keys):
    model, _ = hugging_face(resolved(**keys), architecture)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    tp = 2 if keys.get("num_kv_heads") != 1 else 1
    done = import_model(str(tmp_path / "hf"), tmp_path / "out", tp=tp)
    assert done.largest_difference < 1e-5
    export(tmp_path / "out", tmp_path / "again", tokenizer=False, architecture=architecture)
    theirs, again = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "again")
    assert theirs.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2.5/0.5B", {"use_mrope": True}, "use_mrope: True"),
        ("qwen3/0.6B", {"layer_types": ["chunked_attention"] * 28}, "layer_types: must be 28 times"),
        ("qwen3/0.6B", {"per_layer_config": {"0": {"intermediate_size": 16}}}, "not known here.*per_layer_config: "),
        ("olmo3/7B", {"sliding_window": 1}, "sliding_window: 1"),
        ("gpt2/small", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("gpt2/small", {"embd_pdrop": 0.0}, "embd_pdrop: 0.0"),
        ("falcon/7B", {"alibi": True}, "alibi: True"),
        ("falcon/7B", {"num_ln_in_parallel_attn": 2}, "needs new_decoder_architecture"),
        ("phi3/mini-4k", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
        *mamba.CONFIG_REFUSALS,
        *rwkv.CONFIG_REFUSALS,
        *REFUSED,
    ],
)
def test_what_cannot_be_expressed_is_named(name, changes, message):
    with pytest.raises(UserError, match=message):
        read_config({**PUBLISHED[name], **changes}, "config.json")


def test_positions_by_kind_of_layer():
    """OLMo 3 scales those of layers without a window; whatever cannot be expressed is refused."""
    fields = FAMILIES["olmo3"].config(resolved(**OLMO).model, 67, TokenIds())
    fields["layer_types"][0] = "sliding_attention"
    keys = read_config(fields, "config.json")[1]
    assert keys["rotary_emb_base"] == OLMO["rotary_emb_base"] and "rotary_emb_base_local" not in keys
    scaled = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    fields["rope_parameters"]["full_attention"] = scaled
    keys = read_config(fields, "config.json")[1]
    assert keys["rotary_emb_base_local"] == 500.0 and keys["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    fields["rope_parameters"]["sliding_attention"] = {**scaled, "factor": 3.0}
    with pytest.raises(UserError, match="differ between layers"):
        read_config(fields, "config.json")
    del fields["rope_parameters"]["sliding_attention"]
    fields["rope_parameters"]["rope_theta"] = 500.0
    with pytest.raises(UserError, match="rope_parameters: rope_theta .*full_attention"):
        read_config(fields, "config.json")


def test_a_window_that_is_left_out_is_that_of_the_class():
    fields = {name: value for name, value in PUBLISHED["mistral/7B"].items() if name != "sliding_window"}
    assert read_config(fields, "config.json")[1]["sliding_window_width"] == 4095
    assert "sliding_window_width" not in read_config({**fields, "sliding_window": None}, "config.json")[1]


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_phi_3_for_long_texts(kind):
    """As its files have it: three fields, the original length next to them; written in the same way."""
    fields = deepcopy(PUBLISHED["phi3/mini-4k"])
    scaling = {"type": kind, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    keys = read_config({**fields, "max_position_embeddings": 131072, "rope_scaling": dict(scaling)}, "config.json")[1]
    assert keys["rope_scaling"]["original_max_position_embeddings"] == 4096
    args = resolved(**{**keys, "seq_length": 4096, "train_micro_batch_size_per_gpu": 1})
    written = FAMILIES["phi3"].config(args.model, 32064, TokenIds())
    assert written["rope_scaling"] == {**scaling, "type": "longrope"}
    assert written["original_max_position_embeddings"] == 4096
