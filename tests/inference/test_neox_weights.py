"""Text from GPT-NeoX's own checkpoints is the text of transformers, at any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.neox_files import write_neox
from tests.convert.helpers import VOCAB, hugging_face, resolved
from tests.distributed import run_distributed
from tests.inference.models import EOD, GPT_NEOX, PROMPTS, Layout, complete, stage_of

pytestmark = pytest.mark.cpu

KEYS = {**GPT_NEOX, "num_kv_heads": 4}
TOKENS = 12


def write(rank: int, world: int, folder: str, keys: dict, layout: Layout) -> list[list[int]]:
    return [done.tokens for done in complete(stage_of(Path(folder), keys, layout, rank), tokens=TOKENS)]


@pytest.mark.parametrize("form", ["pipe", "whole"])
def test_greedy_text(tmp_path, form):
    model, theirs = hugging_face(resolved(**{**KEYS, "train_batch_size": 8}), "neox", seed=4)
    with torch.no_grad():
        for parameter in model.parameters():  # so that the best token is clearly the best
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    theirs = {name: (t * 3.0 if t.ndim == 2 else t) for name, t in theirs.items()}
    folder = write_neox(tmp_path / "global_step9", theirs, KEYS, tp=2, form=form, names="legacy")
    assert EOD < VOCAB
    expected = []
    for prompt in PROMPTS:
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=EOD, pad_token_id=EOD
        )
        text = whole[0, len(prompt) :].tolist()
        expected.append(text[: text.index(EOD)] if EOD in text else text)
    assert len({token for text in expected for token in text}) > 5
    assert write(0, 1, str(folder), KEYS, Layout()) == expected
    layout = Layout(tp=2, pp=2)
    assert run_distributed(write, layout.world, str(folder), KEYS, layout)[0] == expected
