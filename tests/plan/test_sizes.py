"""What the plan says a rank holds against the model that is really built; the memory estimate against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import tables
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.plan.memory import Memory, estimate
from megatron.plan.stages import Held, stage_sizes, topology

pytestmark = pytest.mark.cpu

NEOX = "num_layers: 4\nhidden_size: 32\nnum_attention_heads: 4\nseq_length: 16\ntrain_micro_batch_size_per_gpu: 2\n"
STYLES = {
    "neox": ["gpt_j_residual=true", "pos_emb=rotary", "no_weight_tying=true"],
    "learned, tied": ["pos_emb=learned", "use_qk_layernorm=true", "gpt_j_residual=true", "gpt_j_tied=true"],
    "llama": [
        *("norm=rmsnorm", "pos_emb=rotary", "activation=swiglu", "num_kv_heads=2", "intermediate_size=48"),
        *("use_bias_in_mlp=false", "use_bias_in_attn_linear=false", "no_weight_tying=true"),
    ],
    "wide heads": [
        *("norm=rmsnorm", "pos_emb=rotary", "num_kv_heads=2", "head_dim=12", "use_bias_in_attn_output=false"),
        *("use_separate_qk_norms=true", "qk_norm_per_head=true"),
    ],
}
VOCAB = 99
BUCKET = "zero_optimization.reduce_bucket_size=10"


def derived(folder: Path, ranks: int, *overrides: str) -> NeoXArgs:
    (folder / "run.yml").write_text(NEOX)
    return derive(
        NeoXArgs.from_files([str(folder / "run.yml")], list(overrides)), Facts(vocab_size=VOCAB, num_devices=ranks)
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_parameters_per_rank_are_those_of_the_built_model(tmp_path: Path, style: str, pp: int, tp: int) -> None:
    from megatron.model.gpt import gpt_layers
    from megatron.mpu.state import ParallelState

    layout = (f"pipe_parallel_size={pp}", f"model_parallel_size={tp}", "make_vocab_size_divisible_by=8")
    args = derived(tmp_path, pp * tp, *STYLES[style], *layout)
    table, held = stage_sizes(args, VOCAB)
    assert len(table) == pp
    for stage, expected in zip(table, held, strict=True):
        state = ParallelState(topology(args), topology(args).rank(pipe=stage.stage, data=0, model=tp - 1), "cpu")
        padded = args.tokenizer.padded_vocab_size
        layers = gpt_layers(args.model, vocab_size=VOCAB, padded_vocab_size=padded, state=state)
        modules = [layer.build() for layer in layers[stage.start : stage.stop]]
        numbers = [p.numel() for module in modules for p in module.parameters()]
        tied_twice = args.tokenizer.padded_vocab_size * 32 // tp if pp == 1 and layers[-1].tied else 0
        assert sum(numbers) - tied_twice == expected.parameters
        blocks = [
            p.numel() for m, row in zip(modules, stage.layers, strict=True) if row.is_block for p in m.parameters()
        ]
        assert sum(blocks) == expected.blocks
        assert sum(p.numel() for module in modules for p in module.parameters() if p.spec.experts) == expected.experts


@pytest.mark.parametrize("style", STYLES)
def test_the_stages_share_out_the_whole_model(tmp_path: Path, style: str) -> None:
    from megatron.neox_arguments.formulas import parameter_count

    args = derived(tmp_path, 2, *STYLES[style], "pipe_parallel_size=2")
    table, _ = stage_sizes(args, VOCAB)
    assert sum(stage.parameters or 0 for stage in table) == parameter_count(args.model, VOCAB).total


def memory(args: NeoXArgs, stage: int = 0, blocks: int = 4, experts: int = 0) -> Memory:
    return estimate(args, held=Held(1000, experts), stage=stage, blocks=range(blocks), padded_vocab_size=128)


def test_weights_gradients_and_optimizer_in_fp32_and_bf16(tmp_path: Path) -> None:
    full = memory(derived(tmp_path, 2))
    assert (full.weights, full.gradients, full.optimizer) == (4000, 4000, 8000)  # Adam: two moments of 4 bytes
    # bf16 over 2 ranks: ZeRO 1; gradients accumulate in fp32, masters and moments are shared out
    half = memory(derived(tmp_path, 2, "precision=bfloat16"))
    assert (half.weights, half.gradients, half.optimizer) == (2000, 4000, 12000 / 2)
    in_bf16 = ("precision=bfloat16", "data_types.grad_accum_dtype=bf16", BUCKET)  # in DeepSpeed's own optimizer
    assert memory(derived(tmp_path, 2, *in_bf16)).gradients == max(2 * (1000 + 10), (2 + 4) * 500)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, (4000, 4000, 8000)), (1, (4000, 4040, 3000)), (2, (4000, 2040, 3000)), (3, (1000, 2040, 3000))],
)
def test_zero_divides_by_data_ranks(tmp_path: Path, stage: int, expected: tuple[int, ...]) -> None:
    """Its optimizers have masters in fp32 too, and their buckets' elements are four bytes in fp32."""
    found = memory(derived(tmp_path, 4, f"zero_optimization.stage={stage}", BUCKET))
    assert (found.weights, found.gradients, found.optimizer) == expected


