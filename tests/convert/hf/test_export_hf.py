"""HF → checkpoint at TP 1 and 2 → HF: bit-identical tensors, equal logits, and refusals (known-faults 1, 2, 31-33)."""

import json
import os
import re
import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.families import choose_family, gpt_neox
from megatron.convert.hf.check import compare
from megatron.convert.hf.export_hf import export
from megatron.convert.parts.transforms import Copy
from megatron.errors import UserError
from tests.convert.helpers import (
    LLAMA,
    NEOX,
    VOCAB,
    full_tensors,
    hugging_face,
    random_tensors,
    resolved,
    specs_of,
    write_checkpoint,
)

pytestmark = pytest.mark.cpu

NEOX_CASES = {
    "parallel": {"gpt_j_residual": True},
    "sequential": {},
    "tied embeddings": {"no_weight_tying": False, "gpt_j_residual": True},
    "full rotary, tanh gelu": {"rotary_pct": 1.0, "bias_gelu_fusion": True},
    "no attention bias": {"use_bias_in_attn_linear": False, "activation": "relu"},
}
# The kinds of frequencies that Llama 3.1 tells apart are all there at head size 8, base 500.
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA_CASES = {
    "mha": {},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "gqa, tied": {"num_kv_heads": 2, "no_weight_tying": False},
    "biases": {"use_bias_in_attn_linear": True, "use_bias_in_mlp": True},
    "geglu": {"activation": "geglu"},
    "scaled positions": {"num_kv_heads": 2, "rope_scaling": LLAMA_3_1},
    "stretched positions": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
}
MISTRAL_CASES = {
    "no window": {"num_kv_heads": 2},
    "window": {"num_kv_heads": 2, "sliding_window_width": 5},
}
CASES = [
    pytest.param(architecture, base, keys, id=f"{architecture}: {name}")
    for architecture, base, cases in (
        ("neox", NEOX, NEOX_CASES),
        ("llama", LLAMA, LLAMA_CASES),
        ("mistral", LLAMA, MISTRAL_CASES),
    )
    for name, keys in cases.items()
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("architecture", "base", "keys"), CASES)
def test_round_trip_is_bit_identical_and_computes_the_same(tmp_path, architecture, base, keys, tp):
    args = resolved(**{**base, **keys})
    model, theirs = hugging_face(args, architecture)
    tensors = full_tensors(args, architecture, theirs)
    if args.model.num_kv_heads % tp:
        with pytest.raises(UserError, match=f"num_kv_heads: {args.model.num_kv_heads} "):
            write_checkpoint(tmp_path / "ckpt", args, tensors, tp)
        return
    folder = write_checkpoint(tmp_path / "ckpt", args, tensors, tp)
    done = export(folder, tmp_path / "hf", tokenizer=False, architecture=architecture)
    assert done.largest_difference < 1e-5
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "generation_config.json", "model.safetensors"]
    written = load_file(tmp_path / "hf/model.safetensors")
    assert sorted(written) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(written[name], tensor), name
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["vocab_size"] == VOCAB
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ignored = ("transformers_version", "architectures", "dtype", "_name_or_path")
    for key, value in model.config.to_dict().items():
        assert key in ignored or copy.config.to_dict()[key] == value, key
    tokens = torch.randint(VOCAB, (1, 40))
    with torch.no_grad():
        assert torch.equal(copy(tokens).logits, model(tokens).logits)


def test_what_hugging_face_needs_and_we_do_without(tmp_path):
    """Norms without parameters, an MLP without biases, one norm for two branches: written out, and still equal."""
    for index, keys in enumerate(
        (
            {"norm": "non_parametric_layernorm", "use_bias_in_mlp": False},
            {"gpt_j_residual": True, "gpt_j_tied": True},
        )
    ):
        args = resolved(**{**NEOX, **keys})
        _, theirs = hugging_face(args, "neox")
        for name in theirs:
            if "post_attention_layernorm" in name:
                theirs[name] = theirs[name.replace("post_attention", "input")]
        folder = write_checkpoint(tmp_path / f"ckpt{index}", args, full_tensors(args, "neox", theirs))
        assert export(folder, tmp_path / f"hf{index}", tokenizer=False).largest_difference < 1e-5


@pytest.fixture
def neox_checkpoint(tmp_path):
    args = resolved(**{**NEOX, "gpt_j_residual": True})
    return write_checkpoint(tmp_path / "ckpt", args, random_tensors(args, "neox"))


