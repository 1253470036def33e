"""Every key of GPT-NeoX is in exactly one class, with GPT-NeoX's default; classes do what they promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.groups import all_keys, describe_unknown
from megatron.neox_arguments.retired import ALIASES, NEVER_DEFAULT, OTHER_VERSIONS, RETIRED
from tests.neox_args.helpers import loaded

pytestmark = pytest.mark.cpu

_LINES = (Path(__file__).parent / "neox_keys.tsv").read_text(encoding="utf-8").splitlines()[1:]
NEOX = {name: ast.literal_eval(default) for name, _, default in (line.split("\t") for line in _LINES)}

# Ours differ on purpose; the field's `differs` says so.
OTHER_DEFAULTS = {
    "gradient_accumulation_steps": None,
    "communication_data_type": None,
    "fp32_allreduce": True,
    "mamba_selective_scan_fusion": None,
    "mamba_causal_conv_fusion": None,
    "sample_output_file": "samples.jsonl",
}


def test_the_list_is_whole() -> None:
    assert len(NEOX) == len(_LINES) == 338


def test_every_neox_key_is_in_exactly_one_class() -> None:
    for name in NEOX:
        assert (name in all_keys()) != (name in RETIRED), name


def test_only_neox_keys_are_not_marked_new() -> None:
    assert {name for name, info in all_keys().items() if not info.new} <= set(NEOX)
    assert not {name for name, info in all_keys().items() if info.new} & set(NEOX)


def test_defaults_are_neox_defaults() -> None:
    for name, neox in NEOX.items():
        ours = RETIRED[name].default if name in RETIRED else all_keys()[name].default
        if name in OTHER_DEFAULTS:
            assert ours == OTHER_DEFAULTS[name] and all_keys()[name].differs, name
        else:
            assert ours == neox, name
            assert type(ours) is type(neox) or {type(ours), type(neox)} == {int, float}, name


def test_every_key_has_a_meaning() -> None:
    for name, info in all_keys().items():
        assert info.doc, name
        assert info.doc.endswith((".", "...", "[kinds...]")) or info.doc.startswith("{"), name


def test_aliases_lead_to_keys() -> None:
    for name, meant in ALIASES.items():
        assert meant in all_keys()
        assert name not in all_keys() and name not in RETIRED
    assert not set(OTHER_VERSIONS) & (set(all_keys()) | set(RETIRED) | set(ALIASES))
    to_write = {name: re.findall(r"write (\w+)", advice) for name, advice in OTHER_VERSIONS.items()}
    assert {name: keys for name, keys in to_write.items() if not set(keys) <= set(all_keys())} == {}
    assert len([name for name, keys in to_write.items() if keys]) > 50
    # advice for names that are near to another key than the one that is meant
    others = {"num_generations": "rollouts_per_prompt", "epsilon": "grpo_epsilon", "r": "lora_r"}  # TRL's and PEFT's
    others |= {"loss_type": "dpo_loss_type", "beta": "dpo_beta", "target_modules": "lora_target_modules"}
    near = {"n_head": "num_attention_heads", "gradient_checkpointing": "checkpoint_activations"}
    for name, meant in {**near, **others}.items():
        problem, key = describe_unknown(name)
        assert key == meant and f"write {meant}" in problem and (name in others or problem.endswith(meant))
    assert "seq_length" in describe_unknown("max_prompt_length")[0]
    assert describe_unknown("version")[1] is None and describe_unknown("train_itres")[1] == "train_iters"


def _other_value(name: str) -> object:
    """A value of the right type that is not the default."""
    info = all_keys()[name]
    for value in (*info.choices, True, False, 7, 0.25, "word", ["word"], [7], {"some": "thing"}):
        try:
            made = NeoXArgs.from_saved({name: value}).get(name)
        except UserError:
            continue
        if made != info.default and made not in (False, None, 0):
            return value
    return None


UNAVAILABLE = [name for name, info in all_keys().items() if not info.available]


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_unavailable_keys_name_the_alternative(name: str, tmp_path: Path) -> None:
    info = all_keys()[name]
    assert loaded(tmp_path, **{name: info.default}).get(name) == info.default
    value = _other_value(name)
    if value is None:  # a switch that is on by default: switching it off asks for nothing
        assert info.default is True
        return
    with pytest.raises(UserError, match=rf"a\.yml:\d+: {name} is not available: \S+"):
        loaded(tmp_path, **{name: value})


CHOICES = [
    (name, value, advice)
    for name, info in all_keys().items()
    if isinstance(info.unavailable, dict)
    for value, advice in info.unavailable.items()
]


@pytest.mark.parametrize(("name", "value", "advice"), CHOICES)
def test_unavailable_choices_name_the_alternative(name: str, value: object, advice: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        loaded(tmp_path, **{name: value})
    assert f"{name}: {value} is not available: {advice}" in str(error.value)


@pytest.mark.parametrize("name", RETIRED)
def test_retired_keys_warn_once_and_say_what_to_use(name: str, tmp_path: Path) -> None:
    args = loaded(tmp_path, **{name: "something else"})
    (note,) = [note for note in args.notes if name in note]
    assert note.endswith(f"{name} has no effect: {RETIRED[name].instead}")
    assert "a.yml:7: " in note
    assert args.to_dict() == loaded(tmp_path).to_dict()


def test_retired_keys_at_neox_defaults_share_one_line(tmp_path: Path) -> None:
    names = [name for name, retired in RETIRED.items() if retired.default not in (None, NEVER_DEFAULT)]
    args = loaded(tmp_path, **{name: RETIRED[name].default for name in names})
    (note,) = args.notes
    assert all(name in note for name in names)


def test_keys_of_other_versions_are_errors_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.yml:7: unknown key 'mlp_type': .*activation: swiglu"):
        loaded(tmp_path, mlp_type="llama")


def test_what_is_advised_instead_of_a_key_exists():
    texts = {name: retired.instead for name, retired in RETIRED.items()}
    for name, info in all_keys().items():
        of_values = info.unavailable if isinstance(info.unavailable, dict) else {"": info.unavailable or ""}
        texts |= {f"{name} {value}": text for value, text in of_values.items()}
    named = {word for text in texts.values() for word in re.findall(r"\b[a-z][a-z0-9]*(?:[._][a-z0-9]+)+\b", text)}
    keys = {word for word in named if not word.endswith((".py", ".jsonl"))}
    assert len(keys) > 20 and {word.split(".")[0] for word in keys} <= set(all_keys())
