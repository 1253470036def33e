"""Reading, merging and overriding: what wins, where it came from, and what is said when it is wrong."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.groups import GROUPS, all_keys
from tests.neox_args.helpers import SMALL, load_text, loaded

pytestmark = pytest.mark.cpu


def test_block_and_flow_style_dashes_and_python_truth(tmp_path: Path) -> None:
    args = load_text(
        tmp_path,
        '{ "num-layers": 4, "hidden_size": 64,\n  # a comment\n  "gpt-j-residual": True,\n'
        ' "optimizer": {"type": "Adam"} }',
        "no-weight-tying: true\nattention-config: [[[global], 4]]\n",
    )
    assert (args.model.num_layers, args.model.hidden_size) == (4, 64)
    assert args.model.gpt_j_residual is True and args.model.no_weight_tying is True
    assert args.model.attention_config == ((("global",), 4),)
    assert args.optimizer.optimizer == {"type": "Adam"}


def test_json_with_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n\t"num_layers": 4,\n\t"lr": 1e-4\n}', encoding="utf-8")
    assert NeoXArgs.from_files([str(path)]).optimizer.lr == 1e-4


def test_the_suffix_and_the_folder_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.yml").write_text("num_layers: 3\n", encoding="utf-8")
    assert NeoXArgs.from_files(["sub/model"], conf_dir=str(tmp_path)).model.num_layers == 3


def test_a_missing_file_names_the_others(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"tine\.yml: .*no such.*tiny\.yml"):
        NeoXArgs.from_files(["tine"], conf_dir=str(tmp_path))


def test_same_key_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"b\.yml:2: train_iters is 20 here and 10 at .*a\.yml:1"):
        load_text(tmp_path, "train-iters: 10\n", "\ntrain_iters: 20\n")  # dashes do not hide it
    assert load_text(tmp_path, "train_iters: 10\n", "train-iters: 10\n").training.train_iters == 10


def test_the_same_file_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text("train_iters: 1", encoding="utf-8")
    with pytest.raises(UserError, match="given twice"):
        NeoXArgs.from_files([str(path), str(path)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nseed: 3\nlr: 2\n", r"a\.yml:3: lr .*a\.yml:1"),
        ("train-iters: 1\ntrain_iters: 1\n", r"a\.yml:2: train_iters .*a\.yml:1"),
        (
            "model_parallel_size: 1\ntensor_model_parallel_size: 2\n",
            r"a\.yml:2: model_parallel_size \(as 'tensor_model",
        ),
        (
            "optimizer:\n  params:\n    lr: 0.1\n    eps: 1e-8\n    lr: 0.2\n",
            r"a\.yml:5: optimizer\.params\.lr .*a\.yml:3",
        ),
        ("num_layers: 4\nseed: [1\n", r"a\.yml:\d+: not valid YAML"),
        ("- 1\n- 2\n", r"a\.yml:1: .*mapping"),
        ("[1, 2]: 3\n", r"a\.yml:1: .*key .*single word"),
    ],
)
def test_mistakes_inside_one_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_text(tmp_path, text)


def test_empty_file(tmp_path: Path) -> None:
    assert load_text(tmp_path, "").to_dict() == load_text(tmp_path, "# nothing\n").to_dict()


@pytest.mark.parametrize(
    ("key", "near"),
    [("num-layer", "num_layers"), ("hiden_size", "hidden_size"), ("tensor_parallel_sizes", "tensor_parallel_size")],
)
def test_unknown_key(key: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"a\.yml:3: unknown key '{key.replace('-', '_')}'\. Did you mean '{near}'\?"):
        load_text(tmp_path, f"seed: 1\n\n{key}: 2\n")


def test_unknown_inner_key(tmp_path: Path) -> None:
    text = "optimizer:\n  type: Adam\n  params:\n    lr: 1e-3\n    bettas: [0.9, 0.95]\n"
    with pytest.raises(UserError, match=r"a\.yml:5: .*'bettas' .*optimizer\.params\b.*'betas'"):
        load_text(tmp_path, text)


def test_aliases(tmp_path: Path) -> None:
    args = load_text(tmp_path, "tensor-model-parallel-size: 2\ngas: 3\nmicro_batch_size: 5\nrope_theta: 500000\n")
    assert args.parallel.model_parallel_size == 2
    assert args.training.gradient_accumulation_steps == 3
    assert args.training.train_micro_batch_size_per_gpu == 5
    assert args.model.rotary_emb_base == 500000


def test_an_architecture_in_the_words_of_other_trainers(tmp_path: Path) -> None:
    """What means the same is taken; what is counted or signed otherwise is an error that says how to write it."""
    words = (
        "num_hidden_layers: 2\nkv_channels: 16\nrms_norm_eps: 1e-6\nrotary_base: 500\nrotary_percent: 0.5\n"
        "untie_embeddings_and_output_weights: true\nnum_local_experts: 8\nnum_experts_per_tok: 2\n"
        "moe_ffn_hidden_size: 48\nexpert_model_parallel_size: 4\n"
    )
    args = load_text(tmp_path, words)
    model = args.model
    assert (model.num_layers, model.head_dim, model.rms_norm_epsilon) == (2, 16, 1e-6)
    assert (model.rotary_emb_base, model.rotary_pct, model.no_weight_tying) == (500, 0.5, True)
    assert (model.moe_num_experts, model.moe_top_k, model.moe_intermediate_size) == (8, 2, 48)
    assert args.parallel.expert_parallel_size == 4
    for text, advice in (
        ("sliding_window: 4096\n", "sliding_window_width, one less"),
        ("tie_word_embeddings: true\n", "no_weight_tying, its opposite"),
        ("hidden_act: silu\n", "activation: swiglu"),
        ("qk_layernorm: true\n", "qk_norm_per_head"),
    ):
        with pytest.raises(UserError, match=rf"a\.yml:1: unknown key .*{advice}"):
            load_text(tmp_path, text)


# ---- extends


def test_extends_inherits_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text(
        "num_layers: 4\nseed: 1\noptimizer: {type: Adam, params: {lr: 0.1, eps: 1.0e-8}}\n", encoding="utf-8"
    )
    args = load_text(tmp_path, "extends: base\nseed: 2\noptimizer: {params: {lr: 0.2}}\n")
    assert args.model.num_layers == 4 and args.training.seed == 2
    assert args.optimizer.optimizer == {"type": "Adam", "params": {"lr": 0.2, "eps": 1e-8}}
    assert args.source("num_layers").endswith("base.yml:1")
    assert args.source("seed").endswith("a.yml:2")
    assert args.source("optimizer.params.eps").endswith("base.yml:3")
    assert args.source("optimizer.params.lr").endswith("a.yml:3")


def test_config_dir_is_the_folder_of_the_file_that_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.yml").write_text(
        "train_data_paths: ['${CONFIG_DIR}/one', /two]\nload: ${CONFIG_DIR}\nvocab-file: ${CONFIG_DIR}/v.json\n"
    )
    (tmp_path / "b.yml").write_text(
        "extends: base/a.yml\nsave: ${CONFIG_DIR}/runs\nvocab_file: '${CONFIG_DIR}/w.json'\n"
    )
    monkeypatch.chdir(tmp_path)
    args = NeoXArgs.from_files(["b.yml"])
    assert args.get("load") == f"{tmp_path}/base" and args.get("save") == f"{tmp_path}/runs"
    assert args.get("vocab_file") == f"{tmp_path}/w.json"
    assert list(args.get("train_data_paths")) == [f"{tmp_path}/base/one", "/two"]


def test_extends_is_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yml").write_text("seed: 5\n", encoding="utf-8")
    (tmp_path / "sub" / "child.yml").write_text("extends: [../base.yml]\n", encoding="utf-8")
    assert NeoXArgs.from_files([str(tmp_path / "sub" / "child")]).training.seed == 5


def test_extends_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text("extends: a\n", encoding="utf-8")
    with pytest.raises(UserError, match="lead back to itself"):
        load_text(tmp_path, "extends: b\n")


def test_extends_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yml: .*no such"):
        load_text(tmp_path, "extends: nowhere\n")


# ---- overrides


def test_overrides_win_and_may_have_dashes(tmp_path: Path) -> None:
    args = load_text(tmp_path, "train_iters: 10\nseed: 1\n", overrides=["train-iters=20", "--seed=3", "lr=1e-4"])
    assert (args.training.train_iters, args.training.seed, args.optimizer.lr) == (20, 3, 1e-4)
    assert args.source("train_iters") == "command line"


def test_overrides_reach_inside(tmp_path: Path) -> None:
    text = "optimizer: {type: Adam, params: {lr: 0.1, eps: 1.0e-8}}\n"
    args = load_text(tmp_path, text, overrides=["optimizer.params.lr=3e-4", "zero_optimization.stage=2"])
    assert args.optimizer.optimizer == {"type": "Adam", "params": {"lr": 3e-4, "eps": 1e-8}}
    assert args.optimizer.zero_optimization == {"stage": 2}
    assert args.source("optimizer.params.lr") == "command line"
    assert args.source("optimizer.params.eps").endswith("a.yml:1")


def test_overrides_win_over_what_says_the_same_inside_a_mapping(tmp_path: Path) -> None:
    text = (
        "optimizer: {type: Adam, params: {lr: 0.1, eps: 1.0e-8}}\nzero_optimization: {stage: 1, overlap_comm: true}\n"
    )
    args = load_text(tmp_path, text, overrides=["lr=3e-4", "zero_stage=0", "optimizer-type=sgd"])
    assert args.optimizer.optimizer == {"params": {"eps": 1e-8}}
    assert args.optimizer.zero_optimization == {"overlap_comm": True}
    assert (args.optimizer.lr, args.optimizer.zero_stage, args.optimizer.optimizer_type) == (3e-4, 0, "sgd")
    args = load_text(
        tmp_path, "lr: 0.1\nzero_stage: 3\n", overrides=["optimizer.params.lr=0.2", "zero_optimization.stage=1"]
    )
    assert args.optimizer.lr is None and args.optimizer.zero_stage is None
    assert args.get("optimizer.params.lr") == 0.2 and args.get("zero_optimization.stage") == 1


def test_override_values_are_yaml(tmp_path: Path) -> None:
    args = load_text(
        tmp_path, "seed: 1\n", overrides=["train_data_paths=[a, b]", "extra_save_iters=[1,2]", "save=null", "split=9,1"]
    )
    assert args.data.train_data_paths == ("a", "b")
    assert args.checkpoint.extra_save_iters == (1, 2)
    assert args.checkpoint.save is None
    assert args.data.split == "9,1"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_itres=3", "train_itres=3: .*'train_itres'.*'train_iters'"),
        ("train_iters", "overrides are written key=value"),
        ("=3", "overrides are written key=value"),
        ("train_iters=[1", "not valid YAML"),
        ("train_iters=ten", "train_iters: .*whole number.* 'ten'"),
        ("seed.deep=1", "seed is not a mapping"),
        ("optimizer.type.name=1", "type is not a mapping"),
        ("optimizer.params.bettas=1", r"unknown key 'bettas' in optimizer\.params"),
    ],
)
def test_wrong_overrides(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_text(tmp_path, "seed: 1\noptimizer: {type: Adam}\n", overrides=[override])


# ---- what the result knows


def test_sources_and_explain(tmp_path: Path) -> None:
    args = loaded(tmp_path)
    assert args.source("hidden_size").endswith("a.yml:2")
    assert args.source("norm") == "default"
    text = args.explain("gradient-clipping")
    assert "gradient_clipping = 1.0" in text and "default: 1.0" in text and "GPT-NeoX" in text
    assert re.search("choices: .*learned.* rotary", args.explain("pos_emb"))
    assert "no effect" in args.explain("clip_grad")
    assert "differs from GPT-NeoX: " in args.explain("fp32_allreduce")
    assert "not available" in args.explain("soft_prompt_tuning")
    chosen = load_text(tmp_path, "optimizer: {type: Lion, params: {betas: [0.95, 0.98]}}\n")
    chosen = derive(
        chosen.replace("test", num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, train_batch_size=1)
    )
    text = chosen.explain("optimizer.params.betas")
    assert text.startswith("optimizer.params.betas = [0.95, 0.98]\n") and "a.yml:1" in text
    assert "[0.9, 0.99] (lion)" in text and "[0.9, 0.999] (adam)" in text
    assert args.explain("optimizer.params.eps").startswith("optimizer.params.eps = 1e-08\n  source:  default")
    assert "not read by lion" in chosen.explain("optimizer.params.momentum")
    with pytest.raises(UserError, match=r"optimizer\.params\.bettas: .*Did you mean 'betas'\?"):
        args.explain("optimizer.params.bettas")
    assert "choices: " in args.explain("optimizer.type")
    with pytest.raises(UserError, match="Did you mean 'num_layers'"):
        args.explain("num_layer")


def test_flat_access(tmp_path: Path) -> None:
    args = load_text(tmp_path, "optimizer: {params: {lr: 0.5}}\n")
    assert args.get("optimizer.params.lr") == 0.5
    with pytest.raises(UserError, match=r"optimizer\.params\.eps is not set"):
        args.get("optimizer.params.eps")


def test_flat_reading(tmp_path: Path) -> None:
    args = loaded(tmp_path, train_data_paths=["x"])
    values = {name: getattr(args, name) for name in all_keys() if name not in GROUPS}
    assert values == {name: value for name, value in args.values().items() if name not in GROUPS}
    assert args.tensor_model_parallel_size == args.parallel.model_parallel_size == 1
    assert args.optimizer.optimizer == args.get("optimizer")
    with pytest.raises(AttributeError, match=r"'hiden_size'.*'hidden_size'"):
        _ = args.hiden_size
    assert not hasattr(args, "__wrapped__") and pickle.loads(pickle.dumps(args)) == copy.deepcopy(args) == args


def test_from_ymls_and_from_dict_are_the_command_line(tmp_path: Path) -> None:
    given = SMALL | {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-8}}}
    path = tmp_path / "a.yml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    changes = {"train-iters": 7, "optimizer.params.lr": 3e-4, "gas": 2}
    line = derive(NeoXArgs.from_files([str(path)], ["train-iters=7", "optimizer.params.lr=3e-4", "gas=2"]))
    args = NeoXArgs.from_ymls([str(path)], overwrite_values=changes)
    assert args == line and args.source("train_iters") == "Python call" and args.train_batch_size == 8
    assert NeoXArgs.from_ymls([str(path)], facts=Facts(num_devices=4)).data_parallel_size == 4
    whole = given | {"train_iters": 7, "gas": 2, "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "eps": 1e-8}}}
    assert NeoXArgs.from_dict(whole) == line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hiden_size": 8}, r"hiden_size: unknown key 'hiden_size'.*'hidden_size'"),
        ({"hidden_size": "eight"}, r"hidden_size: .*'eight'"),
        ({"gas": 1, "gradient-accumulation-steps": 2}, r"gradient-accumulation-steps: gradient_accumulation_steps"),
        ({"optimizer": {"params": {"bettas": 1}}}, r"unknown key 'bettas' in optimizer\.params"),
    ],
)
def test_wrong_dictionaries(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NeoXArgs.from_dict(given)


def test_round_trip_through_plain_data(tmp_path: Path) -> None:
    args = loaded(tmp_path, train_data_paths=["x"], optimizer={"type": "Adam", "params": {"betas": [0.9, 0.95]}})
    again = type(args).from_saved(args.to_dict())
    assert again == args and again.hash() == args.hash()
    assert loaded(tmp_path, seed=7).hash() != args.hash()


def test_round_trip_as_the_launcher_hands_it_on(tmp_path: Path) -> None:
    args = loaded(tmp_path, clip_grad=2.0)
    again = NeoXArgs.from_resolved(args.to_resolved())
    assert again == args and again.notes == args.notes and again.source("seq_length") == args.source("seq_length")
    for text in ("{}", "[]", "not JSON", '{"values": {"num_layer": 3}, "sources": {}, "notes": []}'):
        with pytest.raises(UserError):
            NeoXArgs.from_resolved(text)


def test_nobody_writes_to_it(tmp_path: Path) -> None:
    args = loaded(tmp_path)
    with pytest.raises(AttributeError):
        args.model.num_layers = 3  # type: ignore[misc]
    changed = args.replace(num_layers=3)
    assert (changed.model.num_layers, args.model.num_layers) == (3, SMALL["num_layers"])
    assert changed.source("num_layers") == "set by the program"


# ---- what GPT-NeoX's files have


def test_engine_keys_inside_extra_args_are_moved_out(tmp_path: Path) -> None:
    args = load_text(tmp_path, "deepspeed_extra_args: {comms_logger: {enabled: true}, ssh_port: 2222}\n")
    assert args.deepspeed.comms_logger == {"enabled": True}
    assert args.deepspeed.deepspeed_extra_args == {"ssh_port": 2222}
    with pytest.raises(UserError, match=r"a\.yml:1: train_batch_size is set at .*a\.yml:2 too"):
        load_text(tmp_path, "deepspeed_extra_args: {train_batch_size: 5}\ntrain_batch_size: 4\n")


def test_what_the_engine_refuses_is_left_out_with_a_note(tmp_path: Path) -> None:
    args = load_text(
        tmp_path,
        "fp16: {fp16: true, enabled: true, loss_scale: 0}\n"
        "zero_optimization: {stage: 1, cpu_offload: false}\n"
        "optimizer: {type: Adam, params: {lr: 1.0e-3, max_grad_norm: 1.0}}\n",
    )
    assert args.optimizer.fp16 == {"enabled": True, "loss_scale": 0.0}
    assert args.optimizer.zero_optimization == {"stage": 1}
    assert args.optimizer.optimizer == {"type": "Adam", "params": {"lr": 1e-3}}
    assert any("fp16.fp16" in note and "a.yml:1" in note for note in args.notes)
    assert any("max_grad_norm" in note and "gradient_clipping" in note for note in args.notes)


def test_old_offload_switches_keep_their_meaning(tmp_path: Path) -> None:
    args = load_text(tmp_path, "zero_optimization: {stage: 2, cpu_offload: true}\n")
    assert args.optimizer.zero_optimization == {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def test_loss_scale_in_bf16_is_left_out(tmp_path: Path) -> None:
    args = load_text(tmp_path, "bf16: {enabled: true, loss_scale: 0, loss_scale_window: 1000, hysteresis: 2}\n")
    assert args.optimizer.bf16 == {"enabled": True}
    assert len(args.notes) == 3
