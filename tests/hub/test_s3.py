"""Checkpoints in a bucket, on a real S3 server: whole or not there, resumed where they were cut, read at a start."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import boto3
import pytest
import torch
import torch.distributed as dist

from megatron.callbacks.checkpointer import Checkpointer
from megatron.callbacks.s3_upload import S3Upload
from megatron.checkpoint.find import list_checkpoints
from megatron.checksums import file_crc32
from megatron.errors import UserError
from megatron.hub.s3 import S3Error, S3Folder
from megatron.hub.s3_load import fetch_own
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.run.start import share_start
from megatron.training.callback import Callback
from tests.callbacks.fakes import args_of, trainer_of
from tests.distributed import run_distributed
from tests.hub.s3_server import S3Server
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu


def keys() -> list[str]:
    return [one.key for one in boto3.resource("s3").Bucket("bucket").objects.all()]


def options(save: Path, **more: Any) -> Any:
    return args_of(save=str(save), s3_path="s3://bucket/some/runs/", **more).checkpoint


def uploader(save: Path) -> S3Upload:
    return S3Upload(save, S3Folder.of(options(save)))


def train(save: Path, callback: Callback | None = None, **more: Any) -> None:
    trainer_of([Checkpointer(save, {"run.yml": "a: 1\n"}), callback or uploader(save)], **more).run()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def content(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "lock.json")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_every_checkpoint_arrives_and_another_machine_resumes_from_the_newest(tmp_path: Path, s3: S3Server) -> None:
    save, other = tmp_path / "mine", tmp_path / "elsewhere" / "mine"
    train(save, checkpoint_factor=4, keep_last_n_checkpoints=1)
    folder = S3Folder.of(options(save))
    assert folder.list_steps() == [4, 8, 10] and folder.latest() == 10  # nothing in the bucket is deleted
    mine = {name: data for name, data in content(save).items() if not name.startswith("global_step8")}
    assert all(f"some/runs/mine/{name}" in keys() for name in mine)

    fetch_own(options(other))
    assert content(other) == mine
    s3.log.clear()
    fetch_own(options(other))  # it has it now
    train(other, train_iters=0)
    assert not s3.sent() or s3.sent() == ["latest"]


def test_a_bucket_where_going_back_left_newer_steps(tmp_path: Path, s3: S3Server) -> None:
    save = tmp_path / "mine"
    train(save, checkpoint_factor=5)
    S3Folder.of(options(save)).write_latest(7)
    fetch_own(options(tmp_path / "new" / "mine"))
    assert list_checkpoints(tmp_path / "new" / "mine").steps == (5,)


def test_a_step_that_is_saved_again_replaces_the_copy(tmp_path: Path, s3: S3Server) -> None:
    save, new = tmp_path / "mine", tmp_path / "new" / "mine"
    train(save, checkpoint_factor=5)
    trainer = trainer_of([Checkpointer(save, {}), uploader(save)], seed=5)
    trainer.step, trainer.consumed = 5, 77  # as after going back
    trainer.run()
    fetch_own(options(new))
    assert list_checkpoints(new).checkpoints[10].manifest.consumed == 77 + 5 * 4


def test_an_upload_that_was_cut_is_invisible_and_resumes(tmp_path: Path, s3: S3Server) -> None:
    save = tmp_path / "mine"
    train(save, Callback(), train_iters=2)
    files = [*list_checkpoints(save).checkpoints[2].manifest.files]
    cut = files[len(files) // 2].rpartition("/")[2]
    s3.refuses = lambda method, path: method == "PUT" and path.endswith(cut)
    folder = S3Folder.of(options(save))
    with pytest.raises(S3Error, match=rf"s3://bucket/some/runs/mine: .*{cut}.*AccessDenied"):
        folder.upload(save / "global_step2")
    assert folder.list_steps() == [] and folder.latest() is None and len(keys()) == len(files) // 2
    fetch_own(options(tmp_path / "other" / "mine"))
    assert not (tmp_path / "other").exists()

    s3.refuses = lambda method, path: False
    s3.log.clear()
    folder.upload(save / "global_step2")
    left = [name.rpartition("/")[2] for name in files[len(files) // 2 :]]
    assert s3.sent() == [*left, "manifest.json"] and folder.list_steps() == [2]
    s3.log.clear()
    assert folder.upload(save / "global_step2") == 0 and s3.sent() == []


def test_parts_that_a_killed_upload_left_are_dropped(tmp_path: Path, s3: S3Server) -> None:
    save = tmp_path / "mine"
    train(save, Callback(), train_iters=2)
    client = boto3.client("s3")
    client.create_multipart_upload(Bucket="bucket", Key="some/runs/mine/global_step2/x.pt")
    client.create_multipart_upload(Bucket="bucket", Key="of/another")
    S3Folder.of(options(save)).upload(save / "global_step2")
    assert [one["Key"] for one in client.list_multipart_uploads(Bucket="bucket")["Uploads"]] == ["of/another"]


def test_a_large_file_is_sent_in_parts(tmp_path: Path, s3: S3Server) -> None:
    save = tmp_path / "mine"
    train(save, Callback(), train_iters=2)
    folder = S3Folder("s3://bucket/in/parts", chunk_bytes=5 << 20)
    name = "big.bin"
    path = save / "global_step2" / name
    path.write_bytes(os.urandom(12 << 20))
    manifest = save / "global_step2" / "manifest.json"
    values = json.loads(manifest.read_text())
    values["files"][name] = {"bytes": 12 << 20, "crc32": file_crc32(path)}
    manifest.write_text(json.dumps(values))
    folder.upload(save / "global_step2")
    assert s3.sent().count(name) == 3
    folder.download(2, tmp_path / "back")
    assert (tmp_path / "back" / "global_step2" / name).read_bytes() == path.read_bytes()


def test_a_failed_upload_is_reported_and_tried_again_at_the_next_save(
    tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    save, seen = tmp_path / "mine", []
    s3.refuses = lambda method, path: method == "PUT" and "global_step4/" in path and not seen

    class Look(Callback):
        def before_step(self, trainer: Any) -> None:
            if trainer.step == 7:
                wait_for(lambda: any("AccessDenied" in line for line in caplog.messages))
                seen.append("it failed")

    trainer_of([Checkpointer(save, {}), uploader(save), Look()], checkpoint_factor=4).run()
    assert S3Folder.of(options(save)).list_steps() == [4, 8, 10]
    assert any("global_step4" in line and "AccessDenied" in line for line in caplog.messages)


@pytest.mark.parametrize("error", [KeyError("Metadata"), S3Error("no route")])
def test_whatever_fails_while_sending_is_reported_with_the_checkpoint(
    tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save, real, failed = tmp_path / "mine", S3Folder.upload, []

    def upload(stored: S3Folder, folder: Path) -> int:
        if not failed:
            failed.append(folder.name)
            raise error
        return real(stored, folder)

    monkeypatch.setattr(S3Folder, "upload", upload)
    train(save, checkpoint_factor=5)
    (line,) = [line for line in caplog.messages if str(error) in line]
    assert line.startswith("global_step5 ") and str(save) in line
    assert S3Folder.of(options(save)).list_steps() == [5, 10]


def test_a_checkpoint_that_is_deleted_while_it_is_sent(
    tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    save = tmp_path / "mine"
    train(save, Callback(), checkpoint_factor=5)

    def refuses(method: str, path: str) -> bool:
        if method == "PUT" and "global_step5/" in path:
            shutil.rmtree(save / "global_step5", ignore_errors=True)
        return False

    s3.refuses = refuses
    caplog.set_level("INFO")
    train(save, train_iters=0)
    assert not (save / "global_step5").exists() and S3Folder.of(options(save)).list_steps() == [10]
    assert not any("complete in" in line for line in caplog.messages)
    assert any("global_step5 " in line and "keep_last_n_checkpoints" in line for line in caplog.messages)


def test_the_rights_to_put_get_and_list_objects_are_enough(tmp_path: Path, s3: S3Server) -> None:
    save = tmp_path / "mine"
    s3.refuses = lambda method, path: method == "DELETE" or (method == "GET" and "uploads" in s3.query)
    train(save, checkpoint_factor=5)
    trainer = trainer_of([Checkpointer(save, {}), uploader(save)], seed=5)
    trainer.step, trainer.consumed = 5, 77  # as after going back: step 10 is replaced
    trainer.run()
    assert S3Folder.of(options(save)).list_steps() == [5, 10]


def test_a_busy_store_while_an_asynchronous_save_is_sent_delays_no_step_and_the_next_save_sends_it(
    tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    save, seen, steps = tmp_path / "mine", [], []
    s3.refuses = lambda method, path: method == "PUT" and not seen and 503

    class Look(Callback):
        def after_step(self, trainer: Any, out: Any) -> None:
            steps.append(trainer.step)
            if trainer.step == 5 and saver._writing is not None:
                saver._writing.thread.join(30)  # after the next vote the checkpoint is complete and to be sent
            if trainer.step == 7:
                assert list_checkpoints(save).steps == (4,)
                wait_for(lambda: any("SlowDown" in line for line in caplog.messages))
                seen.append("it failed")

    saver = Checkpointer(save, {})
    trainer_of([saver, uploader(save), Look()], checkpoint_factor=4, async_save=True).run()
    assert steps == [*range(1, 11)] and S3Folder.of(options(save)).list_steps() == [4, 8, 10]
    assert any(line.startswith("global_step4 ") and "SlowDown" in line for line in caplog.messages)


def test_training_does_not_wait_but_the_end_does(tmp_path: Path, s3: S3Server) -> None:
    save, steps = tmp_path / "mine", []
    s3.gate.clear()

    class Look(Callback):
        def before_step(self, trainer: Any) -> None:
            steps.append((trainer.step, s3.gate.is_set()))
            if trainer.step == 7:
                s3.gate.set()

    trainer_of([Checkpointer(save, {}), uploader(save), Look()], checkpoint_factor=4).run()
    assert (7, False) in steps and S3Folder.of(options(save)).list_steps() == [4, 8, 10]


def test_a_damaged_copy_is_refused_and_leaves_nothing(tmp_path: Path, s3: S3Server) -> None:
    save, new = tmp_path / "mine", tmp_path / "new" / "mine"
    train(save, train_iters=2)
    (key,) = [key for key in keys() if key.endswith("layer_02-model_00-model_states.pt")]
    found = boto3.resource("s3").Object("bucket", key)
    data = bytearray(found.get()["Body"].read())
    data[len(data) // 2] ^= 1
    found.put(Body=bytes(data))
    with pytest.raises(UserError, match=r"s3_path: s3://bucket/.*/global_step2 is damaged: .*layer_02"):
        fetch_own(options(new))
    assert not list(new.iterdir())


def start_of(rank: int, world: int, keys: dict[str, Any]) -> tuple[str, int]:
    start = share_start(
        args_of(**keys),
        ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, torch.device("cpu")),
    )
    return start.kind, start.step


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["weights", "state"])
@pytest.mark.parametrize("copy_is_whole", [True, False])
def test_a_damaged_checkpoint_is_replaced_by_the_copy(
    tmp_path: Path, s3: S3Server, kind: str, copy_is_whole: bool
) -> None:
    save = tmp_path / "mine"
    train(save, checkpoint_factor=5)
    whole = content(save)
    name = {"weights": "layer_02-model_00-model_states.pt", "state": "mp_rank_00_model_states.pt"}[kind]
    damage(save / "global_step10" / name)
    if not copy_is_whole:
        (key,) = [key for key in keys() if key.endswith(f"global_step10/{name}")]
        boto3.client("s3").upload_file(str(save / "global_step10" / name), "bucket", key)
    expected = ("resume", 10 if copy_is_whole else 5)
    assert run_distributed(start_of, 1, {"save": str(save), "s3_path": "s3://bucket/some/runs"}) == [expected]
    assert (content(save) == whole) == copy_is_whole


def test_a_download_that_was_cut_goes_on(tmp_path: Path, s3: S3Server) -> None:
    save, new = tmp_path / "mine", tmp_path / "new" / "mine"
    train(save, train_iters=2)
    files = [*list_checkpoints(save).checkpoints[2].manifest.files]
    cut = len(files) // 2
    s3.refuses = lambda method, path: method != "PUT" and path.endswith(files[cut])
    with pytest.raises(UserError, match=r"s3_path: .*(403|Forbidden|AccessDenied)"):
        fetch_own(options(new))
    assert list_checkpoints(new).latest is None

    (bad,) = new.rglob(files[1])
    damage(bad)
    s3.refuses = lambda method, path: False
    s3.log.clear()
    fetch_own(options(new))
    got = [path.partition("global_step2/")[2] for method, path in s3.log if method == "GET" and "global_step2/" in path]
    assert got == ["manifest.json", files[1], *files[cut:]]
    assert content(new) == content(save) and not list(new.glob(".*"))


class Slow:
    """A place in a bucket that takes its time."""

    address, seconds = "s3://slow", 2.5

    def upload(self, folder: Path) -> int:
        time.sleep(self.seconds)
        return 1

    def write_latest(self, step: int) -> None:
        pass


def wait_for_rank_0(rank: int, world: int, save: Path) -> tuple[int, int, str]:
    """How often a rank met the others while rank 0 sent, and while it downloaded; what it raised in the end."""
    state, beats = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, torch.device("cpu")), []
    stored: Any = Slow() if rank == 0 else None
    trainer: Any = SimpleNamespace(state=state, progress=SimpleNamespace(beat=lambda: beats.append(0)), step=2)
    upload = S3Upload(save, stored)
    upload.loaded(trainer)
    upload.end(trainer)
    sending = len(beats)

    def fetch(*more: Any) -> None:
        time.sleep(Slow.seconds)
        raise UserError("s3_path: gone")

    gathers = mock.Mock(wraps=dist.all_gather_object)
    with mock.patch("megatron.run.start.fetch_first", fetch), mock.patch.object(dist, "all_gather_object", gathers):
        try:
            share_start(args_of(save=str(save), s3_path="s3://bucket"), state)
        except UserError as error:
            return sending, gathers.call_count, str(error)
    return sending, gathers.call_count, ""


def test_no_rank_waits_for_rank_0_in_one_long_collective(tmp_path: Path) -> None:
    save = tmp_path / "mine"
    train(save, Callback(), train_iters=2)
    for sending, downloading, error in run_distributed(wait_for_rank_0, 2, save):
        assert sending >= 3 and downloading >= 3 and "s3_path: gone" in error


def test_a_run_that_goes_back_sends_one_thing_at_a_time(tmp_path: Path) -> None:
    save, sent = tmp_path / "mine", []
    train(save, Callback(), train_iters=2)
    stored: Any = SimpleNamespace(
        address="s3://slow",
        upload=lambda folder: (time.sleep(0.3), sent.append(folder.name))[1] or 1,
        write_latest=lambda step: sent.append(step),
    )
    trainer: Any = SimpleNamespace(state=ParallelState.single("cpu"), progress=SimpleNamespace(beat=lambda: None))
    upload = S3Upload(save, stored)
    upload.loaded(trainer)
    upload.loaded(trainer)
    upload.end(trainer)
    assert sent == ["global_step2", 2]


def test_a_bucket_that_cannot_be_read(tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    save = tmp_path / "mine"
    s3.refuses = lambda method, path: True
    with pytest.raises(UserError, match=r"s3_path: s3://bucket/some/runs/mine: .*AccessDenied"):
        fetch_own(options(save))  # to begin at step 0 could be wrong
    train(save, Callback(), train_iters=2)
    fetch_own(options(save))
    assert "AccessDenied" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"s3_path": "bucket/path"}, r"s3_path: .*s3://bucket/path.*'bucket/path'"),
        ({"save": None}, r"s3_path: .*save"),
        ({"s3_chunk_size": 1000}, r"s3_chunk_size: .*1000.*5242880"),
    ],
)
def test_keys_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        args_of(**{"save": "x", "s3_path": "s3://bucket", **changes})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r"requirements/requirements-s3\.txt"):
        S3Folder("s3://bucket")


def test_a_run_whose_folder_is_gone_resumes_from_the_bucket(tmp_path: Path, s3: S3Server) -> None:
    save = tmp_path / "mine"
    flat = {"data_path": corpus(tmp_path / "data"), "save": str(save), "s3_path": "s3://bucket/runs"}
    assert run({**flat, "exit_interval": 3}, Layout(dp=2))[0].steps == [1, 2, 3]
    shutil.rmtree(save)
    reports = run(flat, Layout(dp=2))
    assert [report.steps for report in reports] == [[4, 5, 6]] * 2
    assert S3Folder("s3://bucket/runs/mine").list_steps() == [3, 6]
