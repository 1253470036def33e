"""All that is wrong with a config is one message, and nothing in it is only the consequence of something else in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_trainable, derive
from megatron.neox_arguments.problems import Problems
from tests.neox_args.helpers import SMALL

pytestmark = pytest.mark.cpu

# (keys to change; None removes one, what is said of them after `file:line: ` or alone). Each is a mistake of its own.
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size: must be set"),
    ({"seq_length": "long"}, "seq_length: expected a whole number, got 'long'"),
    ({"rotary_pct": 2}, r"rotary_pct: must be in \(0, 1\], is 2"),
    ({"attention_dropout": -1}, r"attention_dropout: must be in \[0, 1\), is -1"),
    ({"precision": "fp64"}, "precision: 'fp64' is not one of"),
    ({"zero_optimization": {"stage": 1, "stge": 1}}, "unknown key 'stge' in zero_optimization.*'stage'"),
    ({"optimizer": {"type": "Adma"}}, "optimizer.type: 'Adma' .*'adam'"),
    ({"lr": -1}, "lr: must be 0 or more, is -1"),
    ({"train_batch_size": 7}, "train_batch_size: 7 is not a multiple of micro 4"),
    ({"warmup": 20}, "warmup: .*not 20: for 20 steps write 20 steps$"),
    ({"split": "a"}, "split: 'a' "),
    ({"save_everything": True}, "unknown key 'save_everything'"),
    ({"eval_iters": -1}, "eval_iters: must be 0 .*is -1"),
    ({"top_p": -2}, "top_p: "),
    ({"tensor_model_parallel_siz": 2}, "unknown key 'tensor_model_parallel_siz'.*'tensor_model_parallel_size'"),
    ({"num_gpus": 0}, "num_gpus: must be above 0, is 0"),
]


def problems_of(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with a config, without its folder."""
    (folder / "a.yml").write_text(text, encoding="utf-8")
    found = Problems()
    args = NeoXArgs.from_files([str(folder / "a.yml")], overrides, problems=found)
    check_trainable(derive(args, Facts(), found), found)
    return [str(one).replace(f"{folder}/", "") for one in found.found]


def text_of(changes: dict[str, Any]) -> str:
    values = {**SMALL, "data_path": "d", **changes}
    return yaml.safe_dump({name: value for name, value in values.items() if value is not None}, sort_keys=False)


def test_a_config_without_a_mistake(tmp_path: Path) -> None:
    assert problems_of(tmp_path, text_of({})) == []


@pytest.mark.parametrize(("changes", "said"), FAULTS, ids=[next(iter(changes)) for changes, _ in FAULTS])
def test_a_mistake_is_one_problem(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (only,) = problems_of(tmp_path, text_of(changes))
    assert re.search(rf"^(a\.yml:\d+: )?{said}", only)


def test_seven_mistakes_are_seven_problems_with_their_lines(tmp_path: Path) -> None:
    """Those that no other hides: keys that a rule reads together are right in all of it or wrong in one."""
    chosen = [FAULTS[i] for i in (1, 2, 4, 5, 6, 9, 11)]
    text = text_of({name: value for changes, _ in chosen for name, value in changes.items()})
    found = problems_of(tmp_path, text)
    assert len(found) == 7
    for changes, said in chosen:
        (line,) = [number for number, one in enumerate(text.splitlines(), 1) if one.startswith(next(iter(changes)))]
        inside = line + 2 if "zero_optimization" in changes else line + 1 if "optimizer" in changes else line
        assert [one for one in found if re.search(rf"^a\.yml:{inside}: {said}", one)], (said, found)


def test_everything_at_once(tmp_path: Path) -> None:
    """All of the mistakes that do not share a key, and all that is missing, on the command line too."""
    overrides = ("no equals", "lr=[", "num_layer=3")
    text = text_of({"hidden_size": None, "train_iters": None, "data_path": None, "num_attention_heads": None})
    text = text.replace("train_micro_batch_size_per_gpu: 4\n", "seed: 1\nseed: 2\n")
    found = problems_of(tmp_path, text, overrides)
    expected = [
        r"^a\.yml:4: seed is already set at a\.yml:3;",
        r"^command line: 'no equals': .*key=value",
        r"^command line: lr=\[: ",
        r"^command line: num_layer=3: unknown key 'num_layer'.*'num_layers'",
        r"^hidden_size: must be set",
        r"^num_attention_heads: must be set",
        r"^train_micro_batch_size_per_gpu: must be set, or train_batch_size",
        r"^set train_iters",
        r"^set data_path",
    ]
    assert len(found) == len(expected)
    for one in expected:
        assert [said for said in found if re.search(one, said)], one


def test_one_error_for_python_with_a_line_each(tmp_path: Path) -> None:
    text = "num_attention_heads: 2\nhidden_size: x\nseq_length: 1.5\nnum_layers: 2\n"
    (tmp_path / "a.yml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        NeoXArgs.from_ymls([str(tmp_path / "a.yml")], {"train_batch_size": -1})
    lines = str(error.value).splitlines()
    assert "3" in lines[0] and len(lines) == 4
    assert re.search(r"a\.yml:2: hidden_size: ", lines[1]) and re.search(r"a\.yml:3: seq_length: ", lines[2])
    assert re.search(r"Python call.*train_batch_size: must be above 0, is -1", lines[3])


def test_of_files_that_cannot_be_read_nothing_else_is_concluded(tmp_path: Path) -> None:
    """A key may be set in the file that is missing, so that no key is said to be."""
    (tmp_path / "bad.yml").write_text("a: [\n", encoding="utf-8")
    (tmp_path / "good.yml").write_text("num_layers: x\nhidden_size: -1\n", encoding="utf-8")
    paths = [str(tmp_path / name) for name in ("gone.yml", "bad.yml", "good.yml")]
    with pytest.raises(UserError) as error:
        NeoXArgs.from_ymls(paths)
    first, *lines = str(error.value).splitlines()
    assert "3" in first and [
        next(part for part in ("gone.yml: ", "bad.yml:2: ", "good.yml:1: num_layers: ") if part in line)
        for line in lines
    ] == ["gone.yml: ", "bad.yml:2: ", "good.yml:1: num_layers: "]


def test_keys_that_one_advice_refuses_are_one_problem(tmp_path: Path) -> None:
    """A file for muP with base shapes sets a handful of keys; none of them alone is a mistake."""
    keys = {"save_base_shapes": True, "base_shapes_file": "x", "mup_width_scale": 4}
    (only,) = problems_of(tmp_path, text_of(keys))
    assert re.search(r"^a\.yml:8: save_base_shapes, base_shapes_file \(line 9\), mup_width_scale \(line 10\) are", only)
