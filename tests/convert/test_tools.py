"""The command lines, and the tokenizer next to the exported model."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.find import open_checkpoint
from megatron.convert.hf.export_hf import export
from megatron.errors import UserError
from tests.convert.helpers import LLAMA, NEOX, VOCAB, random_tensors, resolved, write_checkpoint

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"w{i}" for i in range(VOCAB - 3)]
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def tool(name, *arguments):
    """Run a tool as a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/ckpts" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a tool in this process: its exit code, stdout and stderr."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "tools/ckpts" / name), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def vocabulary(tmp_path):
    """A Hugging Face tokenizer folder of exactly the model's vocabulary: words, two special tokens and padding."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate([*WORDS, "<unk>"])}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>", "<|padding|>"])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "w5",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|padding|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def checkpoint(tmp_path, keys, architecture, **more):
    args = resolved(**keys, **more)
    return write_checkpoint(tmp_path / "ckpt", args, random_tensors(args, architecture), tp=2)


@pytest.mark.slow
def test_the_command_line_of_neox_makes_a_folder_that_transformers_opens(tmp_path, vocabulary, call):
    folder = checkpoint(tmp_path, NEOX, "neox", tokenizer_type="HFTokenizer", vocab_file="moved/tokenizer.json")
    run_yml = tmp_path / "run.yml"
    run_yml.write_text(f"tokenizer-type: HFTokenizer\nvocab-file: {vocabulary}/tokenizer.json\nhidden_size: 32\n")
    options = ("--input_dir", folder, "--config_file", run_yml, "--output_dir", tmp_path / "hf")
    done = tool("convert_neox_to_hf.py", *options, "--precision", "bf16", "--architecture", "neox")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/hf: GPTNeoXForCausalLM" in done.stdout and done.stdout.count("logit difference") == 1
    assert "logit difference" not in done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == VOCAB
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        5,
        VOCAB - 2,
        VOCAB - 1,
    )
    assert model.generation_config.eos_token_id == VOCAB - 2
    opened = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert opened("w3 w7").input_ids == [3, 7] and opened.eos_token == "<|endoftext|>"
    assert opened.apply_chat_template([{"role": "user", "content": "w3"}], tokenize=False) == "<user>w3"
    code, _, message = call("convert_neox_to_hf.py", *options)
    assert code == 2 and "--overwrite" in message
    code, _, message = call("convert_neox_to_hf.py", *options, "--overwrite", "--architecture", "llama")
    assert code == 2 and "norm: layernorm" in message and "Traceback" not in message


def test_a_missing_vocabulary_names_the_ways_out(tmp_path):
    folder = checkpoint(tmp_path, LLAMA, "llama", tokenizer_type="HFTokenizer", vocab_file="moved/tokenizer.json")
    with pytest.raises(UserError, match="moved/tokenizer.json.*--config_file.*--no_save_tokenizer"):
        export(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    export(folder, tmp_path / "hf", tokenizer=False, pad_token_id=3)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"]) == (3, None)


def test_vocab_is_hf_tokenizer(tmp_path, vocabulary):
    folder = checkpoint(tmp_path, LLAMA, "llama", tokenizer_type="SPMTokenizer", vocab_file=str(vocabulary))
    export(folder, tmp_path / "hf", vocab_is_hf=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("w3").input_ids == [3]


def test_another_tokenizer_than_the_model_s_is_refused(tmp_path, vocabulary):
    folder = checkpoint(tmp_path, LLAMA, "llama", tokenizer_type="HFTokenizer", vocab_file=str(vocabulary))
    with pytest.raises(UserError, match=f" {VOCAB} tokens"):
        export(folder, tmp_path / "hf", pad_token_id=VOCAB)


def test_inspect(tmp_path, call):
    folder = checkpoint(tmp_path, LLAMA, "llama")
    code, out, error = call("inspect_checkpoints.py", folder, "--checksums")
    assert code == 0, error
    line = next(line for line in out.splitlines() if line.startswith("2.attention.query_key_value.weight"))
    assert "[96, 32]" in line and "float32" in line and "in parts 32+32+32" in line and "norm" in line
    code, out, _ = call("inspect_checkpoints.py", "--checkpoint-path", folder, "--diff", folder)
    assert code == 0 and out.endswith("15 parameters are equal\n")
    code, _, error = call("inspect_checkpoints.py", tmp_path / "nowhere")
    assert code == 2 and "does not exist" in error


def test_difference_of_two_checkpoints(tmp_path):
    from megatron.checkpoint.reader import CheckpointReader
    from megatron.convert.inspect import difference

    args = resolved(**LLAMA)
    tensors = random_tensors(args, "llama")
    one = CheckpointReader(open_checkpoint(write_checkpoint(tmp_path / "one", args, tensors)))
    changed = {**tensors, "2.attention.dense.weight": tensors["2.attention.dense.weight"] + 0.25}
    other = CheckpointReader(open_checkpoint(write_checkpoint(tmp_path / "other", args, changed, tp=2)))
    lines = list(difference(one, other))
    assert any(line.startswith("2.attention.dense.weight") and "0.25" in line for line in lines)
    assert re.fullmatch(rf"{len(tensors) - 1} .*equal, 1 differ, 0 .*alone", lines[-1])
