"""A memory estimate per rank: weights, gradients, optimizer and activations.

Per parameter held by the rank (tensor-parallel shard of its stage), for dp data ranks, with w bytes of a weight (2 in
bf16 and fp16, else 4) and a bytes of a gradient (4, but 2 in fp16 at ZeRO 1), at the stage of ZeRO that runs
(`effective_zero_stage`; the native engine's is 1):

| part      | bytes                                                                                             |
|-----------|---------------------------------------------------------------------------------------------------|
| weights   | w, in ZeRO 3 w / dp                                                                               |
| moments   | 4 per moment, `moments` of the optimizer's row (Adam 2, Lion 1), and `block_moments` of blocks,    |
|           | whose parameters are nearly all matrices (Muon 1); from ZeRO 1 on divided by dp                   |
| masters   | 4 / dp from ZeRO 1 on; none in fp32 with the native engine, whose weights they are                |
| average   | 4 / dp with ema_decay, or while a schedule-free optimizer's is evaluated or saved; as much for the   |
|           | reference of kl_div_beta                                                                           |
| gradients | without ZeRO, in bf16 at ZeRO 1, and with the native engine: 4; in fixed point: 8 + 4 / dp        |
|           | else ZeRO 1: a and one bucket (two with overlap_comm), or (a + 4) / dp if that is more            |
|           | ZeRO 2: (a + w) / dp and one bucket (two with overlap_comm)                                       |
|           | ZeRO 3: 8 / dp and one bucket                                                                     |

A bucket of DeepSpeed's has reduce_bucket_size elements (5e8 by default) of a bytes in ZeRO 1, w in ZeRO 2, 4 in ZeRO 3.
Of experts, parameters are what the rank holds of them under tensor and expert parallelism, and dp is replaced by
dp / ep, the number of ranks that hold the same.

What is frozen (lora_r, parameter_groups) counts as weights alone, and so do a teacher (distill_teacher) and a
reward_model, their experts as if they were not divided.

Activations, per token of a micro-batch and block, in elements: the inputs and outputs of the norms (4h, or 3h with one
shared norm; divided by tp under sequence parallel), and, always divided by tp, queries, keys and values before and
after rotation, the attention's output, and the feed-forward's rows before and after the activation; of a mixture of
experts moe_top_k times those of one expert with its inputs and outputs, as if the load was balanced; of Mamba and RWKV
as in `_mamba` and `_rwkv`. `full`
recomputation keeps the input of each chunk and the whole of one chunk, `selective` keeps results of matrix products.
Stage s of p holds min(accumulation, p - s) micro-batches at once (1F1B). With distill, rmu, and kl_impl: full the last
stage has 4 bytes for each number that another model says of the tokens of all micro-batches of a step: v of a token,
or 2 distill_top_k, or with ga_loss: rmu a hidden state in the model's type, of both batches; and as much once more
before the forward pass, while they are put together.

Not counted: the framework itself (about 0.5 GB per process), the gradient of one parameter on its way into its sum,
allocator fragmentation, and that offload_optimizer moves optimizer state into the host's memory. Expect
the real peak within some 30 % above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megatron.checkpoint.find import open_checkpoint
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.block_sizes import MAMBA, RWKV, is_gated
from megatron.neox_arguments.formulas import loss_chunk
from megatron.neox_arguments.optimizer_params import KIND, optimizer_params
from megatron.neox_arguments.rules_post import has_teacher
from megatron.neox_arguments.rules_rollouts import keeps_reference
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.neox_arguments.schema_train import OptimizerConfig
from megatron.plan.refusals import open_other
from megatron.plan.stages import Held
from megatron.registry import added
from megatron.rows import row, rows
from megatron.training.engine_config import deepspeed_config, effective_zero_stage, owns_reduction


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(args: NeoXArgs, *, held: Held, stage: int, blocks: Sequence[int], padded_vocab_size: int) -> Memory:
    """The memory of a rank of pipeline stage `stage` that holds `held` and the blocks with these numbers (from 0).

    `args` is derived. See the module's text for the formula.
    """
    dp, ep = args.parallel.data_parallel_size, args.parallel.expert_parallel_size
    stage_of_zero, native = effective_zero_stage(args), args.optimizer.engine == "native"
    if native:
        stage_of_zero = 1
    half = args.optimizer.precision != "fp32"
    trained = held.trained or held

    def divided(held: Held) -> Held:
        """What ZeRO leaves of them on each data rank."""
        experts = held.experts / (dp / ep)
        of_blocks = (held.blocks - held.experts) / dp + experts
        return Held((held.parameters - held.experts) / dp + experts, experts, of_blocks)

    parts = divided(trained)
    kept = parts if stage_of_zero else trained
    master = 4 if half or (stage_of_zero and not native) else 0
    averages = args.optimizer.ema_decay is not None or row(KIND, args.optimizer.optimizer_type).get("averages")
    copies = bool(averages) + keeps_reference(args.get)
    return Memory(
        weights=(2 if half else 4) * (divided(held) if stage_of_zero == 3 else held).parameters,
        gradients=_gradients(args, stage_of_zero, trained.parameters, parts.parameters),
        optimizer=(4 * moments(args.optimizer) + master) * (kept.parameters - kept.blocks)
        + (4 * moments(args.optimizer, of_blocks=True) + master) * kept.blocks
        + 4 * parts.parameters * copies,
        activations=_activations(args, stage=stage, blocks=blocks, padded_vocab_size=padded_vocab_size),
    )


def bytes_beside(args: NeoXArgs) -> float:
    """Of the weights of the run's teacher and reward model on each rank. Raises `UserError` without them."""
    found = 0.0
    if has_teacher(args.get) and not args.post.distill_precompute:
        found += _weight_bytes(args, "distill_teacher", args.optimizer.precision)
    if args.post.reward_model is not None:
        found += _weight_bytes(args, "reward_model", None)
    return found


