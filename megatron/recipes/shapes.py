"""The network of a family at any size: its small published recipe, made wider and deeper.

Only widths, heads, depth and context change; every other key of the recipe's network (norms, positions, biases) is the
family's and stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.formulas import ParameterCount, flops_per_token, parameter_count, round_up
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.recipes import scaling

FAMILIES = {
    "llama": "llama/60M.yml",
    "neox": "pythia/70M.yml",
    "qwen3": "qwen3/60M.yml",
    "gemma3": "gemma3/60M.yml",
    "olmo3": "olmo3/60M.yml",
    "mamba2": "mamba2/60M.yml",
}
"""The recipe of each family, below configs/."""
UNIT = 32  # feed-forward widths are multiples of it, as LLaMA's 1376 and 11008 are
_DEPTHS = (0.8, 1.25)  # how far a network may be from the depth of its width, to be of the size asked for
_LARGER = 1.3  # than the size asked for: a network that nobody wanted


@dataclass(frozen=True)
class Shape:
    """A network.

    Attributes:
        keys: its config keys, sizes first.
        vocab_size: of the tokenizer.
        count: its parameters.
        flops: of training, per token.
    """

    keys: Mapping[str, Any]
    vocab_size: int
    count: ParameterCount
    flops: float

    @property
    def outside_embeddings(self) -> int:
        """Parameters of the blocks and norms that one token uses: of value embeddings, its own rows."""
        return self.count.active - self.count.embedding - self.count.head


def read_recipe(family: str, configs: Path) -> dict[str, Any]:
    """The network's keys in the recipe of a family. Raises `UserError` for an unknown one."""
    path = configs / FAMILIES[family]
    if not path.is_file():
        raise UserError(f"{path}: no such file; the recipe of --family {family} is a part of Deepy")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    network = {field.name for field in fields(ModelConfig)}
    return {key: value for key, value in values.items() if key in network and not key.startswith("checkpoint")}


def width_for(base: Mapping[str, Any], parameters: float) -> float:
    """About the width of a network of so many parameters: 12 layers h^2, layers as h^(2/3)."""
    layers, width = base["num_layers"], base["hidden_size"]
    return width * (parameters / (12 * layers * width * width)) ** (3 / 8)


def scaled(base: Mapping[str, Any], parameters: int, vocab_size: int) -> Shape:
    """The network of the family of `base` with about so many parameters, its vocabulary among them.

    Depth follows width (`scaling.depth`), give or take a quarter; the nearest to the size is taken.
    Raises `UserError` when all of them are much larger, as with a large vocabulary.
    """
    best: tuple[float, int, int] | None = None
    unit, step = _width_unit(base), _depth_unit(base)
    for width in _widths(unit):
        one, two = (build(base, width, layers, vocab_size).count.total for layers in (step, 2 * step))
        usual = scaling.depth(width, base["num_layers"], base["hidden_size"]) / step
        least, most = (max(1, round(usual * share)) for share in _DEPTHS)
        steps = min(most, max(least, 1 + round((parameters - one) / (two - one))))
        size = one + (steps - 1) * (two - one)
        off = abs(math.log(size / parameters)), width, steps * step
        best = min(best or off, off)
        if one + (least - 1) * (two - one) > parameters:
            break
    assert best is not None
    shape = build(base, best[1], best[2], vocab_size)
    if shape.count.total > _LARGER * parameters:
        raise UserError(
            f"--size: the smallest network of this family with {vocab_size:,} tokens has {shape.count.total:,} "
            "parameters. Ask for a larger one, or for a tokenizer with fewer tokens (--vocab-size)"
        )
    return shape


def _width_unit(base: Mapping[str, Any]) -> int:
    """What a width is a multiple of: that of a query head, or of a group of them where there are several key heads."""
    heads = base.get("num_attention_heads")
    if heads is None:
        return base["mamba_head_dim"]
    keys = base.get("num_kv_heads", heads)
    return base["hidden_size"] // heads * (heads // keys if keys > 1 else 1)


def _depth_unit(base: Mapping[str, Any]) -> int:
    """Layers after which the kinds of layers repeat."""
    (pattern, _), *_ = base["attention_config"]
    return len(pattern)


def _widths(unit: int) -> Iterator[int]:
    """Multiples of `unit`, the larger the coarser, so that the heads of large networks divide among ranks."""
    width = unit
    while True:
        yield width
        width += unit << max(0, (width // unit).bit_length() - 4)


def build(base: Mapping[str, Any], width: int, layers: int, vocab_size: int) -> Shape:
    """The network of a recipe with this width and depth; `base` itself at its own."""
    ratio = width / base["hidden_size"]
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": width}
    if heads := base.get("num_attention_heads"):
        sizes["num_attention_heads"] = round(heads * ratio)
    if keys := base.get("num_kv_heads"):
        sizes["num_kv_heads"] = 1 if keys == 1 else round(keys * ratio)
    if inner := base.get("intermediate_size"):
        sizes["intermediate_size"] = round_up(round(inner * ratio), UNIT)
    sizes["seq_length"] = scaling.context(layers / base["num_layers"])
    if heads:
        sizes["max_position_embeddings"] = sizes["seq_length"]
    if (window := base.get("sliding_window_width")) and sizes["seq_length"] != base["seq_length"]:
        # The same share of a sample. The token itself is not counted.
        sizes["sliding_window_width"] = (window + 1) * sizes["seq_length"] // base["seq_length"] - 1
    keys_of_run = {**base, **sizes}
    run = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "train_iters": 1, "optimizer_type": "Adam"}
    model = NeoXArgs.from_dict({**keys_of_run, **run}, facts=Facts(vocab_size=vocab_size)).model
    return Shape(keys_of_run, vocab_size, parameter_count(model, vocab_size), flops_per_token(model, vocab_size))
