"""GPT-NeoX's own checkpoints: every layout and every name, against transformers (known-faults 1, 2, 24, 31-33)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import find_checkpoint, list_checkpoints, open_checkpoint
from megatron.checkpoint.neox_folder import is_neox_folder
from megatron.checkpoint.neox_reader import NeoXReader
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.outputs import checkpoint_outputs
from megatron.errors import UserError
from tests.checkpoint.neox_files import write_neox
from tests.checkpoint.starts import decide
from tests.convert.families import mamba_cases as mamba
from tests.convert.helpers import LLAMA, NEOX, VOCAB, hugging_face, random_tensors, resolved, write_checkpoint

pytestmark = pytest.mark.cpu

PARALLEL = {**NEOX, "gpt_j_residual": True}
NEOX_CASES = {
    "parallel": PARALLEL,
    "sequential": NEOX,
    "tied embeddings": {**PARALLEL, "no_weight_tying": False},
    "one norm for both": {**PARALLEL, "gpt_j_tied": True},
}
LLAMA_CASES = {"mha": LLAMA, "gqa": {**LLAMA, "num_kv_heads": 2}}
CASES = [
    pytest.param(architecture, keys, names, id=f"{architecture} {case}, {names}")
    for architecture, cases, all_names in (
        ("neox", NEOX_CASES, ("new", "legacy", "te")),
        ("llama", LLAMA_CASES, ("new", "legacy")),
    )
    for case, keys in cases.items()
    for names in all_names
]


def model_of(keys, architecture="neox"):
    """(config group `model`, random model, its tensors)."""
    args = resolved(**keys)
    model, theirs = hugging_face(args, architecture)
    if keys.get("gpt_j_tied"):
        # The Hugging Face model has a second norm, which computes the same; in GPT-NeoX's file it is unused.
        with torch.no_grad():
            for layer in model.gpt_neox.layers:
                layer.post_attention_layernorm.load_state_dict(layer.input_layernorm.state_dict())
    return args.model, model, theirs


def logits_of(reader, model, tokens):
    return dict(checkpoint_outputs(reader, model, tokens, torch.float32))["logits"]


def largest_difference(folder, model, theirs) -> float:
    tokens = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(input_ids=tokens, use_cache=False).logits
    assert expected.std() > 0.1
    return float((logits_of(NeoXReader(open_checkpoint(folder), model, VOCAB), model, tokens) - expected).abs().max())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("form", ["pipe", "whole", "nested"])
@pytest.mark.parametrize(("architecture", "keys", "names"), CASES)
def test_logits_are_those_of_transformers(tmp_path, architecture, keys, names, form, tp):
    model, theirs, tensors = model_of(keys, architecture)
    bomb = tmp_path / "something ran"
    folder = write_neox(tmp_path / "global_step9", tensors, keys, tp=tp, form=form, names=names, bomb=bomb)
    assert is_neox_folder(folder)
    assert largest_difference(folder, model, theirs) < 1e-5
    assert not bomb.exists()


# GPT-NeoX wants heads of every model.
MAMBA = {**mamba.MAMBA, "num_attention_heads": 4}


@pytest.mark.parametrize("form", ["pipe", "whole", "nested"])
@pytest.mark.parametrize("tied", [False, True])
def test_mamba(tmp_path, form, tied):
    keys = {**MAMBA, "no_weight_tying": not tied}
    model, theirs, tensors = model_of(keys, "mamba")
    folder = write_neox(tmp_path / "global_step9", tensors, keys, form=form)
    assert largest_difference(folder, model, theirs) < 1e-5


def test_mamba_of_several_tensor_parallel_ranks_is_no_other_layouts_model(tmp_path):
    model, _, tensors = model_of(MAMBA, "mamba")
    folder = write_neox(tmp_path / "global_step9", tensors, MAMBA, tp=2)
    with pytest.raises(UserError, match="global_step9: layer 2 .*Mamba.* model_parallel_size 2 "):
        NeoXReader(open_checkpoint(folder), model, VOCAB)


def test_experts_of_theirs_are_refused_by_name(tmp_path):
    model, _, tensors = model_of(PARALLEL)
    folder = write_neox(tmp_path / "global_step9", tensors, PARALLEL)
    path = folder / "layer_02-model_00-model_states.pt"
    torch.save({**torch.load(path), "mlp.experts.mlp.w1": torch.zeros(4, 32)}, path)
    with pytest.raises(UserError, match=r"layer 2 is a mixture of experts of GPT-NeoX \(mlp.experts.mlp.w1\)"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)


@pytest.mark.parametrize("form", ["pipe", "nested"])
def test_norms_behind_the_branches_and_on_all_queries_together(tmp_path, form):
    norms = {"use_qk_layernorm": True, "use_separate_qk_norms": True}
    keys = {**LLAMA, "norm_placement": "olmo3", **norms, "num_kv_heads": 2}
    model, theirs, tensors = model_of(keys, "olmo2")
    folder = write_neox(tmp_path / "global_step9", tensors, keys, form=form)
    assert largest_difference(folder, model, theirs) < 1e-5
    folder = write_neox(tmp_path / "two" / "global_step9", tensors, keys, form=form, tp=2)
    with pytest.raises(UserError, match="layer 2 .* model_parallel_size 2 .*use_separate_qk_norms"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)


def test_the_table_of_relative_positions_is_in_every_block_of_their_files(tmp_path):
    _, _, tensors = model_of(PARALLEL)
    keys = {**PARALLEL, "pos_emb": "rpe", "rpe_num_buckets": 6}
    folder = write_neox(tmp_path / "global_step9", tensors, keys, tp=2)
    tables = [torch.randn(6, 2) for _ in range(2)]
    for layer in (2, 3):
        for rank in range(2):
            path = folder / f"layer_{layer:02}-model_{rank:02}-model_states.pt"
            torch.save({**torch.load(path, weights_only=False), "attention.rpe.weight": tables[rank]}, path)
    model = resolved(**keys).model
    reader = NeoXReader(open_checkpoint(folder), model, VOCAB)
    assert torch.equal(reader.weight("0.shared_positions.weight"), torch.cat(tables, 1))
    torch.save({**torch.load(path, weights_only=False), "attention.rpe.weight": tables[0]}, path)
    with pytest.raises(UserError, match="global_step9: .*attention.rpe.weight.*pipe_parallel_size"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)


def test_every_rank_of_any_size_gets_its_part(tmp_path):
    model, _, tensors = model_of(PARALLEL)
    reader = NeoXReader(open_checkpoint(write_neox(tmp_path / "global_step9", tensors, PARALLEL, tp=2)), model, VOCAB)
    name = "2.attention.query_key_value.weight"
    assert (reader.manifest.step, reader.dtype(name)) == (9, torch.float32)
    spec = reader.spec(name)
    parts = [reader.local_weight(name, spec, rank, 4) for rank in range(4)]
    whole = reader.weight(name).view(3, 4, 8, 32)  # q, k, v; heads
    for head, part in enumerate(parts):
        assert torch.equal(part.view(3, 8, 32), whole[:, head])
        theirs = tensors["gpt_neox.layers.0.attention.query_key_value.weight"].view(4, 3, 8, 32)
        assert torch.equal(whole[:, head], theirs[head])


def test_the_files_of_torch_before_1_6_are_read(tmp_path):
    model, theirs, tensors = model_of(PARALLEL)
    folder = write_neox(tmp_path / "global_step9", tensors, PARALLEL, names="legacy")
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=False)
        torch.save(content, path, _use_new_zipfile_serialization=False)
    assert largest_difference(folder, model, theirs) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers: 2 .*checkpoint, 3 .*config"),
        ({"hidden_size": 64}, "hidden_size: 32 .*checkpoint, 64 .*config"),
        ({"num_attention_heads": 2}, "num_attention_heads: 4 .*checkpoint, 2 .*config"),
        ({"intermediate_size": 64}, r"2\.mlp\.linear1\.weight .*\[48, 32\], this model .*\[32, 32\]"),
        ({"use_bias_in_mlp": False}, "holds 2.mlp.linear1.bias,"),
        ({"no_weight_tying": False}, r"holds layers \[6\],.* num_layers and no_weight_tying"),
        ({"norm": "rmsnorm"}, "holds 2.input_layernorm.bias,"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["pipe", "whole"])
def test_another_model_is_refused_by_the_key(tmp_path, changes, message, form):
    _, _, tensors = model_of(PARALLEL)
    folder = write_neox(tmp_path / "global_step9", tensors, PARALLEL, tp=2, form=form)
    with pytest.raises(UserError, match=message):
        NeoXReader(open_checkpoint(folder), resolved(**{**PARALLEL, **changes}).model, VOCAB)


def test_a_depth_that_no_argument_tells_is_refused(tmp_path):
    """A converter's file has no arguments: the layers themselves show that the model is deeper."""
    _, _, tensors = model_of({**PARALLEL, "num_layers": 3})
    folder = write_neox(tmp_path / "global_step9", tensors, {**PARALLEL, "num_layers": 3}, form="nested")
    with pytest.raises(UserError, match=r"global_step9 .*layers.*num_layers"):
        NeoXReader(open_checkpoint(folder), resolved(**PARALLEL).model, VOCAB)


