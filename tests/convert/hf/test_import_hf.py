"""HF → checkpoint → HF: bit-identical tensors, logits and gradients of `transformers`, refusals, all or nothing."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert import importing
from megatron.convert.families import FAMILIES, read_config
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from megatron.convert.parts.family import Constant, Rule
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.errors import UserError
from megatron.inference.build import build_stage
from megatron.inference.generate import Limits, generate
from megatron.inference.sampling import Draws, Sampling
from megatron.model.gpt import gpt_layers
from megatron.model.sequential import SequentialModel
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.tokenizer import build_tokenizer
from tests.convert.families.cases import GPT2
from tests.convert.helpers import LLAMA, NEOX, VOCAB, hugging_face, resolved
from tests.convert.hf.test_export_hf import CASES
from tests.convert.test_tools import TEMPLATE, vocabulary  # noqa: F401 (a fixture)
from tests.data.hub_server import Hub, Repo
from tests.distributed import run_distributed
from tests.test_files import POINTER

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[3]
GQA = {**LLAMA, "num_kv_heads": 2}


def source_of(folder, keys, architecture, dtype=torch.float32, shard="50KB"):
    """A random model as transformers saves it, in several shards."""
    model, _ = hugging_face(resolved(**keys), architecture)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model.float()


def tensors_in(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("architecture", "base", "keys"), CASES)
def test_there_and_back_is_bit_identical(tmp_path, architecture, base, keys, tp):
    source_of(tmp_path / "hf", {**base, **keys}, architecture)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    if keys.get("num_kv_heads", tp) % tp:
        with pytest.raises(UserError, match="num_kv_heads 1 .* 2 tensor-parallel"):
            import_model(str(tmp_path / "hf"), tmp_path / "out", tp=tp)
        assert os.listdir(tmp_path) == ["hf"]
        return
    done = import_model(str(tmp_path / "hf"), tmp_path / "out", tp=tp, iteration=7)
    assert done.largest_difference < 1e-5 and done.folder == tmp_path / "out/global_step7"
    export(tmp_path / "out", tmp_path / "again", tokenizer=False, architecture=architecture)
    theirs, again = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "again")
    assert theirs.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.items())
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name).config.to_dict() for name in ("hf", "again"))
    del one["_name_or_path"], other["_name_or_path"]
    assert one == other


@pytest.mark.parametrize(("keys", "architecture"), [(NEOX, "neox"), (GQA, "llama")])
def test_one_step_s_gradients_are_those_of_transformers(tmp_path, keys, architecture):
    keys = {**keys, "no_weight_tying": architecture == "neox"}
    model = source_of(tmp_path / "hf", keys, architecture)
    done = import_model(str(tmp_path / "hf"), tmp_path / "out")
    args = derive(NeoXArgs.from_files([str(done.config)]), Facts(vocab_size=VOCAB))
    layers = gpt_layers(args.model, vocab_size=VOCAB, padded_vocab_size=128, state=ParallelState.single())
    network = SequentialModel(layers, None, seed=None, state=ParallelState.single())
    reader = CheckpointReader(open_checkpoint(done.folder))
    with torch.no_grad():
        for name, parameter in named_parameters(network):
            parameter.copy_(reader.local_weight(name, parameter.spec, 0, 1))
    tokens = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(23).expand(2, 23)
    network((tokens[:, :-1], positions)).token_loss(tokens[:, 1:]).mean().backward()
    model(tokens, labels=tokens).loss.backward()
    gradients = {name: p.grad for name, p in named_parameters(network)}
    theirs = {name: p.grad for name, p in model.named_parameters()}
    compared = 0
    for rule in FAMILIES[architecture].table(args.model):
        assert not isinstance(rule, Constant)
        wanted = rule.transform.load([theirs[name] for name in rule.among(theirs).theirs])
        ours = gradients[rule.ours][: wanted.shape[0]]
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
        compared += 1
    assert compared == len(gradients)


def completions(rank, world, config, folder, pp, tp):
    """Greedy texts of a rank of PP x TP."""
    layout = [f"pipe_parallel_size={pp}", f"model_parallel_size={tp}"]
    args = for_inference(NeoXArgs.from_files([config], layout))
    tokenizer = build_tokenizer(args.tokenizer)
    args = derive(args, Facts(vocab_size=tokenizer.vocab_size, num_devices=world))
    topology = Topology({"pipe": pp, "data": 1, "model": tp})
    stage = build_stage(
        args, ParallelState.build(topology, rank, torch.device("cpu")), tokenizer, open_checkpoint(folder)
    )
    prompts = [[5, 9, 33, 2], [8]]
    done = generate(stage, prompts, Limits(12, VOCAB - 2, (VOCAB - 2,)), Sampling(), Draws(0, range(2)))
    return [list(each.tokens) for each in done]


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_the_checkpoint_runs_at_any_layout_and_writes_what_transformers_writes(tmp_path, vocabulary, pp, tp):  # noqa: F811
    model = source_of(tmp_path / "hf", {**GQA, "init_method_std": 0.3}, "llama")
    for file in vocabulary.iterdir():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    done = import_model(str(tmp_path / "hf"), tmp_path / "out", tp=2)
    found = run_distributed(completions, pp * tp, str(done.config), str(done.folder), pp, tp)
    texts = next(texts for texts in found if texts and all(texts))
    for prompt, text in zip([[5, 9, 33, 2], [8]], texts, strict=True):
        written = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=VOCAB - 2, pad_token_id=0
        )
        assert written[0, len(prompt) :].tolist()[: len(text)] == text


def test_two_swapped_weights_are_noticed_and_nothing_is_left(tmp_path, monkeypatch):
    source_of(tmp_path / "hf", GQA, "llama")
    read = importing._read
    other = {"self_attn.q_proj.weight": "self_attn.o_proj.weight", "self_attn.o_proj.weight": "self_attn.q_proj.weight"}

    def swapped(source, rule, dtype):
        names = []
        for name in rule.theirs:
            head, _, tail = name.partition("layers.0.")
            names.append(f"{head}layers.0.{other.get(tail, tail)}" if tail else name)
        return read(source, Rule(rule.ours, tuple(names), rule.transform), dtype)

    monkeypatch.setattr(importing, "_read", swapped)
    with pytest.raises(UserError, match=r"logits differ by \d.* block 0\b"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]
    assert import_model(str(tmp_path / "hf"), tmp_path / "out", check=False).largest_difference is None


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    source_of(tmp_path / "hf", NEOX, "neox")
    read, calls = HuggingFaceFolder.tensor, []

    def interrupted(folder, name):
        calls.append(name)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return read(folder, name)

    monkeypatch.setattr(HuggingFaceFolder, "tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]
    (tmp_path / ".out.draft-999999999").mkdir()  # of a process that was killed
    import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]


@pytest.mark.parametrize(
    ("stored", "precision", "dtype", "key"),
    [
        (torch.bfloat16, "auto", "bfloat16", "bfloat16"),
        (torch.float16, "auto", "float16", "fp16"),
        (torch.bfloat16, "fp32", "float32", "fp32"),
        (torch.float32, "bf16", "bfloat16", "bfloat16"),
    ],
)
def test_precision(tmp_path, stored, precision, dtype, key):
    source_of(tmp_path / "hf", GQA, "llama", stored)
    done = import_model(str(tmp_path / "hf"), tmp_path / "out", precision=precision)
    assert done.largest_difference < 1e-5
    assert {entry.dtype for entry in open_checkpoint(done.folder).manifest.parameters.values()} == {dtype}
    assert NeoXArgs.from_files([str(done.config)]).get("precision") == key


def test_values_beyond_fp16_are_refused(tmp_path):
    source_of(tmp_path / "hf", GQA, "llama", shard="1GB")
    tensors = tensors_in(tmp_path / "hf")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e6
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="down_proj.weight: .*fp16"):
        import_model(str(tmp_path / "hf"), tmp_path / "out", precision="fp16")
    assert os.listdir(tmp_path) == ["hf"]


def test_older_files_pickles_buffers_and_a_tied_head_written_twice(tmp_path):
    source_of(tmp_path / "hf", {**GQA, "no_weight_tying": False}, "llama", shard="1GB")
    tensors = tensors_in(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(tensors, tmp_path / "hf/pytorch_model.bin")
    assert import_model(str(tmp_path / "hf"), tmp_path / "out").largest_difference < 1e-5
    tensors["lm_head.weight"][0, 0] += 1
    torch.save(tensors, tmp_path / "hf/pytorch_model.bin")
    with pytest.raises(UserError, match=r"lm_head.weight .* differs from .*; set tie_word_embeddings: false"):
        import_model(str(tmp_path / "hf"), tmp_path / "other")
    changed(tmp_path / "hf", tie_word_embeddings=False, attn_implementation="flash_attention_2")  # as TRL leaves it
    assert import_model(str(tmp_path / "hf"), tmp_path / "other").largest_difference < 1e-5


def test_files_that_are_not_what_their_names_say(tmp_path):
    source_of(tmp_path / "hf", GQA, "llama", shard="1GB")
    weights = tmp_path / "hf/model.safetensors"
    tensors, pickle = {"model.norm.weight": torch.ones(2)}, tmp_path / "hf/pytorch_model.bin"
    index = tmp_path / "hf/model.safetensors.index.json"

    def refused(*parts):
        with pytest.raises(UserError) as error:
            import_model(str(tmp_path / "hf"), tmp_path / "out")
        assert all(str(part) in str(error.value) for part in parts), error.value
        assert sorted(os.listdir(tmp_path)) == ["hf"]

    weights.write_text(POINTER)
    refused(weights, "git lfs pull")
    weights.unlink()
    for content in ("{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        index.write_text(content)
        refused(index)
    for name in ("../outside.safetensors", "/etc/passwd", "a/../../outside.bin"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        refused(index, name, "outside of the folder")
    index.unlink()
    for content in ([tensors], {"model": tensors}, torch.ones(3)):
        torch.save(content, pickle)
        refused(pickle)
        pickle.unlink()  # an earlier one may still be mapped
    pickle.write_text(POINTER)
    refused(pickle, "git lfs pull")
    pickle.unlink()
    (tmp_path / "hf/adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}')
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, tmp_path / "hf/adapter_model.safetensors")
    refused("adapter", "meta-llama/Llama-3.2-1B", "merge")
    config = tmp_path / "hf/config.json"
    config.unlink()
    refused("adapter", "merge")
    (tmp_path / "hf/adapter_config.json").unlink()
    config.write_text(POINTER)
    refused(config, "git lfs pull")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_gpt_2_as_first_published(tmp_path, file):
    """Names without `transformer.`, causal masks stored with the weights, no head."""
    source_of(tmp_path / "hf", {**GPT2, "num_layers": 3}, "gpt2", shard="1GB")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_in(tmp_path / "hf").items()}
    assert "wte.weight" in tensors and not any("lm_head" in name for name in tensors)
    for block in range(3):
        tensors[f"h.{block}.attn.bias"] = torch.ones(64, 64).tril().view(1, 1, 64, 64)
        tensors[f"h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
    (tmp_path / "hf/model.safetensors").unlink()
    if file.endswith("bin"):
        torch.save(tensors, tmp_path / "hf" / file)
    else:
        save_file(tensors, tmp_path / "hf" / file)
    assert import_model(str(tmp_path / "hf"), tmp_path / "out", tp=2).largest_difference < 1e-5
    export(tmp_path / "out", tmp_path / "again", tokenizer=False, architecture="gpt2")
    for name, tensor in tensors_in(tmp_path / "again").items():
        assert torch.equal(tensor, tensors[name.removeprefix("transformer.")])


def changed(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_causal": False}, "not known here.*is_causal: False"),
        ({"model_type": "t5"}, "model_type: 't5' is not known here. Known: .*gpt_neox"),
        ({"hidden_act": "quick_gelu"}, "hidden_act: 'quick_gelu' cannot be expressed"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rotary positions scaled as 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' .*linear lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "linear has no beta"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "not known: model.layers.1.input_layernorm.weight"),
        ({"intermediate_size": 96}, r"up_proj\.weight .*\[80, 32\], .*config .*\[96, 32\]"),
    ],
)
def test_what_is_unknown_or_does_not_fit_is_named_before_anything_is_written(tmp_path, fields, message):
    source_of(tmp_path / "hf", GQA, "llama")
    changed(tmp_path / "hf", **fields)
    with pytest.raises(UserError, match=message):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_missing_shard_and_a_missing_folder(tmp_path):
    source_of(tmp_path / "hf", GQA, "llama")
    shard = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{shard.name} cannot be read"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} is missing"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    with pytest.raises(UserError, match="folder .* does not exist"):
        import_model(str(tmp_path / "nowhere"), tmp_path / "out")


def test_steps_of_one_model_gather_in_a_folder(tmp_path):
    source_of(tmp_path / "hf", NEOX, "neox")
    import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=1)
    import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=2)
    assert (tmp_path / "out/latest").read_text() == "global_step2"
    with pytest.raises(UserError, match="--output-dir: .* iteration 1 .*--overwrite"):
        import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=1)
    import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=1, overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.yml", "global_step1", "global_step2", "latest"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(UserError, match="--output-dir: .*/mine .*not empty"):
        import_model(str(tmp_path / "hf"), tmp_path / "mine")


def test_the_checkpoint_names_the_folders_it_gets_however_the_output_is_written(tmp_path):
    """Written as a draft next to them; `..` in a path does not change the folder."""
    source_of(tmp_path / "hf", NEOX, "neox")
    (tmp_path / "below").mkdir()
    done = import_model(str(tmp_path / "hf"), tmp_path / "below" / ".." / "out")
    assert ".draft-" not in (done.folder / "manifest.json").read_text()
    assert open_checkpoint(done.folder).manifest.config["load"] == str(tmp_path / "out")


def test_a_step_with_another_vocabulary_does_not_join_a_folder(tmp_path):
    source_of(tmp_path / "hf", NEOX, "neox")
    import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    model.resize_token_embeddings(VOCAB + 7, mean_resizing=False)
    model.save_pretrained(tmp_path / "hf2")
    with pytest.raises(UserError, match=f"vocab_size: {VOCAB} there, {VOCAB + 7} in the model"):
        import_model(str(tmp_path / "hf2"), tmp_path / "out", iteration=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "activation: 'gelu' there, 'relu' "),
        ({"layer_norm_eps": 0.5}, "another model: layernorm_epsilon"),
    ],
)
def test_a_step_of_another_model_does_not_join_a_folder(tmp_path, change, message):
    source_of(tmp_path / "hf", NEOX, "neox")
    import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=1)
    before = (tmp_path / "out/config.yml").read_bytes()
    config = tmp_path / "hf/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(UserError, match=f"--output-dir: .*{message}"):
        import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=2, overwrite=True)
    assert (tmp_path / "out/config.yml").read_bytes() == before
    # the only step there is may become another model's
    import_model(str(tmp_path / "hf"), tmp_path / "out", iteration=1, overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.yml", "global_step1", "latest"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, r"^--tp: .*3"),
        ({"tp": 4}, r"^--tp: num_kv_heads 2 cannot be split over 4"),
        ({"tp": 0}, r"^--tp: must be above 0"),
        ({"pp": -1}, r"^--pp: must be 0 or more"),
        ({"pp": 9}, r"^--pp: 9 stages cannot share 2 layers"),
    ],
)
def test_a_layout_that_does_not_fit_is_reported_with_its_flag(tmp_path, layout, message):
    source_of(tmp_path / "hf", GQA, "llama")
    with pytest.raises(UserError, match=message):
        import_model(str(tmp_path / "hf"), tmp_path / "out", **layout)
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "/hf: .*num_kv_heads: 3 "),
        ({"intermediate_size": "80"}, r"hf/config\.json: transformers .*intermediate_size"),
    ],
)
def test_a_config_that_cannot_be_built_is_reported_with_its_folder(tmp_path, fields, message):
    source_of(tmp_path / "hf", GQA, "llama")
    config = tmp_path / "hf/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(UserError, match=message):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_file_in_the_place_of_its_folder(tmp_path):
    source_of(tmp_path / "hf", GQA, "llama")
    with pytest.raises(UserError, match="--hf-model: .*config.json "):
        import_model(str(tmp_path / "hf/config.json"), tmp_path / "out")


def test_only_one_parameter_is_in_memory_while_writing(tmp_path, monkeypatch):
    source_of(tmp_path / "hf", GQA, "llama")
    alive, peak, original = set(), [], importing._read

    def read(source, rule, dtype):
        value = original(source, rule, dtype).clone()
        alive.add(rule.ours)
        weakref.finalize(value, alive.discard, rule.ours)
        peak.append(len(alive))
        return value

    monkeypatch.setattr(importing, "_read", read)
    import_model(str(tmp_path / "hf"), tmp_path / "out", check=False)
    assert max(peak) <= 2


def tool(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )


def test_all_tokens_that_end_a_text_come_back(tmp_path, vocabulary):  # noqa: F811
    source_of(tmp_path / "hf", LLAMA, "llama")
    for file in vocabulary.iterdir():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    generation = {
        "eos_token_id": [VOCAB - 2, 7, 9],
        "temperature": 0.6,
        "do_sample": True,
        "transformers_version": "4.1",
    }
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    import_model(str(tmp_path / "hf"), tmp_path / "out", check=False)
    export(tmp_path / "out", tmp_path / "back", check=False, pad_token_id=4)
    back = json.loads((tmp_path / "back/generation_config.json").read_text())
    del generation["transformers_version"]
    assert back == {**generation, "pad_token_id": 4}


IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    ("config", "generation"),
    [
        ({"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": None}, {"eos_token_id": 7}),
        ({"eos_token_id": [6, 7]}, {"eos_token_id": [7, 6, 9], "pad_token_id": 7, "temperature": 0.6}),
        ({"bos_token_id": None, "eos_token_id": None, "pad_token_id": VOCAB + 3}, {"bos_token_id": 5}),
        ({}, {}),
        ({"eos_token_id": [6, 7], "pad_token_id": -1}, None),
    ],
)
def test_the_ids_of_a_model_s_own_files_come_back(tmp_path, vocabulary, tokenizer, config, generation):  # noqa: F811
    source_of(tmp_path / "hf", LLAMA, "llama")
    path = tmp_path / "hf/config.json"
    others = {key: value for key, value in json.loads(path.read_text()).items() if key not in IDS}
    path.write_text(json.dumps({**others, **config}))
    for file in vocabulary.iterdir() if tokenizer else ():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "hf/generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    import_model(str(tmp_path / "hf"), tmp_path / "out", check=False)
    export(tmp_path / "out", tmp_path / "back", check=False, tokenizer=tokenizer)
    back = [json.loads((tmp_path / "back" / name).read_text()) for name in ("config.json", "generation_config.json")]
    ids = [{key: value for key, value in found.items() if key in IDS} for found in back]
    assert ids[0] == config
    # Without the file, transformers makes one of config.json.
    expected = {key: value for key, value in (config if generation is None else generation).items() if key in IDS}
    assert ids[1] == expected


@pytest.mark.slow
def test_the_command_makes_a_folder_that_dry_runs_and_knows_its_tokenizer(tmp_path, vocabulary):  # noqa: F811
    """The model has more rows than the tokenizer has tokens, as Pythia's do."""
    source_of(tmp_path / "hf", NEOX, "neox")
    whole = json.loads((vocabulary / "tokenizer.json").read_text())
    whole["added_tokens"].pop()
    (vocabulary / "tokenizer.json").write_text(json.dumps(whole))
    for file in vocabulary.iterdir():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    options = ("--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out", "--tp", 2, "--iteration", 5)
    done = tool("huggingface/convert_hf_gptneox_to_neox.py", *options, "--no-transformer-engine")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/out/global_step5" in done.stdout and done.stdout.count("logit difference") == 1
    assert "logit difference" not in done.stderr
    assert build_tokenizer(NeoXArgs.from_files([str(tmp_path / "out/config.yml")]).tokenizer).vocab_size == VOCAB
    assert (tmp_path / "out/tokenizer/chat_template.jinja").read_text() == TEMPLATE
    (tmp_path / "prompts.txt").write_text("w1 w2\n")
    keys = ("text_gen_type=input-file", f"sample_input_file={tmp_path}/prompts.txt", "--dry-run")
    planned = tool("deepy.py", "generate.py", tmp_path / "out/config.yml", *keys)
    assert planned.returncode == 0, planned.stderr
    again = tool("huggingface/convert_hf_to_neox.py", *options)
    assert again.returncode == 2 and "--overwrite" in again.stderr and "Traceback" not in again.stderr


