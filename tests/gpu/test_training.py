"""A run on a GPU is the run on a CPU: same command, same losses. Saved and resumed, it is the run that was never left.

DEEPY_GPU_TESTS_ON=cpu compares the CPU with itself, which tries keys and functions without a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.models import BALANCED as EXPERTS
from tests.training.models import MAMBA_AND_ATTENTION as MAMBA
from tests.training.runs import KEYS, corpus

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
# relative, over six steps; bf16 on a CPU is 1e-4 away from fp32
TOLERANCE = {"fp32": 1e-5, "bfloat16": 2e-3, "fp16": 1e-3}
PACKED = {"intra_document_masking": True, "pack_impl": "best_fit"}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_kv_heads": 2}
TRANSFORMER_ENGINE = {**WIDE, "te_mha": True, "te_layernorm_mlp": True, "no_weight_tying": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@dataclass(frozen=True)
class Case:
    """What a run on the GPU has besides `model`, which the CPU trains as well, in fp32.

    `needs`: a package without which there is nothing to see; `tolerance`: where `TOLERANCE` is not the precision's.
    """

    precision: str
    keys: dict[str, Any]
    model: dict[str, Any]
    needs: str = ""
    tolerance: float | None = None


def case(precision: str, model: dict[str, Any] | None = None, **more: Any) -> Case:
    options = {name: more.pop(name) for name in ("needs", "tolerance") if name in more}
    return Case(precision, more, model or {}, **options)


# What was never seen on a GPU first: a limit of time cuts off the end.
CASES = {
    "native": case("bfloat16", engine="native"),
    "native, packed in fp32": case("fp32", PACKED, engine="native"),
    "experts, recomputed": case("bfloat16", EXPERTS, checkpoint_policy="full", tolerance=5e-3),
    "experts, recomputed in part": case("bfloat16", EXPERTS, checkpoint_policy="selective", tolerance=5e-3),
    "zero 3": case("bfloat16", zero_optimization={"stage": 3}),
    "zero 2": case("bfloat16", zero_optimization={"stage": 2}),
    "recomputed": case("bfloat16", checkpoint_policy="full"),
    "recomputed in part": case("bfloat16", checkpoint_policy="selective"),
    "fp16": case("fp16", fp16={"loss_scale": 1024.0}),
    "packed": case("bfloat16", PACKED),
    "packed, recomputed": case("bfloat16", PACKED, checkpoint_policy="full"),
    "plain": case("bfloat16"),
    "fp32": case("fp32"),
    "experts in fp32": case("fp32", EXPERTS, checkpoint_policy="full"),
    "offloaded": case("bfloat16", zero_optimization={"stage": 2, **OFFLOAD}),
    "accumulated": case("bfloat16", train_micro_batch_size_per_gpu=2),
    "packed in fp32": case("fp32", PACKED),
    "mamba": case("bfloat16", MAMBA, tolerance=5e-3),
    "Transformer Engine": case("bfloat16", TRANSFORMER_ENGINE, needs="transformer_engine.pytorch", tolerance=5e-3),
    "FlashAttention": case("bfloat16", {**WIDE, **PACKED}, attention_backend="flash", needs="flash_attn"),
}


class Run:
    """`deepy.py COMMAND` on one "cpu" or "cuda" device, started at once, so that several run side by side."""

    def __init__(self, folder: Path, name: str, device: str, command: str = "train.py", **keys: Any) -> None:
        self.device, self.save = device, folder / name
        config = {**KEYS, "data_path": str(folder / "text_document"), "save": str(self.save), "num_gpus": 1, **keys}
        path = folder / f"{name}.{command}.yml"
        path.write_text(yaml.safe_dump(config))
        hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
        self.errors = (folder / f"{name}.{command}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "deepy.py", command, str(path)],
            cwd=ROOT,
            env={**os.environ, **hidden},
            stdout=self.errors,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> Run:
        """Its end in order, on the device that was asked for."""
        try:
            code = self.process.wait(timeout=140)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
        self.errors.seek(0)
        text = self.errors.read()
        assert code == 0, text[-6000:]
        assert ("no GPU" in text) == (self.device == "cpu"), text[-6000:]
        return self

    def losses(self) -> list[float]:
        self.wait()
        rows = [json.loads(line) for line in (self.save / "metrics.jsonl").read_text().splitlines()]
        return [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path)
    return tmp_path


@pytest.mark.gpu
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CASES)
def test_same_losses_as_on_a_cpu(folder: Path, device: str, name: str) -> None:
    one = CASES[name]
    if one.needs:
        pytest.importorskip(one.needs)
    if one.precision == "fp16" and device == "cpu":
        pytest.skip("DeepSpeed trains in fp16 on GPUs only")
    tried = Run(folder, "tried", device, precision=one.precision, **{**one.model, **one.keys})
    reference = Run(folder, "reference", "cpu", precision="fp32", **one.model)
    losses, wanted = tried.losses(), reference.losses()
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted, rel=one.tolerance or TOLERANCE[one.precision])
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("precision", "engine"), [("bfloat16", "native"), ("bfloat16", "deepspeed"), ("fp32", "deepspeed")]
)
def test_a_resumed_run_draws_the_dropout_of_one_that_was_never_left(
    folder: Path, device: str, precision: str, engine: str
) -> None:
    own = {"precision": precision, "engine": engine}
    keys = {**own, "hidden_dropout": 0.2, "attention_dropout": 0.2, "checkpoint_factor": 3}
    whole = Run(folder, "whole", device, **keys)
    plain = Run(folder, "plain", device, **own)
    first = Run(folder, "parts", device, **keys, train_iters=3, lr_decay_iters=20).losses()
    losses = Run(folder, "parts", device, **keys, load=str(folder / "parts")).losses()
    assert losses[:3] == first and len(losses) == STEPS
    # The same kernels on the same numbers; one that adds atomically may round otherwise.
    wanted = whole.losses()
    assert losses == pytest.approx(wanted, rel=1e-6 if precision == "fp32" else 1e-4)
    assert wanted != pytest.approx(plain.losses(), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_trained_saved_resumed_and_written(folder: Path, device: str) -> None:
    """What a user types: bf16 on packed documents, going on, and text from the result."""
    keys = {"precision": "bfloat16", **PACKED, "train_iters": 40, "lr_decay_iters": 40, "checkpoint_factor": 20}
    Run(folder, "run", device, **{**keys, "train_iters": 20}).wait()
    losses = Run(folder, "run", device, **keys, load=str(folder / "run")).losses()
    assert len(losses) == 40 and losses[-1] < losses[19] < losses[0]
    samples = folder / "samples.jsonl"
    text = {"text_gen_type": "unconditional", "maximum_tokens": 12, "num_samples": 3, "temperature": 1.0}
    written = {"sample_output_file": str(samples), "load": str(folder / "run"), "precision": "bfloat16"}
    Run(folder, "run", device, "generate.py", **text, **written).wait()
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 3 and all(row["length"] > 0 and row["text"] for row in rows)


@pytest.mark.gpu
@pytest.mark.timeout(150)
def test_a_profile_has_kernels_and_the_model_s_memory(folder: Path) -> None:
    steps = {"profile_step_start": 2, "profile_step_stop": 4}
    Run(folder, "profiled", "cuda", precision="bfloat16", profile=True, memory_profiling=True, **steps).wait()
    profile = folder / "profiled" / "profile"
    (trace,) = profile.glob("rank0.*.pt.trace.json")
    assert any(event.get("cat") == "kernel" for event in json.loads(trace.read_text())["traceEvents"])
    snapshot = pickle.loads((profile / "mem_snapshot_rank0.pickle").read_bytes())
    frames = [frame["name"] for events in snapshot["device_traces"] for one in events for frame in one["frames"]]
    assert "build_model" in frames and "train_batch" in frames


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_comparison_sees_a_difference(folder: Path) -> None:
    """The same functions without a GPU: two runs agree, another precision does not pass for equal."""
    runs = [Run(folder, name, "cpu", precision="fp32") for name in ("first", "again")]
    first, again = (run.losses() for run in runs)
    assert again == first and len(first) == STEPS
    rounded = Run(folder, "rounded", "cpu", precision="bfloat16").losses()
    assert rounded == pytest.approx(first, rel=TOLERANCE["bfloat16"])
    assert rounded != pytest.approx(first, rel=TOLERANCE["fp32"])