@pytest.mark.parametrize("vocab", [VOCAB - 20, VOCAB + 20])
def test_another_tokenizer_is_refused(tmp_path, vocab):
    model, _, tensors = model_of(PARALLEL)
    folder = write_neox(tmp_path / "global_step9", tensors, PARALLEL, tp=2)
    with pytest.raises(UserError, match=rf"global_step9 .*\b65 to 80 tokens, .*\b{vocab}; .*tokenizer_type.*resize"):
        NeoXReader(open_checkpoint(folder), model, vocab)


def test_missing_and_partial_files_are_listed(tmp_path):
    model, _, tensors = model_of(PARALLEL)
    folder = write_neox(tmp_path / "global_step9", tensors, PARALLEL, tp=2)
    part = folder / "layer_03-model_01-model_states.pt"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"layer_03-model_01-model_states.pt cannot be read: .* damaged"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)
    part.unlink()
    (folder / "layer_05-model_00-model_states.pt").unlink()
    with pytest.raises(UserError, match="missing layer_03-model_01-model_states.pt, layer_05-model_00-model_states.pt"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)
    for file in folder.glob("layer_*-model_01-*"):
        file.unlink()
    with pytest.raises(UserError, match="missing layer_00-model_01-model_states.pt"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)


def test_weights_over_zero_3_files_and_gated_transformer_engine_are_refused(tmp_path):
    model, _, tensors = model_of(PARALLEL)
    folder = write_neox(tmp_path / "global_step9", tensors, PARALLEL)
    torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match=r"ZeRO stage 3.*zero_to_fp32.py"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)
    model, _, tensors = model_of(LLAMA, "llama")
    folder = write_neox(tmp_path / "llama" / "global_step9", tensors, LLAMA, names="te")
    with pytest.raises(UserError, match=r"layer 2 .*\(activation: "):
        NeoXReader(open_checkpoint(folder), model, VOCAB)
    grouped = {**LLAMA, "num_kv_heads": 2}
    model, _, tensors = model_of(grouped, "llama")
    folder = write_neox(tmp_path / "grouped" / "global_step9", tensors, grouped, names="te")
    with pytest.raises(UserError, match=r"layer 2 .*key/value heads.*group by group"):
        NeoXReader(open_checkpoint(folder), model, VOCAB)


