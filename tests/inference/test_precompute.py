"""Log-probabilities of a run's texts in GPT-NeoX's files: those of transformers, at any layout, once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.convert.hf.export_hf import export
from megatron.data.tokens.indexed import IndexedDataset
from megatron.inference.modes import write_texts
from tests.data.corpus import write
from tests.distributed import RankFailure, run_distributed
from tests.inference.models import GPT_LLAMA, Layout, Letters, inference_args, make_checkpoint
from tests.training.tiny import SEQUENCE, process_of

pytestmark = pytest.mark.cpu


def score(rank: int, world: int, keys: dict[str, object], layout: Layout) -> int:
    return write_texts(dataclasses.replace(process_of(rank, inference_args(keys, layout), layout), tokenizer=Letters()))


def test_of_both_sides_of_pairs_and_validation_data(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "save", GPT_LLAMA)
    draw = np.random.default_rng(0)
    lengths = {"good": [5, 1, SEQUENCE + 9, 2], "bad": [7, 3, 4, 1], "valid": [6]}
    texts = {name: [draw.integers(0, 66, n).tolist() for n in numbers] for name, numbers in lengths.items()}
    paths = {name: write(tmp_path / name, some, np.uint16) for name, some in texts.items()}
    keys = {
        **GPT_LLAMA,
        "load": str(tmp_path / "save"),
        "text_gen_type": "precompute",
        "dataset_impl": "pairwise",
        "pack_impl": "unpacked",
    }
    keys |= {
        "train_data_paths": [paths["good"]],
        "neg_train_data_paths": [paths["bad"]],
        "precompute_model_name": "base",
    }
    keys |= {"valid_data_paths": [paths["valid"]], "neg_valid_data_paths": [paths["good"]]}
    run_distributed(score, 4, keys, Layout(tp=2, dp=2), timeout=110)

    export(folder, tmp_path / "hf", tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, some in texts.items():
        found = IndexedDataset(f"{paths[name]}_base")
        assert found.dtype == np.float32 and len(found) == len(some)
        for number, text in enumerate(some):
            ids = torch.tensor([text[: SEQUENCE + 1]])
            with torch.no_grad():
                logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            np.testing.assert_allclose(found.get(number), logprobs.numpy(), atol=2e-5)

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*_base.*")}
    Path(f"{paths['bad']}_base.idx").unlink()
    run_distributed(score, 1, keys, Layout(), timeout=110)
    again = {path for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert {path.name for path in again} == {"bad_base.bin", "bad_base.idx", "bad_base.json"}
    there = r"_base.bin is there already, of another checkpoint, seq_length or data"
    with pytest.raises(RankFailure, match=f"good{there}"):
        run_distributed(score, 1, {**keys, "seq_length": 8}, Layout(), timeout=110)
    write(tmp_path / "bad", [[token + 1 for token in text] for text in texts["bad"]], np.uint16)
    with pytest.raises(RankFailure, match=f"bad{there}"):
        run_distributed(score, 1, keys, Layout(), timeout=110)
