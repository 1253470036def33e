"""The real engine: straight run = stop + resume, bit for bit; to 1e-5 at another layout (known-faults 39)."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.save import save_checkpoint
from megatron.convert.hf.export_hf import export
from megatron.data.batch import StepBatch
from megatron.mpu.random import seed_everything
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from tests.distributed import run_distributed

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

VOCAB, BATCH, SEQ, BEFORE, AFTER = 67, 12, 12, 3, 3
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "seq_length": SEQ,
    "pos_emb": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "intermediate_size": 48,
    "make_vocab_size_divisible_by": 8,
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": BEFORE + AFTER,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 0.5,
    "lr_decay_style": "constant",
    "seed": 5,
}
FP32 = {"precision": "fp32"}
BF16 = {"precision": "bfloat16"}


def stage(number):
    return {"zero_optimization": {"stage": number}}


def start(rank, layout, keys):
    """This rank's engine: configuration, groups, model, optimizer, as `train.py` makes them."""
    from megatron.training import setup, setup_deepspeed

    pp, dp, tp = layout
    sizes = {"pipe_parallel_size": pp if pp > 1 else 0, "model_parallel_size": tp}
    args = derive(NeoXArgs.from_saved({**MODEL, **keys, **sizes}), Facts(vocab_size=VOCAB, num_devices=pp * dp * tp))
    setup_deepspeed.init_deepspeed(torch.device("cpu"))
    state = ParallelState.build(Topology({"pipe": pp, "data": dp, "model": tp}), rank, "cpu")
    seed_everything(args.training.seed, state)
    process = setup.Process(args, state, SimpleNamespace(vocab_size=VOCAB))
    return args, setup.build_engine(process, setup.build_model(process, args.training.seed))


def batch(step, state):
    """This data rank's share of a global batch; sample i trains on i % SEQ + 1 of its tokens."""
    samples = [torch.Generator().manual_seed(1000 + step * BATCH + i) for i in range(BATCH)]
    text = torch.stack([torch.randint(VOCAB, (SEQ + 1,), generator=generator) for generator in samples])
    mask = torch.stack([(torch.arange(SEQ) <= i % SEQ).float() for i in range(BATCH)])
    gas = BATCH // state.dp_size
    mine = [m * state.dp_size + state.dp_rank for m in range(gas)]
    tokens, targets = text[mine, None, :-1], text[mine, None, 1:]
    positions = torch.arange(SEQ).expand_as(tokens)
    mask = mask[mine, None]
    return StepBatch(tokens, targets, mask, positions, None, step, step * BATCH, int(mask.sum()))


def train(rank, world, layout, keys, root, first, last, save):
    """Losses and grad norms of steps first..last-1, starting from the checkpoint at `first` if that is not 0."""
    args, engine = start(rank, layout, keys)
    heads = Heads.of(args.model)
    if first:
        opened = open_checkpoint(f"{root}/global_step{first}")
        load_checkpoint(opened, engine, engine.state, heads=heads)
        assert (opened.manifest.step, opened.manifest.consumed) == (first, first * BATCH)
    curve = []
    for step in range(first, last):
        out = engine.train_batch(batch(step, engine.state), 1e-3 * (step + 1) / BATCH)
        curve.append((float(out.loss), float(out.grad_norm)))
    if save:
        save_checkpoint(
            root, last, engine, engine.state, heads=heads, consumed=last * BATCH, client={}, config=args.to_dict()
        )
    digest = {name: p.detach().double().sum().item() for name, p in engine.params().items()}
    return curve, digest


def run(layout, keys, root, first, last, save=False):
    return run_distributed(train, math.prod(layout), layout, keys, str(root), first, last, save, timeout=110)