def _weight_bytes(args: NeoXArgs, key: str, precision: str | None) -> float:
    """Of the model that `key` names, its stages taken for equal, in a precision or its own (None)."""
    checkpoint = open_other(args, key)
    tp, stages = args.parallel.model_parallel_size, max(1, args.parallel.pipe_parallel_size)
    entries = [*checkpoint.manifest.parameters.values()]
    if (base := checkpoint.manifest.base) is not None:
        entries += open_checkpoint(base.path).manifest.parameters.values()
    held = sum(prod(one.shape) / (1 if one.split_dim is None else tp) for one in entries)
    return held / stages * (4 if (precision or checkpoint.manifest.config.get("precision")) == "fp32" else 2)


def _gradients(args: NeoXArgs, stage: int, whole: float, parts: float) -> float:
    """Of `whole` parameters, of which the rank keeps the optimizer state of `parts`."""
    if args.training.deterministic == "layout":
        return 8 * whole + 4 * parts  # sums in fixed point, and what the optimizer reads of them
    config = deepspeed_config(args)
    if stage == 0 or args.optimizer.engine == "native" or owns_reduction(config):
        return 4 * whole
    weight = 4 if args.optimizer.precision == "fp32" else 2
    each = 4 if config["data_types"]["grad_accum_dtype"] == "fp32" else 2
    zero = config["zero_optimization"]
    bucket = zero.get("reduce_bucket_size", 5e8) * (2 if stage < 3 and zero.get("overlap_comm") else 1)
    if stage == 1:
        return max(each * (whole + bucket), (each + 4) * parts)
    if stage == 2:
        return (each + weight) * parts + weight * bucket
    return (each + 4) * parts + 4 * bucket


def moments(optimizer: OptimizerConfig, *, of_blocks: bool = False) -> int:
    """Tensors of a parameter's size that the optimizer keeps, of a parameter in a block or of another; 2 for a plugin
    that does not state it."""
    kind, name = KIND, optimizer.optimizer_type
    found = row(kind, name)
    if of_blocks and "block_moments" in found:
        return int(found["block_moments"])
    if "moments" not in found and name not in added(kind):
        place = rows(kind)[name].place
        raise UserError(f"{place}: {kind} {name!r}: register it with moments=, the number of tensors it keeps")
    stated = found.get("moments", 2)
    if isinstance(stated, int):
        return stated
    params = optimizer_params(optimizer.optimizer_type, optimizer.optimizer)
    return sum(count for name, count in stated.items() if name == "always" or params.get(name))


def _activations(args: NeoXArgs, *, stage: int, blocks: Sequence[int], padded_vocab_size: int) -> float:
    model, parallel, training = args.model, args.parallel, args.training
    tp, pp = parallel.model_parallel_size, max(1, parallel.pipe_parallel_size)
    element = 2 if args.optimizer.precision != "fp32" else 4
    tokens = training.train_micro_batch_size_per_gpu * BatchPlan.of(args).tokens_per_sample
    in_flight = min(training.gradient_accumulation_steps, pp - stage)
    costs = [_per_block(args, block) for block in blocks]
    policy = model.checkpoint_policy or ("full" if model.checkpoint_activations else "none")
    if policy == "full":
        every = model.checkpoint_num_layers
        chunks = [costs[first : first + every] for first in range(0, len(costs), every)]
        kept = sum(chunk[0].entry for chunk in chunks) * in_flight
        kept += max(sum(cost.everything for cost in chunk) for chunk in chunks)
    elif policy == "selective":
        kept = sum(cost.products for cost in costs) * in_flight + max(cost.everything for cost in costs)
    else:
        kept = sum(cost.everything for cost in costs) * in_flight
    head = 0.0
    if stage == pp - 1:  # hidden states in and out of the head, and one chunk of logits with its gradient in fp32
        head = (
            2 * tokens * model.hidden_size * element
            + 8 * min(loss_chunk(model.loss_chunk_size, on_gpu=True), tokens) * padded_vocab_size / tp
        )
    told = 0.0
    if stage == pp - 1:
        told = 4 * training.gradient_accumulation_steps * tokens * _told(args, padded_vocab_size)
    return max(kept * tokens * element + head, told) + told


