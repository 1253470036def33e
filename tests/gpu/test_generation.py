"""Text written on a GPU is the text written on a CPU, and scores are the same scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import open_checkpoint
from megatron.inference.build import build_stage
from megatron.inference.sampling import Sampling
from megatron.inference.scoring import score
from megatron.inference.stage import Stage
from megatron.mpu.state import ParallelState
from tests.inference.models import EOD, GPT_LLAMA, GPT_NEOX, Layout, Letters, complete, inference_args, make_checkpoint

MODELS = {"neox": GPT_NEOX, "llama": GPT_LLAMA}


def stage_on(device: str, folder: Path, keys: dict[str, object]) -> Stage:
    return build_stage(inference_args(keys, Layout()), ParallelState.single(device), Letters(), open_checkpoint(folder))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_same_text_and_scores_as_on_a_cpu(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, MODELS[name])
    cpu, gpu = (stage_on(device, folder, MODELS[name]) for device in ("cpu", "cuda"))
    for sampling in (Sampling(), Sampling(1.0, top_k=20, top_p=0.9)):
        for use_cache in (True, False):
            texts = [
                [done.tokens for done in complete(stage, sampling=sampling, seed=3, use_cache=use_cache)]
                for stage in (cpu, gpu)
            ]
            assert texts[0] == texts[1]
    pairs = [([EOD], [5, 9, 33]), ([1, 2, 3], [4]), ([7] * 10, [40, 2])]
    for one, other in zip(score(cpu, pairs, 2), score(gpu, pairs, 2), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-3) and one[1] == other[1]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "fp16"])
def test_half_precision_on_a_gpu(tmp_path: Path, precision: str) -> None:
    keys = {**GPT_NEOX, "precision": precision}
    stage = stage_on("cuda", make_checkpoint(tmp_path, GPT_NEOX), keys)
    assert {p.dtype for layer in stage.layers for p in layer.parameters()} == {
        {"bfloat16": torch.bfloat16, "fp16": torch.float16}[precision]
    }
    cached, whole = ([done.tokens for done in complete(stage, tokens=4, use_cache=flag)] for flag in (True, False))
    assert sum(a == b for a, b in zip(cached, whole, strict=True)) >= 3  # a tie may fall the other way
