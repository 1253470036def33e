"""What `load` and `save` mean, and errors that list what a folder holds."""

import re
import zlib
from dataclasses import replace

import pytest

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.manifest import FileEntry
from megatron.errors import UserError
from tests.checkpoint.starts import decide, put

pytestmark = pytest.mark.cpu


def test_nothing_anywhere_is_a_fresh_start_and_logged(save):
    for load in (None, save):
        start = decide(save, load)
        assert (start.kind, start.checkpoint, start.step, start.load_optim) == ("fresh", None, 0, False)
        assert "fresh start" in start.message
    assert decide(None, None).kind == "fresh"


def test_save_is_resumed_whatever_load_iteration_and_finetune_are(save, base):
    put(save, 10)
    for load, iteration, finetune in ((None, None, False), (base, 2, False), (base, None, True), (save, None, False)):
        start = decide(save, load, iteration, finetune)
        assert (start.kind, start.checkpoint.path, start.step) == ("resume", save / "global_step10", 10)
        assert start.load_optim
    assert f"load: {base}, iteration: 2, finetune)" in decide(save, base, 2, True).message


def test_the_first_start_obeys_load_iteration_and_finetune(save, base):
    start = decide(save, base)
    assert (start.kind, start.checkpoint.path, start.step) == ("load", base / "global_step4", 4)
    start = decide(save, base, 2)
    assert (start.kind, start.checkpoint.path, start.step) == ("load", base / "global_step2", 2)
    assert "step 2" in start.message
    start = decide(save, base, 2, finetune=True)
    assert (start.kind, start.checkpoint.path, start.step, start.load_optim) == (
        "finetune",
        base / "global_step2",
        0,
        False,
    )


def test_a_missing_iteration_lists_the_steps(save, base):
    with pytest.raises(UserError, match=r"iteration 3.*\[2, 4\]"):
        decide(save, base, 3)


def test_iteration_of_the_run_s_own_folder(base):
    """known-faults 38: asked to go back to 2, the run does; restarted later, it continues from what came after."""
    start = decide(base, base, 2)
    assert (start.kind, start.step) == ("load", 2)
    with pytest.raises(UserError, match=r"iteration 3.*\[2, 4\]"):
        decide(base, base, 3)
    put(base, 3, iteration=2)
    start = decide(base, base, 2)
    assert (start.kind, start.step) == ("resume", 3)
    assert "iteration: 2" in start.message


def test_iteration_without_anything_to_load_is_an_error(save):
    with pytest.raises(UserError, match="iteration: 5"):
        decide(save, None, 5)
    with pytest.raises(UserError, match="does not exist"):
        decide(save, save, 5)


def test_load_without_a_checkpoint_never_starts_fresh(save, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        decide(save, tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"load: .*/empty: .*it is empty"):
        decide(save, empty)
    (empty / "config.json").write_text("{}")
    (empty / "model.safetensors").write_text("")
    start = decide(save, empty)
    assert (start.kind, start.step, start.load_optim, start.checkpoint.published) == ("finetune", 0, False, str(empty))
    with pytest.raises(UserError, match=r"iteration: 3, .*Hugging Face"):
        decide(save, empty, 3)
    with pytest.raises(UserError, match=r"save: .*/empty is a Hugging Face model"):
        decide(empty, empty)


@pytest.mark.parametrize(("key", "finetune"), [("save", False), ("load", False), ("load", True), ("init_from", False)])
def test_a_step_back_names_what_is_wrong_with_the_newer_ones(tmp_path, key, finetune):
    """One has another state file of the same size, one lacks a file. An older folder that is damaged is not named."""
    root = tmp_path / key
    for step in (2, 10, 20, 30):
        put(root, step)
    states = [root / f"global_step{step}" / "mp_rank_00_model_states.pt" for step in (2, 20, 30)]
    states[0].unlink()
    data = states[1].read_bytes()
    states[1].write_bytes(bytes(len(data)))
    states[2].unlink()
    found = {"save": {"save": root}, "load": {"load": root}}.get(key, {"init_from": {"path": str(root)}})
    start = decide(**{"save": None, **found}, finetune=finetune)
    assert start.checkpoint.path == root / "global_step10" and start.skips
    name = states[1].name
    numbers = rf"[^()]*\b{zlib.crc32(bytes(len(data)))}\b[^()]*\b{zlib.crc32(data)}"
    says = rf": global_step20 \({name} {numbers}\), global_step30 \({name} is missing\)$"
    assert re.search(says, start.message) and "global_step2 " not in start.message, start.message
    assert not decide(None, root, 10).skips


def test_incomplete_folders_are_ignored_and_named(save):
    put(save, 2)
    (save / "global_step5").mkdir()
    broken = put(save, 4, latest=True)
    files = {"layer_00-model_00-model_states.pt": FileEntry(bytes=7, crc32=0)}
    replace(broken, files=broken.files | files).write(save / "global_step4")
    start = decide(save, None)
    assert (start.kind, start.step) == ("resume", 2)
    assert "global_step4" in start.message and "global_step5" in start.message
    with pytest.raises(UserError, match=r"steps: \[2\].*global_step4 \(layer_00.*missing\).*global_step5 \(.*manifest"):
        find_checkpoint(save, 5)
