"""Texts end where the model's own files say, and are scored and exported so: against `transformers` and the harness's
adapter, with the tokenizers that were published."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.find import Checkpoint, find_checkpoint
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import load_template
from megatron.data.chat.tokenizer import chat_tokenizer
from megatron.data.tokenise.encode import write_datasets
from megatron.errors import UserError
from megatron.inference.build import build_stage
from megatron.inference.evaluation_team import evaluation_team
from megatron.inference.exported_text import as_exported
from megatron.inference.generate import generate as REAL
from megatron.inference.harness import HarnessModel
from megatron.inference.inputs import inherit_tokens
from megatron.inference.modes import TextGenerator, find_ends, write_texts
from megatron.inference.team import Control
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.model_tokens import stop_ids
from megatron.training.setup import Process
from tests.convert.chat_models import chat_model
from tests.data.chat.chats import THREE, rows
from tests.inference.test_harness import assert_same, requests
from tests.tokenizer.published import MODELS, published
from tests.training.runs import run

pytestmark = pytest.mark.cpu

TEXT = "Say hi, please"
TURN = {"qwen3": "<|im_end|>", "llama3.1": "<|eot_id|>", "gemma3": "<end_of_turn>", "gpt-oss": "<|return|>"}
# Special, but no end: written by generate.py, left out by the harness.
INSIDE = {
    "qwen3": "<|vision_start|>",
    "llama3.1": "<|start_header_id|>",
    "gemma3": "<start_of_image>",
    "gpt-oss": "<|channel|>",
}  # fmt: skip
ENDS = {
    "qwen3": {151643, 151645},
    "llama3.1": {128001, 128008, 128009},
    "gemma3": {1, 106},
    "gpt-oss": {199999, 200002, 200012},
}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Chat:
    """A model that says TEXT, a special token and its end of turn, again and again: theirs, ours, and exported."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.tokenizer = AutoTokenizer.from_pretrained(published(name))
        self.end = self.tokenizer.convert_tokens_to_ids(TURN[name])
        words = self.tokenizer(TEXT, add_special_tokens=False).input_ids
        path = [*words, self.tokenizer.convert_tokens_to_ids(INSIDE[name]), self.end]
        self.theirs = chat_model(folder / "hf", name, path)
        self.imported = import_model(str(folder / "hf"), folder / "ours", check=False)

    def generated(self, prompt: str, model: Any = None) -> list[int]:
        """New tokens by transformers."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        return (model or self.theirs).generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()

    @cached_property
    def ours(self) -> tuple[NeoXArgs, Tokenizer, Checkpoint]:
        return opened(self.imported.config)

    @cached_property
    def exported(self) -> Path:
        return export(self.imported.folder, self.folder / "back", check=False).folder


@pytest.fixture(scope="module", params=sorted(MODELS))
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(tmp_path_factory.mktemp("chat"), request.param)


def opened(config: Path, *overrides: str) -> tuple[NeoXArgs, Tokenizer, Checkpoint]:
    args = for_inference(NeoXArgs.from_files([str(config)], list(overrides)))
    tokenizer = build_tokenizer(args.tokenizer)
    args = derive(args, Facts(vocab_size=tokenizer.vocab_size, num_devices=1))
    return args, tokenizer, find_checkpoint(args.checkpoint.load or "", None, "load")


def write(args: NeoXArgs, tokenizer: Tokenizer, checkpoint: Checkpoint, prompt: str = "Say") -> dict[str, Any]:
    """The record that generate.py writes."""
    state = ParallelState.single()
    stage = build_stage(args, state, tokenizer, checkpoint)
    generator = TextGenerator(Control(state), stage, tokenizer, args, find_ends(args, tokenizer, checkpoint))
    return generator.complete([prompt])[0]


@pytest.mark.parametrize("chat", ["llama3.1", "qwen3"], indirect=True)  # its template begins with the start; without
def test_a_chat_is_what_transformers_makes_of_it(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, and the same answer, for texts, for chats of a file, and in a conversation."""
    conversation = [{"role": "user", "content": "One"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": conversation}) + '\n{"prompt": "Two"}\n')
    asked: list[list[int]] = []
    monkeypatch.setattr(
        "megatron.inference.modes.generate", lambda *given, **more: asked.extend(given[1]) or REAL(*given, **more)
    )

    def run_generate(*overrides: str, typed: str = "") -> str:
        given = (*overrides, "maximum_tokens=12", "temperature=0")
        args, tokenizer, _ = opened(chat.imported.config, *given)
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert write_texts(Process(args, ParallelState.single(), tokenizer)) == 0
        return shown.getvalue()

    def theirs(*turns: str, system: str | None = None) -> tuple[list[int], str]:
        roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        first = [] if system is None else [{"role": "system", "content": system}]
        ids = chat.tokenizer.apply_chat_template([*first, *roles], add_generation_prompt=True, return_dict=False)
        text = chat.theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        kept = [token for token in text if token not in ENDS[chat.name]]
        return ids, chat.tokenizer.decode(kept)

    out = tmp_path / "out.jsonl"
    run_generate(
        f"sample_input_file={tmp_path}/in.jsonl", "chat=true", "chat_system=Be brief.", f"sample_output_file={out}"
    )
    expected = [theirs("One"), theirs("Two", system="Be brief.")]
    assert sorted(asked) == sorted(ids for ids, _ in expected)
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == [text for _, text in expected]
    asked.clear()
    shown = run_generate("text_gen_type=interactive", "chat=true", typed="One\nTwo\n/new\nTwo\n")
    first, answer = theirs("One")
    expected = [(first, answer), theirs("One", answer, "Two"), theirs("Two")]
    assert asked == [ids for ids, _ in expected]
    assert shown == "".join(f"{text}\n" for _, text in expected)


def ids_of(path: Path) -> dict[str, Any]:
    return {key: value for key, value in json.loads(path.read_text()).items() if key in IDS}


def test_a_text_ends_where_transformers_ends_it(chat: Chat) -> None:
    expected = chat.generated("Say")
    assert expected[-1] == chat.end and len(expected) == 5
    record = write(*chat.ours)
    assert record["text"] == chat.tokenizer.decode(expected[:-1]) == f" hi, please{INSIDE[chat.name]}"
    assert record["finished"] and record["length"] == 4
    assert find_ends(*chat.ours) == ENDS[chat.name]


def test_an_import_comes_back_with_the_ids_that_it_had(chat: Chat) -> None:
    model = MODELS[chat.name]
    assert ids_of(chat.exported / "config.json") == model.config
    generation = json.loads((chat.exported / "generation_config.json").read_text())
    assert generation == {key: value for key, value in model.generation.items() if key != "transformers_version"}
    files = [(folder / "tokenizer_config.json").read_bytes() for folder in (published(chat.name), chat.exported)]
    assert files[0] == files[1]


def test_transformers_ends_a_text_of_the_export_there_too(chat: Chat) -> None:
    model = AutoModelForCausalLM.from_pretrained(chat.exported, dtype=torch.float32)
    assert chat.generated("Say", model) == chat.generated("Say")


def answers(model: Any) -> dict[str, list[Any]]:
    pairs = [("Say", " hi, please"), ("Say hi,", " no"), ("", "Say hi"), ("", f"{TURN['qwen3']}hi")]
    texts = [(TEXT,), (f"{TEXT}. " * 20,), ("h",)]
    prompts = [("Say", {"until": ["\n\n"], "max_gen_toks": 12}), ("Say", {"until": ["please"], "max_gen_toks": 12})]
    return {
        "loglikelihood": model.loglikelihood(requests("loglikelihood", pairs)),
        "rolling": model.loglikelihood_rolling(requests("loglikelihood_rolling", texts)),
        "generate": model.generate_until(requests("generate_until", prompts)),
    }


def test_scores_are_those_of_the_harness_own_adapter_on_the_exported_folder(chat: Chat) -> None:
    state = ParallelState.single()
    args, tokenizer, checkpoint = chat.ours
    exported = as_exported(tokenizer, inherit_tokens(args, checkpoint))
    stage = build_stage(args, state, tokenizer, checkpoint)
    ours = HarnessModel(evaluation_team(Control(state), stage, exported, batch=2, seed=1), tokenizer, exported)
    theirs = HFLM(str(chat.exported), device="cpu", dtype="float32", batch_size=1, logits_cache=False)
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    found = answers(ours)
    assert_same(found, answers(theirs))
    assert found["generate"] == [" hi, please", " hi, "]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model of Qwen 3 as it was published, one number in generation_config.json: only <|endoftext|> ends it."""
    folder = tmp_path_factory.mktemp("qwen") / "hf"
    tokenizer = AutoTokenizer.from_pretrained(published("qwen3"))
    words = tokenizer(TEXT, add_special_tokens=False).input_ids
    chat_model(folder, "qwen3", [*words, 151645, 151643])
    for name, change in {
        "config.json": {"eos_token_id": 151643},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    generation = {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    import_model(str(folder), folder.parent / "ours", check=False)
    return folder.parent


def test_chats_that_were_trained_on_add_their_end_of_turn(qwen: Path, tmp_path: Path) -> None:
    tokenizer, template = chat_tokenizer(str(qwen / "hf")), load_template(qwen / "hf")
    encoder = ChatEncoder(tokenizer, template, ChatOptions(), template.eos_id(tokenizer))
    write_datasets([rows(*[{"messages": THREE}] * 40)], encoder, str(tmp_path / "chats"))
    data = {
        "train_data_paths": [str(tmp_path / "chats_messages_document")],
        "train_label_data_paths": [str(tmp_path / "chats_messages_label_document")],
        "split": "1,0,0",
    }
    keys = yaml.safe_load((qwen / "ours/config.yml").read_text().replace("${CONFIG_DIR}", str(qwen / "ours")))
    keys |= {"seq_length": 32, "train_iters": 1, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
    keys |= {"eval_iters": 0, "eod_mask_loss": False, "checkpoint_factor": 1, "warmup": 0.0}
    first = run({**keys, **data, "save": str(tmp_path / "run")})[0]
    assert first.exit_code == 0, first.error
    back = export(tmp_path / "run", tmp_path / "hf", check=False).folder
    assert ids_of(back / "config.json") == {"bos_token_id": 151643, "eos_token_id": [151645, 151643]}
    assert ids_of(back / "generation_config.json") == {"bos_token_id": 151643, "eos_token_id": [151645, 151643]}
    # A further stage, on texts and with a config that says nothing of it, keeps what the checkpoint knows.
    del keys["model_tokens"]
    more = {"train_data_paths": data["train_data_paths"], "load": str(tmp_path / "run"), "save": str(tmp_path / "more")}
    manifest = Path(f"{data['train_data_paths'][0]}.manifest.json")
    plain = json.loads(manifest.read_text())
    assert plain["extra"].pop("turn_ends") == [151645]
    manifest.write_text(json.dumps(plain))
    assert run({**keys, **more, "split": "1,0,0"})[0].exit_code == 0
    again = export(tmp_path / "more", tmp_path / "hf2", check=False).folder
    assert ids_of(again / "config.json") == ids_of(back / "config.json")


def test_a_folder_converted_before_knows_the_tokenizer_s_end(qwen: Path, tmp_path: Path) -> None:
    """Neither `model_tokens` nor generation_config.json: what the tokenizer calls eos, and the end of document."""
    settings = yaml.safe_load((qwen / "ours/config.yml").read_text().replace("${CONFIG_DIR}", str(qwen / "ours")))
    del settings["model_tokens"]
    settings["vocab_file"] = str(published("qwen3"))
    (tmp_path / "config.yml").write_text(yaml.safe_dump(settings))
    args, tokenizer, checkpoint = opened(tmp_path / "config.yml")
    checkpoint.manifest.config.pop("model_tokens")
    assert find_ends(args, tokenizer, checkpoint) == {151643, 151645}


def test_stop_tokens_end_a_text_too(qwen: Path) -> None:
    args, tokenizer, checkpoint = opened(qwen / "ours/config.yml", "maximum_tokens=12")
    assert write(args, tokenizer, checkpoint)["text"] == " hi, please<|im_end|>"  # ends at <|endoftext|>
    found = write(args.replace(stop_tokens=(" please", 151645)), tokenizer, checkpoint)
    assert found["text"] == " hi," and found["finished"]
    for given in ('"<|im_end|>"', "151645", "['<|im_end|>', 151643]"):
        stops = NeoXArgs.from_files([str(qwen / "ours/config.yml")], [f"stop_tokens={given}"]).generation.stop_tokens
        assert stop_ids(stops, tokenizer) | {151643} == {151643, 151645}
    for wrong, message in (("hi, please", "'hi, please' is not one token .* 3"), (151936, "151936 .* 151669")):
        with pytest.raises(UserError, match=f"stop_tokens: .*{message}"):
            stop_ids([wrong], tokenizer)


def test_ids_that_are_none_are_refused_at_import(qwen: Path, tmp_path: Path) -> None:
    for file in (qwen / "hf").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, "<|im_end|>"]}')
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id: .*im_end"):
        import_model(str(tmp_path), tmp_path / "out")
