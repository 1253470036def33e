"""Rules about mixtures: a named one becomes the flat data keys; phases, caps and validation sets fit their lists."""

from __future__ import annotations

from typing import Any

from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.mixture_files import fault_at
from megatron.neox_arguments.mixtures import (
    COMPANIONS,
    SET_KEYS,
    MixtureFault,
    NamedMixture,
    check_steps,
    parse,
    parse_named,
    sets_in_training,
    weight_phases,
)
from megatron.neox_arguments.rules_pairs import written

PER_SOURCE = ("train_data_max_epochs", "train_data_max_tokens", "train_data_holdout")
_OPTIONS = {
    **{key.format("train"): option for option, key in COMPANIONS.items()},
    "train_data_max_epochs": "max_epochs",
    "train_data_max_tokens": "max_tokens",
    "train_data_holdout": "holdout",
}
FILLED = ("train_data_names", "train_data_paths", "train_data_weights", *_OPTIONS, "valid_sets")
"""What `named_mixture` sets."""


def named_mixture(draft: Draft) -> None:
    """`mixture` fills in the flat keys about training data, and adds its validation sets."""
    if draft["mixture"] is None:
        return
    if isinstance(draft["mixture"], str):
        draft.fail("mixture", f"{draft['mixture']!r} names a mixture file, which only a config file or deepy.py reads")
    try:
        mixture = parse(draft["mixture"])
    except MixtureFault as fault:
        inside = {name: where for name, where in draft.sources.items() if name.startswith("mixture.")}
        raise UserError(fault_at(fault, inside, draft.source("mixture"))) from fault
    if draft["data_path"] is not None:
        other = f"mixture is set too ({draft.source('mixture')}); use one of the two"
        draft.fail("data_path", f"{other} (data_path: null undoes that of a file merged or extended)")
    for name, value in _flat(mixture).items():
        if draft.is_set(name) and draft[name] != value:
            draft.fail(name, f"mixture is set too ({draft.source('mixture')}) and gives {value}; keep one of the two")
        draft.set(name, value, "mixture")
    own = _sets(draft)
    for name in mixture.valid_sets.keys() & own.keys():
        if own[name] != mixture.valid_sets[name]:
            draft.fail("valid_sets", f"{name} is another set in mixture ({draft.source('mixture')}); rename one")
    if mixture.valid_sets:
        draft.set("valid_sets", {**mixture.valid_sets, **own}, "mixture")


def _flat(mixture: NamedMixture) -> dict[str, Any]:
    """The flat keys that a mixture sets."""
    names = tuple(mixture.sources)
    phases = tuple((step, tuple(weights[name] for name in names)) for step, weights in mixture.phases)
    flat: dict[str, Any] = {
        "train_data_names": names,
        "train_data_paths": tuple(source["path"] for source in mixture.sources.values()),
        "train_data_weights": phases if len(phases) > 1 else phases[0][1],
    }
    for key, option in _OPTIONS.items():
        values = tuple(source.get(option) for source in mixture.sources.values())
        if any(value is not None for value in values):
            flat[key] = values
    return flat


def _sets(draft: Draft) -> dict[str, dict[str, Any]]:
    """`valid_sets` in its full form. Raises `UserError`."""
    try:
        return parse_named(draft["valid_sets"], SET_KEYS, "")
    except MixtureFault as fault:
        name = f"valid_sets.{fault.place}" if fault.place else "valid_sets"
        draft.fail(name, str(fault))


def train_weights(draft: Draft) -> None:
    """`train_data_weights`: one number per source, also in every phase; phases begin at 0 and rise."""
    name, paths = "train_data_weights", draft["train_data_paths"]
    key = written(draft.__getitem__, "train_data_paths")
    phases = weight_phases(draft[name])
    if phases is None:
        return
    if paths is None:
        draft.fail(name, f"is set without {key}")
    fault = check_steps([step for step, _ in phases])
    if fault:
        draft.fail(name, fault)
    for step, weights in phases:
        inside = f" in the phase from step {step}" if len(phases) > 1 else ""
        if len(weights) != len(paths):
            draft.fail(name, f"has {len(weights)} weights for {len(paths)} {key}{inside}")
        if any(weight < 0 for weight in weights) or sum(weights) <= 0:
            draft.fail(name, f"weights must not be negative and not all 0, are {list(weights)}{inside}")
    if draft["weight_by_num_documents"]:
        draft.fail("weight_by_num_documents", f"{name} is set too ({draft.source(name)}); keep one of the two")
    late = [step for step, _ in phases if draft["train_iters"] is not None and step >= draft["train_iters"] > 0]
    if late:
        draft.note(f"{name}: the phase from step {late[0]} is never reached, train_iters is {draft['train_iters']}")


def per_source(draft: Draft) -> None:
    """Names, caps and holdouts: one value for all sources of training, or one for each."""
    sources = 1 if draft["data_path"] is not None else len(draft["train_data_paths"] or ())
    for name in PER_SOURCE:
        value = draft[name]
        if value is None:
            continue
        if isinstance(value, tuple) and len(value) != sources:
            draft.fail(name, f"has {len(value)} values for {sources} sources of training; give one for each, or one")
        least = 0 if name == "train_data_holdout" else None
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and (one < 0 or (one == 0 and least is None)):
                draft.fail(name, f"must be above 0, is {one} (null: no limit)")
    names = draft["train_data_names"]
    if names is not None:
        if len(names) != sources:
            draft.fail("train_data_names", f"has {len(names)} names for {sources} sources of training")
        twice = [one for one in names if names.count(one) > 1]
        if twice:
            draft.fail("train_data_names", f"{twice[0]!r} is there twice")


def budgets(draft: Draft) -> None:
    """Simulated epoching: `target_budget` tokens are the large run, `experiment_budget` is this one's."""
    target = draft["target_budget"]
    if target is None:
        if draft.get_given("experiment_budget") is not None:
            draft.fail("experiment_budget", "is set without target_budget, the tokens of the run that is simulated")
        return
    for name in ("train_data_max_epochs", "train_data_max_tokens"):
        if draft[name] is not None:
            draft.fail(name, f"target_budget is set too ({draft.source('target_budget')}): both cut the sources")
    if draft.get_given("experiment_budget") is None:
        if draft["train_iters"] is None:
            draft.fail("target_budget", "needs experiment_budget or train_iters, which train_epochs would follow from")
        tokens = BatchPlan.from_values(draft.__getitem__).tokens(draft["train_iters"])
        draft.set("experiment_budget", tokens or None, "train_iters x train_batch_size x seq_length")
    draft.positive("target_budget", "experiment_budget")
    if draft["experiment_budget"] is not None and draft["experiment_budget"] > target:
        draft.fail("target_budget", f"is below experiment_budget ({draft['experiment_budget']}): nothing to simulate")


def valid_sets(draft: Draft) -> None:
    """Validation sets by name: known keys, and names that no tag has."""
    if draft["valid_sets"] is None:
        return
    sets = _sets(draft)
    for name, one in sets.items():
        for tag in one.get("tags", ()):
            if tag in sets:
                draft.fail(f"valid_sets.{name}", f"the tag {tag!r} is the name of a set; their metrics would be one")
    draft.values["valid_sets"] = sets or None


def has_valid_sets(draft: Draft) -> bool:
    """Whether named sets are validated on: those of `valid_sets`, held-out parts, sources without any weight."""
    if draft["valid_sets"]:
        return True
    return bool(sets_in_training(draft["train_data_weights"], draft["train_data_holdout"]))
