"""Sizes and costs as plain arithmetic: feed-forward widths, parameter counts, FLOPs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.neox_arguments.block_sizes import Size, block_size, mixer_flops, norm_parameters, position_parameters
from megatron.neox_arguments.schema_model import ModelConfig


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def gated_width(width: int, multiple: int) -> int:
    """GPT-NeoX's rule for gated layers: two thirds of `width`, shared by the two halves, rounded up to `multiple`.

    32768 with multiple 256 gives 11008, LLaMA-7B's width.
    """
    return round_up(int(width * 2 / 3) // 2, multiple)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model over the real vocabulary (padding rows do not count)."""

    embedding: int
    """Word and position embeddings at the input."""
    blocks: tuple[Size, ...]
    """Each block, first to last."""
    final_norm: int
    head: int
    """The output matrix when it is not the word embedding."""

    @property
    def layers(self) -> int:
        """All blocks together."""
        return sum(block.total for block in self.blocks)

    @property
    def total(self) -> int:
        return self.embedding + self.layers + self.final_norm + self.head

    @property
    def active(self) -> int:
        """What one token uses: without the experts it is not sent to."""
        return self.total - sum(block.idle for block in self.blocks)

    @property
    def non_embedding(self) -> int:
        """Parameters outside the input embeddings (a tied output matrix is one of those)."""
        return self.layers + self.final_norm + self.head


def parameter_count(model: ModelConfig, vocab_size: int) -> ParameterCount:
    """Count the parameters of a derived model with `vocab_size` (real, unpadded) tokens."""
    h = model.hidden_size
    return ParameterCount(
        embedding=vocab_size * h + position_parameters(model),
        blocks=tuple(block_size(model, layer, vocab_size) for layer in range(model.num_layers)),
        final_norm=norm_parameters(model, h),
        head=0 if model.ties_head else head_size(model, vocab_size),
    )


def head_size(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the output matrix and its bias, tied or not; those of rewards have neither bias nor vocabulary."""
    if model.output_head == "reward":
        return model.hidden_size
    return vocab_size * (model.hidden_size + model.use_bias_in_head)


def loss_chunk(configured: int | None, on_gpu: bool) -> int:
    """Tokens per chunk of the fused output matrix and loss: `loss_chunk_size`, else what was measured best.

    On a CPU 256 to 1024 are equally fast. On a GPU each chunk costs a pass over the fp32 gradient of the output matrix:
    on an H200 a step of a 1.4B model took 4 % less with 4096 than with 512, for 1.6 GB.
    """
    return configured or (4096 if on_gpu else 512)


def flops_per_token(model: ModelConfig, vocab_size: int) -> float:
    """Training FLOPs per token: 6 per parameter in a matrix product plus full attention, 12 n d s per layer (n heads of
    d).

    Full attention means the causal half is counted too, the convention of most published MFU figures; recomputation is
    not counted. The output matrix counts once whether tied or not; embedding look-ups do not count, nor do experts that
    a token is not sent to.
    """
    count = parameter_count(model, vocab_size)
    head = vocab_size * model.hidden_size if model.output_head == "vocabulary" else model.hidden_size
    matrices = sum(block.active for block in count.blocks) + count.final_norm + head
    assert model.attention_config is not None  # derived
    return 6.0 * matrices + sum(mixer_flops(model, kind) for kind in model.attention_config)


def neox_flops_per_token(model: ModelConfig, vocab_size: int, *, recompute: bool | None = None) -> float:
    """GPT-NeoX's own formula per token: 24 c L h^2 (1 + s/6h + V/16Lh), c = 4 with recomputation, else 3.

    It ignores grouped queries, gated and explicit feed-forward widths and sliding windows, and counts recomputation as
    work (`recompute=False` gives the figure it uses for MFU).
    """
    layers, h, s = model.num_layers, model.hidden_size, model.seq_length
    factor = 4 if (model.checkpoint_activations if recompute is None else recompute) else 3
    return 24.0 * factor * layers * h * h * (1 + s / (6 * h) + vocab_size / (16 * layers * h))
