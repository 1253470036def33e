"""Names of plugins stand wherever Deepy's own do; sizes follow; typos are still errors that name the nearest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.convert.families import FAMILIES, choose_family, read_config
from megatron.errors import UserError
from megatron.model.gpt import build_layer, gpt_layers
from megatron.model.partition import layer_parameters, layer_rows, partition
from megatron.mpu.owned import count_parameters
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.formulas import flops_per_token, parameter_count
from megatron.neox_arguments.optimizer_params import optimizer_params
from megatron.optim.optimizers import build_optimizer
from megatron.plan import sections
from megatron.plan.memory import moments
from megatron.plan.stages import layer_sizes
from megatron.registry import Registry
from tests.neox_args.helpers import SMALL
from tests.plugins.helpers import ROOT, write_config, write_layers

pytestmark = pytest.mark.cpu

EVERYTHING = str(Path(__file__).with_name("everything.py"))
VOCAB = 67
# A key, the plugin's name for it and a misspelling of that.
NAMES = [
    ("init_method", "constant", "constnt"),
    ("output_layer_init_method", "Constant", "constnt"),  # choices are matched without regard to case
    ("mlp_config", ["narrow"], ["narow"]),
    ("mlp_config", [["narrow", "dense"], 2], [["narow", "dense"], 2]),
    ("pos_emb", "ramp", "ram"),
    ("attention_config", [[["Halving", "global"], "all"]], [[["Halvin", "global"], "all"]]),
    ("attention_backend", "by_formula", "by_formla"),
    ("optimizer", {"type": "signdescent", "params": {"persistence": 0.5}}, {"type": "signdescend"}),
    ("optimizer_type", "SignDescent", "SignDescend"),
    ("lr_decay_style", "square", "squar"),
    ("tokenizer_type", "letters", "leters"),
]


def loaded(tmp_path: Path, **keys: Any) -> NeoXArgs:
    return derive(NeoXArgs.from_files([write_config(tmp_path / "run.yml", plugins=[EVERYTHING], **(SMALL | keys))]))


@pytest.mark.parametrize(("key", "name", "typo"), NAMES, ids=[f"{key}-{i}" for i, (key, *_) in enumerate(NAMES)])
def test_a_key_takes_the_names_of_plugins_and_names_the_nearest_to_a_typo(key, name, typo, tmp_path) -> None:
    if key == "mlp_config" and len(name) == 2:
        name, typo = [name], [typo]
    args = loaded(tmp_path, **{key: name})
    assert derive(NeoXArgs.from_resolved(args.to_resolved())).to_dict() == args.to_dict()
    with pytest.raises(UserError) as error:
        loaded(tmp_path, **{key: typo})
    message, wanted = str(error.value), {"Constant": "constant", "signdescent": "SignDescent"}
    plain = next(w for w in ("Halving", "narrow", "SignDescent", wanted.get(str(name), name)) if str(w) in message)
    assert "run.yml" in message and f"Did you mean {plain!r}?" in message


def test_values_that_the_names_make(tmp_path) -> None:
    args = loaded(
        tmp_path,
        attention_config=["Halving", "global", "Halving", "global"],
        mlp_config=[[["dense", "narrow"], "all"]],
        optimizer={"type": "SIGNDESCENT", "params": {"persistence": 0.5}},
    )
    assert args.model.layer_mlps == ("none", "narrow", "none", "narrow")
    assert [row.name for row in layer_rows(args.model)][1:3] == ["HalvingBlock", "TransformerBlock"]
    assert args.optimizer.optimizer_type == "SignDescent" and args.optimizer.optimizer["params"] == {"persistence": 0.5}
    with pytest.raises(UserError, match=r"key 'persistenc' .*optimizer\.params\b.*'persistence'"):
        loaded(tmp_path, optimizer={"type": "SignDescent", "params": {"persistenc": 0.5}})
    with pytest.raises(UserError, match="unknown key 'persistence'"):
        loaded(tmp_path, optimizer={"type": "adam", "params": {"persistence": 0.5}})
    with pytest.raises(UserError, match="mlp_config: describes 2 layers, num_layers is 4"):
        loaded(tmp_path, mlp_config=["narrow", "dense"])


OPTIMIZER = """\
from megatron.optim.optimizers import OPTIMIZERS


@OPTIMIZERS.register("in_code")
def in_code(groups, lr, params):
    return params.get("betas", (0.5, 0.75)), params


@OPTIMIZERS.register("in_row", params={"betas": (0.25, 0.5), "steps": 5}, moments=4)
def in_row(groups, lr, params):
    return params["betas"], params
