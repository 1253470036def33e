"""A small run with checkpoints, metrics and evaluations, and a client of the tests' Hub in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch

from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.weights import save_weights
from tests.convert.helpers import LLAMA, VOCAB, random_tensors, resolved, specs_of
from tests.hub.upload_server import TOKEN, UploadHub

SECRET = "0123456789" * 4  # as W&B's keys were
PRIVATE = ("bobsname", SECRET, "/scratch", "login7")


def write_tokenizer(folder: Path) -> Path:
    """A Hugging Face tokenizer with the model's vocabulary."""
    folder.mkdir(parents=True)
    words = {**{f"w{i}": i for i in range(VOCAB - 2)}, "<unk>": VOCAB - 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_run(root: Path, steps: tuple[int, ...] = (5, 10), train_iters: int = 10) -> Path:
    """A save folder `root`, of a user called bobsname, with everything that a run leaves there."""
    tokenizer = write_tokenizer(root.parent / "bobsname" / root.name / "tokenizer")
    args = resolved(
        **LLAMA,
        tokenizer_type="HFTokenizer",
        vocab_file=str(tokenizer / "tokenizer.json"),
        train_iters=train_iters,
        train_data_paths=["/scratch/bobsname/pile_text_document", "/scratch/bobsname/code_text_document"],
        train_data_weights=[3.0, 1.0],
        save=str(root),
        hostfile="/scratch/bobsname/hosts",
        wandb_team="bobsname",
        master_addr="login7",
    )
    tensors, specs = random_tensors(args, "llama"), specs_of(args, 1)
    for step in steps:
        pairs = [(specs[name], tensors[name] * (1 + step / 100)) for name in specs]
        folder = save_weights(
            root, step, pairs, tp_size=1, heads=Heads.of(args.model), config=args.to_dict(), dtype=torch.float32
        )
        (folder / "configs").mkdir(exist_ok=True)
        text = f"# of bobsname\nnum_layers: 2\nwandb_api_key: {SECRET}\nsave: /scratch/bobsname/run\n"
        (folder / "configs/run.yml").write_text(text)
    lines = [{"step": step, "time": 0.0, "train/lm_loss": 5 - step / 10} for step in range(1, train_iters + 1)]
    lines.append({"step": 5, "time": 0.0, "validation/lm_loss": 4.75})
    text = "\n".join(json.dumps(line) for line in lines)
    (root / "metrics.jsonl").write_text(text + '\n{"step": 11, "tr')  # of a killed run
    (root / "eval_results").mkdir()
    results = {"results": {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.0125}}}
    (root / "eval_results/iteration_5.json").write_text(json.dumps({**results, "config": {"user": "bobsname"}}))
    return root


def log_in(hub: UploadHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Make this process a client of `hub`; returns its environment for the commands, with no cluster's programs."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return {"HOME": str(home), "PATH": "/usr/bin:/bin"}
