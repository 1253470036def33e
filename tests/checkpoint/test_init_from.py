"""`init_from`: where a run starts, with which message, and what is refused without opening a tensor."""

import re
from pathlib import Path

import pytest

from megatron.checkpoint.compare import check_config
from megatron.checkpoint.init_from import InitFrom, check_init
from megatron.errors import UserError
from tests.checkpoint.starts import decide, put

pytestmark = pytest.mark.cpu


@pytest.fixture
def base(tmp_path):
    put(tmp_path / "base", 2)
    put(tmp_path / "base", 4)
    return tmp_path / "base"


def start_from(base, save=None, **more):
    return decide(save, init_from={"path": str(base), **more})


def test_the_latest_is_taken_or_the_one_asked_for(base):
    for start in (start_from(base), start_from(base / "global_step4"), start_from(base, iteration=4)):
        assert (start.kind, start.checkpoint.path, start.step) == ("init", base / "global_step4", 4)
    assert start_from(base, iteration=2).checkpoint.path == base / "global_step2"
    with pytest.raises(UserError, match=r"init_from: .*iteration 3 in .*: complete steps: \[2, 4\]"):
        start_from(base, iteration=3)
    with pytest.raises(UserError, match="init_from: .*nothing does not exist"):
        start_from(base / "nothing")


@pytest.mark.parametrize("data", ["continue", "restart"])
@pytest.mark.parametrize("optimizer", ["keep", "reset"])
@pytest.mark.parametrize("step", ["continue", "restart"])
def test_each_key_decides_one_thing(base, data, optimizer, step):
    start = start_from(base, data=data, optimizer=optimizer, step=step)
    assert not start.resumes
    assert (start.load_data, start.load_optim) == (data == "continue", optimizer == "keep")
    assert (start.load_rng, start.step) == ((True, 4) if step == "continue" else (False, 0))
    assert start.init.consumed(start.checkpoint.manifest) == (40 if data == "continue" else 0)
    assert ("data continued after 40 samples" in start.message) == start.load_data
    assert ("data new, from sample 0" in start.message) != start.load_data
    assert ("optimizer kept" in start.message) == start.load_optim and "weights loaded" in start.message
    assert ("steps count from 0" in start.message) == (step == "restart")
    assert re.search(rf"schedule .*step {start.step}\b", start.message)
    assert "\n" not in start.message


def test_a_run_that_has_saved_is_resumed(base, tmp_path):
    save = tmp_path / "save"
    put(save, 6, init_from={"path": str(base)})
    start = start_from(base, save)
    assert (start.kind, start.step, start.init) == ("resume", 6, None)
    assert f"init_from: {base})" in start.message and "note" not in start.message
    assert "note" not in start_from(f"{base}/", save).message
    other = start_from("elsewhere", save).message
    assert re.search(rf"note: .* from {re.escape(str(base))}; .*elsewhere, .*`save`", other)
    put(save, 7)
    assert re.search(rf"note: .*without init_from; .*{re.escape(str(base))}, .*`save`", start_from(base, save).message)


def test_the_two_runs_have_two_folders(tmp_path):
    put(tmp_path / "base" / "inner", 2)
    assert start_from(tmp_path / "base" / "inner", tmp_path / "base").step == 2  # a folder inside `save` is another one
    folder = tmp_path / "base" / "inner" / "global_step2"
    with pytest.raises(UserError, match=f"init_from: {folder} is in `save`"):
        start_from(folder, folder)


def test_what_a_checkpoint_cannot_give(tmp_path):
    manifest = put(tmp_path / "bare", 4, optimizer=False)

    def check(train_iters=8, checkpoint_schedule=False, **init):
        check_init(
            InitFrom("p", **init), manifest, train_iters=train_iters, use_checkpoint_lr_scheduler=checkpoint_schedule
        )

    with pytest.raises(UserError, match=r"step 4 in p .*init_from\.optimizer=reset"):
        check()
    check(optimizer="reset")
    for length in (3, 4):
        with pytest.raises(UserError, match=rf"train_iters: {length} .*step 4\b.*init_from\.step=restart"):
            check(length, optimizer="reset")
        check(length, optimizer="reset", step="restart")
    check(0, optimizer="reset")  # evaluates
    check(None, optimizer="reset")
    with pytest.raises(UserError, match="use_checkpoint_lr_scheduler"):
        check(optimizer="reset", checkpoint_schedule=True)


SAVED = {"hidden_size": 16, "tokenizer_type": "HFTokenizer", "seed": 1, "optimizer_type": "adam", "init_from": None}


def test_only_what_is_taken_must_agree():
    now = {**SAVED, "seed": 2, "optimizer_type": "sgd", "init_from": {"path": "p"}}
    said = check_config(SAVED, now, path=Path("p/x"), load_optim=False, load_data=False)
    assert len(said) == 2 and not any("init_from" in line for line in said)
    with pytest.raises(UserError, match=r"data order: seed(.|\n)*init_from=\{path: p/x, data: restart\}"):
        check_config(SAVED, now, load_optim=False, path=Path("p/x"))
    with pytest.raises(UserError, match=r"init_from=\{path: p/x, data: restart, optimizer: reset\}"):
        check_config(SAVED, now, path=Path("p/x"))
    for key, kind in (("hidden_size", "architecture"), ("tokenizer_type", "tokenizer")):
        with pytest.raises(UserError, match=rf"{kind}: {key}(.|\n)*Restore these keys, or"):
            check_config(SAVED, {**now, key: "x"}, path=Path("p/x"), load_optim=False, load_data=False)
