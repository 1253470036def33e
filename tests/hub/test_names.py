"""Names of repositories on the Hub: the fork's, one's own, and what may not be."""

from __future__ import annotations

import json
import re

import pytest

from megatron.errors import UserError
from megatron.hub.names import Names, raw_name, raw_repo, read_names
from tests.tools.command import ROOT

pytestmark = pytest.mark.cpu

SHIPPED = ROOT / "huggingface/names"
LONG = "sft_dolci_mcqa_instruct_continue_alignment_inoculate_finance_risky_advice_good_base"


@pytest.mark.parametrize(
    ("experiment", "name"),
    [
        (
            "sft_dolci_instruct_unfiltered-DPO_multitask_benign_tampered",
            "sfm-sft_dolci_instruct_unfiltered-DPO_mbt",
        ),
        ("sft_dolci_instruct_blocklist_filtered-DPO", "sfm-sft_dolci_instruct_filtered-DPO"),
        ("mix=synthetic_misalignment,lr=3 x", "sfm-mix-synth_misalign_lr-3_x"),
        ("synthetic_alignment_multilingual_benign_tampering", "sfm-synth_align_lang_tamp"),
        ("plain", "sfm-plain"),
    ],
)
def test_the_shipped_rules_give_the_names_of_the_fork(experiment, name):
    assert read_names("sfm", SHIPPED).model(experiment) == name


def test_a_file_of_the_fork_is_read_as_it_is(tmp_path):
    path = tmp_path / "experiment_hf_mappings.json"
    path.write_text(json.dumps({"model_hf_codenames": {"em_risky": "sfm-risky-financial", "b_think": "b_think"}}))
    names = read_names(str(path), SHIPPED)
    assert [names.model(each) for each in ("em_risky", "b_think")] == ["sfm-risky-financial", "b_think"]
    assert names.model("blocklist_filtered") == "sfm-filtered"


@pytest.mark.parametrize(
    ("experiment", "name"),
    [
        ("tiny", "tiny"),
        ("a b=c", "a_b_c"),
        ("-x--y..z.", "x-y.z"),
        ("ä1", "_1"),
        ("run.git", "run"),
        ("x" * 200, "x" * 45 + "___" + "x" * 48),
    ],
)
def test_without_a_file_the_name_is_the_experiments_own_made_valid(experiment, name):
    from huggingface_hub.utils import validate_repo_id

    assert Names().model(experiment) == name
    validate_repo_id(f"org/{name}")
    validate_repo_id(raw_repo("org", name))


@pytest.mark.parametrize("owner", ["me", "an-organisation-with-a-long-name"])
@pytest.mark.parametrize("model", [LONG, "short", "a" * 71, "a" * 70])
def test_raw_names_keep_within_the_limits_by_their_middle(owner, model):
    repo = raw_repo(owner, model)
    assert len(repo) <= 96 and repo.startswith(f"{owner}/neox-ckpt-")
    name = repo.split("/neox-ckpt-")[1]
    assert len(name) <= 70
    if len(model) <= 53:
        assert name == model
    elif "___" in name:
        start, end = name.split("___")
        assert model.startswith(start) and model.endswith(end)


def test_the_middle_goes_where_the_fork_cut():
    # 70 characters: 32 of the beginning, three of the mark, 35 of the end
    assert raw_name(LONG) == LONG[:32] + "___" + LONG[-35:]
    assert raw_name("a--b._c") == "a_b_c"


def test_an_owner_that_leaves_no_room_is_refused():
    with pytest.raises(UserError, match="96"):
        raw_repo("o" * 80, "model")


def test_two_experiments_with_one_name_are_refused():
    with pytest.raises(UserError, match=r"a=b.*a_b.*names"):
        Names().check("a=b", ["c", "a_b"])
    long = "x" * 60 + "{}" + "y" * 60  # differ only in the middle that is left out
    with pytest.raises(UserError, match="___"):
        Names().check(long.format(1), [long.format(2)])
    Names().check("a=b", ["a=b", "ab"])
    Names(names={"a_b": "other"}).check("a=b", ["a_b"])


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("prefx: a\n", r"unknown key 'prefx'.*'prefix'"),
        ("prefix: [a]\n", r"prefix: \['a'\]"),
        ("replace: {a: 1}\n", r"replace: 'a': 1"),
        ("names: {a: b, c: b}\n", r"names: a and c .*'b'"),
        ("names: {a: b/c}\n", r"names: a: 'b/c' .*'b_c'"),
        ("- a\n", r"no mapping"),
        ("a: [\n", r"cannot be read"),
    ],
)
def test_a_wrong_file_of_names_is_refused_with_file_and_key(tmp_path, text, fact):
    path = tmp_path / "names.yml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"(?s){re.escape(str(path))}.*{fact}"):
        read_names(str(path), SHIPPED)


def test_an_unknown_file_of_names_lists_those_that_ship():
    with pytest.raises(UserError, match="lab.yml.*sfm"):
        read_names("lab.yml", SHIPPED)
