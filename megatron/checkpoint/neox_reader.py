"""Read GPT-NeoX's checkpoints like ours: full weights by canonical name, one parameter at a time.

Their files do not list the parameters or how they are divided, so both come from the model's configuration, and every
name and shape in the files is compared with it. Optimizer state is joined like the weights (neox_optimizer.py finds it
by parameter). How the shards of the ranks are joined:

* biases of row-parallel projections (attention.dense, mlp.linear2): in the parallel form (gpt_j_residual) every rank
  adds its copy before the sum over ranks, so the effective bias is the sum of the copies; in the sequential form it is
  added once, and all copies are equal. Each copy gets the gradient of the effective bias, whose moments it has;
* norms and other replicated parameters: those of rank 0;
* vocabulary: one rank after the other, without the padding after the tokenizer's last token;
* the rest like our own files (neox_layout.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.feed_forward_width import advise_width
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.foreign import load_foreign
from megatron.checkpoint.init_from import NEW_REWARD_MODEL
from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.neox_folder import NeoXFiles
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.neox_names import (
    GPT_NEOX_EXPERTS,
    POSITIONS_OF_BLOCKS,
    ROW_BIASES,
    SHARED_POSITIONS,
    TRANSFORMER_ENGINE_MLP,
    is_parameter,
    sources,
)
from megatron.checkpoint.neox_optimizer import NeoXOptimizer, Place
from megatron.checkpoint.reader import WEIGHT, CheckpointReader
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.model.head import REWARD
from megatron.model.specs import model_specs
from megatron.mpu.sharding import ParamSpec
from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.schema_model import ModelConfig

logger = get_logger(__name__)

_EMBEDDING = "word_embeddings.weight"
_OTHER_VOCABULARY = (
    "set tokenizer_type and vocab_file to the tokenizer it was trained with. To train with another vocabulary, let a "
    "run with that tokenizer save a checkpoint first (load, with finetune: true), and start from it with "
    "init_from.vocab=resize"
)
_VOCABULARY = (_EMBEDDING, "final_linear.weight")
_MUST_AGREE = ("num_layers", "hidden_size", "num_attention_heads")


class NeoXReader(CheckpointReader):
    """The weights of a checkpoint of GPT-NeoX as those of the model that `model` describes, and their optimizer state.

    Raises `UserError` when files are missing or do not fit the model.
    """

    def __init__(self, checkpoint: Checkpoint, model: ModelConfig, vocab_size: int, *, new_head: bool = False) -> None:
        self.checkpoint, self.folder = checkpoint, checkpoint.path
        self.heads = Heads.of(model)
        self._files: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._numbered: dict[str, dict[int, dict[str, Any]]] = {}  # of files that hold a whole model
        self._layout = NeoXFiles.of(self.folder)
        self.tp_size = self._layout.tp_size
        self._sum_biases = model.gpt_j_residual and self.tp_size > 1
        attention = enumerate(model.attention_config or (), start=2)
        blocks = [number for number, kind in attention if kind in ("global", "flash", "local")]
        self._relative = blocks if model.pos_emb == "rpe" else []
        client = self._entries(layout.state_file(0))
        written = client.get("args")
        written = written if isinstance(written, Mapping) else {}
        _check_args(self.folder, written, model, vocab_size)
        if new_head and not self._holds(model.num_layers + 4, REWARD):
            model = replace(model, output_head="vocabulary")
        specs = model_specs(model, vocab_size)
        by_layer: dict[int, dict[str, ParamSpec]] = {}
        for name, spec in specs.items():
            number, local = layout.split_name(name)
            by_layer.setdefault(number, {})[local] = spec
        self._layout.check(set(by_layer), _int(written.get("model_parallel_size"), 1))
        self._check_depth(set(by_layer))
        self._sources: dict[str, tuple[str, ...]] = {}
        self._last_parameter: str | None = None
        self._last_moments: dict[int, dict[str, Tensor]] = {}  # by tensor-parallel rank
        parameters: dict[str, ParameterEntry] = {}
        for number, wanted in by_layer.items():
            parameters |= self._read_layer(number, wanted, model)
        if self._sum_biases and TRANSFORMER_ENGINE_MLP in self._layer(2, 0):
            logger.warning(
                f"{self.folder}: GPT-NeoX with Transformer Engine sums twice over tensor-parallel ranks under "
                "gpt_j_residual. A model trained that way gives other outputs here; one that was converted to "
                "these files does not"
            )
        self.manifest = replace(
            checkpoint.manifest,
            step=_int(client.get("iteration"), checkpoint.manifest.step),
            layout={"tp": self.tp_size},
            heads=asdict(self.heads),
            parameters=parameters,
        )

    @cached_property
    def _optimizer(self) -> NeoXOptimizer:
        return NeoXOptimizer(self._layout, self._stored_shapes)

    def optimizer_keys(self, name: str) -> list[str]:
        for rank in range(1, self.tp_size):
            self._moments(name, rank)  # all of them are needed: what is damaged is found before anything is loaded
        return super().optimizer_keys(name)

    def state(self) -> dict[str, Any]:
        client = {"step": self.manifest.step, "consumed": self.manifest.consumed, "callbacks": {}}
        if not self.manifest.optimizer:
            return {"scalars": {}, "client": client}
        skipped = self._entries(layout.state_file(0)).get("skipped_steps")
        return {"scalars": {**self._optimizer.scalars(), "skipped_steps": _int(skipped, 0)}, "client": client}

    def load_file(self, name: str) -> dict[str, Any]:
        return load_foreign(self.folder / name)

    def _read_layer(self, number: int, wanted: dict[str, ParamSpec], model: ModelConfig) -> dict[str, ParameterEntry]:
        """Find the parameters of one layer and check their shapes on all ranks."""
        stored = self._layer(number, 0)
        where = self._layout.name(number, 0)
        found, left_over = sources(stored, wanted)
        if experts := [name for name in left_over if name.startswith(GPT_NEOX_EXPERTS)]:
            raise UserError(
                f"{self.folder}: layer {number} is a mixture of experts of GPT-NeoX ({_some(experts)}): each of its "
                "files has the rows of a rank's experts as one matrix and its routing is another, so these are not read"
            )
        problems = [f"{where} lacks {number}.{name}" for name in wanted if name not in found]
        problems += [f"{where} holds {number}.{name}, which this model does not have" for name in left_over]
        if problems:
            advice = (
                "Check norm, activation, use_bias_in_mlp, use_bias_in_attn_linear, gpt_j_tied, no_weight_tying and the "
                "other keys of the run's config"
            )
            if REWARD in wanted and REWARD not in found:
                advice = f"For {NEW_REWARD_MODEL}"
            raise UserError(f"{self.folder} does not fit this model: {_some(problems)}. {advice}.")
        self._check_readable(number, stored, wanted, model)
        entries = {}
        for local, spec in wanted.items():
            self._sources[spec.name] = found[local]
            first = self._part(spec.name, 0)
            padded = first.shape[0] * self.tp_size if local in _VOCABULARY else None
            if padded is not None and padded < spec.shape[0]:
                raise UserError(
                    f"{self.folder}: {spec.name} has rows for {padded} tokens, the tokenizer has {spec.shape[0]}; "
                    f"{_OTHER_VOCABULARY}"
                )
            dtype = str(first.dtype).removeprefix("torch.")
            entries[spec.name] = ParameterEntry(spec.shape, spec.split_dim, spec.blocks, padded, dtype)
            self._check_shapes(spec, padded, model)
        return entries

    def _check_shapes(self, spec: ParamSpec, padded: int | None, model: ModelConfig) -> None:
        size = [padded if d == spec.split_dim and padded is not None else n for d, n in enumerate(spec.shape)]
        if spec.split_dim is not None:
            if size[spec.split_dim] % self.tp_size:
                raise UserError(
                    f"{self.folder}: {spec.name} of {size} cannot be cut for the {self.tp_size} tensor-parallel ranks "
                    "of these files; the config is of another model"
                )
            size[spec.split_dim] //= self.tp_size
        for rank in range(self.tp_size):
            if (shape := list(self._part(spec.name, rank).shape)) != size:
                advice = advise_width(model, layout.split_name(spec.name)[1], shape, self.tp_size)
                raise UserError(
                    f"{self.folder}: {spec.name} of tensor-parallel rank {rank} has shape {shape}, this model wants "
                    f"{size} there{advice or '. Check hidden_size, num_kv_heads, intermediate_size and activation'}"
                )

    def _check_readable(self, number: int, stored: Iterable[str], wanted: Iterable[str], model: ModelConfig) -> None:
        """Refuse what cannot be joined, or whose row order is unknown."""
        if self.tp_size > 1 and "attention.q_norm.scale" in wanted and not model.qk_norm_per_head:
            raise UserError(
                f"{self.folder}: layer {number} has norms over each rank's share of the queries, so its "
                f"outputs at model_parallel_size {self.tp_size} differ from any other layout's (use_separate_qk_norms)"
            )
        if self.tp_size > 1 and "mixer.x_proj.weight" in wanted:
            raise UserError(
                f"{self.folder}: layer {number} is GPT-NeoX's Mamba, where at model_parallel_size {self.tp_size} "
                "each rank has step sizes, B and C from its own channels only: other layouts cannot compute that"
            )
        if "attention.qkv.weight" in stored and not self.heads.per_head_on_disk:
            raise UserError(
                f"{self.folder}: layer {number} has fewer key/value heads than heads under Transformer Engine's names, "
                "whose rows are in its own order, group by group, which is not read"
            )
        if TRANSFORMER_ENGINE_MLP in stored and is_gated(model.activation):
            raise UserError(
                f"{self.folder}: layer {number} has a gated feed-forward under Transformer Engine's names, whose rows "
                f"are gate and up in an order that the files do not record (activation: {model.activation})"
            )

    def _check_depth(self, layers: set[int]) -> None:
        stored = {number for number, _ in self._layout.layers}
        if not self._layout.layers:
            self._layer(0, 0)
            stored = set(self._numbered[layout.state_file(0)])
        if more := sorted(number for number in stored - layers if number <= 1 or self._parameters_of(number)):
            raise UserError(
                f"{self.folder} holds layers {more}, which do not exist with this num_layers and no_weight_tying"
            )

    def _parameters_of(self, number: int) -> list[str]:
        """Names in a layer that this model does not have, apart from a copy of the embedding."""
        return [name for name in self._layer(number, 0) if name != _EMBEDDING]

    def _holds(self, number: int, local: str) -> bool:
        """Whether a layer, which may not be there, has a parameter of this name."""
        return (not self._layout.layers or (number, 0) in self._layout.layers) and local in self._stored(number, 0)

    def _layer(self, number: int, tp_rank: int) -> dict[str, Any]:
        """{name: tensor} of one layer on one rank; the table of relative positions is the embedding's."""
        stored = self._stored(number, tp_rank)
        if not self._relative:
            return stored
        if number > 0:
            return {name: value for name, value in stored.items() if name != POSITIONS_OF_BLOCKS}
        tables = [self._stored(block, tp_rank).get(POSITIONS_OF_BLOCKS) for block in self._relative]
        if not all(isinstance(table, Tensor) and torch.equal(table, tables[0]) for table in tables):
            raise UserError(
                f"{self.folder}: blocks have different tables of relative positions ({POSITIONS_OF_BLOCKS}): its"
                " pipeline stages trained one each, which is another model at every pipe_parallel_size"
            )
        return {**stored, SHARED_POSITIONS: tables[0]}

    def _stored(self, number: int, tp_rank: int) -> dict[str, Any]:
        """{name: tensor} of one layer on one rank, as the files have it."""
        name = self._layout.name(number, tp_rank)
        if self._layout.layers:
            return self._entries(name)
        if name not in self._numbered:
            self._numbered[name] = _numbers(self._entries(name), self.folder / name)
        return self._numbered[name].get(number, {})

    def _entries(self, name: str) -> dict[str, Any]:
        """A file's content; the last ones stay mapped."""
        if name not in self._files:
            self._files[name] = self.load_file(name)
            if len(self._files) > 2 * self.tp_size + 1:
                self._files.popitem(last=False)
        return self._files[name]

    def _part(self, name: str, tp_rank: int) -> Tensor:
        """One rank's shard as it is stored."""
        number, _ = layout.split_name(name)
        stored = self._layer(number, tp_rank)
        parts = []
        for key in self._sources[name]:
            value = stored.get(key)
            if not isinstance(value, Tensor):
                what = "lacks" if value is None else "has no tensor for"
                raise UserError(f"{self.folder / self._layout.name(number, tp_rank)} {what} {number}.{key}")
            parts.append(value)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _weights(self, name: str, tp_rank: int) -> Tensor:
        if self._sum_biases and name.endswith(ROW_BIASES):
            return torch.stack([self._part(name, rank).float() for rank in range(self.tp_size)]).sum(0)
        return self._part(name, tp_rank)

    def _moments(self, name: str, tp_rank: int) -> dict[str, Tensor]:
        found = self._stored_moments(name, tp_rank)
        if WEIGHT not in found:  # the weights are the masters
            found[WEIGHT] = self._weights(name, tp_rank).float()
        elif self._sum_biases and name.endswith(ROW_BIASES):
            copies = [self._stored_moments(name, rank)[WEIGHT] for rank in range(self.tp_size)]
            found[WEIGHT] = torch.stack(copies).sum(0)
        return found

    def _stored_moments(self, name: str, tp_rank: int) -> dict[str, Tensor]:
        """Of the last parameter they are kept: `local_optimizer` asks for them again with each key and rank."""
        number, _ = layout.split_name(name)
        if name != self._last_parameter:
            self._last_parameter, self._last_moments = name, {}
        if tp_rank not in self._last_moments:
            found = [self._optimizer.read((number, key), tp_rank) for key in self._sources[name]]
            joined = {key: torch.cat([one[key] for one in found]) for key in found[0]} if len(found) > 1 else found[0]
            self._last_moments[tp_rank] = joined
        return dict(self._last_moments[tp_rank])

    def _stored_shapes(self, tp_rank: int) -> dict[Place, tuple[int, ...]]:
        """Of all parameters in the files of one rank, in the order in which their model has them."""
        first = self._stored(0, tp_rank)
        if not self._layout.layers:
            numbers = set(self._numbered[layout.state_file(tp_rank)])
        else:
            numbers = {number for number, _ in self._layout.layers}
        found = {(0, key): tuple(value.shape) for key, value in first.items()}
        for number in sorted(numbers - {0}):
            for key, value in self._stored(number, tp_rank).items():
                if isinstance(value, Tensor) and is_parameter(key) and key != _EMBEDDING:
                    found[number, key] = tuple(value.shape)
        return found


