"""A checkpoint's shapes decide what `intermediate_size` means: training, inference, conversion; and errors of shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from megatron.checkpoint.feed_forward_width import advise_width
from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.neox_reader import NeoXReader
from megatron.convert.settings import open_source
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.plan.preflight import config_for
from tests.checkpoint.neox_files import write_neox
from tests.convert.helpers import LLAMA, VOCAB, full_tensors, hugging_face, resolved, write_checkpoint

pytestmark = pytest.mark.cpu

# hidden_size 32, so LLaMA's own 8/3 is 85, rounded up 88.
MEANT = {
    "a third, as the ratio says": (264, 88, "two_thirds"),
    "final, against the ratio": (264, 264, "final"),
    "final, where the ratio leaves it open": (208, 208, "final"),
    "a third, where the ratio leaves it open": (240, 80, "two_thirds"),
    "a third, against the ratio": (120, 40, "two_thirds"),
    "LLaMA's, where nothing is set": (None, 88, "final"),
}


def settings(size: int | None) -> dict:
    return {key: value for key, value in LLAMA.items() if key != "intermediate_size"} | {
        "mlp_multiple_of": 8,
        "vocab_size": VOCAB,
        **({} if size is None else {"intermediate_size": size}),
    }


@pytest.fixture(scope="module", params=MEANT, ids=MEANT)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(config file, width, rule, a folder of GPT-NeoX cut for two ranks, a save folder of ours)."""
    size, width, rule = MEANT[request.param]
    folder = tmp_path_factory.mktemp("width")
    config = folder / "run.yml"
    config.write_text(yaml.safe_dump(settings(size)))
    args = resolved(**LLAMA | {"intermediate_size": width, "gated_width_rule": "final"})
    theirs = hugging_face(args, "llama")[1]
    write_neox(folder / "theirs" / "global_step9", theirs, LLAMA, tp=2, form="pipe")
    write_checkpoint(folder / "ours", args, full_tensors(args, "llama", theirs))
    return config, width, rule, folder / "theirs", folder / "ours"


@pytest.mark.parametrize("whose", [3, 4], ids=["GPT-NeoX's", "ours"])
def test_runs_take_the_width_of_the_checkpoint(made, whose: int):
    config, width, rule = made[:3]
    starts = {
        "train.py": [f"load={made[whose]}", "finetune=true"],
        "generate.py": [f"load={made[whose]}"],
    }
    for script, overrides in starts.items():
        args = config_for(NeoXArgs.from_files([str(config)], overrides), script)
        assert (args.get("gated_width_rule"), args.is_set("gated_width_rule")) == (rule, True)
        assert str(made[whose]) in args.source("gated_width_rule")
        assert any(f" {width} wide" in note for note in args.notes)
        assert derive(args, Facts(vocab_size=VOCAB)).model.ffn_width == width


def test_a_run_of_our_own_is_resumed_with_its_width(made):
    config, width, _, _, ours = made
    args = config_for(NeoXArgs.from_files([str(config)], [f"save={ours}"]), "train.py")
    assert derive(args).model.ffn_width == width


def test_a_folder_without_a_checkpoint_leaves_it_to_the_ratio(made, tmp_path: Path):
    given = NeoXArgs.from_files([str(made[0])], [f"load={tmp_path}", "finetune=true"])
    assert config_for(given, "train.py") == given


def test_conversions_take_the_width_of_the_checkpoint(made):
    config, width, _, theirs, _ = made
    reader, found = open_source(theirs, [str(config)])
    assert found.model.ffn_width == width
    assert reader.weight("2.mlp.linear2.weight").shape == torch.Size([32, width])


@pytest.mark.parametrize(
    ("keys", "cure"),
    [
        ({"intermediate_size": 264, "gated_width_rule": "final"}, "gated_width_rule: two_thirds"),
        ({"intermediate_size": 88, "gated_width_rule": "two_thirds"}, "gated_width_rule: final"),
        ({"intermediate_size": 96}, "intermediate_size: 88 with gated_width_rule: final"),
    ],
)
def test_an_error_of_shape_names_the_key_that_cures_it(keys: dict, cure: str, tmp_path: Path):
    args = resolved(**LLAMA | {"intermediate_size": 88, "gated_width_rule": "final"})
    folder = write_neox(tmp_path / "global_step9", hugging_face(args, "llama")[1], LLAMA, tp=2, form="whole")
    model = resolved(**LLAMA | {"mlp_multiple_of": 8} | keys).model
    with pytest.raises(UserError, match=rf"2\.mlp\.linear\d\.weight .* 88 wide .*{cure}$"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)


def test_under_te_layernorm_mlp_only_intermediate_size_cures_it():
    """It builds the width as given, so that a gated_width_rule would do nothing."""
    model = resolved(**LLAMA | {"intermediate_size": 264, "te_layernorm_mlp": True}).model
    for local, shape in (("mlp.linear1.weight", [88, 32]), ("mlp.linear2.weight", [32, 44])):
        advice = advise_width(model, local, shape, 2)
        assert "intermediate_size: 88" in advice and "264" in advice and "gated_width_rule" not in advice
