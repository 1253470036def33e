"""Raw LLaMA and Mistral files both ways: bit for bit, and the logits of transformers and of an fp64 network."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.find import open_checkpoint
from megatron.convert import importing
from megatron.convert.hf.export_hf import export
from megatron.convert.outputs import keep_ends, random_tokens
from megatron.convert.pairs import Place
from megatron.convert.parts.family import Rule
from megatron.convert.raw import export_raw as export_raw_module
from megatron.convert.raw.export_raw import export_raw
from megatron.convert.raw.files import RawFolder
from megatron.convert.raw.formulas import raw_outputs
from megatron.convert.raw.import_raw import import_raw
from megatron.convert.raw.params import computed_width, keys_of
from megatron.convert.verify import verify
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from tests.convert.helpers import LLAMA, hugging_face, resolved
from tests.convert.raw.raw_files import logits_64, raw_tensors, write_raw

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[3]
EVEN = 68  # tokens that two files divide
BASE = {**LLAMA, "intermediate_size": 88, "rms_norm_epsilon": 1e-5}
PARAMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "vocab_size": -1, "rope_theta": 500.0}
CASES = {
    "7B, all heads": (BASE, {**PARAMS, "multiple_of": 8}, "llama"),
    "34B, grouped": ({**BASE, "num_kv_heads": 2}, {**PARAMS, "n_kv_heads": 2, "multiple_of": 8}, "llama"),
    "tied, one key head": (
        {**BASE, "num_kv_heads": 1, "no_weight_tying": False},
        {**PARAMS, "n_kv_heads": 1, "multiple_of": 8},
        "llama",
    ),
    "mistral, wide heads, window": (
        {**BASE, "num_kv_heads": 2, "head_dim": 16, "sliding_window_width": 4},
        {**PARAMS, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 88, "sliding_window": 5},
        "mistral",
    ),
}


@pytest.fixture(autouse=True)
def even_vocabulary(monkeypatch):
    """The reference model has a number of tokens that two files divide."""
    monkeypatch.setattr("tests.convert.helpers.VOCAB", EVEN)


def source(tmp_path, case, shards=1, embedding_dim=1):
    """(raw folder, the raw tensors, their params, transformers' tensors) of a random model; its folder is `hf`."""
    keys, params, architecture = CASES[case]
    model, theirs = hugging_face(resolved(**keys), architecture)
    model.save_pretrained(tmp_path / "hf")
    tensors = raw_tensors(theirs, 4, params.get("n_kv_heads", 4))
    return write_raw(tmp_path / "raw", tensors, params, shards, embedding_dim), tensors, params, theirs


@pytest.mark.parametrize(("shards", "embedding_dim"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_identical(tmp_path, case, shards, embedding_dim):
    if shards > CASES[case][1].get("n_kv_heads", 4):
        shards = 1
    raw, tensors, params, theirs = source(tmp_path, case, shards, embedding_dim)
    tp = 2 if params.get("n_kv_heads", 4) > 1 else 1
    done = import_raw(raw, tmp_path / "out", tp=tp, iteration=3, longest=64)
    assert done.largest_difference < 1e-5 and done.folder == tmp_path / "out/global_step3"
    found = verify(Place(str(tmp_path / "out"), "A"), Place(str(tmp_path / "hf"), "B"))
    assert found.ok and found.logits < 1e-5, found
    export(tmp_path / "out", tmp_path / "again", tokenizer=False, architecture=CASES[case][2])
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == theirs.keys() and all(torch.equal(again[name], tensor) for name, tensor in theirs.items())
    back = export_raw(tmp_path / "out", tmp_path / "back", shards=shards)
    assert back.largest_difference < 1e-5
    written = RawFolder(tmp_path / "back")
    assert set(written.tensors) == set(tensors)
    assert all(torch.equal(written.tensor(name), tensor) for name, tensor in tensors.items())
    assert len(list((tmp_path / "back").glob("consolidated.*.pth"))) == shards
    expected = {**params, "vocab_size": EVEN, "n_kv_heads": params.get("n_kv_heads", 4)}
    made = json.loads((tmp_path / "back/params.json").read_text())
    width = computed_width(32, made["multiple_of"], made.get("ffn_dim_multiplier")) if "multiple_of" in made else 88
    assert {k: v for k, v in made.items() if k != "multiple_of"} == {
        k: v for k, v in expected.items() if k != "multiple_of"
    }
    assert width == 88


@pytest.mark.parametrize("case", CASES)
def test_the_check_s_network_is_the_published_one_in_fp64(tmp_path, case):
    raw, tensors, params, _ = source(tmp_path, case)
    folder = RawFolder(raw)
    tokens = random_tokens(EVEN, 64)
    *_, (name, logits) = raw_outputs(folder, keys_of(folder, "", 64), tokens, torch.float32)
    assert name == "logits"
    assert float((logits - keep_ends(logits_64(tensors, params, tokens))).abs().max()) < 2e-5


def test_stretched_positions_of_llama_3_1(tmp_path):
    """The reference is transformers' own scaling of a model with the numbers of Llama 3.1."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    keys = {**BASE, "rotary_emb_base": 500000, "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}
    model, theirs = hugging_face(resolved(**keys), "llama")
    model.save_pretrained(tmp_path / "hf")
    params = {**PARAMS, "rope_theta": 500000.0, "use_scaled_rope": True, "multiple_of": 8}
    raw = write_raw(tmp_path / "raw" / "llama3.1-8B", raw_tensors(theirs, 4, 4), params, 2, 0)
    with pytest.raises(UserError, match="params.json: use_scaled_rope.*--model_size"):
        import_raw(raw, tmp_path / "out")
    done = import_raw(tmp_path / "raw", tmp_path / "out", model_size="llama3.1-8B")
    assert NeoXArgs.from_files([str(done.config)]).get("rope_scaling")["factor"] == 8.0
    assert NeoXArgs.from_files([str(done.config)]).get("max_position_embeddings") == 131072
    assert verify(Place(str(tmp_path / "hf"), "A"), Place(str(tmp_path / "out"), "B")).logits < 1e-5
    export_raw(tmp_path / "out", tmp_path / "back", shards=2)
    assert json.loads((tmp_path / "back/params.json").read_text())["rope_scaling_factor"] == 8.0
    written = torch.load(tmp_path / "back/consolidated.01.pth", weights_only=True)
    assert written["tok_embeddings.weight"].shape == (EVEN // 2, 32)


def test_safetensors_and_bfloat16(tmp_path):
    raw, tensors, _, _ = source(tmp_path, "mistral, wide heads, window")
    (raw / "consolidated.00.pth").unlink()
    save_file({name: t.bfloat16().clone() for name, t in tensors.items()}, raw / "consolidated.safetensors")
    done = import_raw(raw, tmp_path / "out")
    assert {entry.dtype for entry in open_checkpoint(done.folder).manifest.parameters.values()} == {"bfloat16"}
    assert NeoXArgs.from_files([str(done.config)]).get("precision") == "bfloat16"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"moe": {"num_experts": 8}}, "not known here.*moe"),
        ({"n_layers": 3}, r"raw .*params\.json; .*layers\.2\."),
        ({"n_layers": 1}, r"raw .*params\.json; .*layers\.1\."),
        ({"hidden_dim": 96}, "hidden_dim: 96, but w1 has 88 rows"),
        ({"n_heads": 2, "n_kv_heads": 2, "head_dim": 8}, r"wq\.weight .*\[32, 32\], .*config "),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, params, message):
    raw, _, known, _ = source(tmp_path, "7B, all heads")
    (raw / "params.json").write_text(json.dumps({**known, **params}))
    with pytest.raises(UserError, match=message):
        import_raw(raw, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "raw"]


def test_missing_and_unlike_files_are_named(tmp_path):
    raw, *_ = source(tmp_path, "7B, all heads", 2)
    with pytest.raises(UserError, match="--input_dir: .*raw: .*--model_size"):
        import_raw(tmp_path, tmp_path / "out")
    part = torch.load(raw / "consolidated.01.pth", weights_only=True)
    torch.save({**part, "layers.0.attention.wq.weight": torch.zeros(3, 3)}, raw / "consolidated.01.pth")
    with pytest.raises(UserError, match="wq.weight .*shapes"):
        import_raw(raw, tmp_path / "out")
    (raw / "consolidated.00.pth").rename(raw / "consolidated.02.pth")
    with pytest.raises(UserError, match=r"lacks consolidated.00.pth"):
        import_raw(raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "shards", "message"),
    [
        ({"activation": "geglu"}, 1, "activation: geglu"),
        ({"use_bias_in_mlp": True}, 1, "use_bias_in_mlp"),
        ({"num_kv_heads": 2}, 4, r"num_kv_heads 2\b.*\b4 files"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1, "rope_scaling: .*linear"),
    ],
)
def test_what_these_files_cannot_express_is_named(tmp_path, changes, shards, message):
    from tests.convert.helpers import random_tensors, write_checkpoint

    args = resolved(**{**BASE, **changes})
    folder = write_checkpoint(tmp_path / "ckpt", args, random_tensors(args, "llama"))
    with pytest.raises(UserError, match=message):
        export_raw(folder, tmp_path / "raw", shards=shards)
    assert os.listdir(tmp_path) == ["ckpt"]


def test_rows_in_the_wrong_order_are_noticed_both_ways(tmp_path, monkeypatch):
    raw, _, _, _ = source(tmp_path, "34B, grouped")
    import_raw(raw, tmp_path / "good")
    read = importing._read

    def without_moving(folder, rule, dtype):
        if rule.ours == "3.attention.query_key_value.weight":
            return torch.cat([folder.tensor(name) for name in rule.theirs])
        return read(folder, Rule(rule.ours, rule.theirs, rule.transform), dtype)

    monkeypatch.setattr(importing, "_read", without_moving)
    with pytest.raises(UserError, match=r"logits differ by \d.* block 1\b"):
        import_raw(raw, tmp_path / "out")
    add = export_raw_module._add

    def swapped(files, name, tensor, embedding_dim):
        names = {"layers.1.feed_forward.w1.weight": "layers.1.feed_forward.w3.weight"}
        names |= {new: old for old, new in names.items()}
        add(files, names.get(name, name), tensor, embedding_dim)

    monkeypatch.setattr(export_raw_module, "_add", swapped)
    with pytest.raises(UserError, match=r"logits differ by \d.* block 1\b"):
        export_raw(tmp_path / "good", tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == ["good", "hf", "raw"]


def run(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "tools/ckpts" / name), run_name="__main__")
    return end.value.code, *capsys.readouterr()


def test_the_commands_with_a_tokenizer_of_tiktoken(tmp_path, monkeypatch, capsys):
    source(tmp_path, "34B, grouped", 2)
    (tmp_path / "tokenizer.model").write_text("".join(f"{token} {i}\n" for i, token in enumerate(("IQ==", "Ig=="))))
    given = ("--input_dir", tmp_path, "--model_size", "raw", "--output_dir", tmp_path / "out")
    more = ("--num_output_shards", 2, "--pipeline_parallel")
    code, out, error = run(monkeypatch, capsys, "convert_raw_llama_weights_to_neox.py", *given, *more)
    assert code == 0 and f"{tmp_path}/out/global_step0" in out and "logit difference" in out, error
    args = NeoXArgs.from_files([str(tmp_path / "out/config.yml")])
    assert args.get("tokenizer_type") == "TiktokenTokenizer" and args.get("model_parallel_size") == 2
    special = json.loads((tmp_path / "out/tokenizer/tokenizer.tiktoken.json").read_text())["special_tokens"]
    assert len(special) == 256 and special["<|begin_of_text|>"] == 2 and special["<|eot_id|>"] == 11
    assert args.get("model_tokens") == {"config": {"bos_token_id": 2, "eos_token_id": [3, 10, 11]}}
    back = ("--input_dir", tmp_path / "out", "--output_dir", tmp_path / "back", "--num_output_shards", 2)
    code, out, error = run(monkeypatch, capsys, "convert_neox_to_raw_llama.py", *back, "--precision", "bf16")
    assert code == 0 and "logit difference" in out, error
    assert (tmp_path / "back/tokenizer.model").read_bytes() == (tmp_path / "tokenizer.model").read_bytes()
    assert RawFolder(tmp_path / "back").tensors["norm.weight"].dtype == torch.bfloat16
    code, _, error = run(monkeypatch, capsys, "convert_neox_to_raw_llama.py", *back)
    assert code == 2 and "--overwrite" in error and "Traceback" not in error
