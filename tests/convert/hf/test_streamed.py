"""Outputs layer by layer: a model of transformers that is filled a layer at a time gives the bits of `from_pretrained`,
what does not fit is named, and two streams are compared."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.hf.streamed import StreamedModel, folder_outputs, folder_tokens
from megatron.convert.outputs import checkpoint_outputs, compare_outputs, keep_ends, random_tokens
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.errors import UserError
from tests.convert.families.cases import FAMILY_CASES
from tests.convert.helpers import (
    LLAMA,
    NEOX,
    VOCAB,
    full_tensors,
    hugging_face,
    random_tensors,
    resolved,
    write_checkpoint,
)

pytestmark = pytest.mark.cpu

CASES = [pytest.param(architecture, keys, id=f"{architecture}: {name}") for architecture, name, keys in FAMILY_CASES]
DEEP = {**LLAMA, "num_layers": 6, "num_kv_heads": 2}


def saved(folder, keys, architecture="llama", dtype=torch.float32, shard="5GB"):
    model, _ = hugging_face(resolved(**keys), architecture)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return HuggingFaceFolder(folder)


def whole(folder, tokens):
    """(hidden states after the embedding and each block, logits) of the model that transformers loads at once."""
    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, output_hidden_states=True)


@pytest.mark.parametrize(("architecture", "keys"), CASES)
def test_a_layer_at_a_time_gives_the_bits_of_from_pretrained(tmp_path, architecture, keys):
    folder = saved(tmp_path, keys, architecture)
    tokens = folder_tokens(folder)
    found = folder_outputs(folder, tokens)
    assert [name for name, _ in found] == ["the embedding", "block 0", "block 1", "the final norm", "logits"]
    assert found[-1][1].dtype == torch.float32 and found[-1][1].shape == (*tokens.shape, VOCAB)
    assert torch.equal(found[-1][1], whole(folder, tokens).logits)


def test_what_is_between_the_layers_is_what_transformers_reports(tmp_path):
    folder = saved(tmp_path, DEEP, dtype=torch.bfloat16, shard="20KB")
    tokens = folder_tokens(folder)
    found, wanted = folder_outputs(folder, tokens), whole(folder, tokens)
    for (_, hidden), expected in zip(found, wanted.hidden_states[:-1], strict=False):
        assert torch.equal(hidden, expected)
    assert torch.equal(found[-2][1], wanted.hidden_states[-1]) and torch.equal(found[-1][1], wanted.logits)


@pytest.mark.parametrize("tied", [False, True])
def test_one_layer_is_in_memory_while_it_runs_and_none_behind_it(tmp_path, tied):
    folder = saved(tmp_path, {**DEEP, "no_weight_tying": not tied})
    streamed = StreamedModel(folder, None)

    def filled():
        parameters = streamed.model.named_parameters()
        return {name.removesuffix(".weight") for name, p in parameters if p.device.type != "meta"}

    seen = []
    for name, module in streamed.model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda *_, name=name: seen.append((name, filled())), prepend=True)
    with torch.no_grad():
        streamed.model(input_ids=random_tokens(VOCAB, 32), use_cache=False)
    assert len(seen) > 6 * 9
    for name, there in seen:
        layer = name.split(".")[:3] if ".layers." in name else None
        if layer:
            assert there and all(other.split(".")[:3] == layer for other in there), name
        else:
            assert there == ({"model.embed_tokens"} if name == "lm_head" and tied else {name})
    assert filled() == set()


def test_weights_are_rounded_first_when_asked(tmp_path):
    folder = saved(tmp_path / "wide", DEEP)
    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    tokens = folder_tokens(folder)
    rounded = folder_outputs(folder, tokens, torch.bfloat16)
    narrow = folder_outputs(HuggingFaceFolder(tmp_path / "narrow"), tokens)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(rounded, narrow, strict=True))
    assert not torch.equal(rounded[-1][1], folder_outputs(folder, tokens)[-1][1])


def change(folder, edit):
    path = folder.path / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    return HuggingFaceFolder(folder.path)


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path):
    folder, name = saved(tmp_path, LLAMA), "model.layers.1.mlp.down_proj.weight"
    tokens, right = folder_tokens(folder), load_file(tmp_path / "model.safetensors")[name]
    with pytest.raises(UserError, match=f"missing keys in {tmp_path}: {name}"):
        folder_outputs(change(folder, lambda tensors: tensors.pop(name)), tokens)
    with pytest.raises(UserError, match="unexpected keys in .*: model.layers.1.mlp.extra"):
        folder_outputs(
            change(folder, lambda tensors: tensors.update({name: right, "model.layers.1.mlp.extra": right.clone()})),
            tokens,
        )
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.extra"))
    with pytest.raises(UserError, match=rf"mismatched keys in .*: {name} \(here \[32, 79\], wanted \[32, 80\]\)"):
        folder_outputs(change(folder, lambda tensors: tensors.update({name: right[:, 1:].contiguous()})), tokens)


def test_a_tied_head_may_be_written_out_and_an_untied_one_may_not_be_missing(tmp_path):
    folder = saved(tmp_path, {**LLAMA, "no_weight_tying": False})
    tokens = folder_tokens(folder)
    expected = folder_outputs(folder, tokens)[-1][1]
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(folder_outputs(HuggingFaceFolder(tmp_path), tokens)[-1][1], expected)
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(UserError, match="missing keys in .*: lm_head.weight"):
        folder_outputs(HuggingFaceFolder(tmp_path), tokens)


def test_two_folders_and_two_checkpoints_are_compared_and_the_first_drift_is_named(tmp_path):
    folder = saved(tmp_path / "one", DEEP)
    tokens = folder_tokens(folder)
    saved(tmp_path / "two", DEEP)
    other = HuggingFaceFolder(tmp_path / "two")
    assert compare_outputs(folder_outputs(folder, tokens), folder_outputs(other, tokens)).logits == 0
    change(other, lambda t: t.update({"model.layers.3.mlp.up_proj.weight": t["model.layers.3.mlp.up_proj.weight"] + 1}))
    found = compare_outputs(folder_outputs(folder, tokens), folder_outputs(HuggingFaceFolder(other.path), tokens))
    assert not found.ok and found.first_drift == "block 3" and found.logits > found.allowed
    args = resolved(**DEEP)
    tensors = random_tensors(args, "llama")
    one = CheckpointReader(open_checkpoint(write_checkpoint(tmp_path / "a", args, tensors)))
    for name, drift in (("0.word_embeddings.weight", "the embedding"), ("9.norm.scale", "the final norm")):
        changed = {**tensors, name: tensors[name].flip(0)}
        two = CheckpointReader(open_checkpoint(write_checkpoint(tmp_path / f"b{name[0]}", args, changed, tp=2)))
        streams = [checkpoint_outputs(reader, args.model, tokens) for reader in (one, two)]
        assert compare_outputs(*streams).first_drift == drift
    same = [checkpoint_outputs(one, args.model, tokens), folder_outputs(folder, tokens)]
    assert compare_outputs(*same).ok


def test_other_networks_are_not_compared(tmp_path):
    tokens = random_tokens(VOCAB, 32)
    one, other = saved(tmp_path / "one", DEEP), saved(tmp_path / "other", {**DEEP, "num_layers": 5})
    with pytest.raises(UserError, match="block 5 .*the final norm "):
        compare_outputs(folder_outputs(one, tokens), folder_outputs(other, tokens))
    with pytest.raises(UserError, match="no logits"):
        compare_outputs(folder_outputs(one, tokens)[:3], folder_outputs(one, tokens))


def test_a_nan_is_a_difference():
    stream = [("block 0", torch.ones(2, 3, 4)), ("logits", torch.ones(2, 3, 5))]
    broken = [(name, output.clone().index_fill_(1, torch.tensor(1), float("nan"))) for name, output in stream]
    for pair in ((stream, broken), (broken, stream), (broken, broken)):
        found = compare_outputs(*pair)
        assert not found.ok and found.first_drift == "block 0"


def test_long_texts_show_windows_and_are_compared_at_both_ends(tmp_path):
    keys = {**LLAMA, "sliding_window_width": 90, "max_position_embeddings": 256, "seq_length": 128}
    folder = saved(tmp_path / "hf", keys, "mistral")
    tokens = folder_tokens(folder)
    assert tokens.shape[1] > 90 + 1
    found, wanted = folder_outputs(folder, tokens), whole(folder, tokens)
    assert found[0][1].shape == (2, 64, 32)
    torch.testing.assert_close(found[-1][1], keep_ends(wanted.logits), rtol=0, atol=1e-6)
    args = resolved(**keys)
    tensors = full_tensors(args, "mistral", load_file(tmp_path / "hf/model.safetensors"))
    reader = CheckpointReader(open_checkpoint(write_checkpoint(tmp_path / "ckpt", args, tensors)))
    assert compare_outputs(checkpoint_outputs(reader, args.model, tokens), found).ok
    wider = resolved(**{**keys, "sliding_window_width": 91}).model
    assert not compare_outputs(checkpoint_outputs(reader, wider, tokens), found).ok
    assert resolved(**NEOX).model.layer_windows[0] is None and random_tokens(VOCAB, 20).shape == (2, 20)