# ---- where they count as checkpoints, and where not


@pytest.fixture
def base(tmp_path) -> Path:
    return write_neox(tmp_path / "neox" / "global_step9", model_of(PARALLEL)[2], PARALLEL).parent


def test_they_are_found_by_those_who_take_weights(base):
    folder = base / "global_step9"
    assert find_checkpoint(base) == find_checkpoint(base, 9) == find_checkpoint(folder)
    assert find_checkpoint(base).path == folder
    assert list_checkpoints(base, neox=True).latest == 9
    listing = list_checkpoints(base)
    assert listing.latest is None and listing.incomplete == {"global_step9": "written by GPT-NeoX"}
    with pytest.raises(UserError, match=rf"iteration 8 in {re.escape(str(base))}: .*steps: \[9\]"):
        find_checkpoint(base, 8)


def test_a_folder_of_any_name_is_found_by_itself(base):
    other = (base / "global_step9").rename(base / "0")
    assert find_checkpoint(other).path == other
    assert decide(None, other, finetune=True).checkpoint.path == other


def test_training_starts_from_their_weights_alone(base, tmp_path):
    start = decide(tmp_path / "save", base, finetune=True)
    assert (start.kind, start.step, start.checkpoint.path) == ("finetune", 0, base / "global_step9")
    assert "written by GPT-NeoX" in start.message and not start.load_optim
    with pytest.raises(UserError, match=r"mp_rank_00_model_states.pt does not say how far .*finetune: true"):
        decide(tmp_path / "save", base)
    with pytest.raises(UserError, match="init_from.data=restart and, .* init_from.optimizer=reset"):
        decide(None, None, init_from={"path": str(base)})
    start = decide(None, None, init_from={"path": str(base), "optimizer": "reset", "data": "restart"})
    assert (start.kind, start.step, start.load_optim, start.load_data) == ("init", 9, False, False)


@pytest.mark.parametrize(
    ("load", "more", "why"),
    [
        (None, {}, "does not continue their run"),
        ("other", {}, "does not continue their run"),
        ("same", {"finetune": True}, "does not continue their run"),
        ("same", {"iteration": 9}, "iteration: 9 would write over"),
    ],
)
def test_no_other_run_begins_among_them(base, load, more, why, tmp_path):
    where = {None: None, "same": base, "other": tmp_path / "other"}[load]
    with pytest.raises(UserError, match=rf"save: {re.escape(str(base))} .*GPT-NeoX, and .*{why}.*`save`"):
        decide(base, where, **more)


def test_a_damaged_checkpoint_of_ours_is_not_one_of_theirs(tmp_path):
    args = resolved(**PARALLEL)
    folder = write_checkpoint(tmp_path / "ours", args, random_tensors(args, "neox"), tp=2)
    (folder / "manifest.json").unlink()
    assert not is_neox_folder(folder)
    assert list_checkpoints(tmp_path / "ours", neox=True).incomplete == {"global_step7": "no manifest.json"}
    with pytest.raises(UserError, match="no manifest.json"):
        find_checkpoint(folder)


def test_our_reader_says_whose_folder_it_is(base):
    with pytest.raises(UserError, match="global_step9 was written by GPT-NeoX"):
        CheckpointReader(open_checkpoint(base / "global_step9"))
