"""documentation/mixtures.md: every YAML in it loads and dry-runs, and does what the text says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron.errors import UserError
from tests.plan.test_planner import dry_run, rows

pytestmark = pytest.mark.cpu

TEXT = (Path(__file__).resolve().parents[2] / "documentation" / "mixtures.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
NAMES = ("web", "code", "math", "news", "wiki")


@pytest.fixture
def folder(tmp_path: Path, run_config: Path, tokens: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data and the mixtures that the text speaks of, and `run.yml`."""
    (tmp_path / "data").mkdir()
    made = tokens(1000, 100)
    for name in NAMES:
        for suffix in (".bin", ".idx"):
            (tmp_path / "data" / f"{name}_text_document{suffix}").symlink_to(made + suffix)
    (tmp_path / "mixtures").mkdir()
    (tmp_path / "mixtures" / "late_math.yml").write_text(next(one for one in EXAMPLES if "max_tokens: 1e9" in one))
    (tmp_path / "mixtures" / "only_web.yml").write_text("mixture: {sources: {web: web_text_document}}")
    run_config.write_text(re.sub("data_path:.*\n|split:.*\n", "", run_config.read_text()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_dry_runs(folder: Path, number: int) -> None:
    example = folder / "example.yml"
    text = re.sub("train_iters:.*\n", "", EXAMPLES[number])
    example.write_text(text)
    root = ["data_root=data"] if "mixture" in yaml.safe_load(text) else []
    table = rows(dry_run(folder / "run.yml", example, *root), "data", "role")
    assert [row[0] for row in table].count("train") >= 1
    assert ("[60, " in text or "late_math" in text) == (">" in " ".join(table[0]))


def test_the_examples_are_all_there() -> None:
    assert len(EXAMPLES) == 7
    keys = {key for example in EXAMPLES for key in yaml.safe_load(example)}
    assert keys >= {"mixture", "valid_sets", "train_data_weights", "train_data_max_epochs", "train_data_holdout"}


def test_a_mixture_by_name_from_the_command_line(folder: Path) -> None:
    given = (folder / "run.yml", "mixture=late_math", "data_root=data")
    table = rows(dry_run(*given), "data", "role")
    assert [row[:2] for row in table[:5]] == [
        ["train", "web"],
        ["train", "code"],
        ["train", "math"],
        ["valid/news", "news"],
        ["valid/code", "code"],
    ]
    assert table[1][3] == "99,800"  # two documents of 100 tokens hold the 8 samples of 16
    merged = rows(dry_run(folder / "run.yml", folder / "mixtures" / "late_math.yml", "data_root=data"), "data", "role")
    assert merged == table
    changed = rows(dry_run(*given, "mixture.weights={web: 1, math: 1}"), "data", "role")
    assert [row[4] for row in changed[:3]] == ["0.5", "0", "0.5"]


def test_simulated_epoching(folder: Path) -> None:
    lists = ("train_data_paths=[data/web_text_document]", "train_iters=100")  # 25,600 tokens
    table = rows(dry_run(folder / "run.yml", *lists, "target_budget=2.56e6"), "data", "role")
    assert table[0][2:4] == ["10", "1,000"]
    with pytest.raises(UserError, match="both cut the sources"):
        dry_run(folder / "run.yml", *lists, "target_budget=2.56e6", "train_data_max_epochs=1")


def test_the_refusal_looks_as_in_the_text(folder: Path) -> None:
    shown = re.search(r"```\n(train_data_max_epochs: the training.*?)\n```", TEXT, flags=re.DOTALL).group(1)
    lists = ("train_data_paths=[data/web_text_document, data/math_text_document]", "train_data_names=[web, math]")
    with pytest.raises(UserError) as caught:
        dry_run(folder / "run.yml", *lists, "train_data_weights=[3, 1]", "train_data_max_epochs=[null, 0.01]")

    def shape(text: str) -> str:
        return re.sub(r"\d+(\.\d+)?", "N", re.sub(r", or a weight of at most [^)]*\)", "", text))

    assert shape(str(caught.value)) == shape(shown)
