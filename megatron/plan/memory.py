"""A memory estimate per rank: weights, gradients, optimizer and activations.

Per parameter held by the rank (P of them, tensor-parallel shard of its stage, `w` bytes each: 2 in bf16/fp16, else 4):

| part      | bytes                                                                 | divided by dp from |
|-----------|-----------------------------------------------------------------------|--------------------|
| weights   | w P                                                                   | ZeRO 3             |
| gradients | 4 P, or 2 P with data_types.grad_accum_dtype bf16 or fp16             | ZeRO 2             |
| masters   | 4 P in half precision, else 0                                         | ZeRO 1             |
| moments   | 4 P per moment: Adam 2, Lion 1, SGD 1 with momentum else 0            | ZeRO 1             |

Activations, per token of a micro-batch and block, in elements: the inputs and outputs of the norms (4h, or 3h with one
shared norm; divided by tp under sequence parallel), and, always divided by tp, queries, keys and values before and
after rotation, the attention's output, and the feed-forward's rows before and after the activation. `full`
recomputation keeps the input of each chunk and the whole of one chunk, `selective` keeps results of matrix products.
Stage s of p holds min(accumulation, p - s) micro-batches at once (1F1B).

Not counted: the framework itself (about 0.5 GB per process), communication buckets, allocator fragmentation. Expect
the real peak within some 30 % above.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.formulas import loss_chunk

_MOMENTS = {"sgd": 0, "lion": 1}


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


def estimate(args: NeoXArgs, *, parameters: int, stage: int, blocks: int, padded_vocab_size: int) -> Memory:
    """The memory of a rank of pipeline stage `stage` that holds `parameters` and `blocks` transformer blocks.

    `args` is derived. See the module's text for the formula.
    """
    optimizer, dp = args.optimizer, args.parallel.data_parallel_size
    half = optimizer.precision != "fp32"
    zero = optimizer.zero_stage
    weight_bytes = 2 if half else 4
    gradient_bytes = 4 if (optimizer.data_types or {}).get("grad_accum_dtype", "fp32") == "fp32" else 2
    moments = _MOMENTS.get(optimizer.optimizer_type, 2)
    if optimizer.optimizer_type == "sgd" and optimizer.momentum:
        moments = 1
    state_bytes = 4 * moments + (4 if half else 0)
    return Memory(
        weights=weight_bytes * parameters / (dp if zero >= 3 else 1),
        gradients=gradient_bytes * parameters / (dp if zero >= 2 else 1),
        optimizer=state_bytes * parameters / (dp if zero >= 1 else 1),
        activations=_activations(args, stage=stage, blocks=blocks, padded_vocab_size=padded_vocab_size),
    )


def _activations(args: NeoXArgs, *, stage: int, blocks: int, padded_vocab_size: int) -> float:
    model, parallel, training = args.model, args.parallel, args.training
    tp, pp = parallel.model_parallel_size, max(1, parallel.pipe_parallel_size)
    element = 2 if args.optimizer.precision != "fp32" else 4
    tokens = training.train_micro_batch_size_per_gpu * model.seq_length
    in_flight = min(training.gradient_accumulation_steps, pp - stage)
    everything, products, entry = _per_block(args)
    policy = model.checkpoint_policy or ("full" if model.checkpoint_activations else "none")
    if policy == "full":
        chunk = min(model.checkpoint_num_layers, blocks)
        kept = entry * -(-blocks // chunk) * in_flight + everything * chunk
    elif policy == "selective":
        kept = products * blocks * in_flight + everything
    else:
        kept = everything * blocks * in_flight
    head = 0.0
    if stage == pp - 1:  # hidden states in and out of the head, and one chunk of logits with its gradient in fp32
        head = (
            2 * tokens * model.hidden_size * element
            + 8 * min(loss_chunk(model.loss_chunk_size, on_gpu=True), tokens) * padded_vocab_size / tp
        )
    return kept * tokens * element + head


def _per_block(args: NeoXArgs) -> tuple[float, float, float]:
    """Elements per token that one block keeps: (without recomputation, selective, its input alone)."""
    model, tp = args.model, args.parallel.model_parallel_size
    outer = tp if args.parallel.sequence_parallel else 1
    h, d = model.hidden_size, model.head_dim
    queries, pairs = model.num_attention_heads * d, (model.num_attention_heads + 2 * model.num_kv_heads) * d
    gated = is_gated(model.activation)
    up = 2 * model.ffn_width if gated else model.ffn_width
    after = 2 * model.ffn_width if gated else model.ffn_width
    rotated = queries + model.num_kv_heads * d if model.pos_emb == "rotary" else 0
    norms = 3 if model.gpt_j_residual and model.gpt_j_tied else 4
    everything = norms * h / outer + (pairs + rotated + queries + up + after) / tp
    products = 3 * h / outer + (pairs + queries + up) / tp
    return everything, products, h / outer
