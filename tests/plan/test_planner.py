"""The dry run: what it says, what it refuses, that it is quick, and that every shipped config goes through it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron.checkpoint.start import Start
from megatron.cluster.launch import place
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.plan import sections
from megatron.plan.partners import ConfigFiles
from megatron.plan.planner import plan
from megatron.plan.saves import Saves

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path for path in ROOT.glob("configs/**/*.yml") if path.parent.name != "mixtures")
MIXTURES = sorted(ROOT.glob("configs/mixtures/*.yml"))
CONFIGS = ConfigFiles(ROOT / "configs")  # some are parts: of a network, or of a machine


def dry_run(*given: str | Path, script: str = "train.py") -> str:
    paths = [str(item) for item in given if isinstance(item, Path)]
    args = NeoXArgs.from_files(paths, [item for item in given if isinstance(item, str)])
    return plan(args, place(args, {"DS_ACCELERATOR": "cpu"}, default_hostfile="/no such file"), script)


def section(text: str, title: str) -> list[str]:
    """The lines of the section whose title starts so."""
    parts = [part for part in text.split("== ") if part.startswith(title)]
    assert len(parts) == 1, f"{len(parts)} sections {title!r} in:\n{text}"
    return [line.strip() for line in parts[0].splitlines()[1:] if line.strip()]


def rows(text: str, title: str, head: str) -> list[list[str]]:
    """The cells of the table under a header line that starts with `head`."""
    lines = section(text, title)
    start = next(i for i, line in enumerate(lines) if line.split()[0] == head)
    return [line.split() for line in lines[start + 1 :]]


def test_ranks_stages_and_batch_of_a_3d_layout(run_config: Path) -> None:
    layout = ("pipe_parallel_size=2", "model_parallel_size=2", "num_gpus=8")
    text = dry_run(run_config, *layout)
    # outermost pipe, then data, then model: GPT-NeoX's order
    expected = [[p, d, m] for p in "01" for d in "01" for m in "01"]
    assert [row[2:] for row in rows(text, "ranks", "rank")] == expected
    assert [row[0] for row in rows(text, "ranks", "rank")] == [str(rank) for rank in range(8)]
    stage = rows(text, "stages", "stage")
    assert [row[:2] for row in stage] == [["0", "3"], ["1", "3"]]
    assert "train_batch_size 16 = micro 2 x accumulation 4 x data parallel 2" in section(text, "steps")
    assert "256 tokens per step, 100 steps, 25.6K tokens" in "\n".join(section(text, "steps"))


def test_callbacks_are_listed_with_their_keys(run_config: Path) -> None:
    text = dry_run(run_config, "log_interval=7", "callbacks.replica_check=false", "callbacks.stop_on_signal=false")
    listed = {row[0]: row[1:] for row in rows(text, "callbacks", "callback")}
    assert listed["meter"] == ["log", "log_interval=7"] and "replica_check" not in listed
    assert section(text, "callbacks")[-1] == "off: replica_check, stop_on_signal"


def test_parameters_are_those_of_the_formula(run_config: Path) -> None:
    # h = 32, FFN 128, layernorm: qkv 3h(h+1), dense h(h+1), two norms 4h, MLP 128(h+1) + h(128+1); tied embedding 512h
    block = 3 * 32 * 33 + 32 * 33 + 4 * 32 + 128 * 33 + 32 * 129
    total = 6 * block + 512 * 32 + 2 * 32
    assert any(line.startswith(f"parameters {total:,} ") for line in section(dry_run(run_config), "model"))
    # FLOPs: 6 per parameter in a matrix product and full attention 12 L h s, for 256 tokens
    flops = 256 * (6 * (6 * block + 512 * 32 + 2 * 32) + 12 * 6 * 32 * 16)
    assert any(line.startswith(f"{flops:.3e} FLOPs per step") for line in section(dry_run(run_config), "steps"))


def test_keys_come_with_their_sources(run_config: Path) -> None:
    lines = {line.split()[0]: line for line in section(dry_run(run_config, "train_iters=7"), "config")}
    assert lines["train_iters"].split()[1:] == ["7", "command", "line"]
    assert lines["hidden_size"].endswith(f"{run_config}:2")
    assert "derived" in lines["gradient_accumulation_steps"]
    assert "log_interval" not in lines  # at its default


def test_data_tokens_and_epochs_per_source(run_config: Path) -> None:
    *table, note = rows(dry_run(run_config), "data", "role")
    # 100 documents of 200 tokens split 8:1:1; 1600 training samples of 16 tokens; (100 // 50 + 1) x 2 x 16 to validate
    assert [row[0] for row in table] == ["train", "valid", "test"]
    assert [row[2:4] for row in table] == [["80", "16,000"], ["10", "2,000"], ["10", "2,000"]]
    assert [row[5] for row in table] == ["1,600", "96", "32"]
    assert float(table[0][6]) == pytest.approx(1600 * 16 / 16000, rel=1e-2)
    assert " ".join(note).startswith("valid and test: the last 20 of 100 documents of ")


def test_mixture_shares_the_samples_by_weight(run_config: Path, tokens: Callable[..., str]) -> None:
    text = run_config.read_text().splitlines()
    run_config.write_text("\n".join(line for line in text if not line.startswith(("data_path", "split"))))
    paths = f"train_data_paths=[{tokens(50, 100)}, {tokens(100, 200)}]"
    table = rows(dry_run(run_config, paths, "train_data_weights=[3, 1]", "eval_iters=0"), "data", "role")
    assert [row[4:6] for row in table] == [["0.75", "1,200"], ["0.25", "400"]]


def test_epochs_become_steps(run_config: Path) -> None:
    text = run_config.read_text().replace("train_iters: 100", "train_epochs: 2")
    run_config.write_text(text)
    # (16000 - 1) // 16 = 999 samples a pass, two passes, 16 samples a step
    steps = 999 * 2 // 16
    assert any(f" {steps} steps" in line for line in section(dry_run(run_config), "steps"))


def test_checkpoint_plan(run_config: Path, tmp_path: Path) -> None:
    save = f"save={tmp_path / 'ckpt'}"
    lines = section(dry_run(run_config, save, "checkpoint_factor=30", "extra_save_iters=[5]"), "checkpoints")
    assert lines[0].startswith("fresh start")
    assert "after steps 5, 30, 60, 90, 100 (5 checkpoints)" in lines[1]
    lines = section(
        dry_run(run_config, save, "checkpoint_factor=30", "extra_save_iters=[5]", "keep_last_n_checkpoints=2"),
        "checkpoints",
    )
    assert ", 3 kept: " in lines[2]  # 90, 100 and the explicit 5
    every = ("checkpoint_factor=50", "temporary_checkpoint_minutes=15")
    assert ", 3 kept: " in section(dry_run(run_config, save, *every), "checkpoints")[2]  # 50, 100 and a temporary one
    lines = section(dry_run(run_config, save, "checkpoint_scale=log", "checkpoint_factor=2"), "checkpoints")
    assert "after steps 1, 2, 4, 8, 16, 32, 64, 100 " in lines[1]
    assert section(dry_run(run_config), "checkpoints")[1].startswith("nothing is saved")


@pytest.mark.parametrize(("step", "left"), [(60, True), (100, False)])
def test_a_run_at_its_end_has_no_step_left(step: int, left: bool) -> None:
    shown = sections.checkpoints(Start("resume", None, step, "resuming"), Saves([60, 100], 2, 1e6, None), "out")
    assert ("no step is left: the run ends at step 100" in "\n".join(shown)) is not left


def test_differences_for_this_config_are_listed(run_config: Path) -> None:
    assert any("gradient_clipping 1.0" in line for line in section(dry_run(run_config), "differences"))
    off = section(dry_run(run_config, "gradient_clipping=0.5"), "differences")
    assert not any("gradient_clipping 1.0" in line for line in off)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data_path=/nowhere/data",), "/nowhere/data"),
        (("data_path=",), "data_path"),
        (("train_iters=",), "train_iters"),
        (("tokenizer_type=HFTokenizer", "vocab_file=/nowhere/tok.json"), "/nowhere/tok.json"),
        (("load=/nowhere/ckpt",), "/nowhere/ckpt"),
        (("load=.", "iteration=7"), "iteration 7"),
        (("pipe_parallel_size=7",), "pipe_parallel_size"),
        (("pipe_partition_method=type:nonsense", "pipe_parallel_size=2"), "matches no layer"),
        (("model_parallel_size=2", "num_gpus=3"), "nearest 2 or 4"),
        (("train_batch_size=15",), "15"),
        (("split=98,1,1", "seq_length=300", "max_position_embeddings=300"), "(valid, 1 documents)"),
        (("seq_length=20000", "max_position_embeddings=20000", "eval_iters=0"), "20001"),
    ],
)
def test_what_the_real_run_would_refuse_is_refused(run_config: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        dry_run(run_config, *overrides)
    assert message in str(error.value)


def test_evaluation_and_generation_need_a_checkpoint_and_no_data(run_config: Path) -> None:
    for script in ("eval.py", "generate.py"):
        with pytest.raises(UserError, match="load is not set"):
            dry_run(run_config, "data_path=", script=script)
        with pytest.raises(UserError, match="/nowhere/ckpt"):
            dry_run(run_config, "data_path=", "load=/nowhere/ckpt", script=script)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_config_dry_runs(path: Path, tokens: Callable[..., str], tmp_path: Path) -> None:
    given: list[Path | str] = [*CONFIGS.whole(path)[0]]
    script = "generate.py" if path.name == "text_generation.yml" else "train.py"
    given += ["tokenizer_type=CharLevelTokenizer", "vocab_file=", "eval_iters=1", f"data_path={tokens(1000, 100)}"]
    given += ["split=1,1,1", f"save={tmp_path}", f"load={tmp_path}"]
    if script == "generate.py":
        with pytest.raises(UserError, match="load: no checkpoint in"):
            dry_run(*given, script=script)
        return
    text = dry_run(*given, script=script)
    for title in ("config", "ranks", "model", "stages", "memory", "steps", "data", "checkpoints"):
        assert section(text, title), title


@pytest.mark.parametrize("path", MIXTURES, ids=lambda path: path.stem)
def test_every_shipped_mixture_dry_runs(
    path: Path, run_config: Path, tokens: Callable[..., str], tmp_path: Path
) -> None:
    made = tokens(2000, 100)
    mixture = yaml.safe_load(path.read_text())["mixture"]
    named = [*mixture["sources"].values(), *mixture.get("valid_sets", {}).values()]
    for file in (one if isinstance(one, str) else one["path"] for one in named):
        (tmp_path / "in" / file).parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".bin", ".idx"):
            (tmp_path / "in" / f"{file}{suffix}").symlink_to(made + suffix)
    run_config.write_text(run_config.read_text().replace("data_path:", "# data_path:"))
    text = dry_run(run_config, path, f"data_root={tmp_path / 'in'}", "train_iters=9900")
    table = rows(text, "data", "role")
    assert [row[1] for row in table if row[0] == "train"] == list(mixture["sources"])
    assert ("weights of train" in text) == isinstance(mixture["weights"], list)
    sets = [row[0].removeprefix("valid/") for row in table if row[0].startswith("valid/")]
    assert set(sets) >= set(mixture.get("valid_sets", {}))


def test_the_command_is_quick_exits_0_or_2_and_imports_no_torch(run_config: Path) -> None:
    (run_config.parent / "train.py").touch()
    code = (
        "import atexit, runpy, sys\n"
        "heavy = {'torch', 'deepspeed', 'transformers'}\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules))))\n"
        f"sys.argv = ['deepy.py', 'train.py', {str(run_config)!r}, '--dry-run', *sys.argv[1:]]\n"
        f"runpy.run_path({str(ROOT / 'deepy.py')!r}, run_name='__main__')\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *argv]
        options = {"cwd": run_config.parent, "env": env, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, check=False, **options)

    done = run()
    assert done.returncode == 0, done.stderr
    assert "Dry run: nothing was started." in done.stdout and "heavy: []" in done.stdout
    missing = ("data_path=/nowhere/data", "tokenizer_type=HFTokenizer", "vocab_file=/nowhere/tok.json")
    refused = run(*missing, "load=/nowhere/ckpt")
    assert refused.returncode == 2 and "error: " in refused.stderr and "Traceback" not in refused.stderr
    # what does not need them is planned all the same: GPT-2's vocabulary of 50,257 in rows of 128
    assert "50257 tokens, 50304 rows" in refused.stdout and rows(refused.stdout, "memory", "stage")
    for path in ("/nowhere/data", "/nowhere/tok.json", "/nowhere/ckpt"):
        assert len([line for line in refused.stderr.splitlines() if path in line]) == 1, refused.stderr


def test_what_a_packing_leaves_out_is_reported(run_config: Path) -> None:
    run_config.write_text(run_config.read_text() + "pack_impl: best_fit\n")
    assert any("an epoch is" in line and "of them padding" in line for line in section(dry_run(run_config), "data"))
