"""Every packing in real training: the loss is that of the documents alone, and a run stopped and gone on is the same.

The reference is transformers' Llama in fp64, one unpadded document after the other.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.order.datasets import plan_datasets
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.mpu.sharding import named_parameters
from megatron.neox_arguments.schema_data import DataConfig
from tests.distributed import run_distributed
from tests.training.runs import run
from tests.training.test_reference import hf_twin, llama_weights, unpad
from tests.training.tiny import LLAMA, SEQUENCE, VOCAB, Layout, build

pytestmark = pytest.mark.cpu

PACKINGS = ["pack_until_overflow", "unpacked", "best_fit"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Documents of 2 to 17 tokens, one of them twice as long as a sample, and labels that train about half of them."""
    rng, folder = np.random.RandomState(5), tmp_path_factory.mktemp("chats")
    lengths = [*rng.randint(2, SEQUENCE + 2, 29).tolist(), 2 * SEQUENCE]
    documents = [rng.randint(1, VOCAB, length) for length in lengths]
    masks = [np.where(rng.rand(len(d)) < 0.5, d, -100) for d in documents]
    masks[3][:] = -100  # trains nothing
    paths = []
    for name, values, dtype in (("text", documents, np.uint16), ("label", masks, np.int32)):
        with IndexedDatasetBuilder(folder / name, dtype) as builder:
            for value in values:
                builder.add_document(value)
            builder.finalize()
        paths.append(str(folder / name))
    return paths


def train_and_count(rank, world, pack_impl, chats, dp):
    """Start weights, summed loss and trained tokens of the first step and of an epoch, and the loss of three steps."""
    data = DataConfig(train_data_paths=(chats[0],), train_label_data_paths=(chats[1],), pack_impl=pack_impl)
    keys = {**LLAMA, "intra_document_masking": True}
    engine, args, lr = build(rank, keys, Layout(dp=dp, micro=2))
    plan = plan_datasets(data, seq_length=SEQUENCE, seed=1, train_samples=64)
    rules = CollateRules(SEQUENCE, intra_document_masking=True, vocab_size=VOCAB)
    gas = args.training.gradient_accumulation_steps
    dataset = plan.build().train
    loader = StepLoader(dataset, micro_batch=2, gas=gas, rules=rules, dp_rank=engine.state.dp_rank, dp_size=dp)
    start = {n: p.detach().clone().double() for n, p in named_parameters(engine.module)}
    evaluated = [engine.eval_batch(batch) for batch in islice(loader.steps(), 8)]
    outs = map(engine.train_batch, loader.steps(), [lr(0)] * 3)
    losses = [(float(out.loss), out.trained_tokens, out.padding) for out in outs]
    pieces = [[(p.document, p.offset, p.length) for p in dataset.locate(i).pieces] for i in range(64)]
    return start, [(float(one.sums), one.trained_tokens) for one in evaluated], losses, pieces


def alone(model, chats, piece):
    """Summed loss and trained tokens of one piece of a document, by itself."""
    tokens, labels = (torch.from_numpy(IndexedDataset(p).get(*piece).astype(np.int64)) for p in chats)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    loss = F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
    return float(loss), int((labels[1:] >= 0).sum())


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pack_impl", PACKINGS)
def test_the_loss_is_that_of_the_documents_alone(pack_impl, chats, dp):
    start, evaluated, trained, pieces = run_distributed(train_and_count, dp, pack_impl, chats, dp, timeout=110)[0]
    model = hf_twin("llama")
    model.load_state_dict({n: unpad(n, v) for n, v in llama_weights(start).items()}, strict=False)
    known = {piece: alone(model, chats, piece) for row in pieces for piece in row}
    assert len(evaluated) == 8
    for step, (loss, count) in enumerate(evaluated):
        found = [known[piece] for row in pieces[8 * step : 8 * step + 8] for piece in row]
        assert count == sum(tokens for _, tokens in found) > 0
        assert loss == pytest.approx(sum(value for value, _ in found), rel=1e-6)
    # The first step is taken at the start weights: its mean is that of the evaluation.
    assert trained[0][1] == evaluated[0][1]
    assert trained[0][0] == pytest.approx(evaluated[0][0] / evaluated[0][1], rel=1e-6)
    assert trained[2][0] < trained[0][0] * 1.5  # the others are real steps too
    assert [tokens for _, tokens, _ in trained] == [tokens for _, tokens in evaluated[:3]]
    lengths = [min(SEQUENCE, sum(length for *_, length in row)) for row in pieces]
    assert [padding for *_, padding in trained] == [8 * SEQUENCE - sum(lengths[at : at + 8]) for at in (0, 8, 16)]


@pytest.mark.parametrize("pack_impl", PACKINGS)
def test_stopped_and_resumed_for_longer_is_the_same(tmp_path, chats, pack_impl):
    """Six steps at once; three, then on to six; and on to nine, which needs more samples than were planned."""
    keys = {
        "train_data_paths": [chats[0]],
        "train_label_data_paths": [chats[1]],
        "valid_data_paths": [chats[0]],
        "valid_label_data_paths": [chats[1]],
        "test_data_paths": [chats[0]],
        "pack_impl": pack_impl,
        "intra_document_masking": True,
        "eod_mask_loss": False,
        "eval_iters": 1,
        "eval_interval": 3,
        "num_workers": 1,
    }
    layout = Layout(dp=2, zero=1)
    straight = run({**keys, "save": str(tmp_path / "a")}, layout)
    again = {"load": str(tmp_path / "a"), "iteration": 3, "save": str(tmp_path / "b")}
    resumed = run({**keys, **again}, layout)
    longer = run({**keys, "load": str(tmp_path / "a"), "save": str(tmp_path / "c"), "train_iters": 9}, layout)
    for before, after, on in zip(straight, resumed, longer, strict=True):
        assert not before.error and not after.error and not on.error
        assert before.steps == [1, 2, 3, 4, 5, 6] and after.steps == [4, 5, 6] and on.steps == [7, 8, 9]
        assert after.tokens[:3] == before.tokens[3:6]
        assert after.loss == before.loss[3:] and after.grad_norm == before.grad_norm[3:]
        assert before.state and after.state == before.state
        assert [e for e in before.evaluated if e[0] == 6] == [e for e in after.evaluated if e[0] == 6] != []
        assert len({tuple(step) for step in [*before.tokens[:6], *on.tokens[:3]]}) == 9
