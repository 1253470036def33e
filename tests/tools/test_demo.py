"""`make demo`: what it reuses, what it forgets, and that it fails when a stage or a result is bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import demo, demo_post

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that looks like the repository to the demo."""
    monkeypatch.chdir(tmp_path)
    for name in demo.CONFIGS:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("a: 1\n")
    return tmp_path


def a_demo(*stages: demo.Stage, good: bool = True) -> demo.Demo:
    return demo.Demo(demo.DEMO, demo.CONFIGS, stages, lambda: good)


def finish(difference: float = 3e-6, last_loss: float = 4.5) -> None:
    """Files as the stages leave them."""
    (demo.DEMO / "logs").mkdir(parents=True, exist_ok=True)
    demo.CHECKPOINTS.mkdir()
    rows = [
        {"step": 10, "train/lm_loss": 8.9},
        {"step": 20, "train/lm_loss": last_loss},
        {"step": 20, "validation/lm_loss": 4.6},
    ]
    (demo.CHECKPOINTS / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (demo.DEMO / "generated.jsonl").write_text(json.dumps({"context": "def ", "text": "f():"}) + "\n")
    demo.log_of(demo.DEMO, "Export").write_text(
        f"largest logit difference to our own model in fp32: 7\n"
        f"logit difference between Deepy and transformers in fp32: largest {difference:.2e}\n"
    )


def test_stages_are_done_when_their_results_exist(folder: Path) -> None:
    train, resume = demo.stages(200)[2:4]
    assert "exit_interval=100" in train.command
    assert not train.done()
    assert not resume.done()
    demo.CHECKPOINTS.mkdir(parents=True)
    (demo.CHECKPOINTS / "latest").write_text("global_step100")
    assert train.done()
    assert not resume.done()
    (demo.CHECKPOINTS / "latest").write_text("global_step200\n")
    assert resume.done()


def test_output_is_shown_and_kept_only_on_success(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = demo.Stage("Plan", "", "echo planned; python -c 'import sys; print(sys.prefix)'", lambda: False)
    bad = demo.Stage("Export", "", "echo half; exit 3", lambda: False)
    done = demo.Stage("Train", "", "exit 5", lambda: True)
    assert a_demo(good, done).run() == 0
    assert "    planned" in capfd.readouterr().out
    assert "planned" in demo.log_of(demo.DEMO, "Plan").read_text()
    assert a_demo(bad).run() == 3
    assert not demo.log_of(demo.DEMO, "Export").exists()
    assert a_demo(good, good=False).run() == 1


def test_a_stage_ends_at_its_first_command_that_fails(folder: Path) -> None:
    assert a_demo(demo.Stage("Data", "", "false\ntouch went-on", lambda: False)).run() == 1
    assert not Path("went-on").exists()


def test_other_configs_make_the_demo_start_afresh(folder: Path) -> None:
    assert a_demo().run() == 0
    finish()
    assert a_demo().run() == 0
    assert demo.CHECKPOINTS.exists()
    Path(demo.CONFIGS[1]).write_text("a: 2\n")
    assert a_demo().run() == 0
    assert not demo.CHECKPOINTS.exists()
    assert (demo.DEMO / "configs.sha256").exists()


def test_summary_of_a_good_demo(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish()
    assert demo.summary()
    text = capsys.readouterr().out
    assert "8.900 (step 10) -> 4.500 (step 20)" in text
    assert "4.600" in text and "3.0e-06" in text and "def f():" in text


@pytest.mark.parametrize("bad", [{"difference": 2e-4}, {"last_loss": 9.5}, {"last_loss": float("nan")}])
def test_a_bad_result_fails_the_demo(folder: Path, bad: dict[str, float]) -> None:
    finish(**bad)
    assert not demo.summary()


@pytest.mark.parametrize("reward", [0.9, 0.2])
def test_the_demo_of_post_training_needs_every_figure_to_move(tmp_path: Path, monkeypatch: Any, reward: float) -> None:
    monkeypatch.chdir(tmp_path)
    figures = {
        "sft": {"train/lm_loss": (4.0, 0.5)},
        "rm": {"train/accuracy": (0.4, 1.0)},
        "dpo": {"train/margins": (0.0, 2.0)},
        "grpo": {"rollout/reward": (0.3, reward)},
        "unlearn": {"train/ga_actual_loss": (0.1, 9.0), "train/lm_loss": (0.1, 0.01)},
    }
    for run, metrics in figures.items():
        (demo_post.DEMO / run).mkdir(parents=True)
        rows = [
            {"step": step, **{name: values[step > 10] for name, values in metrics.items()}} for step in (10, 20, 30)
        ]
        (demo_post.DEMO / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (demo_post.DEMO / "generated.jsonl").write_text("{}\n")
    assert demo_post.summary() == (reward > 0.3)
