"""What a run logs before it begins: how many differences from GPT-NeoX there are, and when they are listed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.start import Start
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.differences import differences_for
from megatron.run.start import log_start
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("kind", "keys", "whole"),
    [
        ("fresh", {"gradient_clipping": 1.0}, True),  # which GPT-NeoX does not clip with
        ("load", {"gradient_clipping": 1.0}, True),
        ("resume", {"gradient_clipping": 1.0}, False),
        ("fresh", {}, False),  # clips at the default
    ],
)
def test_differences_are_counted_and_listed_where_they_matter(
    kind: str, keys: dict[str, Any], whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = derived(tmp_path, facts=Facts(vocab_size=100), save="s", checkpoint_factor=5, **keys)
    lines = differences_for(args)
    with caplog.at_level(logging.DEBUG):
        log_start(args, Start(kind, None, 0, "the start"))
    (line,) = [record.message for record in caplog.records if "GPT-NeoX matter" in record.message]
    assert line.startswith(f"{len(lines)} ") and "s/resolved.yml" in line
    listed = [record for record in caplog.records if record.levelno == logging.DEBUG]  # in log files alone
    assert [record.message.strip() for record in listed] == (lines if whole else [])