PYTHIA_70M = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_8B = {
    **LLAMA_2_7B, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "vocab_size": 128256, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(PYTHIA_70M, 70426624), (LLAMA_2_7B, 6738415616), (LLAMA_3_8B, 8030261248), (MISTRAL_7B, 7241732096)],
)
def test_published_configs_are_read_without_a_field_left(config, parameters):
    """Sizes as published (models' pages, counted by transformers on the meta device)."""
    family, keys = read_config(config, "config.json")
    vocab = config["vocab_size"]
    args = resolved_for(vocab, **{**keys, "seq_length": 2048, "train_micro_batch_size_per_gpu": 1})
    specs = importing.specs_of(args, vocab, 2)
    assert sum(torch.Size(spec.shape).numel() for spec in specs.values()) == parameters
    assert FAMILIES[family].unsupported(args.model) == []
    if config is MISTRAL_7B:
        assert set(args.model.layer_windows) == {4095}
    if config is PYTHIA_70M:
        assert args.model.gpt_j_residual and args.model.rotary_pct == 0.25
    assert Heads.of(args.model).num_kv_heads == config.get("num_key_value_heads", config["num_attention_heads"])


def resolved_for(vocab, **keys):

    return derive(NeoXArgs.from_saved(keys), Facts(vocab_size=vocab))


