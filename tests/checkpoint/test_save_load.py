"""Save and load in one process: exact, complete or invisible, strict."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from megatron.checkpoint import layout
from megatron.checkpoint.attempt import SaveError
from megatron.checkpoint.find import list_checkpoints, open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.tensor_file import CheckedFile
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from tests.checkpoint.fake_engine import HEADS, HEADS_MHA, VOCAB, FakeEngine

pytestmark = pytest.mark.cpu


def save(root, engine, step, heads=HEADS, **options):
    options = {"consumed": 8 * step, "client": {"step": step}, "config": {"hidden_size": 16}, **options}
    return save_checkpoint(root, step, engine, engine.state, heads=heads, **options)


def engine(seed=1, steps=0, **options):
    made = FakeEngine(ParallelState.single(), seed, **options)
    for _ in range(steps):
        made.step()
    return made


def weights(made):
    return {name: p.detach().clone() for name, p in made.params().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("heads", [HEADS, HEADS_MHA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stop_and_resume_is_bit_exact(tmp_path, heads, dtype):
    straight = engine(steps=5, heads=heads, dtype=dtype)
    stopped = engine(steps=2, heads=heads, dtype=dtype)
    folder = save(tmp_path, stopped, 2, heads=heads, client={"callbacks": {"x": [1, 2.5, None, "a"]}})
    torch.rand(7)
    expected_random = torch.rand(3)
    resumed = engine(seed=9, heads=heads, dtype=dtype)
    torch.manual_seed(0)
    opened = open_checkpoint(folder)
    client = load_checkpoint(opened, resumed, resumed.state, heads=heads)
    torch.rand(7)
    assert torch.equal(torch.rand(3), expected_random)
    assert (opened.manifest.step, opened.manifest.consumed) == (2, 16)
    assert client == {"callbacks": {"x": [1, 2.5, None, "a"]}}
    for _ in range(3):
        resumed.step()
    assert_equal(weights(resumed), weights(straight))
    assert_equal(resumed.masters, straight.masters)


def test_files_have_neox_names_types_and_layers(tmp_path):
    made = engine(steps=1, dtype=torch.bfloat16)
    folder = save(tmp_path, made, 3, config_files={"a.yml": "hidden-size: 16\n"})
    assert folder == tmp_path / "global_step3" and (tmp_path / "latest").read_text() == "global_step3"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    layers = ["00", "02", "03", "05", "06"]
    assert names == sorted(
        [f"layer_{i}-model_00-model_states.pt" for i in layers]
        + [f"optim_layer_{i}-model_00.pt" for i in layers]
        + ["mp_rank_00_model_states.pt", "rng_rank_00000.pt", "manifest.json", "configs/a.yml", "configs/resolved.yml"]
    )
    block = torch.load(folder / "layer_02-model_00-model_states.pt", weights_only=True)
    assert "attention.query_key_value.weight" in block and "mlp.linear1.weight" in block
    embedding = torch.load(folder / "layer_00-model_00-model_states.pt", weights_only=True)["word_embeddings.weight"]
    assert embedding.dtype == torch.bfloat16 and embedding.shape[0] == 40 and not embedding[VOCAB:].any()
    moments = torch.load(folder / "optim_layer_02-model_00.pt", weights_only=True)["2.mlp.linear1.weight"]
    assert sorted(moments) == ["exp_avg", "exp_avg_sq", "weight"] and moments["weight"].dtype == torch.float32
    assert (folder / "configs/a.yml").read_text() == "hidden-size: 16\n"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["consumed"] == 24 and manifest["config"] == {"hidden_size": 16}
    assert torch.__version__.startswith(manifest["versions"]["torch"])
    assert Manifest.read(folder).missing(folder, checksums=True) is None


def test_without_optimizer_or_random_state(tmp_path):
    made = engine(steps=2)
    folder = save(tmp_path, made, 2, save_optim=False, save_rng=False)
    assert not [name for name in os.listdir(folder) if name.startswith(("optim_", "rng_"))]
    other = engine(seed=9)
    with pytest.raises(UserError, match="no_load_optim: true"):
        load_checkpoint(open_checkpoint(folder), other, other.state, heads=HEADS)
    with pytest.raises(UserError, match="no_load_rng: true"):
        load_checkpoint(open_checkpoint(folder), other, other.state, heads=HEADS, load_optim=False)
    load_checkpoint(open_checkpoint(folder), other, other.state, heads=HEADS, load_optim=False, load_rng=False)
    assert_equal(weights(other), weights(made))
    assert other.steps == 0


class Other(FakeEngine):
    """An engine whose parameters are changed after the fact."""

    def __init__(self, change):
        super().__init__(ParallelState.single(), 9)
        change(self._params)


def rename(params):
    params["2.attention.dens.weight"] = params.pop("2.attention.dense.weight")


def remove(params):
    del params["6.final_linear.weight"]


def reshape(params):
    spec = params["3.mlp.linear2.weight"].spec
    object.__setattr__(spec, "shape", (8, 24))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, r"checkpoint: 2\.attention\.dens\.weight.* model: 2\.attention\.dense\.weight"),
        (remove, "not in this model: 6.final_linear.weight"),
        (reshape, r"3.mlp.linear2.weight is \[16, 12\], this model wants \[8, 24\]"),
    ],
)
def test_loading_is_strict(tmp_path, change, message):
    folder = save(tmp_path, engine(), 1)
    other = Other(change)
    before = weights(other)
    with pytest.raises(UserError, match=message):
        load_checkpoint(open_checkpoint(folder), other, other.state, heads=HEADS)
    assert_equal(weights(other), before)


def test_other_head_counts_are_refused(tmp_path):
    folder = save(tmp_path, engine(), 1)
    other = engine()
    with pytest.raises(UserError, match="heads 4 and num_kv_heads 2.* 4 and 4"):
        load_checkpoint(open_checkpoint(folder), other, other.state, heads=HEADS_MHA)


@pytest.mark.parametrize("damage", ["truncate", "delete", "garbage", "flip"])
def test_a_damaged_file_is_found_before_anything_changes(tmp_path, damage):
    folder = save(tmp_path, engine(steps=1), 1)
    path = folder / layout.optimizer_file(2, 0)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-8])
    elif damage == "delete":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"x" * len(data))
    else:
        data[1000] ^= 255
        path.write_bytes(data)
    with pytest.raises(UserError, match=path.name):
        open_checkpoint(folder).check_files(checksums=True)
    if damage == "garbage":
        other = engine(seed=9)
        before = weights(other)
        with pytest.raises(UserError, match=path.name):
            load_checkpoint(open_checkpoint(folder), other, other.state, heads=HEADS)
        assert_equal(weights(other), before)


def test_a_file_that_this_node_does_not_see(tmp_path):
    """The checkpoint was opened where all files are; a rank that loads it looks again."""
    folder = save(tmp_path, engine(seed=1), 2)
    opened = open_checkpoint(folder)
    path = folder / layout.weights_file(2, 0)
    path.unlink()
    other = engine(seed=9)
    before = weights(other)
    with pytest.raises(UserError, match=path.name):
        load_checkpoint(opened, other, other.state, heads=HEADS)
    assert_equal(weights(other), before)


def test_a_newer_format_is_refused(tmp_path):
    folder = save(tmp_path, engine(), 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(UserError, match="format version 99"):
        CheckpointReader(open_checkpoint(folder))


def test_state_that_could_not_be_read_back_is_refused_at_once(tmp_path):
    for bad in ({"a": object()}, {"a": [torch.dtype]}, {"a": {"b": {1, 2}}}):
        with pytest.raises(TypeError, match="client.a"):
            save(tmp_path, engine(), 1, client=bad)
    assert list_checkpoints(tmp_path).steps == ()


class Failing:
    """Makes the k-th file (from 1) fail on its first byte, as a full disk does."""

    def __init__(self, monkeypatch, k):
        self.opened = 0
        original_init, original_write = CheckedFile.__init__, CheckedFile.write

        def init(file, path):
            self.opened += 1
            file.fails = self.opened == k
            original_init(file, path)

        def write(file, data):
            if file.fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original_write(file, data)

        monkeypatch.setattr(CheckedFile, "__init__", init)
        monkeypatch.setattr(CheckedFile, "write", write)


FILES = 14  # of the fake engine's checkpoint; the test below holds this number


def test_number_of_files(tmp_path, monkeypatch):
    counting = Failing(monkeypatch, 0)
    save(tmp_path, engine(steps=2), 2, config_files={"a.yml": "x: 1"})
    assert counting.opened == FILES


@pytest.mark.parametrize("k", range(1, FILES + 1))
def test_disk_full_at_every_file(tmp_path, monkeypatch, k):
    first = engine(steps=1)
    save(tmp_path, first, 1)
    later = engine(steps=2)
    with monkeypatch.context() as patch:
        Failing(patch, k)
        with pytest.raises(SaveError, match=r"step 2 .*No space left.* \d+ bytes.* \d+ bytes.*\[1\]") as raised:
            save(tmp_path, later, 2, config_files={"a.yml": "x: 1"})
    assert raised.value.exit_code != 0
    listing = list_checkpoints(tmp_path)
    assert (listing.steps, listing.latest) == ((1,), 1)
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]
    resumed = engine(seed=9)
    load_checkpoint(listing.checkpoints[1], resumed, resumed.state, heads=HEADS)
    assert_equal(weights(resumed), weights(first))
    save(tmp_path, later, 2)
    assert list_checkpoints(tmp_path).latest == 2


@pytest.mark.parametrize("broken", ["write", "rename"])
def test_failure_while_publishing(tmp_path, monkeypatch, broken):
    save(tmp_path, engine(steps=1), 1)

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr(Manifest, "write", fail)
        else:
            patch.setattr("megatron.checkpoint.folder.os.rename", fail)
        with pytest.raises(SaveError, match="Input/output error"):
            save(tmp_path, engine(steps=2), 2)
    assert list_checkpoints(tmp_path).steps == (1,)
    assert (tmp_path / "latest").read_text() == "global_step1"


def test_too_little_space_is_known_before_writing(tmp_path, monkeypatch):
    save(tmp_path, engine(), 1)
    monkeypatch.setattr("megatron.checkpoint.attempt.free_bytes", lambda root: 1000)
    with pytest.raises(SaveError, match=r"space: \d{4,} bytes .*\b1000 free"):
        save(tmp_path, engine(), 2)
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, engine(steps=1), 2)
    again = engine(steps=2)
    save(tmp_path, again, 2)
    loaded = engine(seed=9)
    load_checkpoint(open_checkpoint(tmp_path / "global_step2"), loaded, loaded.state, heads=HEADS)
    assert_equal(weights(loaded), weights(again))
    assert sorted(os.listdir(tmp_path)) == ["global_step2", "latest"]


def test_a_replacement_cut_off_between_its_renames_is_undone(tmp_path):
    made = engine(steps=1)
    save(tmp_path, made, 2)
    os.rename(tmp_path / "global_step2", tmp_path / layout.replaced_folder(2))
    (tmp_path / layout.temporary_folder(2)).mkdir()
    save(tmp_path, engine(steps=2), 3)
    assert list_checkpoints(tmp_path).steps == (2, 3)
    assert sorted(os.listdir(tmp_path)) == ["global_step2", "global_step3", "latest"]


SAVER = """
    import os, sys, time
    import torch
    from megatron.checkpoint.tensor_file import CheckedFile
    from tests.checkpoint.test_save_load import engine, save
    save(sys.argv[1], engine(steps=1), 1)
    print("saved", flush=True)
    original = CheckedFile.write
    def slow(file, data):
        print("writing", flush=True)
        time.sleep(0.02)
        return original(file, data)
    CheckedFile.write = slow
    save(sys.argv[1], engine(steps=2), 2)
    print("done", flush=True)
"""


def test_kill_9_during_a_save(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout:
            if line.strip() == "writing":
                time.sleep(0.3)
                os.kill(process.pid, signal.SIGKILL)
                break
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert layout.temporary_folder(2) in os.listdir(tmp_path), "the kill came too late to test anything"
    listing = list_checkpoints(tmp_path)
    assert (listing.steps, listing.latest) == ((1,), 1)
    resumed = engine(seed=9)
    load_checkpoint(listing.checkpoints[1], resumed, resumed.state, heads=HEADS)
    resumed.step()
    save(tmp_path, resumed, 2)
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "global_step2", "latest"]