def _numbers(content: Mapping[str, Any], path: Path) -> dict[int, dict[str, Any]]:
    """{layer: {name: tensor}} of a file that holds a whole model."""
    module = content.get("module")
    while isinstance(module, Mapping) and isinstance(module.get("module"), Mapping):
        module = module["module"]
    if not isinstance(module, Mapping) or not module:
        raise UserError(f"{path} has no weights (its entry `module` is empty), and there are no layer files next to it")
    layers: dict[int, dict[str, Any]] = {}
    for key, value in module.items():
        number, _, local = str(key).removeprefix("module.").removeprefix("sequential.").partition(".")
        if not number.isdecimal():
            raise UserError(f"{path}: {key} is not a parameter of a numbered layer")
        layers.setdefault(int(number), {})[local] = value
    return layers


def _check_args(folder: Path, written: Mapping[str, Any], model: ModelConfig, vocab_size: int) -> None:
    """The config keys that GPT-NeoX saved agree with this model. Raises `UserError` naming the key."""
    wrong = [
        f"{key}: {written[key]} in the checkpoint, {getattr(model, key)} in the config"
        for key in _MUST_AGREE
        if key in written and written[key] != getattr(model, key)
    ]
    if wrong:
        raise UserError(f"{folder} does not fit this config: {'; '.join(wrong)}")
    longest = written.get("max_position_embeddings")
    if longest is not None and longest != model.max_position_embeddings:
        logger.warning(
            f"max_position_embeddings: {longest} in {folder}, now {model.max_position_embeddings}: later positions "
            "were never trained"
        )
    padded, multiple = written.get("padded_vocab_size"), written.get("make_vocab_size_divisible_by")
    if isinstance(padded, int) and isinstance(multiple, int):
        fewest = padded - multiple * _int(written.get("model_parallel_size"), 1)
        if not fewest < vocab_size <= padded:
            raise UserError(
                f"{folder} was trained with {fewest + 1} to {padded} tokens, the tokenizer has {vocab_size}; "
                f"{_OTHER_VOCABULARY}"
            )


def _int(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _some(problems: list[str]) -> str:
    return "; ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
