"""Exports go to the Hub while training: which, that no step waits, what is tried again, and what a restart sends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.callbacks.hf_upload import HfUpload
from megatron.cluster.exports import Exports
from megatron.cluster.uploads import Uploads
from megatron.errors import UserError
from megatron.neox_arguments.callback_key import choose_callbacks
from megatron.training.callback import Callback
from tests.callbacks.fakes import args_of, trainer_of
from tests.hub.upload_server import UploadHub

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[UploadHub]:
    caplog.set_level("INFO")
    monkeypatch.setattr(logging.getLogger("deepy"), "propagate", True)
    monkeypatch.setattr("megatron.cluster.uploads._RETRY", ("--max-retries=0",))
    monkeypatch.setattr("megatron.callbacks.hf_upload.LOOK_SECONDS", 0.0)
    with UploadHub() as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield hub


def export(folder: Path, step: int, content: str = "weights") -> None:
    """What a process of hf_export leaves."""
    made = folder / f"global_step{step}"
    made.mkdir(parents=True, exist_ok=True)
    (made / "model.safetensors").write_text(f"{content} {step}")
    (made / "config.json").write_text(content)


class Exporting(Callback):
    """An export is complete after these steps; the process under way has ended before the hooks that follow."""

    def __init__(self, folder: Path, steps: tuple[int, ...], waits: bool = True) -> None:
        self.folder, self.steps, self.waits, self.upload = folder, steps, waits, None

    def after_step(self, trainer: Any, out: Any) -> None:
        if trainer.step in self.steps:
            export(self.folder, trainer.step)
        (upload,) = (one for one in trainer.callbacks if isinstance(one, HfUpload))
        if self.waits and upload._process is not None:
            upload._process.wait(60)


def train(folder: Path, steps: tuple[int, ...], *more: Callback, waits: bool = True, **keys: Any) -> None:
    uploads = Uploads(Exports(folder, folder), "me/tiny")
    trainer_of([*more, Exporting(folder, steps, waits), HfUpload(uploads)], **{"train_iters": 6, **keys}).run()


def branches(hub: UploadHub) -> dict[str, bytes]:
    model = hub.models["me/tiny"]
    return {name: files["model.safetensors"] for name, files in model.branches.items() if files}


def test_each_export_arrives_and_the_last_one_as_main(
    tmp_path: Path, hub: UploadHub, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "hf"
    train(folder, (2, 6))
    assert branches(hub) == {"global_step2": b"weights 2", "global_step6": b"weights 6", "main": b"weights 6"}
    assert hub.models["me/tiny"].private
    (line,) = [line for line in caplog.messages if line.startswith("me/tiny has")]
    assert all(name in line for name in ("global_step2", "global_step6", "main"))
    sent = len(hub.log)
    train(folder, (), train_iters=6)  # nothing is left to send, and nobody is asked
    assert len(hub.log) == sent
    export(folder, 2, "replaced")  # the run went back
    train(folder, ())
    assert branches(hub)["global_step2"] == b"replaced 2"


def test_what_fails_is_a_warning_and_goes_with_the_next_export(
    tmp_path: Path, hub: UploadHub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("/api/models/me/tiny/commit/", status=503, times=1)
    commits: list[tuple[int, int]] = []

    class Look(Callback):
        def before_step(self, trainer: Any) -> None:
            commits.append((trainer.step, hub.count("/api/models/me/tiny/commit/")))

    train(tmp_path / "hf", (1, 4), Look())
    assert dict(commits)[3] == 1 == dict(commits)[4]  # not again before there is another
    assert branches(hub) == {"global_step1": b"weights 1", "global_step4": b"weights 4"}
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "iteration 1 is not sent to me/tiny: " in warning and "upload.log" in warning and "503" in warning


def test_what_the_hub_never_takes_is_named_once_with_the_command_that_sends_it(
    tmp_path: Path, hub: UploadHub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("/api/models/me/tiny/commit/", status=403, times=99)
    train(tmp_path / "hf", (6,))
    (line,) = [line for line in caplog.messages if "lacks" in line]
    folder = tmp_path / "hf" / "global_step6"
    assert line.startswith("me/tiny lacks global_step6, main; ") and f"upload.py {folder} me/tiny global_step6" in line


def test_no_step_waits_and_a_run_that_stops_goes_at_once(tmp_path: Path, hub: UploadHub) -> None:
    class Stops(Callback):
        def after_step(self, trainer: Any, out: Any) -> None:
            if trainer.step == 4:
                trainer.request_stop("stopped", 3)

    folder = tmp_path / "hf"
    train(folder, (1,), Stops(), waits=False)  # in less time than the process takes to start
    assert not hub.models
    train(folder, (), train_iters=5)
    assert branches(hub) == {"global_step1": b"weights 1"}


def test_the_keys(tmp_path: Path) -> None:
    keys = {"save": str(tmp_path), "hf_save_interval": 2}
    chosen = [one.name for one in choose_callbacks(args_of(**keys, hf_upload_repo="lab/tiny"))]
    assert chosen.index("hf_export") < chosen.index("hf_upload")  # whose end comes after the last export
    assert "hf_upload" not in [one.name for one in choose_callbacks(args_of(**keys))]
    with pytest.raises(UserError, match=r"hf_upload_repo: expected NAME or OWNER/NAME, got 'a/b/c'"):
        args_of(**keys, hf_upload_repo="a/b/c")
    with pytest.raises(UserError, match="hf_upload_repo: hf_save_interval"):
        args_of(save=str(tmp_path), hf_upload_repo="lab/tiny")
