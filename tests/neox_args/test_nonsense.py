"""Values that no run can have: refused at once, naming file and line, where a rank would die of them or ignore them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.nested import NESTED, check_nested
from megatron.optim.schedules import learning_rate
from tests.neox_args.helpers import derived, load_text

pytestmark = pytest.mark.cpu

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join([f'*{o}'] * 9)}]\n" for o, n in zip("abcdefg", "bcdefgh")
)
DEEP = "seed: &a0 [1]\n" + "".join(f"k{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 400))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\nnum_layers: &a [*a]\n", 2),
        ("fp16: &x {<<: *x}\n", 1),
        ("fp16: &x {a: {b: [1, *x]}}\n", 1),
        (BOMB, 6),
        (DEEP, 100),
        ("seed: 1\nfp16: " + "{a: " * 300 + "1" + "}" * 300, 2),
        ("seed: " + "[" * 50_000, 1),
        ("lr: 1\nseed: !!timestamp 16\n", 2),
        ("seed: !!float x\n", 1),
        ("seed: !!int 0.95\n", 1),
        ("seed: !!bool x\n", 1),
        ("lr: 1\n\nseed: 2001-99-99\n", 3),
        ("seed: " + "9" * 5000, 1),
        ("seed: 0x" + "f" * 5000, 1),
    ],
    ids=lambda value: str(value)[:20].encode("unicode_escape").decode(),
)
def test_texts_that_python_cannot_read(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(UserError, match=rf"a\.yml:{line}: not valid YAML"):
        load_text(tmp_path, text)
    value = text.partition(": ")[2].strip()
    if "\n" not in value:
        with pytest.raises(UserError, match="seed=.* not valid YAML"):
            load_text(tmp_path, "lr: 1\n", overrides=[f"seed={value}"])


def test_aliases_are_no_fault(tmp_path: Path) -> None:
    text = "fp16: &same {enabled: false}\nbf16: *same\nlr: &rate 0.5\nmin_lr: *rate\n"
    args = load_text(tmp_path, text)
    assert args.optimizer.bf16 == {"enabled": False} and args.schedule.min_lr == 0.5


@pytest.mark.parametrize("number", ["1e30", "9223372036854775808", "-1e30", "1e400", "0x" + "f" * 40])
@pytest.mark.parametrize("key", ["num_layers", "train_iters", "seed", "extra_save_iters", "fp16.hysteresis"])
def test_a_whole_number_has_64_bits(tmp_path: Path, key: str, number: str) -> None:
    with pytest.raises(UserError, match=f"{key}: expected .*(2\\^63|finite|whole)"):
        load_text(tmp_path, "lr: 1\n", overrides=[f"{key}={number}"])


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("num_layers", 10**6, "100000"),
        ("num_gpus", 2**40, "1000000"),
        ("num_workers", 10**6, "1000"),
        ("save", "x" * 256, "255"),
        ("train_data_paths", ["data/a", "y/" * 3000], "4095"),
        ("load", "a\0b", "name"),
        ("padded_vocab_size", 100, "50304.*128"),
        ("npy_eod", -5, "-5"),
        ("npy_eod", 50257, "50257"),
        ("weighted_sampler_alpha", -1, "-1"),
        ("min_lr", -1e-5, "-1e-05"),
        ("moe_top_k", 0, "0"),
        ("moe_jitter_eps", -1, "-1"),
        ("gradient_predivide_factor", 0, "0"),
        ("expansion_factor", 1e-9, "1e-09"),
        ("optimizer", {"type": "sgd", "params": {"momentum": 5}}, "5"),
        ("optimizer", {"type": "adam", "params": {"eps": -1}}, "-1"),
        ("zero_optimization", {"cpu_offload": "abc"}, "true or false"),
        ("zero_optimization", {"offload_param": {"device": "cpu", "ratio": 2}}, "at most 1"),
        ("fp16", {"enabled": True, "initial_scale_power": 1e6}, "at most 127"),
    ],
)
def test_the_key_its_line_and_the_limit_are_named(tmp_path: Path, key: str, value: Any, limit: str) -> None:
    with pytest.raises(UserError, match=rf"a\.yml:\d+: .*{key}.*{limit}"):
        derived(tmp_path, **{key: value}, facts=Facts(vocab_size=50257))


def test_a_computed_value_that_is_right_may_stand_there(tmp_path: Path) -> None:
    args = derived(tmp_path, padded_vocab_size=50304, world_size=7, facts=Facts(vocab_size=50257, num_devices=1))
    assert args.tokenizer.padded_vocab_size == 50304
    assert any("world_size 7 is not used" in note and "a.yml:" in note for note in args.notes)


def refuses(error: type[Exception], call: Callable[..., object], *args: Any, **kwargs: Any) -> bool:
    try:
        call(*args, **kwargs)
    except error:
        return True
    return False


@pytest.mark.parametrize("name", ["zero_optimization", "fp16"])
def test_numbers_that_deepspeed_refuses_on_the_ranks_are_refused_here(name: str) -> None:
    engines = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config}
    refused = 0
    for key, kind in NESTED[name].items():
        for value in (-1, 0, 1, 1000) if kind in (int, float) and key != "stage" else ():
            given = {key: value} | ({"enabled": True} if name == "fp16" else {})
            theirs = refuses(ValidationError, engines[name], **given)
            ours = refuses(UserError, check_nested, name, given, str, print)
            refused += theirs
            assert ours or not theirs, given
            assert not (ours and value > 0 and not theirs) or key == "initial_scale_power", given
    assert refused >= 3


def test_parameters_that_torch_refuses_on_the_ranks_are_refused_here(tmp_path: Path) -> None:
    weight = [torch.nn.Parameter(torch.zeros(1))]
    optimizers = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
    cases = [("adam", {"eps": eps, "betas": (beta, 0.9)}) for eps in (-1.0, 0.0, 1e-8) for beta in (-0.1, 0.0, 1.0)]
    cases += [("sgd", {"momentum": m, "nesterov": n}) for m in (-1.0, 0.0, 0.9) for n in (False, True)]
    for kind, params in cases:
        optimizer = {"type": kind, "params": {**params, "lr": 1e-3}}
        theirs = refuses(ValueError, optimizers[kind], weight, lr=1e-3, **params)
        assert theirs == refuses(UserError, derived, tmp_path, optimizer=optimizer), optimizer


def test_a_warm_up_that_the_run_does_not_leave(tmp_path: Path) -> None:
    """A published schedule, shrunk to 20 steps: the log of such a run ended at a learning rate of 7.132e-07."""
    schedule = {"lr": 3e-4, "lr_decay_iters": 3_600_000, "warmup": 0.00222}
    args = derived(tmp_path, train_iters=20, **schedule)
    (note,) = [note for note in args.notes if "warm-up" in note]
    assert all(number in note for number in ("7992 steps", "train_iters is 20", "7.13e-07", "0.0003"))
    assert f"{learning_rate(19, lr=3e-4, min_lr=0, decay_iters=3_600_000, warmup=0.00222, style='linear'):.3g}" in note
    assert not any("warm-up" in note for note in derived(tmp_path, train_iters=7992, **schedule).notes)
    advised = derived(tmp_path, train_iters=20, **schedule | {"lr_decay_iters": 20})
    assert not any("warm-up" in note or "lr_decay_iters" in note for note in advised.notes)


FILE = "train_data_paths: [a, b]\ntrain_data_weights: [1, 2]\nvalid_data_paths: [v]\ntrain_epochs: 2\ninclude: h1\n"


@pytest.mark.parametrize(
    ("override", "losers"),
    [
        ("data_path=x", ["train_data_paths (a.yml:1)", "valid_data_paths (a.yml:3)", "train_data_weights (a.yml:2)"]),
        ("train_iters=3", ["train_epochs (a.yml:4)"]),
        ("exclude=h2", ["include (a.yml:5)"]),
    ],
)
def test_an_override_wins_over_the_keys_of_files_that_it_excludes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, losers: list[str]
) -> None:
    """data_path=... on top of a published config that has train_data_paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yml").write_text(FILE)
    args = load_text(Path(), FILE, overrides=[override])
    (note,) = args.notes
    assert note == f"command line: {override.partition('=')[0]} wins over {', '.join(losers)}"
    assert not any(args.is_set(loser.partition(" ")[0]) for loser in losers)


