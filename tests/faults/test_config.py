"""Known faults of configurations: names, types, arithmetic, keys that do nothing (31, 65)."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from megatron.cluster.launch import place
from megatron.errors import UserError
from megatron.layers.activations import ACTIVATIONS
from megatron.layers.attention_backends import ATTENTION_BACKENDS
from megatron.layers.init import INITS
from megatron.layers.norms import NORMS
from megatron.layers.positions import POSITIONS
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.nested import NESTED
from megatron.objectives import OBJECTIVES
from megatron.plan.planner import plan
from megatron.plan.preflight import check_before_launch
from megatron.registry import Registry
from tests.faults.commands import make_folder
from tests.neox_args.helpers import derived, load_text

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("key", "registry", "beside"),
    [
        ("norm", NORMS, set()),
        ("activation", ACTIVATIONS, set()),
        ("pos_emb", POSITIONS, set()),
        ("init_method", INITS, set()),
        ("attention_backend", ATTENTION_BACKENDS, {"auto"}),
        ("train_impl", OBJECTIVES, set()),
    ],
)
def test_a_name_that_a_config_may_give_exists(key: str, registry: Registry, beside: set[str]) -> None:
    """65: what loads can be built, so that a dry run (which imports none of it) refuses what the run would."""
    info = all_keys()[key]
    refused = set(info.unavailable) if isinstance(info.unavailable, dict) else set()
    spelt_otherwise = set(info.spellings)
    assert set(info.own_choices) - refused - spelt_otherwise == set(registry) | beside


@pytest.mark.parametrize(
    ("vocabulary", "padded"),
    [(259, {1: 384, 2: 512, 4: 512}), (50257, {1: 50304, 2: 50432, 4: 50688, 8: 51200})],
)
def test_rows_of_the_vocabulary_per_number_of_ranks(vocabulary: int, padded: dict[int, int], tmp_path: Path) -> None:
    """31: the numbers of the report, divisor 128."""
    for tensor, rows in padded.items():
        facts = Facts(vocab_size=vocabulary)
        args = derived(tmp_path, model_parallel_size=tensor, make_vocab_size_divisible_by=128, facts=facts)
        assert args.tokenizer.padded_vocab_size == rows


def test_a_number_in_quotes_is_a_number(tmp_path: Path) -> None:
    """65: YAML reads 1e-4 as a text, quoted or not; both are the number, and the same number twice is no conflict."""
    for text in ('lr: "1e-4"\n', "lr: 1e-4\n", "lr: 0.0001\n"):
        assert load_text(tmp_path, text).optimizer.lr == 1e-4
    assert load_text(tmp_path, 'lr: "1e-4"\n', "lr: 1e-4\n").optimizer.lr == 1e-4


VALUES = ("0", "-1", "3", "-0.5", "nan", "x", '""', "[]", "[1]", "{a: 1}", "{enabled: true}", "null", "[null]")
ABSURD = ("1e30", "1e12", "2147483648", "/", "x" * 300, '"a\\0b"', "2020-01-01", "!!binary aGk=", "{1: {x: [~]}}")
INSIDE = (
    *(f"{name}.{key}" for name, keys in NESTED.items() for key in keys),
    *(f"optimizer.params.{key}" for key in ("betas", "eps", "momentum", "weight_decay", "unknown")),
    *("optimizer.type", "mixture.sources.a", "mixture.sources.a.path", "mixture.weights", "valid_sets.a.tags"),
    *("callbacks.checkpointer", "rope_scaling.factor", "deepspeed_extra_args.x", "zero_optimization.cpu_offload"),
)
CONTEXTS = (
    *("save=c train_iters=1e5 checkpoint_factor=", "save=c checkpoint_scale=log checkpoint_factor="),
    *(
        "tokenizer_type=HFTokenizer vocab_file=",
        "tokenizer_type=TiktokenTokenizer vocab_file=",
        "moe_num_experts=4 moe_top_k=",
    ),
    *("model_parallel_size=4 pipe_parallel_size=", "eval_iters=1 eval_interval=", "train_iters=null train_epochs="),
    *("data_path=null train_data_paths=[data/x,data/x] train_data_weights=", "launcher=slurm hostfile="),
)


def test_any_value_of_any_key_is_planned_or_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65: every key with values of every kind, through the whole dry run: never anything but an answer for the user."""
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setattr(logging.getLogger("deepy"), "disabled", True)
    env, planned = {"DS_ACCELERATOR": "cpu"}, 0
    cases = [f"{key}={value}" for key in all_keys() for value in VALUES]
    chosen = random.Random(9)  # every key with three of the absurd ones
    cases += [f"{key}={value}" for key in (*all_keys(), *INSIDE) for value in chosen.sample(ABSURD, 3)]
    cases += [f"{key}={value}" for key in INSIDE for value in chosen.sample(VALUES, 3)]
    cases += [f"{start}{value}" for start in CONTEXTS for value in (*VALUES, *ABSURD)]
    for override in cases:
        try:
            args = NeoXArgs.from_files(
                ["run.yml"], override.split(" ") if override.startswith(CONTEXTS) else [override]
            )
            placement = place(args, env, default_hostfile="/no such file")
            text = plan(args, placement, "train.py")
            check_before_launch(args, placement, "train.py")
        except UserError:
            continue
        except Exception as error:
            pytest.fail(f"{override}: {type(error).__name__}: {error}")
        planned += 1
        assert "nothing was started" in text, override
    assert planned > len(all_keys())
    assert {path.name for path in tmp_path.iterdir()} == {"run.yml", "data"}


@pytest.mark.parametrize("key", ["layernorm_epsilon", "rms_norm_epsilon", "opt_pos_emb_offset", "mup_embedding_mult"])
def test_sizes_that_make_no_sense_name_the_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=rf"a\.yml:\d+: {key}: must .*, is -1"):
        derived(tmp_path, **{key: -1})
