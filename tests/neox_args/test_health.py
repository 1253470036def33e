"""The keys that watch over the numbers of a run: their short forms and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from tests.neox_args.helpers import SMALL, derived

pytestmark = pytest.mark.cpu

WINDOW = {"window": 128, "sigma": 6.0}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        (False, None),
        (True, WINDOW),
        (64, {**WINDOW, "window": 64}),
        ({"sigma": 4}, {**WINDOW, "sigma": 4.0}),
    ],
)
def test_forms_of_skip_outliers(tmp_path: Path, given: Any, found: Any) -> None:
    assert derived(tmp_path, skip_outliers=given).optimizer.skip_outliers == found


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, None), ("rewind", {"do": "rewind"}), ({"steps": 1, "window": 9}, {"do": "warn", "steps": 1, "window": 9})],
)
def test_forms_of_on_spike(tmp_path: Path, given: Any, found: Any) -> None:
    whole = {**WINDOW, "steps": 3, "before": 8, "most": 3}
    assert derived(tmp_path, on_spike=given, save="x").training.on_spike == (found and {**whole, **found})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"skip_outliers": 3}, r"skip_outliers.window: is 3; at least 4"),
        ({"skip_outliers": {"sigma": 0}}, r"skip_outliers.sigma: is 0; above 0"),
        ({"skip_outliers": {"sigmas": 2}}, r"unknown key 'sigmas' in skip_outliers\. .*sigma"),
        ({"on_spike": "rewinds", "save": "x"}, r"on_spike: is 'rewinds'; warn or rewind"),
        ({"on_spike": "rewind"}, r"on_spike: rewind needs .* set save"),
        ({"on_spike": "rewind", "save": "x", "no_save_optim": True}, r"on_spike: .* no_save_optim"),
        ({"on_spike": "rewind", "save": "x", "no_save_rng": True}, r"on_spike: .* no_save_rng"),
        ({"on_spike": {"steps": 0}}, r"on_spike.steps: is 0; at least 1"),
        ({"monitor_attention": True}, r"monitor_attention: .*monitor_interval.* set it"),
        (
            {"monitor_attention": True, "monitor_interval": 9, "attention_config": [[["mamba"], "all"]]},
            r"monitor_attention: there is no attention layer in attention_config",
        ),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    first = len(SMALL) + 1  # the keys are behind the others
    with pytest.raises(UserError, match=rf"a\.yml:[{first}{first + 1}]: {message}") as error:
        derived(tmp_path, **keys)
    assert error.value.exit_code == 2
