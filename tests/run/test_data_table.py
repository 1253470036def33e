"""The table of the data at start: what it says of weights that change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.data.order.datasets import plan_datasets
from megatron.data.order.phases import Progress
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import Group
from megatron.neox_arguments.schema_data import DataConfig
from megatron.run.data_table import data_lines, evaluation_notes
from tests.data.corpus import write

pytestmark = pytest.mark.cpu


def lines(folder: Path, weights: object, steps: int = 10) -> list[str]:
    paths = tuple(write(folder / name, [[d] * 9 for d in range(1, 9)]) for name in ("web", "math"))
    data = DataConfig(train_data_paths=paths, train_data_weights=weights)
    counts = {"train_samples": 2 * steps, "progress": Progress(batch=2)}
    return data_lines(plan_datasets(data, seq_length=4, seed=1, **counts).table())[3:]


def test_weights_that_stay_need_no_line(tmp_path: Path) -> None:
    assert lines(tmp_path, (3, 1)) == []


def test_changes_are_listed_by_step(tmp_path: Path) -> None:
    weights = [[0, [3, 1]], [4, [1, 1]], [9, [0, 1]]]
    (line,) = lines(tmp_path, weights)
    assert re.search(r"\btrain .*step 0, .*\b4, .*\b9\b", line)


def test_changes_after_the_end_of_the_run_are_listed(tmp_path: Path) -> None:
    weights = [[0, [3, 1]], [10, [1, 1]], [90, [0, 1]]]
    (unreached,) = lines(tmp_path, weights)
    assert re.search(r"\btrain: .*ends before .*step 10 .*\b90$", unreached)
    reached, unreached = lines(tmp_path, weights, steps=11)
    assert re.search(r"\btrain .*step 0, .*\b10\b", reached) and "90" not in reached
    assert re.search(r"\btrain: .*ends before .*step 90$", unreached) and "10" not in unreached


def test_a_small_test_set_that_is_read_over_and_over(tmp_path: Path) -> None:
    """8 documents of 9 tokens; 10 batches of 14 samples of 4 tokens are 560 / 72 = 7.8 of them."""
    paths = [write(tmp_path / name, [[d] * 9 for d in range(1, 9)]) for name in ("a", "b")]
    data = DataConfig(train_data_paths=(paths[0],), valid_data_paths=(paths[1],), test_data_paths=(paths[1],))
    counts = {"train_samples": 1400, "valid_samples": 3 * 140, "test_samples": 140, "progress": Progress(batch=14)}
    notes = evaluation_notes(plan_datasets(data, seq_length=4, seed=1, **counts), 10)
    assert [note.partition(":")[0] for note in notes] == ["valid", "test"]
    assert all("7.8 times" in note and paths[1] in note and "eval_iters=2 " in note for note in notes)
    few = evaluation_notes(
        plan_datasets(data, seq_length=4, seed=1, **counts | {"test_samples": 14, "valid_samples": 42}), 1
    )
    assert few == []


def test_validation_from_the_tail_of_the_training_file(tmp_path: Path) -> None:
    """Said of a file as it was tokenised, not of a shuffled one nor of files for each role."""
    ordered = write(tmp_path / "ordered", [[d] * 9 for d in range(100)])
    merge_groups([Group(str(tmp_path / "mixed"), (ordered,))], seed=1)
    counts = {"train_samples": 20, "valid_samples": 4, "test_samples": 4, "progress": Progress(batch=2)}

    def notes(**keys: object) -> list[str]:
        return evaluation_notes(plan_datasets(DataConfig(**keys), seq_length=4, seed=1, **counts), 1)

    (note,) = notes(data_path=ordered, split="90,8,2")
    assert re.search(r"^valid and test: .*\b10 of 100 documents .*--shuffle", note) and ordered in note
    assert notes(data_path=str(tmp_path / "mixed"), split="90,8,2") == []
    assert notes(data_path=ordered, split="1,0,0") == []
    assert notes(train_data_paths=(ordered,), valid_data_paths=(ordered,), test_data_paths=(ordered,)) == []
