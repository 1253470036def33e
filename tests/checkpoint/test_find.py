"""What `load` and `save` mean, and errors that list what is there."""

import json
import shutil

import pytest

from megatron.checkpoint.find import decide_start, find_checkpoint, list_checkpoints
from megatron.checkpoint.manifest import Manifest
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


def put(root, step, latest=True, **config):
    """A complete checkpoint without tensors."""
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    manifest = Manifest(
        step=step, consumed=0, layout={"tp": 1}, heads={}, optimizer=True, parameters={}, files={}, config=config
    )
    manifest.write(folder)
    if latest:
        (root / "latest").write_text(folder.name)
    return folder


@pytest.fixture
def save(tmp_path):
    return tmp_path / "save"


@pytest.fixture
def base(tmp_path):
    put(tmp_path / "base", 2)
    put(tmp_path / "base", 4)
    return tmp_path / "base"


def test_nothing_anywhere_is_a_fresh_start_said_aloud(save):
    for load in (None, save):
        start = decide_start(save, load)
        assert (start.kind, start.path, start.step, start.load_optim) == ("fresh", None, 0, False)
        assert "fresh start" in start.message
    assert decide_start(None, None).kind == "fresh"


def test_save_is_continued_whatever_load_iteration_and_finetune_say(save, base):
    put(save, 10)
    for load, iteration, finetune in ((None, None, False), (base, 2, False), (base, None, True), (save, None, False)):
        start = decide_start(save, load, iteration, finetune)
        assert (start.kind, start.path, start.step) == ("continue", save / "global_step10", 10)
        assert start.load_optim
    assert "spoke of the first start" in decide_start(save, base, 2, True).message


def test_the_first_start_obeys_load_iteration_and_finetune(save, base):
    start = decide_start(save, base)
    assert (start.kind, start.path, start.step) == ("load", base / "global_step4", 4)
    start = decide_start(save, base, 2)
    assert (start.kind, start.path, start.step) == ("load", base / "global_step2", 2)
    assert "step 2" in start.message
    start = decide_start(save, base, 2, finetune=True)
    assert (start.kind, start.path, start.step, start.load_optim) == ("finetune", base / "global_step2", 0, False)


def test_a_missing_iteration_lists_what_is_there(save, base):
    with pytest.raises(UserError, match=r"iteration 3.*\[2, 4\]"):
        decide_start(save, base, 3)


def test_iteration_of_the_run_s_own_folder(base):
    """known-faults 38: asked to go back to 2, the run does; restarted later, it goes on from what came after."""
    start = decide_start(base, base, 2)
    assert (start.kind, start.step) == ("load", 2)
    with pytest.raises(UserError, match=r"iteration 3.*\[2, 4\]"):
        decide_start(base, base, 3)
    put(base, 3, iteration=2)
    start = decide_start(base, base, 2)
    assert (start.kind, start.step) == ("continue", 3)
    assert "iteration: 2" in start.message


def test_iteration_without_anything_to_load_is_an_error(save):
    with pytest.raises(UserError, match="iteration: 5"):
        decide_start(save, None, 5)
    with pytest.raises(UserError, match="no folder"):
        decide_start(save, save, 5)


def test_load_without_a_checkpoint_never_starts_fresh(save, tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        decide_start(save, tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="no checkpoint to load in .*it is empty"):
        decide_start(save, empty)
    (empty / "config.json").write_text("{}")
    (empty / "model.safetensors").write_text("")
    with pytest.raises(UserError, match="config.json, model.safetensors.*Hugging Face"):
        decide_start(save, empty)


def test_incomplete_folders_are_ignored_and_named(save):
    put(save, 2)
    (save / "global_step5").mkdir()
    broken = put(save, 4, latest=True)
    raw = json.loads((broken / "manifest.json").read_text())
    raw["files"] = {"layer_00-model_00-model_states.pt": {"bytes": 7, "crc32": 0}}
    (broken / "manifest.json").write_text(json.dumps(raw))
    start = decide_start(save, None)
    assert (start.kind, start.step) == ("continue", 2)
    assert "global_step4" in start.message and "global_step5" in start.message
    with pytest.raises(
        UserError, match=r"complete steps: \[2\].*global_step4 \(layer_00.* is missing\).*global_step5 \(no man"
    ):
        find_checkpoint(save, 5)


def test_latest_wins_over_a_higher_step_of_an_abandoned_line(save):
    put(save, 4)
    put(save, 3)
    assert list_checkpoints(save).latest == 3
    shutil.rmtree(save / "global_step3")
    assert list_checkpoints(save).latest == 4


def test_temporary_folders_are_invisible(save):
    put(save, 2)
    (save / "global_step2").rename(save / ".tmp-global_step2")
    listing = list_checkpoints(save)
    assert listing.steps == () and listing.incomplete == {}


def test_find_for_evaluation(base):
    assert find_checkpoint(base) == base / "global_step4"
    assert find_checkpoint(base, 2) == base / "global_step2"
    assert find_checkpoint(base / "global_step2") == base / "global_step2"
    (base / "global_step2" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest.json"):
        find_checkpoint(base / "global_step2")
