"""The rules of `init_from`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.inference import for_inference
from tests.neox_args.helpers import derived, loaded

pytestmark = pytest.mark.cpu

WHOLE = {
    "path": "a",
    "iteration": None,
    "data": "continue",
    "optimizer": "keep",
    "step": "continue",
    "vocab": "keep",
    "layer_map": None,
}
RESET = {"path": "a", "optimizer": "reset"}


def test_what_is_left_out_continues(tmp_path: Path) -> None:
    args = derived(tmp_path, init_from={"path": "a"})
    assert args.checkpoint.init_from == WHOLE and derive(args).checkpoint.init_from == WHOLE
    assert derive(NeoXArgs.from_saved(args.to_dict())).checkpoint.init_from == WHOLE
    given = {"path": "a", "iteration": 5, "data": "restart", "optimizer": "reset", "step": "restart", "vocab": "resize"}
    args = derived(tmp_path, init_from={**given, "layer_map": [0, 0, 1]}, num_layers=3)
    assert args.checkpoint.init_from == {**given, "layer_map": [0, 0, 1]}
    assert derive(NeoXArgs.from_saved(args.to_dict())).checkpoint.init_from == {**given, "layer_map": [0, 0, 1]}
    assert derived(tmp_path).checkpoint.init_from is None


def test_keys_from_the_command_line(tmp_path: Path) -> None:
    loaded(tmp_path)
    args = derive(NeoXArgs.from_files([str(tmp_path / "a.yml")], ["init_from.path=x", "init_from.data=restart"]))
    assert args.checkpoint.init_from == {**WHOLE, "path": "x", "data": "restart"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": {}}, "init_from: lacks path"),
        ({"init_from": {"data": "restart"}}, "init_from: lacks path"),
        ({"init_from": {"path": "a", "data": "again"}}, "init_from.data: 'again' .*continue, restart"),
        ({"init_from": {"path": "a", "optimizer": "restart"}}, "init_from.optimizer: 'restart' .*keep, reset"),
        ({"init_from": {"path": "a", "optimiser": "keep"}}, "unknown key 'optimiser' in init_from.*optimizer"),
        ({"init_from": {"path": "a", "iteration": "last"}}, "init_from.iteration: "),
        ({"init_from": "a"}, "init_from: "),
        ({"init_from": WHOLE, "load": "b"}, "load: init_from is set too"),
        ({"init_from": WHOLE, "load": "a"}, "load: init_from is set too"),
        ({"init_from": WHOLE, "finetune": True}, "finetune: init_from .*optimizer: reset"),
        ({"init_from": WHOLE, "no_load_optim": True}, "no_load_optim: init_from is set too.*init_from.optimizer=reset"),
        ({"init_from": WHOLE, "iteration": 0}, "iteration: init_from is set too.*init_from.iteration"),
        ({"init_from": WHOLE, "save": "./a/"}, r"save: .*init_from\.path"),
        ({"init_from": {"path": "a", "vocab": "resize"}}, r"vocab: resize .*init_from\.optimizer=reset"),
        ({"init_from": {"path": "a", "layer_map": [0]}}, r"layer_map .*init_from\.optimizer=reset"),
        ({"init_from": {"path": "a", "vocab": 8}}, "init_from.vocab: .*keep, resize"),
        ({"init_from": {**RESET, "layer_map": [0, 0, 1]}, "num_layers": 2}, "3 entries, num_layers is 2"),
        ({"init_from": {**RESET, "layer_map": [0, -1]}, "num_layers": 2}, "init_from: layer_map: -1 "),
        ({"init_from": {**RESET, "layer_map": ["a"]}, "num_layers": 2}, r"init_from\.layer_map"),
    ],
    ids=str,
)
def test_contradictions_are_refused_with_their_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        derived(tmp_path, **changes)
    assert "a.yml:" in str(caught.value)


def test_load_may_be_the_save_folder(tmp_path: Path) -> None:
    """As in configs/local_setup.yml: continue when there is something to continue."""
    args = derived(
        tmp_path, init_from={"path": "a"}, save="b", load="./b", no_load_rng=True, override_lr_scheduler=True
    )
    assert args.checkpoint.init_from == WHOLE


def test_evaluation_reads_the_run_s_own_checkpoint(tmp_path: Path) -> None:
    args = for_inference(loaded(tmp_path, init_from={"path": "a"}, save="b"))
    assert (args.checkpoint.load, args.checkpoint.init_from) == ("b", None)
    args = for_inference(loaded(tmp_path, init_from={"path": "a"}, load="c"))
    assert derive(args).checkpoint.load == "c"
