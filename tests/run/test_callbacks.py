"""The `callbacks` key: a metric from a plugin in one file, and Deepy's own switched off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.callback_key import PHASES, choose_callbacks
from megatron.neox_arguments.derive import Facts, derive
from megatron.registry import added
from megatron.rows import rows
from tests.plugins.helpers import blocks, remembered, write_metric
from tests.training.runs import corpus, run
from tests.training.tiny import NEOX, Layout

pytestmark = pytest.mark.cpu


def read_metric(folder: Path, name: str) -> dict[int, float]:
    """Step -> the metric's value in metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def test_the_metric_of_the_guide_is_logged_and_survives_a_resume(tmp_path, capsys):
    named = yaml.safe_load(blocks("yaml")[1])["callbacks"]
    named["smooth_loss"]["half_life"] = 2
    keys = {"data_path": corpus(tmp_path / "data"), "plugins": [str(write_metric(tmp_path))], "callbacks": named}
    straight = run({**keys, "save": str(tmp_path / "a")}, Layout(dp=2))[0]
    shown = capsys.readouterr().out
    expected, average, keep = {}, straight.loss[0], 0.5**0.5
    for step, loss in enumerate(straight.loss, 1):
        average = keep * average + (1 - keep) * loss
        expected[step] = average
    metric = read_metric(tmp_path / "a", "train/smooth_loss")
    assert metric == pytest.approx(expected, rel=1e-6) and len(metric) == 6
    on_console = re.findall(r"iteration +([0-9]+)/ .*train/smooth_loss: ([0-9.]+) \|", shown)
    assert {int(step): float(value) for step, value in on_console} == pytest.approx(metric, rel=1e-5)

    assert run({**keys, "save": str(tmp_path / "b"), "exit_interval": 3}, Layout(dp=2))[0].steps == [1, 2, 3]
    assert run({**keys, "save": str(tmp_path / "b")}, Layout(dp=2))[0].steps == [4, 5, 6]
    assert read_metric(tmp_path / "b", "train/smooth_loss") == metric


@pytest.fixture
def plugin(tmp_path):
    with remembered():
        yield write_metric(tmp_path)


def derived(folder: Path, callbacks: str, **keys: Any) -> NeoXArgs:
    """The derived configuration of run.yml, whose last key, on line 1 + len(keys), is `callbacks`."""
    path = folder / "run.yml"
    flat = {**NEOX, "plugins": ["my_metric.py"], **keys}
    lines = [f"{name}: {json.dumps(value)}" for name, value in flat.items()]
    path.write_text("\n".join([f"callbacks: {callbacks}", *lines]))
    return derive(NeoXArgs.from_files([str(path)]), Facts(vocab_size=64, num_devices=1))


def test_settings_are_typed_and_have_defaults(tmp_path, plugin):
    chosen = {one.name: one for one in choose_callbacks(derived(tmp_path, "{smooth-loss: {half_life: 5}}"))}
    assert chosen["smooth_loss"].settings == {"half_life": 5.0}
    chosen = {one.name: one for one in choose_callbacks(derived(tmp_path, "[smooth_loss]"))}
    assert chosen["smooth_loss"].settings == {"half_life": 100.0}
    names = [one.name for one in choose_callbacks(derived(tmp_path, "{}"))]
    assert "smooth_loss" not in names and "meter" in names  # a plugin's is added by its name only
    assert list(added("callbacks")) == ["smooth_loss"]


def test_order_is_that_of_the_phases(tmp_path, plugin):
    chosen = choose_callbacks(derived(tmp_path, "[smooth_loss]", save=str(tmp_path), log_grad_norm=True))
    assert [one.phase for one in chosen] == sorted((one.phase for one in chosen), key=PHASES.index)
    names = [one.name for one in chosen]
    assert names.index("smooth_loss") < names.index("meter") < names.index("evaluator") < names.index("checkpointer")


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ("{smoth_loss: true}", r"run\.yml:1: callbacks\.smoth_loss: .*'smooth_loss'.*checkpointer, comet, console"),
        ("{\n  meter: true,\n  meteor: false}", r"run\.yml:3: callbacks\.meteor: .*'meter'"),
        ("[meteor]", r"run\.yml:1: callbacks\.meteor: .*'meter'"),
        ("{smooth_loss: {half_live: 3}}", r"run\.yml:1: callbacks\.smooth_loss\.half_live: .*'half_life'"),
        ("{smooth_loss: {half_life: long}}", r"run\.yml:1: callbacks\.smooth_loss\.half_life: .*a number.*'long'"),
        ("{smooth_loss: 3}", r"run\.yml:1: callbacks\.smooth_loss: .* got 3$"),
        ("{meter: {log_interval: 3}}", r"callbacks\.meter\.log_interval: .*its keys are: log_interval"),
        ("{tensorboard: true}", r"callbacks\.tensorboard: .*tensorboard_dir"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(tmp_path, plugin, callbacks, message):
    with pytest.raises(UserError, match=message):
        derived(tmp_path, callbacks, save=str(tmp_path / "save"))


def test_what_a_run_loses_is_noted_where_it_had_something_to_do(tmp_path, plugin):
    args = derived(tmp_path, "{checkpointer: false}", save=str(tmp_path / "save"))
    assert [note for note in args.notes if "callbacks.checkpointer is off" in note and "run.yml:1" in note]
    assert "checkpointer" not in [one.name for one in choose_callbacks(args)]
    assert not [note for note in derived(tmp_path, "{checkpointer: false}").notes if "callbacks" in note]
    (note,) = [
        note
        for note in derived(tmp_path, "{run_status: false}", save=str(tmp_path / "save")).notes
        if "callbacks.run_status is off" in note
    ]
    assert "run.yml:1" in note and "status.json" in note


def test_a_run_without_run_status_writes_no_status(tmp_path):
    keys = {"data_path": corpus(tmp_path / "data"), "save": str(tmp_path / "save")}
    report = run({**keys, "callbacks": {"run_status": False}})[0]
    assert report.exit_code == 0 and (tmp_path / "save" / "latest").is_file()
    assert not (tmp_path / "save" / "status.json").exists()


def test_experts_that_are_balanced_by_biases_cannot_be_switched_off(tmp_path, plugin):
    moe = {"moe_num_experts": 4, "moe_router_type": "topk", "moe_bias_balancing_rate": 0.001, "gpt_j_residual": False}
    with pytest.raises(UserError, match=r"callbacks\.experts: .*moe_bias_balancing_rate is 0\.001"):
        derived(tmp_path, "{experts: false}", **moe)


def test_keys_and_phases_of_our_rows_exist():
    args = NeoXArgs()
    for name, found in rows("callbacks").items():
        assert found.values.get("phase", PHASES[0]) in PHASES, name
        for key in [*found.values.get("idle", ()), *found.values.get("keys", ()), *found.values.get("required_by", ())]:
            args.get(key)


def test_a_run_without_any_callback_of_ours_trains(tmp_path):
    off = dict.fromkeys(rows("callbacks"), False)
    report = run({"data_path": corpus(tmp_path / "data"), "callbacks": off})[0]
    assert report.exit_code == 0 and report.steps == [1, 2, 3, 4, 5, 6] and report.logged == []
