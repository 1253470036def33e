"""The argument grammar of deepy.py and of ranks started by other launchers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from megatron.cluster.command_line import parse_launcher_command_line, parse_rank_command_line
from megatron.errors import UserError
from megatron.home import HOME

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").mkdir()
    for name in ("train.py", "eval.py", "a.yml", "b.yml", "c.json", "configs/run.yml", "configs/text_generation.yml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_configs_overrides_and_flags_in_any_order() -> None:
    line = parse_launcher_command_line(["train.py", "a", "train_iters=100", "b.yml", "--dry-run", "c.json"])
    assert line.user_script == "train.py"
    assert line.paths == ["a.yml", "b.yml", "c.json"]
    assert line.overrides == ["train_iters=100"]
    assert line.dry_run and not line.explain and not line.prepare
    assert parse_launcher_command_line(["train.py", "a", "--prepare"]).prepare


def test_override_spellings_reach_the_config_unchanged() -> None:
    given = ["--optimizer.params.lr=3e-4", "train-iters=5", 'split="9,1"', "attention_config=[[[global], 2]]", "save="]
    line = parse_launcher_command_line(["train.py", "a.yml", *given])
    assert line.overrides == [item.removeprefix("--") for item in given]


def test_keys_are_taken_as_flags_with_a_value_after_them(folder: Path) -> None:
    given = ["--train_iters", "3", "--optimizer.params.lr", "1e-3", "--ema-evaluate", "a.yml", "--seed", "-1"]
    line = parse_launcher_command_line(["train.py", *given, "--ema_evaluate", "no"])
    assert line.paths == ["a.yml"]
    wanted = ["train_iters=3", "optimizer.params.lr=1e-3", "ema-evaluate=true", "seed=-1", "ema_evaluate=no"]
    assert line.overrides == wanted
    with pytest.raises(UserError, match="train-iters=VALUE"):
        parse_launcher_command_line(["train.py", "a.yml", "--train-iters"])


def test_short_names_of_flags_and_prompts_that_look_like_overrides(folder: Path) -> None:
    given = ["--prompt", "E=mc^2", "--output=a=b.jsonl", "--input", "c=d.txt", "top_k=1"]
    line = parse_launcher_command_line(["generate.py", "a.yml", *given])
    wanted = ['sample_input_file="c=d.txt"', 'sample_output_file="a=b.jsonl"', 'prompt=["E=mc^2"]']
    assert line.overrides == ["top_k=1", *wanted]


def test_configs_and_scripts_that_come_with_deepy_are_found_from_anywhere(folder: Path) -> None:
    line = parse_launcher_command_line(["generate.py", "tiny", "llama/7B.yml", "configs/demo.yml"])
    assert line.user_script == str(HOME / "generate.py")
    names = ("tiny.yml", "llama/7B.yml", "demo.yml")
    assert line.paths == [str(HOME / "configs" / name) for name in names]
    Path("tiny.yml").touch()  # what is here comes first
    assert parse_launcher_command_line(["train.py", "tiny"]).paths == ["tiny.yml"]


def test_a_path_with_an_equals_sign_is_not_an_override(folder: Path) -> None:
    (folder / "lr=1").mkdir()
    (folder / "lr=1/run.yml").touch()
    assert parse_launcher_command_line(["train.py", "./lr=1/run.yml"]).paths == ["lr=1/run.yml"]


def test_every_flag_of_the_neox_launcher_becomes_an_override() -> None:
    argv = ["eval.py", "-d", "configs", "run", "text_generation.yml", "--eval_tasks", "lambada", "hellaswag"]
    argv += ["--iteration", "100", "--wandb_group", "1e3", "--wandb_run_name=r=1", "--wandb_team", "t"]
    argv += ["--eval_results_prefix", "p", "-H", "hosts", "-i", "in=1.txt", "-o", "out.jsonl"]
    line = parse_launcher_command_line(argv)
    assert line.paths == ["configs/run.yml", "configs/text_generation.yml"]
    values = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in line.overrides)}
    assert values == {
        "eval_tasks": ["lambada", "hellaswag"],
        "iteration": 100,
        "wandb_group": "1e3",
        "wandb_run_name": "r=1",
        "wandb_team": "t",
        "eval_results_prefix": "p",
        "hostfile": "hosts",
        "sample_input_file": "in=1.txt",
        "sample_output_file": "out.jsonl",
    }


def test_explain_takes_one_key_each_and_leaves_the_configs_alone() -> None:
    line = parse_launcher_command_line(["train.py", "--explain", "lr", "a.yml", "--explain", "seed", "b.yml"])
    assert line.explain == ("lr", "seed") and line.paths == ["a.yml", "b.yml"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train.py"], "CONF"),
        (["trian.py", "a.yml"], "trian.py: no such script.* Did you mean 'train.py'"),
        (["a.yml", "b.yml"], "Did you mean `deepy.py train.py a.yml`"),
        (["train.py", "b.yaml"], "b.yaml: no such config file"),
        (["train.py", "-d", "configs", "runn"], "Did you mean 'run.yml'"),
        (["train.py", "a.yml", "--autotuning", "tune"], "not available"),
        (["train.py", "a.yml", "--iterations", "5"], "Did you mean '--iteration'"),
        (["train.py", "a.yml", "--autotuning", "fly"], "invalid choice"),
        (["train.py", "a.yml", "--output", "runs/a"], "unrecognized arguments: --output"),
        (["generate.py", "a.yml", "--prompt", "Once", "b.yml"], "--prompt: b.yml would be one more prompt"),
    ],
)
def test_bad_arguments_are_user_errors_that_name_the_fix(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_launcher_command_line(argv)


def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_launcher_command_line(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for expected in (
        "deepy.py train.py",
        "--dry-run",
        "--prepare",
        "--explain",
        "-H hosts.txt",
        "torchrun",
        "exit codes",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("script", "shown", "left_out"),
    [
        ("train.py", ["--wandb_group", "train_iters", "--prepare"], ["--eval_tasks", "--prompt"]),
        ("eval.py", ["--eval_tasks", "--num_fewshot", "eval_suite"], ["--prompt", "--wandb_group"]),
        ("generate.py", ["--prompt", "temperature", "text_gen_type=interactive"], ["--eval_tasks", "--wandb_group"]),
    ],
)
def test_help_of_a_script_is_its_own(script, shown, left_out, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    for parse in (lambda: parse_launcher_command_line([script, "--help"]), lambda: parse_rank_command_line(["--help"])):
        with pytest.raises(SystemExit):
            parse()
        text = capsys.readouterr().out
        assert f"python deepy.py {script} run.yml" in text and "${CONFIG_DIR}" in text
        assert [word for word in shown if word not in text] == [] == [word for word in left_out if word in text]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_launcher_command_line(["--version"])
    assert not stop.value.code and re.fullmatch(r"deepy \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_rank_grammar_is_that_of_the_launcher() -> None:
    argv = ["a", "b.yml", "train_iters=3", "-d", "configs", "--iteration", "7", "--local_rank=2"]
    argv[0:2] = ["run", "text_generation.yml"]
    paths, overrides, resolved = parse_rank_command_line(argv)
    assert paths == ["configs/run.yml", "configs/text_generation.yml"]
    assert overrides == ["train_iters=3", "iteration=7"]
    assert resolved is None


def test_rank_started_by_deepy_gets_only_the_resolved_file() -> None:
    assert parse_rank_command_line(["--resolved", "x/y=z.json"]) == ([], [], "x/y=z.json")
    with pytest.raises(UserError, match="alone"):
        parse_rank_command_line(["--resolved", "f.json", "lr=1"])
    with pytest.raises(UserError, match="no config file"):
        parse_rank_command_line([])
    for foreign in (
        ["--megatron_config", "e30="],
        ["a.yml", "--dry-run"],
        ["a.yml", "--prepare"],
        ["a.yml", "--explain", "lr"],
    ):
        with pytest.raises(UserError, match=r"python deepy\.py"):
            parse_rank_command_line(foreign)