# (pipe, data, model)
EXACT = [
    ((1, 1, 1), {**FP32, **stage(0)}),
    ((1, 2, 1), {**FP32, **stage(1), "hidden_dropout": 0.1}),
    ((1, 2, 2), {**FP32, **stage(3)}),
    ((1, 3, 1), {**FP32, **stage(3)}),  # parts of uneven size
    ((2, 1, 2), {**FP32, **stage(0)}),
    ((2, 2, 1), {**FP32, **stage(1), "attention_dropout": 0.1, "hidden_dropout": 0.1}),
    ((1, 2, 1), {**BF16, **stage(2)}),
    ((2, 1, 1), {**BF16, **stage(1)}),
]


@pytest.mark.parametrize(("layout", "keys"), EXACT, ids=str)
def test_resume_at_the_same_layout_is_bit_exact(tmp_path, layout, keys):
    straight = run(layout, keys, tmp_path, 0, BEFORE + AFTER)
    run(layout, keys, tmp_path, 0, BEFORE, save=True)
    resumed = run(layout, keys, tmp_path, BEFORE, BEFORE + AFTER)
    for (curve, digest), (other_curve, other_digest) in zip(straight, resumed, strict=True):
        assert other_curve == curve[BEFORE:]
        assert other_digest == digest


PHI = {"norm": "layernorm", "activation": "gelu", "gpt_j_residual": True, "gpt_j_tied": True, "use_bias_in_head": True}
GEMMA2 = {
    "norm": "rmsnorm_unit_offset",
    "norm_placement": "sandwich",
    "activation": "geglu_tanh",
    "scale_embedding": True,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}


@pytest.mark.parametrize(
    ("keys", "layout"), [({**PHI, "no_weight_tying": True}, (1, 1, 2)), (GEMMA2, (2, 1, 2))], ids=["phi", "gemma2"]
)
def test_families_with_more_parameters_continue_elsewhere_and_are_exported(tmp_path, keys, layout):
    """The bias of a head is padded and split as its matrix is; norms on both sides have names of their own."""
    keys = {**FP32, **keys}
    straight, _ = run((1, 1, 1), {**keys, **stage(0)}, tmp_path, 0, BEFORE + AFTER)[0]
    run(layout, {**keys, **stage(0)}, tmp_path, 0, BEFORE, save=True)
    for other, zero in (((2, 1, 1), 1), ((1, 2, 1), 3)):
        for curve, _ in run(other, {**keys, **stage(zero)}, tmp_path, BEFORE, BEFORE + AFTER):
            for pair, expected in zip(curve, straight[BEFORE:], strict=True):
                assert pair == pytest.approx(expected, rel=1e-5), other
    assert export(tmp_path, tmp_path / "hf", tokenizer=False).largest_difference < 1e-5


CONTINUED_AT = [
    ((1, 1, 1), stage(0)),
    ((1, 2, 1), stage(2)),
    ((1, 3, 1), stage(3)),
    ((2, 1, 1), stage(1)),
    ((1, 1, 2), stage(1)),
    ((2, 1, 2), stage(0)),
]


SAVED_AT = [
    ((1, 1, 2), stage(0), False),
    ((2, 2, 1), stage(1), True),
    pytest.param((2, 2, 1), stage(1), False, marks=pytest.mark.full),
    pytest.param((1, 2, 1), stage(3), True, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "zero", "tied"), SAVED_AT, ids=str)
def test_any_layout_continues_any_other(tmp_path, layout, zero, tied):
    keys = {**FP32, "no_weight_tying": not tied}
    straight, _ = run((1, 1, 1), {**keys, **stage(0)}, tmp_path, 0, BEFORE + AFTER)[0]
    run(layout, {**keys, **zero}, tmp_path, 0, BEFORE, save=True)
    for other, other_zero in CONTINUED_AT:
        for curve, _ in run(other, {**keys, **other_zero}, tmp_path, BEFORE, BEFORE + AFTER):
            for pair, expected in zip(curve, straight[BEFORE:], strict=True):
                assert pair == pytest.approx(expected, rel=1e-5), (other, other_zero)
    assert export(tmp_path, tmp_path / "hf", tokenizer=False).largest_difference < 1e-5
