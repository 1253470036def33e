"""Reward models and KTO as `train.py` runs them: from a language model's checkpoint, through a stop, at two layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from megatron.convert.hf.export_hf import export
from megatron.convert.hf.peft import export_adapters
from megatron.convert.hf.peft_import import import_adapters
from megatron.data.sample import IGNORE
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.inference.inputs import requested_checkpoint
from megatron.neox_arguments import NeoXArgs
from tests.training.runs import Report, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

COMMON: dict[str, Any] = {
    "pack_impl": "unpacked",
    "eod_mask_loss": False,
    "finetune": True,
    "checkpoint_factor": 2,
    "train_iters": 4,
    "lr_decay_iters": 4,
    "eval_interval": 4,
    "eval_iters": 1,
    "train_micro_batch_size_per_gpu": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model after two steps."""
    root = tmp_path_factory.mktemp("base")
    keys = {"data_path": corpus(root / "corpus"), "save": str(root / "save"), "train_iters": 2}
    assert not run(keys)[0].error
    return str(root / "save")


def write(prefix: Path, documents: list[np.ndarray], dtype: Any = np.int32) -> str:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return str(prefix)


def answers(folder: Path, side: str, low: int, ends: int = 1) -> tuple[str, str]:
    """Texts of 40 prompts with answers of letters from `low` on, and their labels: as --for-rm makes them (`ends`: how
    many of the last tokens have one), or with 0 of the whole answer."""
    rng, texts, labels = np.random.RandomState(low), [], []
    for number in range(40):
        prompt = np.random.RandomState(number).randint(97, 123, 3 + number % 3)
        text = np.concatenate([prompt, rng.randint(low, low + 5, rng.randint(2, 7)), [0, 0]])
        label = np.full(len(text), IGNORE)
        first = len(text) - ends if ends else len(prompt)
        label[first:] = text[first:]
        texts.append(text)
        labels.append(label)
    folder.mkdir(exist_ok=True)
    return write(folder / f"{side}_document", texts), write(folder / f"{side}_label_document", labels)


def pairs(folder: Path, ends: int = 1) -> dict[str, Any]:
    keys: dict[str, Any] = {**COMMON, "train_impl": "rm", "dataset_impl": "pairwise"}
    for sign, low in (("pos", 97), ("neg", 115)):
        text, labels = answers(folder, sign, low, ends)
        for role in ("train", "valid"):
            keys |= {f"{sign}_{role}_data_paths": [text], f"{sign}_{role}_label_data_paths": [labels]}
    return keys


def rewarded(folder: Path) -> dict[str, Any]:
    keys: dict[str, Any] = {**COMMON, "train_impl": "kto", "kto_beta": 0.5}
    found = [(*answers(folder, name, low, 0), reward) for name, low, reward in (("good", 97, 1.0), ("bad", 115, -1.0))]
    rewards = [
        write(folder / f"reward_{number}_document", [np.array([reward], np.float32)] * 40, np.float32)
        for number, (_, _, reward) in enumerate(found)
    ]
    for role in ("train", "valid"):
        keys |= {
            f"{role}_data_paths": [text for text, _, _ in found],
            f"{role}_label_data_paths": [labels for _, labels, _ in found],
            f"{role}_reward_data_paths": rewards,
        }
    return keys


def logged(report: Report, name: str) -> list[float]:
    assert not report.error, report.error
    return [metrics[f"train/{name}"] for _, metrics in report.logged]


def through_a_stop(keys: dict[str, Any], root: Path, names: tuple[str, ...]) -> Report:
    """The report of a straight run, which is that of one that stops and goes on."""
    straight = run({**keys, "save": str(root / "straight")})[0]
    stopped = {**keys, "save": str(root / "stopped")}
    first, second = run({**stopped, "exit_interval": 2})[0], run(stopped)[0]
    assert second.steps == [3, 4]
    for name in names:
        assert logged(first, name) + logged(second, name) == logged(straight, name), name
    assert second.state == straight.state
    return straight


def check_layout(keys: dict[str, Any], layout: Layout, straight: Report, names: tuple[str, ...]) -> None:
    for report in run(keys, layout)[:1]:
        for name in names:
            assert logged(report, name) == pytest.approx(logged(straight, name), rel=1e-5, abs=1e-6), name


def evaluated(report: Report) -> dict[str, float]:
    (found,) = [metrics for _, split, metrics in report.evaluated if split == "validation"]
    return found