def _told(args: NeoXArgs, vocab_size: int) -> int:
    """Numbers that a batch has of each token by another model's word."""
    if has_teacher(args.get):
        top_k = args.post.distill_top_k
        return 2 * min(top_k, vocab_size) if top_k else vocab_size
    if args.post.ga_loss == "rmu":  # of what is forgotten and retained, in the model's type
        return args.model.hidden_size * (2 if args.optimizer.precision == "fp32" else 1)
    return vocab_size if keeps_reference(args.get) and args.post.kl_impl == "full" else 0


@dataclass(frozen=True)
class _Kept:
    """Elements per token that one block keeps: without recomputation, selective, its input alone."""

    everything: float
    products: float
    entry: float


def _per_block(args: NeoXArgs, block: int) -> _Kept:
    model, tp = args.model, args.parallel.model_parallel_size
    outer = tp if args.parallel.sequence_parallel else 1
    assert model.attention_config is not None  # derived
    if (kind := model.attention_config[block]) in MAMBA:
        return _mamba(model, kind, tp, outer)
    if kind in RWKV:
        return _rwkv(model, kind, tp, outer)
    h, d = model.hidden_size, model.head_dim
    queries, pairs = model.num_attention_heads * d, (model.num_attention_heads + 2 * model.num_kv_heads) * d
    wide, copies = _feed_forward(model, block)
    rotated = queries + model.num_kv_heads * d if row("pos_emb", model.pos_emb).get("rotates") else 0
    # What norms read and give, and what is added: behind a part they read its output besides.
    norms = 3 if model.gpt_j_residual and model.gpt_j_tied else 6 if model.norm_placement == "sandwich" else 4
    everything = norms * h / outer + (pairs + rotated + queries + 2 * wide + 2 * copies * h) / tp
    products = 3 * h / outer + (pairs + queries + wide + copies * h) / tp
    return _Kept(everything, products, h / outer)


def _mamba(model: ModelConfig, kind: str, tp: int, outer: int) -> _Kept:
    """Nine copies of the channels, what they select, and the states at the borders of a scan's blocks (16 tokens) or
    chunks (64)."""
    h, n = model.hidden_size, model.mamba_d_state
    channels = model.mamba_expand * h
    if kind == "mamba":
        selected, states = model.mamba_dt_rank + 2 * n, n * channels / 16
    else:
        selected, states = 6 * model.mamba_n_groups * n + 3 * channels // model.mamba_head_dim, n * channels / 64
    everything = 3 * h / outer + (9 * channels + selected + states) / tp
    return _Kept(everything, 3 * h / outer + (4 * channels + selected) / tp, h / outer)


def _rwkv(model: ModelConfig, kind: str, tp: int, outer: int) -> _Kept:
    """Norms and what is added; both inputs, the tokens before and five mixtures of them, whole on every rank; keys,
    values and receptance before and after, and the states at the borders of chunks (64); relu, square and product."""
    h, a, f = model.hidden_size, model.dim_att, model.ffn_dim
    assert a is not None and f is not None  # derived
    if kind == "rwkv":  # what mixes and fades by token, the gate and the norm of heads, wider states (every 16 tokens)
        assert model.head_size is not None  # derived
        everything = 6 * h / outer + 22 * h + (12 * a + a * model.head_size / 16 + 3 * f + h) / tp
        return _Kept(everything, 3 * h / outer + 6 * h + (6 * a + f + h) / tp, h / outer)
    everything = 6 * h / outer + 11 * h + (6 * a + a / 16 + 3 * f + h) / tp
    return _Kept(everything, 3 * h / outer + (4 * a + f + h) / tp + h, h / outer)


def _feed_forward(model: ModelConfig, block: int) -> tuple[int, int]:
    """(Width before the activation, over all experts that a token uses; rows that a token has among experts)."""
    assert model.layer_mlps is not None  # derived
    gates = 2 if is_gated(model.activation) else 1
    if model.layer_mlps[block] == "moe":
        used = model.moe_top_k * (model.moe_intermediate_size or model.ffn_width) + model.moe_shared_expert_size
        return gates * used, model.moe_top_k
    return gates * model.ffn_width if model.layer_mlps[block] != "none" else 0, 0