EXPERTS = ("moe_num_experts=8", "moe_router_type=topk", "moe_top_k=2", "moe_intermediate_size=24")


@pytest.mark.parametrize(("pp", "tp", "dp", "ep"), [(1, 1, 2, 2), (1, 2, 4, 2), (2, 1, 4, 4), (2, 2, 2, 1)])
def test_experts_per_rank_are_those_of_the_built_model(tmp_path: Path, pp: int, tp: int, dp: int, ep: int) -> None:
    from megatron.model.gpt import gpt_layers
    from megatron.mpu.state import ParallelState

    layout = (f"pipe_parallel_size={pp}", f"model_parallel_size={tp}", f"expert_parallel_size={ep}")
    experts = (*EXPERTS, "moe_layers=[1, 2]", "moe_shared_expert_size=8", "moe_expert_bias=true")
    args = derived(tmp_path, pp * tp * dp, *experts, *layout, "no_weight_tying=true")
    table, held = stage_sizes(args, VOCAB)
    for stage, expected in zip(table, held, strict=True):
        rank = topology(args).rank(pipe=stage.stage, data=dp - 1, model=tp - 1)
        state = ParallelState(topology(args), rank, "cpu", ep_size=ep)
        padded = args.tokenizer.padded_vocab_size
        layers = gpt_layers(args.model, vocab_size=VOCAB, padded_vocab_size=padded, state=state)
        built = [p for layer in layers[stage.start : stage.stop] for p in layer.build().parameters()]
        assert sum(p.numel() for p in built) == expected.parameters
        assert sum(p.numel() for p in built if p.spec.experts) == expected.experts > 0


def test_masters_of_experts_are_divided_among_the_ranks_that_hold_the_same(tmp_path: Path) -> None:
    keys = (*EXPERTS, "expert_parallel_size=2", "precision=bfloat16")
    found = memory(derived(tmp_path, 8, *keys), experts=600)
    assert (found.weights, found.gradients) == (2000, 4000)
    assert found.optimizer == 12 * (400 / 8 + 600 / 4)
    assert memory(derived(tmp_path, 2, *EXPERTS, "expert_parallel_size=2"), experts=600).optimizer == 8000


def test_a_token_keeps_the_rows_of_its_experts(tmp_path: Path) -> None:
    """Two experts as wide as half the dense layer: its width in all, and each row's input and output."""
    dense = memory(derived(tmp_path, 1, "intermediate_size=48")).activations
    experts = memory(derived(tmp_path, 1, *EXPERTS)).activations
    tokens, rows, width = 2 * 16, 2, 32
    assert experts - dense == 4 * 4 * tokens * rows * 2 * width  # 4 blocks, 4 bytes


def test_an_optimizer_may_keep_less_of_blocks(tmp_path: Path) -> None:
    args = derived(tmp_path, 2, "optimizer.type=Muon", "precision=bfloat16")
    found = estimate(args, held=Held(1000, blocks=700), stage=0, blocks=range(4), padded_vocab_size=128)
    assert found.optimizer == (8 * 700 + 12 * 300) / 2


def test_sgd_without_momentum_has_no_state(tmp_path: Path) -> None:
    found = memory(derived(tmp_path, 1, "optimizer.type=sgd", "optimizer.params.lr=0.1"))
    assert found.optimizer == 0


def test_activations_follow_recomputation_layout_and_micro_batches(tmp_path: Path) -> None:
    plain = memory(derived(tmp_path, 1)).activations
    twice = memory(derived(tmp_path, 1, "train_micro_batch_size_per_gpu=4")).activations
    full = memory(derived(tmp_path, 1, "checkpoint_activations=true")).activations
    selective = memory(derived(tmp_path, 1, "checkpoint_policy=selective")).activations
    assert twice == pytest.approx(2 * plain, rel=0.01)
    assert full < selective < plain
    pipeline = ("pipe_parallel_size=2", "gradient_accumulation_steps=8")
    args = derived(tmp_path, 2, *pipeline)
    # 1F1B: the first of two stages holds two micro-batches, the last one holds one (and the head's chunk of logits)
    head = 2 * 32 * 32 * 4 + 8 * 32 * 128
    first, last = memory(args, blocks=2), memory(args, stage=1, blocks=2)
    assert first.activations == pytest.approx(2 * (last.activations - head))


def test_numbers_for_people() -> None:
    assert [tables.count(n) for n in (12, 9999, 12345, 1.5e9, 2e12, 999_999)] == [
        *("12", "9999", "12.3K", "1.5B", "2T", "1000K")
    ]
    assert [tables.size(n) for n in (10, 1536, 3 * 2**30)] == ["10 B", "1.5 KiB", "3.0 GiB"]
    assert tables.shorten(range(20), 6) == "0, 1, 2, 3, ..., 18, 19"
    assert tables.table(("a", "n"), [("x", 1), ("yy", 100)]) == ["a     n", "x     1", "yy  100"]
