"""Two runs that part at a known step, layer and tensor, saved at other layouts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.diff_runs import diff_runs
from megatron.checkpoint.run_metrics import read_metrics
from megatron.checkpoint.save import save_checkpoint
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.checkpoint.fake_engine import HEADS, FakeEngine
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]


def train(rank, world, root, layout, nudge):
    """Three steps, each with its checkpoint; before the second one rank 0 alters one element of a moment."""
    pp, dp, tp = layout
    engine = FakeEngine(ParallelState.build(Topology({"pipe": pp, "data": dp, "model": tp}), rank, "cpu"), 1)
    for step in (1, 2, 3):
        engine.step()
        if nudge and step == 2 and (name := "3.mlp.linear2.weight") in engine.masters:
            engine.optimizer.state[engine.masters[name]]["exp_avg"][3, 1] += 0.5
        save_checkpoint(root, step, engine, engine.state, heads=HEADS, consumed=8 * step, client={}, config={})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, layout, nudge in (("a", (1, 1, 1), False), ("b", (1, 2, 2), False), ("c", (1, 1, 1), True)):
        run_distributed(train, layout[0] * layout[1] * layout[2], str(root / name), layout, nudge)
        lines = [{"step": k, "time": 1.0 * k, "train/lm_loss": 5.0 - k, "runtime/x": id(name)} for k in (1, 2, 3)]
        if nudge:
            lines[2]["train/lm_loss"] += 1e-9
        (root / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "tr'
        )
    return root


def test_the_same_run_at_another_layout_has_no_difference(runs):
    found = diff_runs(runs / "a", runs / "b")
    assert found.equal and found.checkpoints == (1, 2, 3) and found.steps == (1, 3, 3)


def test_step_layer_and_tensor_are_named(runs):
    found = diff_runs(runs / "b", runs / "c")
    assert [(one.step, one.name) for one in found.metrics] == [(3, "train/lm_loss")]
    assert (found.step, found.layer) == (2, 3)
    (tensor,) = found.tensors
    assert (tensor.name, tensor.kind, tensor.elements) == ("3.mlp.linear2.weight", "exp_avg", (1, 16 * 12))
    assert tensor.largest == pytest.approx(0.5)


def test_the_command_says_where_and_its_exit_code_tells(runs, tmp_path):
    def run(*folders):
        command = [sys.executable, str(ROOT / "tools/ckpts/diff_runs.py"), *map(str, folders)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    done = run(runs / "a", runs / "c")
    assert done.returncode == 2 and "step 2" in done.stdout and "layer 3" in done.stdout, done.stderr
    assert "exp_avg of 3.mlp.linear2.weight: 1 of 192 elements" in done.stdout
    done = run(runs / "a", tmp_path / "nothing")
    assert done.returncode == 2 and str(tmp_path / "nothing") in done.stderr and "Traceback" not in done.stderr


def test_runs_without_a_common_step_are_refused(runs, tmp_path):
    with pytest.raises(UserError, match="no step in common"):
        diff_runs(runs / "a", tmp_path)


def test_of_a_step_that_was_trained_twice_the_later_numbers_count(tmp_path):
    lines = [
        '{"step": 2, "x": 1.0}',
        '{"step": 2, "y": 3, "time": 4.0}',
        "torn",
        '{"step": 2, "x": null}',
        '{"step": 1, "x": 2}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2, "x": 7.5}']))
    assert read_metrics(tmp_path / "metrics.jsonl").by_step() == {1: {"x": 2.0}, 2: {"x": 7.5, "y": 3.0}}
    assert read_metrics(tmp_path / "none.jsonl").by_step() == {}


def test_what_a_run_went_back_from_does_not_count(tmp_path):
    lines = [*({"step": step, "train/lm_loss": 9.0} for step in (1, 2, 3)), {"step": 1, "time": 5.0, "start": True}]
    lines += [{"step": 2, "train/lm_loss": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_metrics(tmp_path / "metrics.jsonl").by_step() == {1: {"train/lm_loss": 9.0}, 2: {"train/lm_loss": 4.0}}


def test_a_tensor_that_one_run_lacks_is_a_difference(tmp_path):
    for name, depth in (("a", 1), ("b", 2)):
        engine = FakeEngine(ParallelState.single(), 1, depth=depth)
        engine.step()
        save_checkpoint(tmp_path / name, 1, engine, engine.state, heads=HEADS, consumed=8, client={}, config={})
    found = diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.layer == 3 and found.tensors and any(tensor.elements is None for tensor in found.tensors)