def test_two_overrides_that_exclude_each_other_stay_an_error(tmp_path: Path) -> None:
    both = ["data_path=x", "train_data_paths=[y]", "train_batch_size=1", "num_attention_heads=1"]
    with pytest.raises(UserError, match="data_path.*train_data_paths"):
        derive(load_text(tmp_path, f"{FILE}num_layers: 1\nhidden_size: 8\nseq_length: 8\n", overrides=both))
    assert load_text(tmp_path, FILE, overrides=["data_path=null"]).notes == ()


def test_damaged_texts_are_read_or_refused(tmp_path: Path) -> None:
    """Characters of a config removed, doubled, replaced and shuffled (seeded): never anything but a sentence."""
    chosen = random.Random(6)
    lines = [
        *FILE.splitlines(),
        "fp16: {enabled: false, loss_scale: 0}",
        "split: '9,1'",
        "extra_save_iters: [&s 1, *s]",
    ]
    parts = [*"?-{[}]'|>%\t@\\\0~#\r\ufeff", '"', "*s", "&s ", "<<: ", "!!float ", "!!timestamp ", "? ", "- ", ": "]
    parts += ["---\n", "...\n", "0x", "1e30", ".inf", "2001-13-01", ""]
    read = 0
    for _ in range(600):
        text = "\n".join(chosen.sample(lines, chosen.randint(1, len(lines)))) + "\n"
        for _ in range(chosen.randint(0, 2)):
            place = chosen.randrange(len(text) + 1)
            text = text[:place] + chosen.choice(parts) + text[place + chosen.randint(0, 3) :]
        try:
            read += not refuses(UserError, load_text, tmp_path, text)
        except Exception as error:
            pytest.fail(f"{text!r}: {type(error).__name__}: {error}")
    assert 100 < read < 500
