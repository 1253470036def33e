"""Metrics in metrics.jsonl, TensorBoard, W&B and Comet: written, and read back."""

from __future__ import annotations

import json
import re
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.callbacks import RunContext, build_callbacks
from megatron.callbacks.comet import Comet
from megatron.callbacks.evaluator import Evaluator
from megatron.callbacks.flops import Flops
from megatron.callbacks.meter import Meter
from megatron.callbacks.metrics_file import MetricsFile
from megatron.callbacks.prometheus import Prometheus
from megatron.callbacks.tensorboard import TensorBoard
from megatron.callbacks.tracker import Tracker
from megatron.callbacks.trackio import Trackio
from megatron.callbacks.weights_and_biases import WeightsAndBiases
from megatron.cluster.tracker_id import tracker_id
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.run.start import TrackerIds
from tests.callbacks.fakes import GoesBack, args_of, batches, out, run_and_go_back, trainer_of, wandb_rows

pytestmark = pytest.mark.cpu


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_jsonl_has_logs_and_evaluations_and_is_appended_to(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    for _ in range(2):
        trainer = trainer_of([Meter(1, Flops(1.0, 1, None)), MetricsFile(path)], [out(2.5)], train_iters=1)
        trainer.run()  # ends by closing it
    trainer = trainer_of([MetricsFile(path)])
    trainer.call("evaluated", "validation", {"lm_loss": 3.0, "lm_loss_ppl": float("inf")})
    first, second, third = lines(path)
    assert first["step"] == second["step"] == 1 and first["train/lm_loss"] == 2.5 and first["time"] <= second["time"]
    assert third["validation/lm_loss"] == 3.0 and third["validation/lm_loss_ppl"] is None


def test_a_line_is_on_disk_before_the_run_ends(tmp_path):
    tracker = MetricsFile(tmp_path / "metrics.jsonl")
    tracker.write({"x": 1.0}, 7)
    assert lines(tmp_path / "metrics.jsonl")[0]["step"] == 7


def test_tensorboard_reads_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trainer_of([Meter(2, Flops(1.0, 1, None)), TensorBoard(str(tmp_path))], [out(4.0), out(2.0)])
    trainer.call("evaluated", "test", {"lm_loss": 1.5})
    trainer.run()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/lm_loss")][:2] == [(2, 3.0), (4, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("test/lm_loss")] == [(0, 1.5)]


@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "wandb", "comet_ml", "trackio"])
def test_a_missing_package_names_the_requirements_file(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    build = {
        "wandb": lambda: WeightsAndBiases(args_of(), None, 0),
        "comet_ml": lambda: Comet(args_of(), None),
        "trackio": lambda: Trackio(args_of(), None),
    }.get(module, lambda: TensorBoard(str(tmp_path)))
    with pytest.raises(UserError, match=r"requirements/requirements-\w+\.txt"):
        build()


def kinds(keys, rank, folder):
    args = NeoXArgs.from_saved({**keys, "save": folder and str(folder)})
    state = SimpleNamespace(rank=rank)
    return [type(tracker).__name__ for tracker in build_callbacks(RunContext(args, state, 37, folder), Tracker)]


def test_who_tracks_what(monkeypatch, tmp_path):
    monkeypatch.setattr(WeightsAndBiases, "__init__", lambda self, args, directory, rank: None)
    monkeypatch.setattr(Comet, "__init__", lambda self, args, directory: None)
    keys = {"use_wandb": True, "tensorboard_dir": str(tmp_path / "tb"), "use_comet": True}
    assert sorted(kinds(keys, 0, tmp_path)) == ["Comet", "MetricsFile", "TensorBoard", "WeightsAndBiases"]
    assert kinds(keys, 1, tmp_path) == []
    assert kinds({**keys, "wandb_init_all_ranks": True}, 1, tmp_path) == ["WeightsAndBiases"]
    assert kinds({}, 0, None) == []


def test_tensorboard_shows_steps_that_are_trained_again_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, value in ((0, 1.0), (2, 2.0)):  # killed after step 4, resumed from the checkpoint of step 2
        tracker = TensorBoard(str(tmp_path))
        tracker.loaded(SimpleNamespace(step=first))
        for step in range(first + 1, 5):
            tracker.write({"x": value}, step)
        tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("x")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


class FakeWandb:
    """Remembers how it was called."""

    def __init__(self, step=0):
        self.given, self.step, self.logged = {}, step, []
        self.url, self.offline, self.dir = "https://w.example/r", False, "wandb/run-1/files"

    def Settings(self, **settings):
        return settings

    def init(self, **given):
        self.given = given
        return self

    def log(self, metrics, step):
        self.logged.append(step)


@pytest.mark.parametrize(
    ("keys", "rank", "expected"),
    [
        (
            {},
            0,
            {
                "project": "neox",
                "group": None,
                "name": None,
                "tags": None,
                "entity": None,
                "settings": {"silent": True},
            },
        ),
        (
            {"wandb_host": "https://w.example", "wandb_team": "t", "wandb_project": "p", "wandb_run_name": "r"},
            0,
            {"project": "p", "name": "r", "entity": "t", "settings": {"base_url": "https://w.example", "silent": True}},
        ),
        ({"wandb_init_all_ranks": True, "wandb_group": "g", "wandb_run_name": "r"}, 3, {"group": "g", "name": "r-3"}),
        ({"wandb_init_all_ranks": True}, 1, {"group": "ranks", "name": "rank-1"}),
        ({"wandb_tags": ["site", "job_7"]}, 0, {"tags": ["site", "job_7"]}),
    ],
)
def test_wandb_keys_reach_wandb(monkeypatch, keys, rank, expected):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    args = NeoXArgs.from_saved({**keys, "git_hash": "abc"})
    WeightsAndBiases(args, None, rank)
    assert {name: fake.given[name] for name in expected} == expected
    assert fake.given["config"]["git_hash"] == "abc" and fake.given["config"]["hidden_size"] == args.model.hidden_size


def test_one_run_folder_is_one_run_of_wandb(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)

    def id_of(folder, rank=0, **keys):
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        WeightsAndBiases(args_of(**keys), folder and str(folder), rank)
        assert fake.given["resume"] == "allow"
        return fake.given["id"]

    first = id_of(tmp_path / "a")
    assert first and id_of(tmp_path / "a") == first and id_of(tmp_path / "b") not in (first, None)
    ranks = [id_of(tmp_path / "a", rank, wandb_init_all_ranks=True) for rank in (0, 1, 0, 1)]
    assert ranks[:2] == ranks[2:] and len({*ranks, first}) == 3
    assert id_of(None) is None
    (tmp_path / "a/trackers/wandb").write_text("\0 not an id\n")
    assert id_of(tmp_path / "a") not in (first, None)
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert id_of(tmp_path / "a") is None


def test_steps_that_wandb_has_are_not_sent_again(monkeypatch, tmp_path):
    fake = FakeWandb(step=10)  # of a run that logged up to 9
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = WeightsAndBiases(args_of(), str(tmp_path), 0)
    for step in (8, 9, 10, 11):
        tracker.logged(trainer_of([]), {"x": 1.0}, step)
    assert fake.logged == [10, 11]


@pytest.mark.parametrize("kind", [WeightsAndBiases, Comet, Trackio])
def test_steps_that_are_trained_again_after_going_back_are_not_sent_again(monkeypatch, kind):
    """What is evaluated of a step comes after its log, and is sent."""
    sent, tracker = [], kind.__new__(kind)
    monkeypatch.setattr(kind, "write", lambda self, metrics, step: sent.append(step))
    monkeypatch.setattr(kind, "close", lambda self: None)
    callbacks = [Meter(1, Flops(1.0, 1, None)), GoesBack(5), Evaluator(2, 1, batches, None), tracker]
    run_and_go_back(trainer_of(callbacks, train_iters=6), 2)
    assert sent == [1, 2, 2, 3, 4, 4, 5, 6, 6]


@pytest.mark.parametrize("to", [0, 2])
def test_metrics_jsonl_says_where_a_run_that_goes_back_begins_again(tmp_path, to):
    path = tmp_path / "metrics.jsonl"
    callbacks = [Meter(1, Flops(1.0, 1, None)), MetricsFile(path), GoesBack(4)]
    run_and_go_back(trainer_of(callbacks, train_iters=4), to)
    found = [(line["step"], line.get("start", False)) for line in lines(path)]
    assert found == [(step, False) for step in (1, 2, 3, 4)] + [(to, True)] + [(n, False) for n in range(to + 1, 5)]


@pytest.mark.slow
def test_wandb_without_a_key_is_a_sentence(monkeypatch, tmp_path):
    for name, value in {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    import wandb

    wandb.teardown()  # its settings are read from the environment once per process
    with pytest.raises(UserError, match="use_wandb: .*API key.*WANDB_MODE=offline"):
        WeightsAndBiases(args_of(), str(tmp_path), 0)
    wandb.teardown()


def test_wandb_works_offline(monkeypatch, tmp_path, capfd, caplog):
    """The real package, without a network: the run is stored in a folder, with config and history; it prints nothing,
    and where the run lies is one line of the log."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delitem(sys.modules, "openai", raising=False)  # of another test: W&B advertises to whoever imports it
    caplog.set_level("INFO", "deepy")
    tracker = WeightsAndBiases(args_of(wandb_run_name="mine", wandb_tags=["my-tag"]), str(tmp_path), 0)
    tracker.write({"train/lm_loss": 2.5}, 3)
    tracker.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    said = [record.message for record in caplog.records if record.name.startswith("deepy.")]
    assert capfd.readouterr() == ("", "") and said == [f"W&B: offline, to send it later: wandb sync {run}"]
    assert run.name.endswith((tmp_path / "trackers/wandb").read_text().strip())
    (record,) = run.glob("run-*.wandb")
    wanted = (b"train/lm_loss", b"hidden_size", b"mine", b"my-tag")
    deadline = time.monotonic() + 60  # W&B's own process writes the file, and may come to it late
    while not all(word in record.read_bytes() for word in wanted):
        assert time.monotonic() < deadline, record.read_bytes()
        time.sleep(0.1)


def test_comet_works_offline(monkeypatch, tmp_path):
    """The real package, without a network: one archive in the run folder, with config, names and history."""
    for name, value in {"START_ONLINE": "0", "AUTO_LOG_ENV_DETAILS": "0", "AUTO_LOG_GIT_PATCH": "0"}.items():
        monkeypatch.setenv(f"COMET_{name}", value)
    keys = {"comet_workspace": "w", "comet_project": "p", "comet_experiment_name": "mine"}
    tracker = Comet(args_of(**keys, comet_tags=["t1", "t2"], comet_others={"why": "a test"}), tmp_path)
    tracker.write({"train/lm_loss": 2.5}, 3)
    tracker.write({"train/lm_loss": 1.5}, 4)
    tracker.close()
    (path,) = (tmp_path / "comet").glob("*/*.zip")
    assert path.name.startswith((tmp_path / "trackers/comet").read_text().strip())
    with zipfile.ZipFile(path) as archive:
        about = json.loads(archive.read("experiment.json"))
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    assert (about["workspace"], about["project_name"], sorted(about["tags"])) == ("w", "p", ["t1", "t2"])
    of = {kind: [m["payload"] for m in messages if m["type"] == kind] for kind in {m["type"] for m in messages}}
    metrics = [one["metric"] for one in of["metric_msg"]]
    assert [(m["metricName"], m["metricValue"], m["step"]) for m in metrics] == [
        ("train/lm_loss", 2.5, 3),
        ("train/lm_loss", 1.5, 4),
    ]
    others = {one["key"]: one["value"] for one in of["log_other"]}
    assert (others["Name"], others["why"]) == ("mine", "a test")
    values = {one["param"]["paramName"]: one["param"]["paramValue"] for one in of["parameter_msg"] if "param" in one}
    assert values["hidden_size"] == 16


def test_a_second_start_does_not_write_over_the_first_of_comet(monkeypatch, tmp_path):
    """The archive's name is random, and the run's seed makes it the same."""
    given = []
    fake = SimpleNamespace(
        ExperimentConfig=lambda **config: given.append(Path(config["offline_directory"])),
        start=lambda **options: SimpleNamespace(log_parameters=lambda values: given.append(options["experiment_key"])),
        exceptions=SimpleNamespace(CometException=ValueError),
    )
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    monkeypatch.delenv("COMET_EXPERIMENT_KEY", raising=False)
    for pid in (11, 12):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        Comet(args_of(), tmp_path)
    first, key, second, same = given
    assert first != second and first.parent == second.parent == tmp_path / "comet"
    assert key == same and len(key) == 32


def test_comet_without_a_key_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    with pytest.raises(UserError, match="use_comet: .*API key.*COMET_START_ONLINE=0"):
        Comet(args_of(), None)


def test_wandb_has_late_results_at_their_own_step_and_loses_none(monkeypatch, tmp_path):
    """Offline, read back: two results of one metric between two logs, both of steps that are past."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WeightsAndBiases(args_of(), str(tmp_path), 0)
    tracker.write({"train/lm_loss": 3.0}, 10)
    tracker.write({"train/lm_loss": 2.0}, 20)
    tracker.write_late({"eval_tasks/a_acc": 0.25}, 5)
    tracker.write_late({"eval_tasks/a_acc": 0.5}, 10)
    tracker.write({"train/lm_loss": 1.0}, 30)
    tracker.write_late({"eval_tasks/a_acc": 0.75}, 20)
    tracker.close()
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # W&B's own process writes the file, and may come to it late
    while len(rows := wandb_rows(record)) < 4:
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)
    assert [(row["_step"], row["train/lm_loss"]) for row in rows if "train/lm_loss" in row] == [
        (10, 3.0),
        (20, 2.0),
        (30, 1.0),
    ]
    scores = [(row["evaluated_iteration"], row["eval_tasks/a_acc"]) for row in rows if "eval_tasks/a_acc" in row]
    assert scores == [(5, 0.25), (10, 0.5), (20, 0.75)]


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 2.0, "eval_tasks/a": 1.0}\n{"step": 2, "ti')
    tracker = MetricsFile(path)
    assert tracker.holds({"eval_tasks/a": 1.0}, 1) and not tracker.holds({"eval_tasks/a": 1.0}, 2)
    assert not tracker.holds({"eval_tasks/b": 1.0}, 1)
    tracker.write_late({"eval_tasks/a": 3.0}, 2)
    assert json.loads(path.read_text().splitlines()[-1])["eval_tasks/a"] == 3.0


def test_trackio_keeps_one_run_with_each_step_once(monkeypatch, tmp_path):
    """The real package and its database; the second start begins at a checkpoint before the last step that was sent."""
    from trackio import sqlite_storage

    for name, module in list(sys.modules.items()):  # its folder is read from the environment at its import
        if name.split(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "db")
    for steps, value in ((range(1, 5), 1.0), (range(3, 7), 2.0)):
        tracker = Trackio(args_of(trackio_project="mine", trackio_run_name="first"), tmp_path / "run")
        for step in steps:
            tracker.logged(trainer_of([]), {"train/lm_loss": value}, step)
        tracker.write_late({"eval_tasks/acc": 0.5}, 2)
        tracker.write_texts([("once", " upon")], steps[-1])
        tracker.close()
    name = f"first-{(tmp_path / 'run/trackers/trackio').read_text()[:8]}"
    assert sqlite_storage.SQLiteStorage.get_runs("mine") == [name]
    rows = sqlite_storage.SQLiteStorage.get_logs("mine", name)
    losses = {row["step"]: row["train/lm_loss"] for row in rows if "train/lm_loss" in row}
    assert losses == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2} and sum("train/lm_loss" in row for row in rows) == 6
    assert [row["step"] for row in rows if "eval_tasks/acc" in row] == [2, 2] and "upon" in str(rows)


