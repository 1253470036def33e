"""Precision, optimizer, ZeRO, schedule, checkpoints, data: what is derived and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_trainable, derive
from tests.neox_args.helpers import SMALL, derived, load_text, loaded

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, "fp32"),
        ({"precision": "bfloat16"}, "bfloat16"),
        ({"precision": "fp16"}, "fp16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": True}}, "bfloat16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bfloat16"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "bfloat16"),
        ({"precision": "bfloat16", "bf16": {"enabled": True}}, "bfloat16"),
    ],
)
def test_precision(changes: dict, want: str, tmp_path: Path) -> None:
    optimizer = derived(tmp_path, **changes).optimizer
    assert optimizer.precision == want
    assert (optimizer.fp16 or {}).get("enabled", False) == (want == "fp16" and "fp16" in changes)
    assert "type" not in (optimizer.fp16 or {})


@pytest.mark.parametrize(
    "changes",
    [
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"precision": "fp32", "fp16": {"enabled": True}},
        {"precision": "fp16", "bf16": {"enabled": True}},
    ],
)
def test_contradicting_precisions(changes: dict, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.yml:\d+: (precision|bf16\.enabled): .*a\.yml:\d+"):
        derived(tmp_path, **changes)


def test_precision_on_the_command_line_wins(tmp_path: Path) -> None:
    text = "\n".join(f"{name}: {value}" for name, value in SMALL.items()) + "\nfp16: {enabled: true, loss_scale: 0}\n"
    args = derive(load_text(tmp_path, text, overrides=["precision=bfloat16"]))
    assert args.optimizer.precision == "bfloat16"
    assert args.optimizer.fp16 == {"loss_scale": 0.0, "enabled": False}
    args = derive(load_text(tmp_path, text + "precision: fp16\n", overrides=["fp16.enabled=false"]))
    assert args.optimizer.precision == "fp32"


def test_timers_are_off_in_a_pipeline_and_that_is_reported(tmp_path: Path) -> None:
    piped = derived(tmp_path, wall_clock_breakdown=True, pipe_parallel_size=2)
    assert not piped.deepspeed.wall_clock_breakdown
    assert any("wall_clock_breakdown is off" in note for note in piped.notes)
    assert derived(tmp_path, wall_clock_breakdown=True).deepspeed.wall_clock_breakdown


def test_a_schedule_free_optimizer_has_a_constant_rate_unless_told_otherwise(tmp_path: Path) -> None:
    free = {"optimizer": {"type": "AdamWScheduleFree"}}
    assert derived(tmp_path, **free).schedule.lr_decay_style == "constant"
    told = derived(tmp_path, **free, lr_decay_style="cosine")
    assert told.schedule.lr_decay_style == "cosine"
    assert any("schedule_free_adamw stands in for a schedule" in note for note in told.notes)


def test_zero(tmp_path: Path) -> None:
    assert derived(tmp_path).optimizer.zero_stage == 0
    assert derived(tmp_path, zero_optimization={"stage": 3}).optimizer.zero_stage == 3
    assert derived(tmp_path, zero_stage=2).optimizer.zero_stage == 2
    raised = derived(tmp_path, precision="bf16", zero_optimization={"stage": 0})
    assert raised.optimizer.zero_stage == 1 and raised.optimizer.zero_optimization == {"stage": 1}
    assert derived(tmp_path, precision="fp16").optimizer.zero_stage == 1
    assert any("ZeRO stage 1 is used" in note for note in raised.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: must be 0, 1, 2 or 3, is 4"),
        ({"zero_stage": 2, "pipe_parallel_size": 2}, "stage 2 .*pipe_parallel_size 2; .*stage 1"),
        ({"zero_stage": 2, "zero_optimization": {"stage": 1}}, "zero_stage: is 2, but zero_optimization.stage is 1"),
        (
            {"optimizer": {"type": "adamm"}},
            "'adamm' .*'adam'.*: adafactor, adam, adamw, .*, lion, .*, sgd, sm3",
        ),
        ({"optimizer": {"type": "Adafactor"}, "zero_stage": 3}, "optimizer.type: adafactor .*stage 3 .*stage 1"),
        ({"optimizer": {"type": "Adafactor"}, "deterministic": "layout"}, "optimizer.type: adafactor .*order"),
        (
            {"optimizer": {"type": "Adafactor"}, "moe_num_experts": 4, "moe_router_type": "topk"},
            "optimizer.type: adafactor .*experts",
        ),
        ({"optimizer": {"type": "Adafactor", "params": {"d": 0.5}}}, "optimizer.params.d: must be 1 or more, is 0.5"),
        ({"optimizer": {"type": "SophiaG"}, "z_loss_weight": 0.1}, "optimizer.type: sophia .*z_loss_weight"),
        (
            {"optimizer": {"type": "sophia"}, "moe_num_experts": 4, "moe_router_type": "topk"},
            "optimizer.type: sophia .*experts",
        ),
        (
            {"optimizer": {"type": "sophia", "params": {"hessian_interval": 0}}},
            "optimizer.params.hessian_interval: must be 1 or more, is 0",
        ),
        ({"optimizer": {"type": "schedule_free"}, "ema_decay": 0.9}, "ema_decay: schedule_free_adamw averages"),
        (
            {"optimizer": {"type": "schedule_free_sgd", "params": {"momentum": 0}}},
            "optimizer.params.momentum: schedule_free_sgd .*above 0",
        ),
        ({"optimizer": {"type": "Muon"}, "zero_stage": 2}, "optimizer.type: muon .*stage 2 .*stage 1"),
        ({"optimizer": {"type": "Muon"}, "precision": "fp16"}, "optimizer.type: muon .*bfloat16"),
        ({"optimizer": {"type": "Muon"}, "use_mup": True, "mup_base_hidden_size": 16}, "muon .*use_mup"),
        (
            {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "optimizer.type: muon .*offload_optimizer",
        ),
        (
            {"optimizer": {"type": "Muon"}, "precision": "bfloat16", "data_types": {"grad_accum_dtype": "bf16"}},
            "optimizer.type: muon .*grad_accum_dtype",
        ),
        (
            {"optimizer": {"type": "Muon"}, "zero_stage": 1, "num_gpus": 2},
            "muon .*stage 1 .*0, or engine: native",
        ),
        ({"optimizer": {"type": "Muon", "params": {"ns_steps": 0}}}, "params.ns_steps: must be 1 to 100, is 0"),
        (
            {"optimizer": {"type": "Muon", "params": {"split_qkv": "rows"}}},
            "split_qkv: 'rows' .*matrices, groups, heads",
        ),
        ({"optimizer": {"type": "Muon", "params": {"adjust_lr_fn": "rms"}}}, "adjust_lr_fn: 'rms' .*match_rms_adamw"),
        ({"optimizer": {"type": "SM3", "params": {"beta": 1.0}}}, r"optimizer\.params\.beta: must be in \[0, 1\)"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer: .*device: cpu",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param: .*stage 3",
        ),
        ({"optimizer": {"params": {"lr": 0.1}}, "lr": 0.2}, "lr: is 0.2, but optimizer.params.lr is 0.1"),
        ({"optimizer": {"type": "SGD"}, "optimizer_type": "adam"}, "is adam, but optimizer.type is SGD"),
        ({"optimizer": {"params": {"lr": -0.1}}}, "optimizer.params.lr: must be 0 or more, is -0.1"),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, r"optimizer\.params\.betas: must be in \[0, 1\)"),
        ({"optimizer": {"params": {"weight_decay": 0.5}}, "weight_decay": 0.1}, "weight_decay: is 0.1, but"),
        ({"weight_decay": -1}, r"weight_decay: must be 0 or more, is -1"),
        ({"gradient_clipping": -1}, r"gradient_clipping: must be 0 \(.*\) or more, is -1\.0"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "'int8' is not one of: fp32, bf16, fp16"),
        ({"fp32_allreduce": True, "communication_data_type": "bf16"}, "fp32_allreduce is set"),
        (
            {"warmup": 2000, "train_iters": 8000},
            "warmup: .*not 2000: .* write 2000 steps",
        ),
        ({"lr_decay_fraction": 1.5}, "lr_decay_fraction: is a fraction"),
        ({"min_lr": 0.1}, "min_lr: 0.1 is above lr 0.001"),
        ({"prescale_gradients": True, "zero_stage": 2}, "prescale_gradients: .*ZeRO stage 2; .*False"),
        (
            {"gradient_predivide_factor": 2.0, "zero_stage": 3},
            "gradient_predivide_factor: .*ZeRO stage 3",
        ),
        (
            {"flops_profiler": {"enabled": True}, "pipe_parallel_size": 2},
            "flops_profiler: .*pipeline",
        ),
        ({"do_train": False, "data_path": "x"}, "do_train: .*train_iters: 0"),
        (
            {"override_lr_scheduler": True, "use_checkpoint_lr_scheduler": True},
            "override_lr_scheduler: use_checkpoint_lr_scheduler",
        ),
        ({"lr_decay_iters": 0}, "lr_decay_iters: must be above 0"),
        ({"train_iters": -1}, "train_iters: must be 0 or more"),
        ({"train_epochs": 0, "train_iters": None}, "train_epochs: must be above 0"),
        ({"iteration": -1}, " iteration: .*0 or more"),
        ({"temperature": -1}, "temperature: .*0 or more"),
        ({"train_epochs": 2}, "train_epochs: train_iters is set too"),
        ({"checkpoint_factor": 1, "checkpoint_scale": "log"}, "checkpoint_factor: .*1.01 .*checkpoint_scale: log"),
        ({"checkpoint_factor": 1.5}, "checkpoint_factor: .*whole number"),
        ({"extra_save_iters": [-1]}, "extra_save_iters: .*negative"),
        ({"eval_iters": -1}, r"eval_iters: must be 0 \(.*\) or more"),
        ({"seed": -1}, r"seed: must be in \[0, 2\^32\)"),
        ({"top_p": 2}, "is a probability"),
        ({"data_path": "a,b"}, r"data_path: 'a,b' .*train_data_paths: \[a, b\]"),
        ({"train_data_paths": ["a,b"]}, r"train_data_paths.*'a,b' .* a list\?"),
        ({"data_path": "a", "train_data_paths": ["b"]}, "train_data_paths is set too"),
        ({"valid_data_paths": ["b"]}, "is set without train_data_paths"),
        ({"train_data_paths": ["a", "b"], "train_data_weights": [1]}, "has 1 weights for 2 train_data_paths"),
        ({"train_data_weights": [1]}, "is set without train_data_paths"),
        ({"train_data_paths": ["a"], "train_data_weights": [-1]}, "train_data_weights: .*negative .*all 0"),
        (
            {"train_data_paths": ["a"], "train_data_weights": [1], "weight_by_num_documents": True},
            "weight_by_num_documents: train_data_weights is set too",
        ),
        ({"train_data_paths": ["a", "b"], "train_label_data_paths": ["c"]}, "has 1 paths for 2 train_data_paths"),
        ({"test_label_data_paths": ["c"]}, "has 1 paths for 0 test_data_paths"),
        ({"split": "a, b"}, "split: 'a, b' .*'969, 30, 1'"),
        ({"split": "1, 1, 1, 1"}, "split: '1, 1, 1, 1' .*'969, 30, 1'"),
        ({"split": "0, 0, 0"}, "split: '0, 0, 0' .*'969, 30, 1'"),
        ({"num_workers": -1}, "num_workers: must be 0 or more"),
    ],
)
def test_mistakes(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        derived(tmp_path, **changes)
    assert re.search(message, str(error.value))
    assert "a.yml:" in str(error.value)


def test_optimizer_values(tmp_path: Path) -> None:
    chosen = {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-5}}
    optimizer = derived(tmp_path, optimizer=chosen).optimizer
    assert (optimizer.optimizer_type, optimizer.lr, optimizer.betas, optimizer.eps) == ("adamw", 0.5, (0.8, 0.9), 1e-5)
    plain = derived(tmp_path).optimizer
    assert (plain.optimizer_type, plain.lr, plain.betas, plain.eps) == ("adam", 0.001, (0.9, 0.999), 1e-8)
    assert derived(tmp_path, optimizer={"type": "Lion"}).optimizer.betas == (0.9, 0.99)


def test_values_of_another_optimizer_are_noted_and_not_shown(tmp_path: Path) -> None:
    args = derived(tmp_path, optimizer={"type": "SGD", "params": {"momentum": 0.9, "betas": [0.8, 0.9]}})
    assert (args.optimizer.momentum, args.optimizer.betas, args.optimizer.eps) == (0.9, None, None)
    assert [note for note in args.notes if "optimizer.params.betas" in note and "sgd" in note]
    again = derive(NeoXArgs.from_resolved(args.to_resolved()))
    assert again.to_dict() == args.to_dict()


def test_weight_decay_inside_the_optimizer_is_used_and_reported(tmp_path: Path) -> None:
    args = derived(tmp_path, optimizer={"params": {"weight_decay": 0.0}})
    assert args.optimizer.weight_decay == 0.0
    assert any("GPT-NeoX would use" in note for note in args.notes)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 100),
        ({"lr_decay_iters": 70}, 70),
        ({"lr_decay_fraction": 0.255}, 25),
        ({"train_iters": None, "train_epochs": 1}, None),
    ],
)
def test_schedule_length(changes: dict, steps: int | None, tmp_path: Path) -> None:
    assert derived(tmp_path, **changes).schedule.lr_decay_iters == steps


def test_schedule_and_run_of_different_length_are_reported(tmp_path: Path) -> None:
    assert any(
        re.search(r"lr_decay_iters 200\b.*train_iters 100\b", note)
        for note in derived(tmp_path, lr_decay_iters=200).notes
    )
    assert any(
        re.search(r"step 50 of 100 .*lr_decay_iters", note) for note in derived(tmp_path, lr_decay_iters=50).notes
    )
    assert not derived(tmp_path, lr_decay_iters=100).notes
    assert not derived(tmp_path, lr_decay_iters=50, lr_decay_style="constant").notes


def test_epochs_become_steps_when_the_data_is_known(tmp_path: Path) -> None:
    first = derived(tmp_path, train_iters=None, train_epochs=3, lr_decay_fraction=0.5)
    assert first.training.train_iters is None
    args = derive(first, Facts(epoch_samples=50))
    assert args.training.train_iters == 37  # 150 samples, 4 per step
    assert args.schedule.lr_decay_iters == 18
    assert derive(args).training.train_iters == 37
    with pytest.raises(UserError, match="less than one batch"):
        derive(first, Facts(epoch_samples=1))


def test_set_length_wins_over_a_fraction(tmp_path: Path) -> None:
    args = derived(tmp_path, lr_decay_iters=100, lr_decay_fraction=0.5)
    assert args.schedule.lr_decay_iters == 100
    assert any("wins over lr_decay_fraction 0.5 (50 steps)" in note for note in args.notes)


def test_saving_at_the_end_only_is_reported(tmp_path: Path) -> None:
    assert any("at the end only" in note for note in derived(tmp_path, save="x").notes)
    assert not derived(tmp_path, save="x", checkpoint_factor=10).notes
    assert not derived(tmp_path, save="x", extra_save_iters=[5]).notes


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, (False, False, False)),
        ({"data_path": "a"}, (True, True, True)),
        ({"data_path": "a", "eval_iters": 0}, (True, False, False)),
        ({"data_path": "a", "train_iters": 0}, (False, True, True)),
        ({"train_data_paths": ["a"], "valid_data_paths": ["b"]}, (True, True, False)),
        ({"data_path": "a", "do_test": False}, (True, True, False)),
    ],
)
def test_what_the_run_does(changes: dict, want: tuple, tmp_path: Path) -> None:
    training = derived(tmp_path, **changes).training
    assert (training.do_train, training.do_valid, training.do_test) == want


def test_what_training_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data_path"):
        check_trainable(derived(tmp_path))
    with pytest.raises(UserError, match="train_iters"):
        check_trainable(derived(tmp_path, train_iters=None, data_path="x"))
    check_trainable(derived(tmp_path, data_path="x"))


def test_kind_of_generation(tmp_path: Path) -> None:
    assert derived(tmp_path).generation.text_gen_type == "unconditional"
    assert derived(tmp_path, sample_input_file="x").generation.text_gen_type == "input-file"
    assert (
        derived(tmp_path, sample_input_file="x", text_gen_type="interactive").generation.text_gen_type == "interactive"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fp16": {"enabled": True, "type": "bfloat16"}, "num_gpus": 2, "train_batch_size": 16},
        {"activation": "swiglu", "checkpoint_policy": "selective", "sliding_window_width": 4},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.2}}, "lr_decay_fraction": 0.5},
        {"train_data_paths": ["a"], "train_data_weights": [2], "save": "x", "communication_data_type": "bfloat16"},
    ],
)
def test_deriving_twice_and_from_plain_data_changes_nothing(changes: dict, tmp_path: Path) -> None:
    facts = Facts(vocab_size=259)
    args = derived(tmp_path, facts=facts, **changes)
    assert derive(args, facts) == args
    again = derive(type(args).from_saved(args.to_dict()), facts)
    assert again == args and again.hash() == args.hash()


def test_a_written_resolved_config_can_be_loaded(tmp_path: Path) -> None:
    args = derived(tmp_path, facts=Facts(vocab_size=259), activation="swiglu", precision="bf16", data_path="x")
    (tmp_path / "resolved.yml").write_text(yaml.safe_dump(args.to_dict()), encoding="utf-8")
    again = derive(NeoXArgs.from_files([str(tmp_path / "resolved.yml")]), Facts(vocab_size=259))
    assert again == args and again.hash() == args.hash()


def test_another_layout_after_the_fact(tmp_path: Path) -> None:
    """A resolved config can be run at another layout: what depends on it is computed afresh."""
    args = derived(tmp_path, facts=Facts(vocab_size=259), model_parallel_size=2)
    changed = derive(args.replace(model_parallel_size=4), Facts(vocab_size=259))
    assert (changed.parallel.world_size, changed.tokenizer.padded_vocab_size) == (4, 512)
    assert loaded(tmp_path).parallel.world_size is None


@pytest.mark.parametrize(("tensor", "stage", "said"), [(1, 0, None), (2, 0, "model_parallel_size"), (2, 1, "ZeRO")])
def test_what_sm3_takes_its_maxima_over(tensor: int, stage: int, said: str | None, tmp_path: Path) -> None:
    keys = {"optimizer": {"type": "SM3", "params": {"lr": 1e-3}}, "precision": "fp32", "zero_stage": stage}
    args = derived(tmp_path, facts=Facts(num_devices=2), **keys, model_parallel_size=tensor)
    notes = [note for note in args.notes if "SM3" in note]
    assert len(notes) == (said is not None) and all(said in note for note in notes if said)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"match": "*.bias", "wieght_decay": 0}, ["entry 1", "'wieght_decay'", "'weight_decay'"]),
        ({"match": "*.bias", "lr_mult": -1}, ["entry 1", "lr_mult", "-1"]),
        ({"match": "*.bias", "weight_decay": True}, ["entry 1", "weight_decay", "True"]),
        ({"match": "*.bias", "freeze": 1}, ["entry 1", "freeze", "1"]),
        ({"match": [], "freeze": True}, ["entry 1", "match", "[]"]),
        ({"freeze": True}, ["entry 1", "match", "None"]),
        ({"match": "*.bias"}, ["entry 1", "*.bias", "freeze"]),
    ],
)
def test_a_wrong_entry_of_parameter_groups_is_named(entry: dict, named: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        derived(tmp_path, parameter_groups=[{"match": "*", "lr_mult": "1e-1"}, entry])
    assert ".yml:" in str(refused.value)
    assert all(part in str(refused.value) for part in ["parameter_groups", *named])
