"""The benchmark of quality: its windows, its budget, its score, and a run of ours from tokens to a line."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from tests.tools.command import ROOT, run

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    yield
    for name in ("quality", "quality_contenders", "flags"):
        sys.modules.pop(name, None)


class Documents(list[Any]):
    prefix = "here"


def test_windows_share_a_token_and_cover_the_documents_in_order() -> None:
    from quality import windows

    data = Documents(np.array(x, np.uint16) for x in ([0, 1, 2], [3, 4], [5, 6, 7, 8]))
    assert windows(data, np.array([2, 0, 1]), 4).tolist() == [[5, 6, 7, 8, 0], [0, 1, 2, 3, 4]]
    with pytest.raises(UserError, match="here: has too few tokens for a window of 9"):
        windows(data, np.arange(3), 9)


def test_a_budget_ends_with_its_seconds_and_says_how_many_steps_there_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of start, then two per step, of which 50 fit into a hundred."""
    import quality_contenders

    spent = iter([1.0, 4.0, 7.0, *(10.0 + 2 * n for n in range(100))])
    monkeypatch.setattr(quality_contenders, "cpu_seconds", lambda: next(spent))
    budget = quality_contenders.Budget(100)
    seen = [(step, budget.total) for step in budget]
    assert [step for step, _ in seen] == list(range(53)) and budget.start == 10.0
    assert {total for _, total in seen[4:]} == {53} == {budget.total}


def test_the_score_is_nats_of_text_over_bytes_of_text(tmp_path: Path) -> None:
    """Of five tokens the last stands for none: what it costs does not count, and the others cost log2(5) bits each."""
    from quality_contenders import Budget, Task, score

    np.save(tmp_path / "held.npy", np.array([[0, 1, 4, 2, 3], [3, 3, 4, 0, 0]]))
    np.save(tmp_path / "bytes.npy", np.array([1, 2, 3, 4, 0]))
    task = Task(tmp_path, SimpleNamespace(), Budget(1))

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(*tokens.shape, 5)
        found[:, 1] = torch.arange(5.0)  # both windows go on with the last token here
        return found

    targets = [1, 2, 3, 3, 0, 0]
    assert score(task, logits) == pytest.approx(6 * math.log2(5) / sum([1, 2, 3, 4, 0][t] for t in targets))


def test_ours_runs_from_tokens_to_a_line(tmp_path: Path) -> None:
    """A second is enough to learn more than chance (six bits) of a text that counts."""
    words = {chr(33 + number): number for number in range(64)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    draw = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for _ in range(20):
            builder.add_item((np.arange(40) + draw.integers(64)) % 64)
            builder.end_document()
        builder.finalize()
    where = ("--data", tmp_path / "text", "--tokenizer", tmp_path / "tokenizer.json")
    sizes = ("--layers", 1, "--hidden", 64, "--tokens", 16, "--batch", 2, "--threads", 1, "--cpu-seconds", 1)
    said = run("tools/bench/quality.py", *where, *sizes).stdout
    found = re.fullmatch(
        r"deepy +([0-9.]+) bits per byte after \d+ CPU s .*: (\d+) steps, ([0-9,]+) tokens, .*\n", said
    )
    assert found, said
    assert float(found[1]) < 5.9 and int(found[3].replace(",", "")) % (16 * int(found[2])) == 0


def test_contenders_that_are_not_there(tmp_path: Path) -> None:
    data = ("--data", tmp_path / "none", "--tokenizer", tmp_path / "none.json")
    for flag, what in (("--nanochat", "scripts/base_train.py"), ("--litgpt", "interpreter")):
        done = run("tools/bench/quality.py", *data, flag, tmp_path / "gone", check=2)
        assert what in done.stderr and flag in done.stderr
