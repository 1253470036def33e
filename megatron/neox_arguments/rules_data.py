"""Rules about data paths, weights and names that only the code behind a key knows."""

from __future__ import annotations

from megatron.errors import nearest
from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.rules_mixture import has_valid_sets
from megatron.neox_arguments.rules_pairs import written

_ROLES = ("train", "valid", "test")


def data_paths(draft: Draft) -> None:
    """data_path or separate path lists, not both; no comma-joined lists; as many weights as paths."""
    if draft["data_impl"] == "infer":
        draft.set("data_impl", "mmap", "the format is that of the files")
    draft.not_negative("num_workers", "weighted_sampler_alpha", "npy_eod")
    with draft.part():
        if None not in (draft["npy_eod"], draft.facts.vocab_size) and draft["npy_eod"] >= draft.facts.vocab_size:
            draft.fail("npy_eod", f"{draft['npy_eod']} is no id of the tokenizer's {draft.facts.vocab_size}")
    with draft.part():
        _split(draft)
    for role in _ROLES:
        with draft.part():
            _paths(draft, role)
            if role != "train":  # those of training may change over time: rules_mixture
                _weights(draft, role)
            _labels(draft, role)
    lists = [f"{role}_data_paths" for role in _ROLES if draft[f"{role}_data_paths"]]
    if draft["data_path"] is not None:
        _no_comma(draft, "data_path", draft["data_path"])
        if lists:
            other = f"{lists[0]} is set too ({draft.source(lists[0])}); use one way or the other"
            draft.fail("data_path", f"{other} (data_path: null undoes that of a file merged or extended)")
    elif lists and "train_data_paths" not in lists:
        needs = written(draft.__getitem__, "train_data_paths")
        draft.fail(written(draft.__getitem__, lists[0]), f"is set without {needs}")
    if lists and draft["eval_iters"] > 0:
        missing = [role for role in _ROLES[1:] if not draft[f"{role}_data_paths"]]
        if has_valid_sets(draft):
            missing = []  # then it is plain that this run is validated in its own way
        if missing:
            keys = [written(draft.__getitem__, f"{role}_data_paths") for role in missing]
            draft.note(f"no {' and no '.join(missing)} data: {', '.join(keys)} not set")


def _no_comma(draft: Draft, name: str, path: str) -> None:
    if "," in path:
        items = ", ".join(part.strip() for part in path.split(","))
        draft.fail(name, f"{path!r} has a comma: did you mean a list? train_data_paths: [{items}]")


def _paths(draft: Draft, role: str) -> None:
    for path in draft[f"{role}_data_paths"] or ():
        _no_comma(draft, f"{role}_data_paths", path)


def _weights(draft: Draft, role: str) -> None:
    paths, name = draft[f"{role}_data_paths"], f"{role}_data_weights"
    key, weights = written(draft.__getitem__, f"{role}_data_paths"), draft[name]
    if weights is None:
        return
    if paths is None:
        draft.fail(name, f"is set without {key}")
    if len(weights) != len(paths):
        draft.fail(name, f"has {len(weights)} weights for {len(paths)} {key}")
    if any(weight < 0 for weight in weights) or sum(weights) <= 0:
        draft.fail(name, f"weights must not be negative and not all 0, are {list(weights)}")
    if draft["weight_by_num_documents"]:
        draft.fail("weight_by_num_documents", f"{name} is set too ({draft.source(name)}); keep one of the two")


def _labels(draft: Draft, role: str) -> None:
    paths, name = draft[f"{role}_data_paths"], f"{role}_label_data_paths"
    for path in draft[name] or ():
        if path is not None:
            _no_comma(draft, name, path)
    if draft[name] is not None and len(draft[name]) != len(paths or ()):
        draft.fail(name, f"has {len(draft[name])} paths for {len(paths or ())} {role}_data_paths; give one for each")


def _split(draft: Draft) -> None:
    """`split` is one to three proportions, separated by commas or slashes."""
    text = draft["split"]
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts, default=-1) < 0 or sum(parts) <= 0:
        draft.fail("split", f"{text!r} is not one to three proportions such as '969, 30, 1'")


def registered_names(draft: Draft) -> None:
    """Values that name an entry of a registry must be known there (phase two)."""
    for name, choices in draft.facts.registries.items():
        with draft.part():
            value = draft[name]
            if isinstance(value, str) and value not in choices and value != "auto":
                hint = nearest(value, list(choices))
                draft.fail(name, f"{value!r} is not known.{hint} Choices: {', '.join(sorted(choices))}")
