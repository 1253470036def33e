"""RWKV-4: what transformers scales for inference is not in the files, and not in the check."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.convert.hf.import_hf import import_model
from megatron.convert.hf.streamed import folder_outputs
from megatron.convert.outputs import TOLERANCE
from megatron.convert.published.folder import HuggingFaceFolder
from tests.convert.families.rwkv_cases import RWKV4
from tests.convert.helpers import VOCAB, hugging_face, resolved

pytestmark = pytest.mark.cpu


@torch.no_grad()
def test_models_that_are_rescaled_for_inference_convert(tmp_path) -> None:
    model, _ = hugging_face(resolved(**{**RWKV4, "num_layers": 6}), "rwkv4")
    model.config.rescale_every = 2
    model.save_pretrained(tmp_path / "hf")
    done = import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert done.largest_difference < 1e-5

    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    mine = folder_outputs(HuggingFaceFolder(tmp_path / "hf"), tokens)[-1][1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    trained = loaded.train()(tokens, use_cache=False).logits[:, -mine.shape[1] :]
    rescaled = loaded.eval()(tokens, use_cache=False).logits[:, -mine.shape[1] :]
    assert loaded.rwkv.layers_are_rescaled
    scale = float(trained.abs().max())
    assert (mine - trained).abs().max() < TOLERANCE * scale
    # The same function but for the epsilon of the norms, which does not know that its input is 1/8.
    assert 0 < (mine - rescaled).abs().max() < 1e-3 * scale
