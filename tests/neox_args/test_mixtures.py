"""Mixtures in a config: weights by phase, named mixtures and what they fill in, caps, validation sets, messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.mixtures import MixtureFault, interpolate, parse
from tests.neox_args.helpers import SMALL, derived

pytestmark = pytest.mark.cpu

TWO = {"train_data_paths": ["a", "b"]}


def failing(tmp_path: Path, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        derived(tmp_path, **keys)
    return str(caught.value)


def write(tmp_path: Path, **files: str) -> list[str]:
    """`run.yml` with what every config needs and `run`; other files as given, `__` for a slash."""
    (tmp_path / "run.yml").write_text(yaml.safe_dump(SMALL) + files.pop("run", ""))
    for name, text in files.items():
        path = tmp_path / f"{name.replace('__', '/')}.yml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [str(tmp_path / "run.yml")]


def test_constant_weights_and_weights_by_phase(tmp_path: Path) -> None:
    assert derived(tmp_path, **TWO, train_data_weights=[3, 1]).data.train_data_weights == (3.0, 1.0)
    phases = derived(tmp_path, **TWO, train_data_weights=[[0, [3, 1]], [50, [1, "1e-1"]]]).data.train_data_weights
    assert phases == ((0, (3.0, 1.0)), (50, (1.0, 0.1)))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], "has 1 weights for 2 train_data_paths"),
        ([[0, [1, 1]], [5, [1]]], r"1 weights for 2 .*step 5\b"),
        ([[1, [1, 1]]], "begins at step 0, not 1"),
        ([[0, [1, 1]], [5, [1, 0]], [5, [0, 1]]], "rising steps; 5 comes after 5"),
        ([[0, [1, 1]], [5, [1, 0]], [4, [0, 1]]], "rising steps; 4 comes after 5"),
        ([[0, [0, 0]]], r"negative .*all 0, are \[0\.0, 0\.0\]"),
        (
            [[0, [1, 1]], [5, [2, -1]]],
            r"negative .*\[2\.0, -1\.0\] .*step 5\b",
        ),
        ([[0, 1], [5, 2]], r"1 weights for 2 .*step 0\b"),
        ([], "0 weights for 2"),
        (["x", 1], "a list of"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, weights: Any, message: str) -> None:
    said = failing(tmp_path, **TWO, train_data_weights=weights)
    assert re.search(f"train_data_weights.*({message})", said), said


def test_a_phase_that_is_never_reached_is_reported(tmp_path: Path) -> None:
    late = {"train_data_weights": [[0, [1, 1]], [100, [1, 0]]], "train_iters": 100}
    assert any(
        re.search(r"train_data_weights: .*step 100\b.*train_iters is 100\b", note)
        for note in derived(tmp_path, **TWO, **late).notes
    )
    assert not any("never reached" in note for note in derived(tmp_path, **TWO, **{**late, "train_iters": 101}).notes)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_data_max_epochs": [1]}, "has 1 values for 2 sources"),
        ({"train_data_max_epochs": 0}, "must be above 0"),
        ({"train_data_max_tokens": [5, -1]}, "must be above 0, is -1"),
        ({"train_data_names": ["x"]}, "has 1 names for 2"),
        ({"train_data_names": ["x", "x"]}, "'x' is there twice"),
        ({"train_data_on_cap": "redistribut"}, "'redistribut'.*'redistribute'"),
        ({"experiment_budget": 5}, "without target_budget"),
        ({"target_budget": 100, "train_data_max_epochs": 1}, "both cut the sources"),
        ({"target_budget": 1, "train_iters": 100}, "nothing to simulate"),
        ({"target_budget": 1000, "train_iters": None, "train_epochs": 1}, "needs experiment_budget"),
        ({"valid_sets": {"x": 3}}, r"valid_sets\.x: .*path or .*mapping.* 3\b"),
        ({"valid_sets": {"x": {"path": "a", "tag": "t"}}}, "valid_sets.x.tag: unknown key 'tag'"),
        ({"valid_sets": {"x": {"path": "a", "tags": ["y"]}, "y": "b"}}, r"valid_sets\.x.* 'y' "),
        ({"valid_sets": {"x y": "a"}}, "'x y' is not a name"),
    ],
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    said = failing(tmp_path, **{**TWO, **keys})
    assert re.search(message, said), said
    assert next(iter(keys)) in said


def test_budgets_default_to_the_run(tmp_path: Path) -> None:
    data = derived(tmp_path, **TWO, target_budget=10**9, train_iters=10, train_batch_size=4, seq_length=8).data
    assert data.experiment_budget == 10 * 4 * 8


def test_sets_are_written_out_and_make_a_run_validate(tmp_path: Path) -> None:
    args = derived(tmp_path, **TWO, eval_iters=2, valid_sets={"x": "v", "y": {"path": "w", "tags": "t"}})
    assert args.data.valid_sets == {"x": {"path": "v"}, "y": {"path": "w", "tags": ["t"]}}
    assert args.training.do_valid and not any("valid_data_paths not set" in note for note in args.notes)
    assert not derived(tmp_path, **TWO, eval_iters=2).training.do_valid
    assert derived(tmp_path, **TWO, eval_iters=2, train_data_holdout=[None, 3]).training.do_valid
    assert derived(tmp_path, **TWO, eval_iters=2, train_data_weights=[1, 0]).training.do_valid
    assert not derived(tmp_path, **TWO, eval_iters=2, train_data_weights=[[0, [1, 0]], [5, [1, 1]]]).training.do_valid


MIXTURE = """
mixture:
  sources:
    web: w
    code: {path: c, labels: cl, max_epochs: 2, max_tokens: 1e6}
  weights:
    - [0, {web: 3, code: 1}]
    - [7, {web: 1}]
  valid_sets: {news: n}
