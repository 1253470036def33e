"""Rules about where a run starts from."""

from __future__ import annotations

import os

from megatron.neox_arguments.draft import Draft
from megatron.plugins import sources

_DEFAULTS = {"iteration": None, "data": "continue", "optimizer": "keep", "step": "continue"}
# Keys that mean the same as, or the opposite of, a key of init_from -> what to write instead.
_OTHER_WAYS = {
    "finetune": "init_from: {data: restart, optimizer: reset, step: restart} takes the weights alone",
    "iteration": "init_from.iteration picks the checkpoint",
    "no_load_optim": "init_from.optimizer=reset means this",
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
    save, load = draft["save"], draft["load"]
    if load is not None and (save is None or _folder(load) != _folder(save)):
        draft.fail("load", "init_from is set too; keep one of the two")
    for name, instead in _OTHER_WAYS.items():
        if draft[name] is not None and draft[name] is not False:
            draft.fail(name, f"init_from is set too: {instead}; remove {name}")
    if save is not None and _folder(save) == _folder(given["path"]):
        draft.fail("save", "is the folder of init_from.path; this run needs one of its own")


def _folder(path: str) -> str:
    return os.path.abspath(path)