@pytest.mark.slow
def test_a_model_of_the_hub_by_revision(tmp_path):
    """Against a Hub on this machine: only the safetensors are fetched, and what is not there is one message."""
    source_of(tmp_path / "hf", GQA, "llama")
    files = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with Hub() as hub:
        hub.models["lab/tiny"] = Repo({**files, "pytorch_model.bin": b"the same again", "README.md": b"# Tiny"})
        environment = {**os.environ, **hub.environment(tmp_path / "home")}

        def convert(model, revision, output):
            given = ["--hf-model", model, "--revision", revision, "--output-dir", str(tmp_path / output)]
            command = [sys.executable, "huggingface/convert_hf_to_neox.py", *given]
            run = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 110}
            return subprocess.run(command, check=False, **run)

        done = convert("lab/tiny", hub.models["lab/tiny"].commit, "out")
        assert done.returncode == 0, done.stderr
        assert hub.count("pytorch_model.bin") == 0
        for model, revision in (("lab/tiny", "step9"), ("lab/other", "main")):
            failed = convert(model, revision, "none")
            assert failed.returncode == 2 and "Traceback" not in failed.stderr
            assert f"cannot fetch {model} at revision {revision}" in failed.stderr
    assert sorted(os.listdir(tmp_path)) == ["hf", "home", "out"]
    export(tmp_path / "out", tmp_path / "again", tokenizer=False)
    theirs, again = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "again")
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.items())