"""


@pytest.mark.parametrize(
    ("kind", "given", "shown", "built"),
    [
        ("in_code", {}, None, ((0.5, 0.75), {})),
        ("in_code", {"betas": [0.1, 0.2]}, (0.1, 0.2), ([0.1, 0.2], {"betas": [0.1, 0.2]})),
        ("in_row", {}, (0.25, 0.5), ((0.25, 0.5), {"betas": (0.25, 0.5), "steps": 5})),
        ("in_row", {"steps": "7"}, (0.25, 0.5), ((0.25, 0.5), {"betas": (0.25, 0.5), "steps": 7})),
    ],
)
def test_an_optimizer_is_built_with_its_own_defaults(kind, given, shown, built, tmp_path) -> None:
    (tmp_path / "own.py").write_text(OPTIMIZER)
    chosen = {"type": kind, "params": {"lr": 0.5, "weight_decay": 0.0, **given}}
    args = derive(
        NeoXArgs.from_files([write_config(tmp_path / "run.yml", plugins=["own.py"], **SMALL, optimizer=chosen)])
    )
    assert args.optimizer.betas == shown and args.optimizer.eps is None
    assert moments(args.optimizer) == {"in_code": 2, "in_row": 4}[kind]
    params = optimizer_params(kind, args.optimizer.optimizer)
    assert build_optimizer(kind, [{"params": []}], 0.5, params) == built


def test_a_plugin_brings_what_is_known_but_not_available(tmp_path) -> None:
    (tmp_path / "bird.py").write_text(
        "from megatron.layers.attention import SelfAttention\nfrom megatron.layers.parts import MIXERS\n\n"
        "MIXERS.register('bigbird')(SelfAttention)\n"
    )
    config = {**SMALL, "attention_config": [[["bigbird"], "all"]]}
    with pytest.raises(UserError, match="bigbird"):
        derive(NeoXArgs.from_files([write_config(tmp_path / "without.yml", **config)]))
    args = derive(NeoXArgs.from_files([write_config(tmp_path / "with.yml", plugins=["bird.py"], **config)]))
    assert set(args.model.attention_config) == {"bigbird"}


# ---- sizes


def example(tmp_path: Path, *overrides: str) -> NeoXArgs:
    """The guide's first example."""
    return derive(NeoXArgs.from_files([str(write_layers(tmp_path))], overrides))