def test_prometheus_reads_the_newest_of_each_metric(tmp_path):
    """Read by Prometheus's grammar of a line: a name, labels, a number."""
    path = tmp_path / "new" / "run.prom"
    tracker = Prometheus(path, 'a "b"\\')
    tracker.write({"train/lm_loss": 2.5, "runtime/x.y": 1e-9}, 3)
    tracker.write({"train/lm_loss": float("nan"), "up": float("inf"), "down": float("-inf")}, 4)
    tracker.write_late({"eval_tasks/acc": 0.5}, 2)
    text = path.read_text()
    sample = r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{run="a \\"b\\"\\\\"\} (NaN|[+-]Inf|-?[0-9.]+(?:e-?[0-9]+)?)'
    found = dict(re.fullmatch(sample, line).groups() for line in text.splitlines() if not line.startswith("#"))
    assert found == {
        "deepy_train_lm_loss": "NaN",
        "deepy_runtime_x_y": "1e-09",
        "deepy_up": "+Inf",
        "deepy_down": "-Inf",
        "deepy_eval_tasks_acc": "0.5",
        "deepy_step": "4.0",
    }
    assert text.count("# TYPE deepy_") == len(found) and text.endswith("\n")


def test_ids_of_trackers_are_in_the_checkpoints_of_their_own_run(tmp_path):
    def start(kind, saved):
        return SimpleNamespace(kind=kind, checkpoint=SimpleNamespace(callbacks={"TrackerIds": saved}))

    state = ParallelState.single("cpu")
    first = tracker_id(tmp_path / "a", "wandb", "NO_SUCH_VARIABLE")
    saved = json.loads(json.dumps(TrackerIds(tmp_path / "a").state_dict()))
    assert saved == {"wandb": first}
    for kind, folder, same in (("resume", "b", True), ("load", "c", False), ("init", "d", False)):
        TrackerIds(tmp_path / folder).restore(start(kind, saved), state)
        assert (tracker_id(tmp_path / folder, "wandb", "NO_SUCH_VARIABLE") == first) is same
    (tmp_path / "e/trackers").mkdir(parents=True)
    (tmp_path / "e/trackers/wandb").touch()  # asks for a new run
    TrackerIds(tmp_path / "e").restore(start("resume", {**saved, "../up": "x", "bad": "a b"}), state)
    assert tracker_id(tmp_path / "e", "wandb", "NO_SUCH_VARIABLE") not in (first, "")
    assert sorted(one.name for one in (tmp_path / "e/trackers").iterdir()) == ["wandb"]
    assert TrackerIds(None).state_dict() == {}
