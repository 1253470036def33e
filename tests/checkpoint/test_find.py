"""Which checkpoints a folder holds, and which one is meant."""

import shutil

import pytest

from megatron.checkpoint.find import find_checkpoint, list_checkpoints
from megatron.errors import UserError
from tests.checkpoint.starts import put

pytestmark = pytest.mark.cpu


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
    assert find_checkpoint(base).path == base / "global_step4"
    assert find_checkpoint(base, 2).path == base / "global_step2"
    assert find_checkpoint(base / "global_step2").path == base / "global_step2"
    (base / "global_step2" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest.json"):
        find_checkpoint(base / "global_step2")
