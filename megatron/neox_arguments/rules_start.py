"""Rules about where a run starts from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.draft import Draft
from megatron.plugins import sources

_DEFAULTS = {
    "iteration": None,
    "data": "continue",
    "optimizer": "keep",
    "step": "continue",
    "vocab": "keep",
    "layer_map": None,
}
_RESET = "init_from.optimizer=reset"
# Keys that mean the same as, or the opposite of, a key of init_from -> what to write instead.
_OTHER_WAYS = {
    "finetune": "init_from: {data: restart, optimizer: reset, step: restart} takes the weights alone",
    "iteration": "init_from.iteration picks the checkpoint",
    "no_load_optim": f"{_RESET} means this",
}


def plugin_sources(draft: Draft) -> None:
    """What the plugins consist of, so that ranks and later starts notice another version."""
    draft.set("plugin_sources", sources(draft["plugins"]) or None, "the files of plugins")


def init_from(draft: Draft) -> None:
    """init_from with all its keys, and no other key about the same start."""
    given = draft["init_from"]
    if given is None:
        return
    if not given.get("path"):
        draft.fail("init_from", "lacks path: the folder in which the other run saved its checkpoints")
    draft.set("init_from", {**_DEFAULTS, **given}, "defaults")
    with draft.part():
        _growth(draft, given)
    save, load = draft["save"], draft["load"]
    if load is not None and (save is None or _folder(load) != _folder(save)):
        draft.fail("load", "init_from is set too; keep one of the two")
    for name, instead in _OTHER_WAYS.items():
        if draft[name] is not None and draft[name] is not False:
            draft.fail(name, f"init_from is set too: {instead}; remove {name}")
    if save is not None and _folder(save) == _folder(given["path"]):
        draft.fail("save", "is the folder of init_from.path; this run needs one of its own")


def _growth(draft: Draft, given: Mapping[str, Any]) -> None:
    """The keys of a model that is larger than the checkpoint."""
    layer_map, resizes = given.get("layer_map"), given.get("vocab") == "resize"
    if (resizes or layer_map is not None) and given.get("optimizer") != "reset":
        what = "vocab: resize" if resizes else "layer_map"
        draft.fail("init_from", f"{what} takes weights alone: its moments are of other shapes; set {_RESET}")
    if layer_map is not None and min(layer_map, default=0) < 0:
        draft.fail("init_from", f"layer_map: {min(layer_map)} is no block, they are numbered from 0")
    if layer_map is not None and len(layer_map) != draft["num_layers"]:
        counts = f"{len(layer_map)} entries, num_layers is {draft['num_layers']}"
        draft.fail("init_from", f"layer_map has {counts}: it names the checkpoint's block for each block of this model")


def _folder(path: str) -> str:
    return os.path.abspath(path)
