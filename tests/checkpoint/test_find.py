"""Which checkpoints a folder holds, and which one is meant."""

import shutil

import pytest

from megatron.checkpoint.find import abandon_after, find_checkpoint, list_checkpoints
from megatron.errors import UserError
from tests.checkpoint.starts import decide, put

pytestmark = pytest.mark.cpu


def test_latest_wins_over_a_higher_step_of_an_abandoned_line(save):
    put(save, 4)
    put(save, 3)
    assert list_checkpoints(save).latest == 3
    shutil.rmtree(save / "global_step3")
    assert list_checkpoints(save).latest == 4


def test_nothing_falls_back_to_an_abandoned_line(save):
    for step in (2, 4, 5, 8):
        put(save, step)
    abandon_after(save, 4)  # the run goes back
    assert list_checkpoints(save).latest == 4 and list_checkpoints(save).steps == (2, 4, 5, 8)
    put(save, 6)
    put(save, 8, consumed=77)  # it replaces the one of the old line
    found = list_checkpoints(save)
    assert (found.latest, found.abandoned) == (8, {5})
    for step, latest in ((8, 6), (6, 4), (4, 2), (2, None)):
        (save / f"global_step{step}" / "manifest.json").unlink()
        assert list_checkpoints(save).latest == latest
    with pytest.raises(UserError, match=r"complete steps: \[5\]; of a line that the run went back from: \[5\]"):
        find_checkpoint(save)
    assert find_checkpoint(save, 5).manifest.step == 5
    with pytest.raises(UserError, match=r"save: .*went back from: \[5\].* take iteration=5 .* restart_if_damaged"):
        decide(save)
    assert decide(save, iteration=5).step == 5
    abandon_after(save, 5)  # a run that goes on from it has made it its own
    assert list_checkpoints(save).latest == 5
    (save / "abandoned.json").write_text("[")
    assert list_checkpoints(save).abandoned == frozenset()


def test_temporary_folders_are_invisible(save):
    put(save, 2)
    (save / "global_step2").rename(save / ".tmp-global_step2")
    listing = list_checkpoints(save)
    assert listing.steps == () and listing.incomplete == {}


def test_find_for_evaluation(base):
    assert find_checkpoint(base).path == base / "global_step4"
    assert find_checkpoint(base, 2).path == base / "global_step2"
    assert find_checkpoint(base / "global_step2").path == base / "global_step2"
    (base / "global_step2" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest.json"):
        find_checkpoint(base / "global_step2")
