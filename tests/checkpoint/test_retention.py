"""keep_last_n_checkpoints (known-faults 36)."""

import os

import pytest

from megatron.checkpoint.retention import apply_retention, to_delete
from tests.checkpoint.test_find import put

pytestmark = pytest.mark.cpu


def test_keeps_the_newest_and_the_extra_ones_and_ignores_incomplete(tmp_path):
    for step in (1, 2, 3, 4):
        put(tmp_path, step)
    (tmp_path / "global_step5").mkdir()
    assert apply_retention(tmp_path, 2, extra=(2,)) == [1]
    assert sorted(os.listdir(tmp_path)) == ["global_step2", "global_step3", "global_step4", "global_step5", "latest"]


@pytest.mark.parametrize("n", [None, 0, -1])
def test_not_positive_keeps_all(n):
    assert to_delete([1, 2, 3], 3, n, ()) == []


def test_never_the_one_that_latest_names():
    assert to_delete([1, 3], 3, 1, ()) == [1]
    assert to_delete([7], 7, 1, ()) == []


def test_later_ones_are_of_an_abandoned_line_and_do_not_count():
    assert to_delete([2, 3, 4, 8], 3, 2, ()) == []
    assert to_delete([2, 3, 4, 8], 3, 1, (), temporary=(8,)) == [2, 8]


def test_abandoned_ones_do_not_count_and_go_with_older_ones():
    assert to_delete([2, 4, 5, 6, 8], 6, 2, (), abandoned=(5, 8)) == [2]
    assert to_delete([2, 4, 5, 6, 8], 6, 1, (), abandoned=(5, 8)) == [2, 4, 5]
    assert to_delete([2, 4, 5, 6, 8], 6, None, (), abandoned=(5, 8)) == []


def test_natural_order():
    assert to_delete([9, 10, 100], 100, 2, ()) == [9]


def test_trailing_slash(tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2)
    assert apply_retention(f"{tmp_path}/", 1) == [1]
    assert not (tmp_path / "global_step1").exists()
