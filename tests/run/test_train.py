"""A whole run: what a person and other tools see of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import tokenizers
import yaml

from megatron.errors import LostRankError, UserError
from megatron.run import train as run_module
from megatron.run.start import TokenizerIdentity
from megatron.tokenizer import create_tokenizer
from megatron.training.callback import Callback
from tests.distributed import run_distributed
from tests.training.runs import KEYS, Faults, corpus, process_of, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

# What users of GPT-NeoX grep its logs with, and the words that scripts take for the end of a run.
TRAINING = re.compile(r"iteration\s+([0-9]+)/\s*([0-9]+) .*lm_loss:\s*([0-9.E+-]+)")
UNHEALTHY = re.compile(r"traceback|exception|error:", re.IGNORECASE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def test_bits_per_byte_are_the_same_at_every_layout(tmp_path, data):
    found = []
    for layout in (Layout(), Layout(pp=2, dp=2)):
        keys = {"data_path": data, "save": str(tmp_path / f"pp{layout.pp}"), "eval_iters": 1, "train_iters": 1}
        run({**keys, "callbacks": {"checkpointer": False}}, layout)
        metrics = [json.loads(line) for line in Path(keys["save"], "metrics.jsonl").read_text().splitlines()]
        found.append(
            [(m["validation/bits_per_byte"], m["validation/lm_loss"]) for m in metrics if "validation/lm_loss" in m]
        )
    assert found[0] == [pytest.approx(one, rel=1e-5) for one in found[1]]
    # A token is a byte, but for the ends of documents, which are about one in 50.
    assert all(1.0 < bits * math.log(2) / loss < 1.1 for bits, loss in found[0])


def test_console_and_run_folder(tmp_path, data, capsys):
    save = tmp_path / "save"
    keys = {"data_path": data, "save": str(save), "eval_iters": 1, "eval_interval": 3, "peak_theoretical_tflops": 0.01}
    keys |= {"profile": True, "profile_step_start": 2, "profile_step_stop": 3, "memory_profiling": True}
    keys["callbacks"] = {"profiler": {"stacks": False}}
    report = run({**keys, "git_hash": "abc", "log_interval": 2, "keep_last_n_checkpoints": 1}, Layout(pp=2, dp=2))[0]
    shown = capsys.readouterr().out  # what the ranks wrote to stdout and stderr
    assert report.exit_code == 0 and not UNHEALTHY.search(shown)
    lines = TRAINING.findall(shown)
    assert [(int(step), int(total)) for step, total, _ in lines] == [(2, 6), (4, 6), (6, 6)]
    means = [(report.loss[i] + report.loss[i + 1]) / 2 for i in (0, 2, 4)]
    assert [float(loss) for *_, loss in lines] == pytest.approx(means, rel=1e-5)
    assert re.search(r"\| MFU: [0-9.]+% \| HFU: [0-9.]+% \|", shown)  # of peak_theoretical_tflops
    assert len(re.findall("validation results at iteration 3 .*lm_loss value: ", shown)) == 1
    for split in ("validation results at the end of training for val", "test results at the end of training for test"):
        assert len(re.findall(rf"{split} data \| lm_loss value: ", shown)) == 1
    grepped = [line for line in shown.splitlines() if re.search("iteration.*lm_loss", line)]
    assert TRAINING.search(grepped[-1])  # grep | tail -1: where the run is, also after its last evaluation
    assert f"run save starts at iteration 0 of 6, save: {save}" in shown
    assert "[Rank 0] (after 1 iterations) memory (MB)" in shown and re.search(r"deleted .*iteration 3\b", shown)

    metrics = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "train/lm_loss" in m] == [2, 4, 6]
    assert [m["step"] for m in metrics if "validation/lm_loss" in m] == [3, 6]
    assert [m["train/learning_rate"] for m in metrics if "train/lm_loss" in m] == report.lr[1::2]
    assert metrics[0]["loss/init"] == pytest.approx(report.loss[0]) and "test/lm_loss_ppl" in metrics[-1]
    assert metrics[0]["train/tokens"] == 2 * KEYS["train_batch_size"] * KEYS["seq_length"]
    assert json.loads((save / "status.json").read_text())["state"] == "ended"
    assert yaml.safe_load((save / "resolved.yml").read_text())["git_hash"] == "abc"
    assert [path.name for path in save.glob("global_step*")] == ["global_step6"]

    traces = {path.name.split(".")[0]: json.loads(path.read_text()) for path in (save / "profile").iterdir()}
    assert sorted(traces) == ["rank0", "rank1", "rank2", "rank3"]
    for trace in traces.values():
        assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])
    assert len(re.findall("memory_profiling: there is no GPU", shown)) == 1  # said, and no reason to refuse


def test_every_zero_or_less_switches_off_what_is_periodic(tmp_path, data, capsys):
    off = dict.fromkeys(
        ("log_interval", "eval_interval", "checkpoint_factor", "exit_interval", "replica_check_interval"), 0
    )
    keys = {"data_path": data, "save": str(tmp_path / "save"), "max_skipped_steps": 0, "keep_last_n_checkpoints": 0}
    reports = run({**keys, **off, "eval_iters": 0}, Layout(dp=2), Faults(nan_gradients=(2, 3), corrupt_weight=(1, 5)))
    for report in reports:
        assert report.exit_code == 0 and len(report.steps) == 6 and report.logged == report.evaluated == []
    assert not TRAINING.search(capsys.readouterr().out)
    assert [path.name for path in (tmp_path / "save").glob("global_step*")] == ["global_step6"]


def test_what_is_not_loaded_or_saved_on_request(tmp_path, data):
    keys = {"data_path": data, "hidden_dropout": 0.2}
    straight = run({**keys, "save": str(tmp_path / "a")})[0]
    again = {**keys, "load": str(tmp_path / "a"), "iteration": 3}
    without_rng = run({**again, "no_load_rng": True})[0]
    assert without_rng.steps == [4, 5, 6] and without_rng.tokens[:3] == straight.tokens[3:6]
    assert without_rng.loss[0] != straight.loss[3]  # other dropout
    without_optimizer = run({**again, "no_load_optim": True})[0]
    assert without_optimizer.steps == [4, 5, 6] and without_optimizer.lr == straight.lr[3:]
    assert without_optimizer.loss[0] == straight.loss[3] and without_optimizer.loss[1] != straight.loss[4]
    assert run({**keys, "train_iters": 3, "save": str(tmp_path / "b"), "no_save_optim": True})[0].exit_code == 0
    refused = run({**keys, "load": str(tmp_path / "b")})[0]
    assert refused.exit_code == 2 and "no_load_optim: true" in refused.error


def test_epochs_become_steps(data):
    """One pass over the training data, in whole batches, reads every sample once."""
    report = run({"data_path": data, "train_iters": None, "train_epochs": 1, "log_interval": 100})[0]
    samples = [sample for step in report.tokens for sample in step]
    assert report.exit_code == 0 and len(report.steps) == 18  # 146 samples in batches of 8
    assert len(set(samples)) == len(samples) == 18 * 8


@pytest.mark.parametrize("off", ["do_valid", "do_test"])
def test_validation_and_test_can_be_switched_off(data, off):
    keys = {"data_path": data, "train_iters": 1, "eval_iters": 1, off: False}
    splits = [split for _, split, _ in run(keys)[0].evaluated]
    assert splits == (["test"] if off == "do_valid" else ["validation"])


def test_a_run_is_not_continued_with_other_token_ids(tmp_path):
    def tokenizer(*tokens):
        path = tmp_path / f"{'-'.join(tokens)}.json"
        ids = {token: i for i, token in enumerate(tokens)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=tokens[0]))
        made.save(str(path))
        return create_tokenizer("HFTokenizer", str(path), None)

    saved = TokenizerIdentity(tokenizer("a", "b"), allow=False).state_dict()
    assert json.loads(json.dumps(saved)) == saved
    TokenizerIdentity(tokenizer("a", "b"), allow=False).load_state_dict(saved)
    TokenizerIdentity(tokenizer("a", "b", "c"), allow=False).load_state_dict(saved)  # only added to
    with pytest.raises(UserError, match="another tokenizer"):
        TokenizerIdentity(tokenizer("b", "a"), allow=False).load_state_dict(saved)
    TokenizerIdentity(tokenizer("b", "a"), allow=True).load_state_dict(saved)


class FailsIn(Callback):
    """Raises in a hook, or in a function of the run before there is an engine, and notes what it hears of."""

    def __init__(self, place, error):
        self.place, self.failure, self.heard = place, error, []

    def fail(self, place):
        if place == self.place:
            raise self.failure

    def start(self, trainer):
        self.fail("start")

    def before_step(self, trainer):
        self.fail("before_step")

    def error(self, trainer, error):
        self.heard.append((type(error), trainer.state.rank, trainer.step))


def fail_in(place, keys, folder):
    """What callbacks hear of a run that fails in this place, and the state in `status.json`."""
    lost, callbacks = place == "build_engine", run_module.build_callbacks
    callback = FailsIn(place, RuntimeError("Connection reset by peer" if lost else "CUDA out of memory"))
    process = process_of(0, keys, Layout())
    with mock.patch.object(run_module, "build_callbacks", lambda *a: [callback, *callbacks(*a)]):
        with mock.patch.object(run_module, place, lambda *a: callback.fail(place), create=True):
            with pytest.raises(LostRankError if lost else RuntimeError):
                run_module.train(process)
    return callback.heard, json.loads((folder / "status.json").read_text())["state"]


def fail_in_each(rank, world, *arguments):
    return {place: fail_in(place, *arguments) for place in ("build_model", "build_engine", "start", "before_step")}


def test_callbacks_hear_once_of_an_error_before_there_is_an_engine_as_of_later_ones(tmp_path, data):
    found = run_distributed(fail_in_each, 1, {"data_path": data, "save": str(tmp_path), "engine": "native"}, tmp_path)[
        0
    ]
    once = [(RuntimeError, 0, 0)], "failed"
    assert found == {**dict.fromkeys(found, once), "build_engine": ([(LostRankError, 0, 0)], "failed")}
    assert len(found) == 4
