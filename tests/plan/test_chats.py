"""`chats`: a file of conversations becomes datasets by content, and a run with defaults that trains the answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.plan.preflight import config_for
from tests.convert.helpers import LLAMA, VOCAB, hugging_face, resolved
from tests.convert.test_tools import vocabulary  # noqa: F401 (a fixture)
from tests.training.runs import run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

TURN = "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}{{ m.content }}{{ eos_token }}{% endfor %}"
TURN += "{% if add_generation_prompt %}w2 {% endif %}"
CHATS = [["w7 w8", "w9 w10 w11"], ["w12", "w13 w14"], ["w15 w16 w17", "w18"]]


@pytest.fixture
def folder(tmp_path, vocabulary) -> Path:  # noqa: F811
    """With a model in `hf`, and `chats.jsonl`."""
    hugging_face(resolved(**LLAMA), "llama")[0].save_pretrained(tmp_path / "hf")
    shutil.copytree(vocabulary, tmp_path / "hf", dirs_exist_ok=True)
    (tmp_path / "hf/chat_template.jinja").write_text(TURN)
    write(tmp_path, CHATS)
    return tmp_path


def chat(asked: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def write(folder: Path, chats: list[list[str]]) -> None:
    records = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in chats
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def config(folder: Path, **keys: Any) -> NeoXArgs:
    lines = {"load": str(folder / "hf"), "chats": str(folder / "chats.jsonl"), "save": str(folder / "save"), **keys}
    (folder / "run.yml").write_text(yaml.safe_dump(lines))
    return config_for(NeoXArgs.from_files([str(folder / "run.yml")]), "train.py")


def derived(args: NeoXArgs, ranks: int = 1) -> NeoXArgs:
    return derive(args, Facts(vocab_size=VOCAB, num_devices=ranks))


def test_three_lines_train_what_the_assistant_says(folder):
    """Tokens are transformers' own, labels the answers with their ends; the first loss is that of transformers."""
    args = config(folder, seq_length=24)
    theirs = AutoTokenizer.from_pretrained(folder / "hf")
    data, labels = (IndexedDataset(args.get(key)[0]) for key in ("train_data_paths", "train_label_data_paths"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    losses = []
    for i, (asked, said) in enumerate(CHATS):
        turns = chat(asked, said)
        ids = theirs.apply_chat_template(turns, return_dict=False)
        assert data.get(i).tolist() == ids
        start = len(theirs.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False))
        wanted = [-100] * start + ids[start:]
        assert labels.get(i).tolist() == wanted and theirs.decode(ids[start:]).split() == [
            *said.split(),
            "<|endoftext|>",
        ]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).logits[0]
        targets = torch.tensor(wanted[1:])
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        losses += each[targets >= 0].tolist()
    report = run({**args.to_dict(), "train_epochs": None, "train_iters": 1}, Layout(tp=2, micro=1))[0]
    assert not report.error and report.loss == [pytest.approx(sum(losses) / len(losses), rel=1e-5)]


def test_defaults_are_published_ones_and_the_config_wins(folder):
    args = config(folder)
    assert args.get("optimizer")["params"]["lr"] == 2e-5 and args.training.train_epochs == 3
    assert derived(args).training.train_batch_size == 1 and derived(args, 2).training.train_batch_size == 2
    assert "3 chats" in " ".join(derived(args).notes)
    assert config(folder, lora_r=2, lora_target_modules=["query_key_value"]).get("optimizer")["params"]["lr"] == 2e-4
    own = {"optimizer": {"type": "Adam", "params": {"lr": 1.0}}, "train_iters": 7, "train_batch_size": 6, "warmup": 0.5}
    args = derived(config(folder, **own))
    assert (args.get("optimizer")["params"]["lr"], args.training.train_iters, args.schedule.warmup) == (1.0, 7, 0.5)
    assert (args.training.train_batch_size, args.training.train_epochs) == (6, None)
    many = args.replace(chats_found={"chats": 64_000, "tokens": 640_000}, train_batch_size=None)
    many = many.replace(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=None)
    sources = {name: where for name, where in many.sources.items() if name not in ("train_batch_size", "seq_length")}
    sources.pop("gradient_accumulation_steps", None)
    many = NeoXArgs.from_values({**many.values(), "seq_length": 40}, sources)
    assert derived(many, 4).training.train_batch_size == 32  # 128 chats of 10 tokens in rows of 40


def test_the_cache_is_by_content_and_whole_or_not_there(folder):
    def cached() -> list[str]:
        return sorted(path.name for path in (folder / "index_cache").iterdir())

    first = config(folder).get("train_data_paths")
    (kept,) = cached()
    stamp = (folder / "index_cache" / kept).stat().st_mtime_ns
    assert config(folder).get("train_data_paths") == first
    assert (folder / "index_cache" / kept).stat().st_mtime_ns == stamp and cached() == [kept]
    write(folder, CHATS[:2])
    assert config(folder).get("train_data_paths") != first
    write(folder, CHATS)
    assert config(folder).get("train_data_paths") == first
    (folder / "hf/chat_template.jinja").write_text(TURN.replace("'w1 '", "'w3 '"))
    assert config(folder).get("train_data_paths") != first
    before = cached()
    with (folder / "chats.jsonl").open("a") as file:
        file.write('{"messages": "none"}\n')
    with pytest.raises(UserError, match=r"chats\.jsonl:4"):
        config(folder)
    assert [name for name in cached() if not name.endswith(".lock")] == before


def test_what_cannot_be_is_refused_by_name(folder):
    with pytest.raises(UserError, match=r"run\.yml:\d: chats: train_data_paths is set too"):
        config(folder, train_data_paths=["x"])
    with pytest.raises(UserError, match=r"chats: .*HFTokenizer.* not CharLevelTokenizer"):
        config(folder, tokenizer_type="CharLevelTokenizer")
    (folder / "chats.jsonl").write_text('{"chosen": [], "rejected": []}\n')
    with pytest.raises(UserError, match="preference pairs"):
        config(folder)
    (folder / "hf/chat_template.jinja").unlink()
    write(folder, CHATS)
    with pytest.raises(UserError, match="template"):
        config(folder)