def test_a_reward_model_on_a_language_model(base: str, tmp_path: Path) -> None:
    keys = {**pairs(tmp_path / "data"), "load": base}
    names = ("lm_loss", "accuracy", "margin", "pos_values", "neg_values")
    straight = through_a_stop(keys, tmp_path, names)
    assert "6.rm_linear.weight/weight" in straight.state
    assert not any("final_linear" in name for name in straight.state)
    found = evaluated(straight)
    assert {"lm_loss", "accuracy", "margin"} <= found.keys() and "lm_loss_ppl" not in found
    assert 0 <= found["accuracy"] <= 1
    check_layout(keys, Layout(pp=2, dp=2, micro=1, zero=1), straight, names)
    refused = run({**keys, "finetune": False, "save": str(tmp_path / "no")})[0]
    assert refused.exit_code == 2 and "finetune: true" in refused.error
    with pytest.raises(UserError, match=rf"load: {tmp_path}/straight/global_step4 holds a reward model .*no words"):
        requested_checkpoint(NeoXArgs.from_saved({"load": str(tmp_path / "straight")}))
    done = export(tmp_path / "straight", tmp_path / "hf", tokenizer=False, pad_token_id=1)
    assert done.architecture == "LlamaForSequenceClassification" and done.largest_difference < 1e-5
    refused = run({**pairs(tmp_path / "more", ends=2), "load": base})[0]
    assert refused.exit_code == 2, refused.error
    assert "pos_document: document " in refused.error and "2 tokens" in refused.error and "--for-rm" in refused.error


def test_kto_with_the_answers_to_others(base: str, tmp_path: Path) -> None:
    keys = {**rewarded(tmp_path / "data"), "load": base}
    names = ("lm_loss", "log_ratio", "kl", "reward_acc")
    straight = through_a_stop(keys, tmp_path, names)
    ratio, kl = logged(straight, "log_ratio"), logged(straight, "kl")
    assert abs(ratio[0]) < 1e-5 and abs(kl[0]) < 1e-5  # the model is its own reference
    assert all(value >= 0 for value in kl) and max(kl) > 1e-4
    assert all(abs(a - b) > 1e-6 for a, b in zip(ratio[1:], kl[1:], strict=True))
    assert {"log_ratio", "kl", "chosen_rewards", "rejected_rewards"} <= evaluated(straight).keys()
    check_layout(keys, Layout(dp=2, tp=2, micro=1), straight, names)
    free = run({**keys, "kto_loss_type": "apo_zero_unpaired"})[0]
    assert logged(free, "kl") == [0.0] * 4


def test_adapters_and_a_head_of_rewards_are_trained_together(base: str, tmp_path: Path) -> None:
    keys = {**pairs(tmp_path / "data"), "load": base, "lora_r": 2, "eval_iters": 0, "save": str(tmp_path / "save")}
    first, second = run({**keys, "exit_interval": 2})[0], run(keys)[0]
    assert second.steps == [3, 4], first.error + second.error
    trained = {name.split("/")[0] for name in second.state if name.endswith("/exp_avg")}
    assert {name for name in trained if ".lora." not in name} == {"6.rm_linear.weight"} and len(trained) > 1
    done = export(tmp_path / "save", tmp_path / "hf", tokenizer=False, pad_token_id=1)
    assert done.architecture == "LlamaForSequenceClassification"
    # PEFT's folder has the head as well, and comes back with it.
    export(base, tmp_path / "base", tokenizer=False, check=False)
    export_adapters(tmp_path / "save", tmp_path / "adapter", base_model=str(tmp_path / "base"))
    rewards = _rewards(tmp_path / "hf")
    assert torch.allclose(_rewards(tmp_path / "base", tmp_path / "adapter"), rewards, rtol=1e-4, atol=1e-6)
    import_adapters(tmp_path / "adapter", base, tmp_path / "back")
    export(tmp_path / "back", tmp_path / "again", tokenizer=False, pad_token_id=1)
    assert torch.allclose(_rewards(tmp_path / "again"), rewards, rtol=1e-5, atol=1e-7)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    del weights["base_model.model.score.weight"]
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"without its head score\.weight.*modules_to_save: \[score\].*--base"):
        import_adapters(tmp_path / "adapter", base, tmp_path / "headless")
    assert not (tmp_path / "headless").exists()


def _rewards(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 1
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    tokens = torch.tensor([[100, 101, 117, 118, 0], [120, 99, 98, 115, 0]])
    with torch.no_grad():
        found = model.eval()(tokens).logits[:, 0]
    assert found.std() > 1e-3
    return found
