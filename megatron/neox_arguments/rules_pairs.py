"""Rules about texts that are compared: preference pairs (`dataset_impl: pairwise`) and texts with a reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.neox_arguments.draft import Draft
from megatron.rows import row, rows

_ROLES = ("train", "valid", "test")
_KINDS = ("data_paths", "label_data_paths")
FILLED = tuple(f"{role}_{kind}" for role in _ROLES for kind in _KINDS)
"""What `pairs` sets: in all else a pair is a document of these paths, which are those of its chosen side."""


def written(value: Callable[[str], Any], name: str) -> str:
    """The key that a user sets to set `name`: of pairs that of their chosen side."""
    return f"pos_{name}" if value("dataset_impl") == "pairwise" and name in FILLED else name


def pairs(draft: Draft) -> None:
    """`pos_*` lists are the data paths of a run on pairs, and each has its `neg_*` counterpart."""
    if draft["dataset_impl"] != "pairwise":
        for role in _ROLES:
            for name in (f"{side}_{role}_{kind}" for side in ("pos", "neg") for kind in _KINDS):
                if draft[name] is not None:
                    draft.fail(name, "is for pairs; set dataset_impl: pairwise")
        return
    if draft["data_path"] is not None:
        draft.fail(
            "data_path", "pairs come in two files: set pos_train_data_paths and neg_train_data_paths (valid_, test_)"
        )
    for role in _ROLES:
        for kind in _KINDS:
            with draft.part():
                _take(draft, f"{role}_{kind}", f"pos_{role}_{kind}")
        with draft.part():
            _match(draft, role)
    for name, one in (draft["valid_sets"] or {}).items():
        if not isinstance(one, dict) or "rejected" not in one:
            draft.fail(f"valid_sets.{name}", "a set of pairs has a path (the chosen texts) and `rejected`")


def _take(draft: Draft, name: str, pos: str) -> None:
    if draft[pos] is None:
        return
    if draft.get_given(name) not in (None, draft[pos]):
        draft.fail(name, f"{pos} is set too ({draft.source(pos)}); with dataset_impl: pairwise write that alone")
    draft.imply(name, draft[pos], pos)


def _match(draft: Draft, role: str) -> None:
    chosen = draft[f"{role}_data_paths"]
    for kind in _KINDS:
        name, counterpart = f"neg_{role}_{kind}", f"pos_{role}_{kind}"
        there, here = draft[name], draft[f"{role}_{kind}"]
        if here is not None and there is None:
            draft.fail(counterpart, f"{name} is not set: a pair has both sides")
        if there is not None and here is None:
            draft.fail(name, f"{counterpart} is not set: a pair has both sides")
        if there is not None and len(there) != len(chosen or ()):
            draft.fail(name, f"has {len(there)} paths for {len(chosen or ())} {counterpart}; give one for each")
        if kind == _KINDS[0] and None in (there or ()):
            draft.fail(name, "a source of the mixture has no `rejected`; with dataset_impl: pairwise each is of pairs")


def answers(draft: Draft) -> None:
    """Whether the packing can hold texts that are compared, and keeps them apart."""
    found = [f"{role}_reward_data_paths" for role in _ROLES if draft[f"{role}_reward_data_paths"] is not None]
    for name in found:
        paths = draft[name.replace("_reward", "")] or ()
        if len(draft[name]) != len(paths):
            draft.fail(name, f"has {len(draft[name])} paths for {len(paths)} {name.replace('_reward', '')}")
    paired = draft["dataset_impl"] == "pairwise"
    if not (paired or found):
        return
    because = "pairs" if paired else f"texts with a reward ({found[0]})"
    able = [name for name, one in rows("pack_impl").items() if "answers" in one.values]
    how = row("pack_impl", draft["pack_impl"]).get("answers")
    if how is None:
        draft.fail("pack_impl", f"{draft['pack_impl']} cannot hold {because}; set one of {', '.join(sorted(able))}")
    if how == "joined" and not draft["intra_document_masking"]:
        draft.fail(
            "intra_document_masking",
            f"pack_impl: {draft['pack_impl']} puts several texts into a row, which would see each other; set "
            f"intra_document_masking: true, or pack_impl: unpacked for {because}",
        )
    if draft["seq_length_ramp"]:
        draft.fail("seq_length_ramp", f"it cuts rows into shorter ones, but {because} are compared as wholes")
