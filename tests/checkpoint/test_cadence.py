"""Save cadence: golden numbers of GPT-NeoX's `save_iters`."""

import pytest

from megatron.checkpoint.cadence import is_save_step, save_steps
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


def test_log_scale_golden():
    assert save_steps(100, scale="log", factor=2) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert save_steps(100, scale="log", factor=1.5) == [1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86, 100]


def test_linear_scale_and_the_end():
    assert save_steps(10, factor=4) == [4, 8, 10]
    assert save_steps(8, factor=4) == [4, 8]


def test_extra_steps_and_step_zero():
    assert save_steps(10, factor=5, extra=(0, 3)) == [0, 3, 5, 10]
    assert save_steps(10, factor=5, extra=(3,)) == [3, 5, 10]
    assert not is_save_step(0, factor=5)


@pytest.mark.parametrize("factor", [None, 0, -1])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_not_positive_switches_off(factor, scale):
    assert save_steps(10, scale=scale, factor=factor, extra=(2,)) == [2, 10]


def test_factors_that_make_no_sense():
    with pytest.raises(UserError, match="above 1"):
        is_save_step(3, scale="log", factor=1)
    with pytest.raises(UserError, match="whole number"):
        is_save_step(3, factor=1.5)
    with pytest.raises(UserError, match="linear, log"):
        is_save_step(3, scale="cubic", factor=2)
