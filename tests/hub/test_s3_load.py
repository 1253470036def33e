"""`save` and `load` in a bucket: what the addresses mean, and a start that fetches what it lacks and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.callbacks.checkpointer import Checkpointer
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.start import decide_start
from megatron.errors import UserError
from megatron.hub.private import share_value
from megatron.hub.s3 import S3Folder
from megatron.hub.s3_load import fetch_load
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.neox_arguments.merge import merge_values
from megatron.plan.preflight import config_for, preflight
from megatron.run.start import share_start
from megatron.training.callback import Callback
from tests.callbacks.fakes import args_of, trainer_of
from tests.convert.helpers import LLAMA, full_tensors, hugging_face, resolved, write_checkpoint
from tests.hub.s3_server import S3Server
from tests.hub.test_s3 import content, damage, train
from tests.inference.models import GPT_NEOX, make_checkpoint
from tests.inference.models import Layout as Ranks
from tests.inference.test_cli import ROOT, start
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

BASE = "s3://bucket/runs/base"


def written(folder: Path, *overrides: str, **keys: Any) -> Any:
    """The options of a config file with these keys, one a line from the first on."""
    (folder / "a.yml").write_text(yaml.safe_dump(keys, sort_keys=False))
    return NeoXArgs.from_files([str(folder / "a.yml")], [*overrides]).checkpoint


def read(**keys: Any) -> Any:
    """The derived configuration of these keys, as a program gives them."""
    return args_of(**merge_values(keys).values)


@pytest.mark.parametrize(
    ("keys", "expected"),  # save, s3_path, load, s3_load
    [
        ({"save": "s3://b-1/x/y/mine/"}, ("mine", "s3://b-1/x/y", None, None)),
        ({"save": "s3://b-1/mine"}, ("mine", "s3://b-1", None, None)),
        ({"load": BASE}, (None, None, "bucket-runs-base.s3", BASE)),
        ({"load": "s3://base"}, (None, None, "base.s3", "s3://base")),
        ({"save": "/disk/mine/", "load": f"{BASE}/"}, ("/disk/mine/", None, "/disk/bucket-runs-base.s3", BASE)),
        (
            {"load": f"{BASE}/global_step7", "save": "runs/mine"},
            ("runs/mine", None, "runs/bucket-runs-base.s3/global_step7", f"{BASE}/global_step7"),
        ),
        ({"save": "s3://b-1/x/mine", "load": BASE}, ("mine", "s3://b-1/x", "bucket-runs-base.s3", BASE)),
        # a run's own place: resuming fetches from there
        ({"save": BASE, "load": f"{BASE}/"}, ("base", "s3://bucket/runs", "base", None)),
        (
            {"save": "d/base", "s3_path": "s3://bucket/runs/", "load": BASE},
            ("d/base", "s3://bucket/runs/", "d/base", None),
        ),
        ({"load": "mine", "s3_load": BASE}, (None, None, "mine", BASE)),
    ],
)
def test_what_addresses_mean(tmp_path: Path, keys: dict[str, str], expected: tuple[str | None, ...]) -> None:
    found = written(tmp_path, **keys)
    assert (found.save, found.s3_path, found.load, found.s3_load) == expected


def test_a_command_line_replaces_addresses_of_files_and_a_start_says_where_it_writes(tmp_path: Path) -> None:
    assert written(tmp_path, "load=here", load=BASE, save="x").s3_load is None
    assert written(tmp_path, "load=here", load="there", s3_load=BASE).s3_load is None
    assert written(tmp_path, f"load={BASE}", load="s3://b-1/b").s3_load == BASE
    (tmp_path / "a.yml").write_text(f"save: {BASE}")
    (note,) = NeoXArgs.from_files([str(tmp_path / "a.yml")]).notes
    assert note.startswith(f"{tmp_path}/a.yml:1: save: {BASE}") and " ./base," in note
    for own in ("s3_path=s3://b-1", f"save={BASE}"):  # copies are sent all the same
        assert "wins over" not in str(NeoXArgs.from_files([str(tmp_path / "a.yml")], ["save=/x", own]).notes)
    (note,) = NeoXArgs.from_files([str(tmp_path / "a.yml")], ["save=/x"]).notes
    assert f"save=/x wins over save: {BASE} ({tmp_path}/a.yml:1)" in note and "s3_path=s3://bucket/runs " in note
    # evaluation keeps what it needs; what is published shows no bucket
    assert for_inference(read(load=BASE, save="s3://b-1/b")).checkpoint.s3_load == BASE
    assert share_value({"save": BASE, "load": BASE, "s3_load": BASE}) == {"save": "base", "load": "base"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seed": 1, "save": "gs://b-1/x"}, r"a\.yml:2: save: .*s3://bucket/path/NAME.*gs://b-1/x"),
        ({"seed": 1, "save": "s3://b-1"}, r"a\.yml:2: save: .*'s3://b-1'"),
        ({"save": f"{BASE}/global_step5"}, r"a\.yml:1: save: .*global_step5"),
        ({"save": "s3://b-1/x//y"}, r"a\.yml:1: save: "),
        ({"save": "s3://b-1/.."}, r"a\.yml:1: save: "),
        ({"load": "s3://_/x"}, r"a\.yml:1: load: .*s3://_/x"),
        ({"s3_path": "s3://other/x", "save": BASE}, rf"a\.yml:2: save: {BASE} .*s3_path \(.*a\.yml:1\)"),
        ({"load": BASE, "s3_load": "s3://other/x"}, rf"a\.yml:1: load: {BASE} .*s3_load \(.*a\.yml:2\)"),
    ],
)
def test_addresses_that_are_none(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        written(tmp_path, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"s3_load": BASE}, "s3_load: .*load"),
        ({"load": "x", "s3_load": "bucket/x"}, "s3_load: .*'bucket/x'"),
        ({"load": "x", "s3_load": f"{BASE}/global_step5"}, "s3_load: .*global_step5.*: x;"),
        ({"load": BASE, "s3_chunk_size": 1000}, "s3_chunk_size: .*1000.*5242880"),
        ({"load": BASE, "init_from": {"path": "x"}}, "load: init_from"),
    ],
)
def test_keys_that_make_no_sense(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(**keys)


@pytest.fixture
def base(tmp_path: Path, s3: S3Server) -> Path:
    """A run of ten steps whose checkpoints 5 and 10 are in the bucket, at `BASE`."""
    save = tmp_path / "elsewhere" / "base"
    train(save, Callback(), checkpoint_factor=5)
    for step in (5, 10):
        S3Folder(BASE).upload(save / f"global_step{step}")
    S3Folder(BASE).write_latest(10)
    s3.log.clear()
    return save


def options(folder: Path, load: str = BASE, **more: Any) -> Any:
    return read(**{"save": str(folder / "new"), "load": load, **more}).checkpoint


def fetched(s3: S3Server) -> list[str]:
    """Steps and files that were read, but for manifests."""
    paths = [path.partition("runs/base/")[2] for method, path in s3.log if method == "GET"]
    return [path for path in paths if path.startswith("global_step") and not path.endswith("manifest.json")]


def test_a_first_start_fetches_the_latest_once_and_starts_from_it(tmp_path: Path, s3: S3Server, base: Path) -> None:
    wanted = options(tmp_path)
    assert wanted.load == str(tmp_path / "bucket-runs-base.s3")
    assert fetch_load(wanted) == tmp_path / "bucket-runs-base.s3" / "global_step10"
    assert content(tmp_path / "bucket-runs-base.s3") == {
        k: v for k, v in content(base).items() if "global_step5" not in k
    }
    begin = decide_start(wanted)
    assert (begin.kind, begin.step) == ("load", 10) and len(fetched(s3)) == len(begin.checkpoint.manifest.files)
    s3.log.clear()
    assert fetch_load(wanted) is None and fetched(s3) == [] and s3.sent() == []

    # going back in the bucket, and a step that is pinned in one of two ways, beside what is there
    S3Folder(BASE).write_latest(5)
    assert fetch_load(wanted) is not None and decide_start(wanted).step == 5
    assert fetch_load(options(tmp_path, iteration=10)) is None
    assert fetch_load(options(tmp_path, f"{BASE}/global_step10")) is None
    assert decide_start(options(tmp_path, f"{BASE}/global_step10")).step == 10
    shutil.rmtree(tmp_path / "bucket-runs-base.s3" / "global_step10")
    assert fetch_load(options(tmp_path, iteration=10)) is not None  # which moves no `latest`
    assert decide_start(options(tmp_path, iteration=10)).step == 10 and decide_start(wanted).step == 5
    S3Folder(BASE).write_latest(10)
    s3.log.clear()
    assert fetch_load(wanted) is not None and fetched(s3) == [] and decide_start(wanted).step == 10


def test_another_checkpoint_of_the_same_step_replaces_the_copy(tmp_path: Path, s3: S3Server, base: Path) -> None:
    wanted = options(tmp_path, iteration=5)
    fetch_load(wanted)
    shutil.rmtree(base)
    train(base, Callback(), checkpoint_factor=5, no_save_rng=True)
    S3Folder(BASE).upload(base / "global_step5")
    assert fetch_load(wanted) is not None
    assert (
        content(tmp_path / "bucket-runs-base.s3")["global_step5/manifest.json"]
        == (base / "global_step5/manifest.json").read_bytes()
    )


def test_nothing_is_fetched_that_no_start_reads(tmp_path: Path, s3: S3Server, base: Path) -> None:
    shutil.copytree(base, tmp_path / "new")
    s3.refuses = lambda method, path: True
    assert fetch_load(options(tmp_path)) is None and s3.log == []
    assert decide_start(options(tmp_path)).kind == "resume" and not (tmp_path / "bucket-runs-base.s3").exists()
    with pytest.raises(UserError, match="load: .*base: .*AccessDenied"):
        fetch_load(options(tmp_path, save=None))


def test_a_store_that_is_busy_once_or_cuts_an_answer_is_asked_again(
    tmp_path: Path, s3: S3Server, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    done: set[str] = set()

    def once(method: str, path: str, end: str) -> bool:
        if method != "GET" or not path.endswith(end) or end in done:
            return False
        done.add(end)
        return True

    s3.refuses = lambda method, path: once(method, path, "mp_rank_00_model_states.pt") and 503
    s3.cuts = lambda method, path: once(method, path, "layer_02-model_00-model_states.pt")
    assert fetch_load(options(tmp_path)) is not None
    assert len(done) == 2 and all(sum(name.endswith(end) for name in fetched(s3)) == 2 for end in done)
    assert content(tmp_path / "bucket-runs-base.s3") == {
        k: v for k, v in content(base).items() if "global_step5" not in k
    }


def test_a_store_that_stays_busy_ends_in_one_message_and_the_next_start_goes_on(
    tmp_path: Path, s3: S3Server, base: Path
) -> None:
    files = [*list_checkpoints(base).checkpoints[5].manifest.files]
    s3.refuses = lambda method, path: path.endswith(files[-1]) and 503
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^load: {BASE}: .*503"):
            fetch_load(options(tmp_path, iteration=5))
    assert list_checkpoints(tmp_path / "bucket-runs-base.s3").steps == ()
    s3.refuses = lambda method, path: False
    s3.log.clear()
    assert fetch_load(options(tmp_path, iteration=5)) is not None
    assert fetched(s3) == [f"global_step5/{files[-1]}"]
    assert not list((tmp_path / "bucket-runs-base.s3").glob(".*"))

    s3.refuses = lambda method, path: 503  # a step that is named and here is taken; the newest one is not known
    assert fetch_load(options(tmp_path, iteration=5)) is None
    with pytest.raises(UserError, match=rf"^load: {BASE}: .*SlowDown"):
        fetch_load(options(tmp_path))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"iteration": 7}, r"load: .*iteration 7 in s3://bucket/runs/base; .*\[5, 10\]"),
        ({"load": f"{BASE}/global_step7"}, r"load: .*iteration 7 in s3://bucket/runs/base; .*\[5, 10\]"),
        ({"load": f"{BASE}/global_step5", "iteration": 10}, "iteration: 10 .*global_step5"),
        ({"load": "s3://bucket/runs/nobody"}, r"load: no checkpoint in s3://bucket/runs/nobody"),
        ({"load": "s3://no-bucket/x"}, r"load: s3://no-bucket/x: .*NoSuchBucket"),
    ],
)
def test_what_a_bucket_does_not_have(
    tmp_path: Path, s3: S3Server, base: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fetch_load(options(tmp_path, **more))
    assert not (tmp_path / "bucket-runs-base.s3").exists()


def test_a_dry_run_says_what_would_be_fetched_and_fetches_nothing(
    tmp_path: Path, s3: S3Server, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    keys = {"save": str(tmp_path / "new"), "load": BASE, "tokenizer_type": "CharLevelTokenizer"}
    keys |= {"data_path": corpus(tmp_path / "data")}
    found = preflight(read(**keys), "train").start
    assert (found.kind, found.step, found.checkpoint) == ("load", 10, None)
    assert (
        f"iteration 10 of {BASE} into {tmp_path}/bucket-runs-base.s3" in found.message and found.message in caplog.text
    )
    finetune = preflight(read(**keys, finetune=True, iteration=5), "train").start
    assert (finetune.kind, finetune.step) == ("finetune", 0) and "iteration 5" in finetune.message
    own = preflight(read(**{**keys, "save": str(tmp_path / "base"), "s3_path": "s3://bucket/runs/"}), "train").start
    assert (own.kind, own.step) == ("resume", 10) and f"{BASE} into {tmp_path}/base first" in own.message
    assert preflight(derive(for_inference(read(**keys)), Facts(num_devices=1)), "generate").start is None
    assert fetched(s3) == [] and not (tmp_path / "bucket-runs-base.s3").exists() and not (tmp_path / "base").exists()
    with pytest.raises(UserError, match=r"load: .*iteration 7 .*\[5, 10\]"):
        preflight(read(**keys, iteration=7), "train")


def test_iteration_goes_back_in_the_run_s_own_place_on_a_new_machine(tmp_path: Path, s3: S3Server, base: Path) -> None:
    keys = {"save": str(tmp_path / "base"), "s3_path": "s3://bucket/runs", "tokenizer_type": "CharLevelTokenizer"}
    keys |= {"data_path": corpus(tmp_path / "data")}
    state = ParallelState.single("cpu")
    for again in (False, True):
        if not again:
            found = preflight(read(**keys, iteration=5), "train").start
            assert (found.kind, found.step) == ("load", 5) and f"iteration 5 of {BASE}" in found.message
            assert fetched(s3) == []
        begin = share_start(read(**keys, iteration=5), state)
        assert (begin.kind, begin.step) == ("load", 5) and list_checkpoints(tmp_path / "base").steps == (5,)
    with pytest.raises(UserError, match=rf"^iteration: .*iteration 7 in {BASE}, .*\[5, 10\], nor .*\[5\]"):
        preflight(read(**keys, iteration=7), "train")
    # The run goes on from there, and later starts with the same keys resume it.
    begun = trainer_of([Checkpointer(tmp_path / "base", {})], checkpoint_factor=6, iteration=5, train_iters=6)
    begun.step = 5
    begun.run()
    assert share_start(read(**keys, iteration=5), state).step == 6
    S3Folder(BASE).upload(tmp_path / "base" / "global_step6")
    S3Folder(BASE).write_latest(6)
    shutil.rmtree(tmp_path / "base")
    begin = share_start(read(**keys, iteration=5), state)
    assert (begin.kind, begin.step) == ("resume", 6)


def test_a_run_that_began_among_gpt_neox_s_checkpoints_is_resumed_from_the_bucket(
    tmp_path: Path, s3: S3Server, base: Path
) -> None:
    save = tmp_path / "base"
    (save / "global_step2").mkdir(parents=True)
    torch.save({"iteration": 2, "global_steps": 2}, save / "global_step2" / "mp_rank_00_model_states.pt")
    assert list_checkpoints(save).holds_neox
    keys = {"save": str(save), "load": str(save), "s3_path": "s3://bucket/runs"}
    keys |= {"data_path": corpus(tmp_path / "data"), "tokenizer_type": "CharLevelTokenizer"}
    found = preflight(read(**keys), "train").start
    begin = share_start(read(**keys), ParallelState.single("cpu"))
    assert (found.kind, found.step) == (begin.kind, begin.step) == ("resume", 10)


@pytest.mark.parametrize("own", [True, False])
def test_a_width_that_is_open_is_that_of_the_checkpoint_in_the_bucket(tmp_path: Path, s3: S3Server, own: bool) -> None:
    args = resolved(**LLAMA | {"intermediate_size": 264, "gated_width_rule": "final"})
    tensors = full_tensors(args, "llama", hugging_face(args, "llama")[1])
    folder = write_checkpoint(tmp_path / "elsewhere" / "base", args, tensors)
    stored = S3Folder(BASE)
    stored.upload(folder)
    keys = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    keys |= {"intermediate_size": 264, "mlp_multiple_of": 8, "save": BASE if own else str(tmp_path / "new")}
    (tmp_path / "a.yml").write_text(yaml.safe_dump(keys | ({} if own else {"load": BASE})))
    for script in ("train.py", "generate.py"):
        found = config_for(NeoXArgs.from_files([str(tmp_path / "a.yml")]), script)
        assert found.get("gated_width_rule") == "final" and any(
            f"{BASE}/{folder.name} is 264" in n for n in found.notes
        )


def test_a_copy_that_is_damaged_here_is_fetched_again(tmp_path: Path, s3: S3Server, base: Path) -> None:
    keys = {"save": str(tmp_path / "new"), "load": BASE}
    for _ in range(2):
        begin = share_start(read(**keys), ParallelState.single("cpu"))
        assert (begin.kind, begin.step) == ("load", 10)
        assert content(tmp_path / "bucket-runs-base.s3") == {
            k: v for k, v in content(base).items() if "global_step5" not in k
        }
        damage(tmp_path / "bucket-runs-base.s3" / "global_step10" / "layer_02-model_00-model_states.pt")


def test_a_run_starts_from_a_bucket_at_another_layout(tmp_path: Path, s3: S3Server) -> None:
    flat = {"data_path": corpus(tmp_path / "data"), "save": str(tmp_path / "mine"), "s3_path": "s3://bucket/runs"}
    assert run({**flat, "exit_interval": 3})[0].steps == [1, 2, 3]
    new = {"data_path": flat["data_path"], "save": str(tmp_path / "new"), "load": "s3://bucket/runs/mine"}
    shutil.rmtree(tmp_path / "mine")
    assert [report.steps for report in run(merge_values(new).values, Layout(dp=2))] == [[4, 5, 6]] * 2
    assert list_checkpoints(tmp_path / "bucket-runs-mine.s3").steps == (3,)


@pytest.mark.parametrize("load", [{}, {"load": "s3://bucket/runs/mine"}])
def test_what_evaluates_a_run_that_saves_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: dict[str, str]
) -> None:
    """From the run's folder where it is, else from where its checkpoints are sent to; never into the run's folder."""
    monkeypatch.chdir(tmp_path)
    args = read(save="s3://bucket/runs/mine", **load)
    found = for_inference(for_inference(args)).checkpoint
    assert (found.load, found.s3_load) == ("bucket-runs-mine.s3", "s3://bucket/runs/mine")
    (tmp_path / "mine").mkdir()
    found = for_inference(args).checkpoint
    assert (found.load, found.s3_load) == ("mine", None)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_evaluation_and_generation_start_from_a_bucket(tmp_path: Path, s3: S3Server) -> None:
    keys = {**GPT_NEOX, "tokenizer_type": "CharLevelTokenizer", "save": "mine", "max_position_embeddings": 64}
    make_checkpoint(tmp_path / "elsewhere", keys, Ranks(tp=2), 512)
    S3Folder(BASE).upload(tmp_path / "elsewhere" / "global_step1")
    (tmp_path / "run.yml").write_text(yaml.safe_dump(keys))
    given = ("run.yml", f"load={BASE}", "model_parallel_size=2")
    dry = start(tmp_path, str(ROOT / "eval.py"), *given, "--eval_tasks", "nothing", "--dry-run")
    assert dry.returncode == 0 and f"iteration 1 of {BASE} into bucket-runs-base.s3 first" in dry.stdout + dry.stderr
    assert not (tmp_path / "bucket-runs-base.s3").exists()
    done = start(tmp_path, str(ROOT / "generate.py"), *given, "--prompt", "hello", "maximum_tokens=3")
    assert done.returncode == 0, done.stderr
    assert "generating with bucket-runs-base.s3/global_step1" in done.stderr and not (tmp_path / "mine").exists()
    assert content(tmp_path / "bucket-runs-base.s3") == content(tmp_path / "elsewhere")
    lost = start(tmp_path, str(ROOT / "generate.py"), "run.yml", f"load={BASE}", "iteration=2", "--prompt", "hello")
    assert lost.returncode == 2 and f"load: no complete checkpoint of iteration 2 in {BASE}" in lost.stderr