SWAPS = {
    "neox": [
        ("2.attention.query_key_value.weight", "3.attention.query_key_value.weight"),
        ("3.input_layernorm.weight", "3.post_attention_layernorm.weight"),
        ("0.word_embeddings.weight", "6.final_linear.weight"),
    ],
    "llama": [
        ("2.attention.dense.weight", "3.attention.dense.weight"),
        ("2.mlp.linear1.weight", "3.mlp.linear1.weight"),
    ],
}


@pytest.mark.parametrize(("architecture", "pair"), [(a, pair) for a, pairs in SWAPS.items() for pair in pairs])
def test_two_swapped_weights_of_the_same_shape_are_noticed(tmp_path, architecture, pair):
    args = resolved(**(NEOX if architecture == "neox" else LLAMA))
    tensors = random_tensors(args, architecture)
    folder = write_checkpoint(tmp_path / "right", args, tensors)
    export(folder, tmp_path / "hf", tokenizer=False)
    one, other = pair
    swapped = {**tensors, one: tensors[other], other: tensors[one]}
    reader = CheckpointReader(open_checkpoint(write_checkpoint(tmp_path / "wrong", args, swapped)))
    result = compare(reader, args.model, tmp_path / "hf", torch.float32)
    assert not result.ok
    expected = "the embedding" if one.startswith("0.") else f"block {int(one[0]) - 2}"
    assert expected in result.first_drift or int(one[0]) - 2 == args.model.num_layers - 1


def test_a_wrong_table_is_refused_and_nothing_published(tmp_path, monkeypatch, neox_checkpoint):
    """The mistake of several public converters: fused rows taken as they lie in memory."""
    monkeypatch.setattr(gpt_neox, "PerHead", lambda heads: Copy())
    with pytest.raises(UserError, match=r"logits differ by \d.* block 0\b"):
        export(neox_checkpoint, tmp_path / "hf", tokenizer=False)
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    assert export(neox_checkpoint, tmp_path / "hf", tokenizer=False, check=False).largest_difference is None


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_precision(tmp_path, precision, dtype):
    args = resolved(**LLAMA)
    tensors = random_tensors(args, "llama")
    folder = write_checkpoint(tmp_path / "ckpt", args, tensors, tp=2, dtype=torch.bfloat16)
    assert export(folder, tmp_path / "hf", tokenizer=False, precision=precision).largest_difference < 1e-5
    written = load_file(tmp_path / "hf/model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == str(dtype)[6:]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == dtype


def test_fp16_overflow_is_an_error(tmp_path):
    args = resolved(**LLAMA)
    tensors = random_tensors(args, "llama")
    tensors["2.mlp.linear2.weight"] = tensors["2.mlp.linear2.weight"] + 1e6
    folder = write_checkpoint(tmp_path / "ckpt", args, tensors)
    with pytest.raises(UserError, match="mlp.down_proj.weight.*fp16"):
        export(folder, tmp_path / "hf", tokenizer=False, precision="fp16")
    assert not (tmp_path / "hf").exists()


def test_shards_and_index(tmp_path, neox_checkpoint):
    export(neox_checkpoint, tmp_path / "hf", tokenizer=False, max_shard_bytes=40000)
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    found = {}
    for name in names:
        part = load_file(tmp_path / "hf" / name)
        assert all(index["weight_map"][tensor] == name for tensor in part)
        assert sum(t.nbytes for t in part.values()) <= 40000 or len(part) == 1
        found.update(part)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert found.keys() == index["weight_map"].keys()


REFUSALS = [
    ("neox", {"norm": "rmsnorm"}, "norm: rmsnorm"),
    ("neox", {"activation": "swiglu"}, "activation: swiglu"),
    ("neox", {"num_kv_heads": 2}, "grouped-query"),
    ("neox", {"pos_emb": "learned"}, "pos_emb: learned"),
    ("neox", {"sliding_window_width": 8}, "sliding_window_width"),
    ("neox", {"use_qk_layernorm": True}, "use_qk_layernorm"),
    ("neox", {"use_mup": True, "mup_base_hidden_size": 16}, "use_mup"),
    ("llama", {"norm": "layernorm"}, "norm: layernorm"),
    ("llama", {"gpt_j_residual": True}, "gpt_j_residual"),
    ("llama", {"rotary_pct": 0.5}, "rotary_pct: 0.5"),
    ("llama", {"sliding_window_width": 8}, "mistral"),
    ("llama", {"activation": "gelu"}, "activation: gelu"),
    ("mistral", {"use_bias_in_mlp": True}, "no biases"),
    ("gpt5", {}, "Choices: falcon, .*llama, .*mistral, .*neox, "),
]


@pytest.mark.parametrize(("architecture", "keys", "message"), REFUSALS)
def test_what_hugging_face_cannot_express_is_named_before_anything_is_written(tmp_path, architecture, keys, message):
    args = resolved(**{**(NEOX if architecture == "neox" else LLAMA), **keys})
    tensors = {name: torch.zeros(spec.shape) for name, spec in specs_of(args, 1).items()}
    folder = write_checkpoint(tmp_path / "ckpt", args, tensors)
    with pytest.raises(UserError, match=message):
        export(folder, tmp_path / "hf", tokenizer=False, architecture=architecture)
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]