"""


def test_a_mixture_fills_in_the_flat_keys(tmp_path: Path) -> None:
    args = derive(NeoXArgs.from_files(write(tmp_path, run=MIXTURE + "valid_sets: {own: {path: o, tags: [t]}}\n")))
    data = args.data
    assert data.train_data_names == ("web", "code") and data.train_data_paths == ("w", "c")
    assert data.train_data_weights == ((0, (3.0, 1.0)), (7, (1.0, 0.0)))
    assert data.train_label_data_paths == (None, "cl") and data.train_data_max_epochs == (None, 2.0)
    assert data.train_data_max_tokens == (None, 10**6) and data.train_data_holdout is None
    assert data.valid_sets == {"news": {"path": "n"}, "own": {"path": "o", "tags": ["t"]}}
    assert args.source("train_data_paths") == "derived: mixture"
    again = derive(NeoXArgs.from_saved(args.to_dict()))
    assert again.data == data and derive(args).data == data


def test_a_named_mixture_is_found_next_to_the_config_and_overrides_reach_into_it(tmp_path: Path) -> None:
    paths = write(tmp_path, run="mixture: mine\n", mixtures__mine=MIXTURE)
    args = derive(NeoXArgs.from_files(paths))
    assert args.data.train_data_names == ("web", "code")
    assert args.sources["mixture"].startswith(str(tmp_path / "mixtures" / "mine.yml"))
    args = derive(NeoXArgs.from_files(paths, ["mixture.sources.web.max_epochs=3", "mixture.weights={web: 1, code: 2}"]))
    assert args.data.train_data_max_epochs == (3.0, 2.0) and args.data.train_data_weights == (1.0, 2.0)
    other = write(tmp_path, run="", mine=MIXTURE)
    assert (
        derive(
            NeoXArgs.from_files(other, [f"mixture={tmp_path / 'mine'}", "mixture.sources.web.path=x"])
        ).data.train_data_paths[0]
        == "x"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixture: {sources: {a: x}, weight: {a: 1}}", r"run\.yml:7: .*key 'weight' .*'weights'"),
        ("mixture: {weights: {a: 1}}", "needs sources"),
        ("mixture: {sources: {a: x}, weights: {b: 1}}", "mixture.weights.b: there is no source 'b'"),
        ("mixture: {sources: {a: {path: x, max_epoch: 1}}}", "unknown key 'max_epoch'. Did you mean"),
        ("mixture: {sources: {a: {path: x, max_epochs: many}}}", "max_epochs: .*number.* 'many'"),
        ("mixture: {sources: {a: x}, weights: [[1, {a: 1}]]}", "begins at step 0, not 1"),
        ("mixture: {sources: {a: x}, weights: [[0, [1]]]}", r"run\.yml:7: .*\[step, {source: number}\]"),
        ("mixture: {sources: {a: x}, weights: {a: 0}}", "not all 0"),
        ("mixture: nowhere", r"run\.yml:7: .*'nowhere'; .*mixtures/nowhere\.yml"),
        ("mixture: 3", r"run\.yml:7: mixture: .*\b3\b"),
        ("mixture: {sources: {a: x}}\ndata_path: y", "data_path: mixture is set too"),
        ("mixture: {sources: {a: x}}\ntrain_data_paths: [y]", "train_data_paths: mixture is set too"),
        ("mixture: {interpolate: {mine: 0.5}}", "add up to 1, not 0.5"),
        ("mixture: {interpolate: {mine: 1}, sources: {a: x}}", "mixture: interpolate .*sources"),
        ("mixture: circle", "leads back to itself"),
        ("mixture: wrong", r"wrong\.yml.*: .*`mixture`; .*\blr"),
    ],
)
def test_faults_in_a_mixture_name_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    paths = write(
        tmp_path, run=text + "\n", mine=MIXTURE, circle="mixture: {interpolate: {circle: 1}}", wrong="lr: 1\n" + MIXTURE
    )
    with pytest.raises(UserError, match=message):
        derive(NeoXArgs.from_files(paths))


def test_interpolating_mixtures(tmp_path: Path) -> None:
    other = "mixture: {sources: {code: {path: c, labels: cl, max_epochs: 2, max_tokens: 1e6}, math: m}}"
    run = "mixture: {interpolate: {mine: 0.4, other: 0.6}}\n"
    data = derive(NeoXArgs.from_files(write(tmp_path, run=run, mine=MIXTURE, mixtures__other=other))).data
    assert data.train_data_names == ("web", "code", "math")
    (first, before), (second, after) = data.train_data_weights
    assert (first, second) == (0, 7)
    assert before == pytest.approx((0.4 * 0.75, 0.4 * 0.25 + 0.6 * 0.5, 0.6 * 0.5))
    assert after == pytest.approx((0.4, 0.3, 0.3))
    assert data.valid_sets == {"news": {"path": "n"}}
    with pytest.raises(MixtureFault, match="web is .*'x'.*'y'"):
        interpolate([(parse({"sources": {"web": "x"}}), 0.5), (parse({"sources": {"web": "y"}}), 0.5)])


def test_what_a_mixture_says_of_itself_is_read_as_the_same() -> None:
    for text in (MIXTURE, "mixture: {sources: {a: x}}", "mixture: {sources: {a: x, b: y}, weights: {b: 2}}"):
        mixture = parse(yaml.safe_load(text)["mixture"])
        assert parse(mixture.to_value()) == mixture