def held(args: NeoXArgs, tp: int) -> list[int]:
    """Numbers in memory on the first of `tp` ranks, layer by layer."""
    state = ParallelState(Topology({"pipe": 1, "data": 1, "model": tp}), 0, "cpu")
    layers = gpt_layers(args.model, vocab_size=VOCAB, padded_vocab_size=-(-VOCAB // tp) * tp, state=state)
    return [sum(p.numel() for _, p in named_parameters(build_layer(layer, None, state))) for layer in layers]


@pytest.mark.parametrize("overrides", [(), ("norm_placement=olmo3",), ("use_qk_layernorm=true",)])
def test_the_example_is_counted_as_it_is_built(overrides, tmp_path) -> None:
    args = example(tmp_path, "no_weight_tying=true", *overrides)
    assert args.model.ffn_width == 48 and args.model.attention_config == ("average", "global") * 2
    counts = layer_parameters(args.model, VOCAB)
    assert counts == held(args, 1)
    for tp in (1, 2, 4):
        if args.model.num_kv_heads % tp == 0:
            sizes = layer_sizes(args.model, VOCAB, -(-VOCAB // tp) * tp, tp)
            assert [size.local for size in sizes] == held(args, tp)


def test_other_parts_are_counted_as_they_are_built(tmp_path) -> None:
    args = loaded(
        tmp_path,
        pos_emb="ramp",
        mlp_config=[[["narrow", "dense"], 2]],
        attention_config=["global", "Halving", "global", "global"],
        no_weight_tying=True,
    )
    assert args.model.layer_mlps == ("narrow", "none", "narrow", "dense")
    assert layer_parameters(args.model, VOCAB) == held(args, 1)


def test_an_entry_may_say_its_size(tmp_path) -> None:
    dense, counted = loaded(tmp_path), loaded(tmp_path, mlp_config=["counted"])
    own = parameter_count(counted.model, VOCAB)
    h, f = dense.model.hidden_size, dense.model.ffn_width
    of_dense = 2 * h * f + f + h
    assert parameter_count(dense.model, VOCAB).blocks[0].total - own.blocks[0].total == of_dense - 12345
    assert own.total - own.active == 4 * 345


def test_flops_of_a_mixer_are_its_products_and_what_it_says(tmp_path) -> None:
    args = example(tmp_path)
    model = args.model
    with_attention = derive(args.replace(attention_config=None, plugin_options=None)).model
    own, other = (parameter_count(m, VOCAB).layers for m in (model, with_attention))
    difference = flops_per_token(model, VOCAB) - flops_per_token(with_attention, VOCAB)
    attention = 12 * model.hidden_size * model.seq_length  # heads x head_dim is the width here
    said = 6 * model.hidden_size * 5  # log2(32) doublings
    assert difference == pytest.approx(6 * (own - other) + 2 * (said - attention))


def test_the_dry_run_names_mixers_that_do_not_say_their_flops(tmp_path) -> None:
    said = example(tmp_path)
    silent = loaded(tmp_path, attention_config=["global", "Halving", "global", "Halving"], train_batch_size=4)
    assert "outside matrix products" not in "\n".join(sections.steps(said, VOCAB))
    assert "Halving outside matrix products" in "\n".join(sections.steps(silent, VOCAB))


def test_what_cannot_be_built_without_memory_says_what_to_do(tmp_path) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import torch\nfrom megatron.layers.parts import MLPS, FeedForward\n"
        "from megatron.mpu.layers import ColumnParallelLinear\n\n\n"
        "@MLPS.register('stubborn')\n"
        "class Stubborn(FeedForward):\n"
        "    def __init__(self, model, state):\n"
        "        super().__init__()\n"
        "        self.offset = torch.ones(1, device=state.device).item()\n"
    )
    args = derive(
        NeoXArgs.from_files(
            [write_config(tmp_path / "run.yml", plugins=["stubborn.py"], mlp_config="stubborn", **SMALL)]
        )
    )
    with pytest.raises(UserError, match=r"mlp_config: 'stubborn' \(.*stubborn.py:6\) cannot be built .* `size`"):
        parameter_count(args.model, VOCAB)


def test_stages_of_equal_parameters_know_the_plugins(tmp_path) -> None:
    args = loaded(tmp_path, num_layers=4, attention_config=["global", "global", "Halving", "Halving"])
    rows, counts = layer_rows(args.model), layer_parameters(args.model, VOCAB)
    bounds = partition(rows, 2, "parameters", counts)
    assert bounds == [0, 2, 7]  # embedding and one block of attention against all the rest
    assert partition(rows, 2, "type:halving", counts) == [0, 4, 7]


def test_the_built_model_has_the_parameters_that_the_run_reports(tmp_path) -> None:
    args = example(tmp_path, "no_weight_tying=true")
    state = ParallelState.single()
    layers = gpt_layers(args.model, vocab_size=VOCAB, padded_vocab_size=VOCAB, state=state)
    total = sum(count_parameters(build_layer(layer, None, state), state) for layer in layers)
    assert total == parameter_count(args.model, VOCAB).total


# ---- conversion


def test_no_family_takes_a_model_of_plugins_by_mistake(tmp_path) -> None:
    for overrides in ((), ("norm=rmsnorm", "activation=swiglu"), ("norm=rmsnorm", "attention_config=null")):
        model = example(tmp_path, *overrides, "use_bias_in_attn_linear=false", "use_bias_in_mlp=false").model
        with pytest.raises(UserError, match="no Hugging Face architecture known here"):
            choose_family(model, None)
    plugged = loaded(
        tmp_path, mlp_config=["narrow"], activation="swiglu", norm="rmsnorm", pos_emb="rotary", use_bias_in_mlp=False
    ).model
    for name in FAMILIES:
        assert FAMILIES[name].unsupported(plugged), name


def test_families_of_plugins_are_tried_after_ours(tmp_path) -> None:
    """Although a plugin is imported before ours are."""
    (tmp_path / "greedy.py").write_text(
        "from megatron.convert.families import FAMILIES\nfrom megatron.convert.parts.family import Family\n\n"
        "FAMILIES.register('a_greedy_one')(Family('Greedy', list, dict, lambda model: []))\n"
    )
    keys = {"norm": "rmsnorm", "activation": "swiglu", "pos_emb": "rotary", "use_bias_in_mlp": False}
    config = write_config(tmp_path / "run.yml", plugins=["greedy.py"], **SMALL, **keys, use_bias_in_attn_linear=False)
    code = """
import sys
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
args = derive(NeoXArgs.from_files([sys.argv[1]]))
from megatron.convert.families import choose_family
for model in (args.model, args.replace(norm="scalenorm").model):
    print(choose_family(model, None).architecture)
"""
    command = [sys.executable, "-c", code, config]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout.split() == ["LlamaForCausalLM", "Greedy"], done.stderr


def test_two_families_may_not_read_one_model_type() -> None:
    FAMILIES.register("mine")(replace(FAMILIES["llama"]))
    with pytest.raises(UserError, match=r"config\.json: model_type: 'llama'.*: llama, mine"):
        read_config({"model_type": "llama"}, "config.json")


# ---- registries


def test_every_registry_lists_choices_and_the_nearest_name() -> None:
    table: Registry[int] = Registry("thing")
    table.register("alpha", "beta")(1)
    with pytest.raises(UserError, match=r"^thing: 'alpa' .*'alpha'.*: alpha, beta$"):
        table["alpa"]