def test_output_folder_with_something_else_in_it_is_left_alone(tmp_path, neox_checkpoint):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/thesis.tex").write_text("x")
    with pytest.raises(UserError, match="--output_dir: .*hf exists"):
        export(neox_checkpoint, tmp_path / "hf", tokenizer=False)
    (tmp_path / "hf/thesis.tex").unlink()
    export(neox_checkpoint, tmp_path / "hf", tokenizer=False)
    before = (tmp_path / "hf/config.json").stat().st_mtime_ns
    with pytest.raises(UserError, match="--output_dir: .*hf .*--overwrite"):
        export(neox_checkpoint.parent, tmp_path / "hf", tokenizer=False)
    assert (tmp_path / "hf/config.json").stat().st_mtime_ns == before
    export(neox_checkpoint.parent, tmp_path / "hf", tokenizer=False, overwrite=True)
    assert (tmp_path / "hf/config.json").stat().st_mtime_ns != before


def test_config_file_must_describe_the_same_model(tmp_path, neox_checkpoint):
    config = tmp_path / "run.yml"
    config.write_text("hidden-size: 64\nnum_layers: 2\n")
    with pytest.raises(UserError, match="hidden_size: 64 there, 32 in the checkpoint"):
        export(neox_checkpoint, tmp_path / "hf", tokenizer=False, config_files=[str(config)])
    config.write_text("hidden-size: 32\nnum_layers: 2\n")
    export(neox_checkpoint, tmp_path / "hf", tokenizer=False, config_files=[str(config)])


def test_only_one_parameter_is_in_memory_while_writing(tmp_path, neox_checkpoint, monkeypatch):
    alive, peak = set(), []
    original = CheckpointReader.weight

    def weight(reader, name):
        value = original(reader, name).clone()
        alive.add(name)
        weakref.finalize(value, alive.discard, name)
        peak.append(len(alive))
        return value

    monkeypatch.setattr(CheckpointReader, "weight", weight)
    export(neox_checkpoint, tmp_path / "hf", tokenizer=False, check=False)
    assert max(peak) <= 2


@pytest.mark.parametrize(
    ("keys", "architecture"),
    [
        ({**NEOX, "rotary_pct": 1.0}, "GPTNeoXForCausalLM"),
        ({**NEOX, "rotary_pct": 1.0, "gpt_j_residual": True}, "GPTNeoXForCausalLM"),
        (LLAMA, "LlamaForCausalLM"),
        ({**LLAMA, "sliding_window_width": 5}, "MistralForCausalLM"),
    ],
)
def test_a_model_that_several_express_gets_the_usual_name(keys, architecture):
    """Falcon has the rotary networks of GPT-NeoX too, Phi-3 those of Llama."""
    assert choose_family(resolved(**keys).model, None).architecture == architecture


def test_a_model_that_no_family_expresses_lists_the_nearest_first():
    """One key away from Mamba: what to change is on the first line, not among twenty."""
    keys = {"attention_config": [[["mamba"], "all"]], "pos_emb": "none", "norm": "layernorm"}
    with pytest.raises(UserError, match="can express this model") as refused:
        choose_family(resolved(**{**NEOX, **keys}, mamba_use_bias_in_x_proj=False).model, None)
    lines = str(refused.value).splitlines()
    assert re.match(r"  mamba: norm: layernorm .*\brmsnorm\b", lines[1])
    assert len(lines) == 6 and "qwen3_moe" in lines[5] and "--architecture" in lines[5]
