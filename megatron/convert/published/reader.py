"""A Hugging Face folder read as a checkpoint of ours is: full weights by canonical name, one parameter at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.find import Checkpoint, open_checkpoint
from megatron.checkpoint.manifest import Manifest, ParameterEntry
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.families import FAMILIES, read_config
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Rule
from megatron.convert.parts.tensors import OneByOne
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.errors import UserError
from megatron.model.specs import model_specs
from megatron.mpu.sharding import ParamSpec, shard
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.schema_model import ModelConfig


class HuggingFaceReader(CheckpointReader):
    """The weights of a folder as those of our model, `model`, that its config.json describes.

    Raises `UserError` when config.json or the names of the tensors are not those of a family known here.
    """

    def __init__(self, source: HuggingFaceFolder) -> None:
        self._source = source
        self.folder = source.path
        self.checkpoint = Checkpoint(source.path, Manifest.empty(0), published=str(source.path))
        self.family, keys = keys_of(source)
        self.model = model_of(keys)
        self.heads = Heads.of(self.model)
        self.tp_size = 1
        self._rules = rules_of(source, self.family, self.model)
        self.manifest = Manifest(
            step=0,
            consumed=0,
            layout={"tp": 1},
            heads={"num_attention_heads": self.heads.num_attention_heads, "num_kv_heads": self.heads.num_kv_heads},
            optimizer=False,
            parameters={
                name: ParameterEntry(spec.shape, spec.split_dim, spec.blocks, spec.padded, self._type_of(name))
                for name, spec in model_specs(self.model, keys["vocab_size"]).items()
            },
            files={},
            config={},
        )

    def weight(self, name: str) -> Tensor:
        self.entry(name)
        rule = self._rules[name]
        return rule.transform.load(OneByOne(self._source.tensor, rule.theirs))

    def local_weight(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> Tensor:
        local = shard(self.weight(name), spec, tp_rank, tp_size)
        return local.clone() if share is None else local.reshape(-1)[share.start : share.stop]

    def state(self) -> dict[str, Any]:
        """No run saved it: there are no counters, and nothing of callbacks."""
        return {"client": {}}

    def _type_of(self, name: str) -> str:
        return str(self._source.tensors[self._rules[name].theirs[0]].dtype).removeprefix("torch.")


def open_published(checkpoint: Checkpoint) -> HuggingFaceReader:
    """The reader of a Hugging Face model that a key like `load` names, wherever its files are on this machine."""
    if checkpoint.path.is_dir() or checkpoint.published is None:
        return HuggingFaceReader(HuggingFaceFolder(checkpoint.path))
    return HuggingFaceReader(HuggingFaceFolder(open_checkpoint(checkpoint.published).path))


def keys_of(source: HuggingFaceFolder) -> tuple[str, dict[str, Any]]:
    """(family, our flat keys with `vocab_size`) of a folder's config.json."""
    where = source.path / "config.json"
    family, keys = read_config(source.config, str(where))
    size = source.config.get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"{where}: vocab_size is {size!r}, not a number")
    if source.is_reward_model:
        labels = source.config.get("num_labels") or len(source.config.get("id2label") or (0, 1))
        if labels != 1:
            raise UserError(f"{where}: {labels} labels (id2label); a reward model has one number for a text")
        keys = {**keys, "train_impl": "rm"}
    return family, {**keys, "vocab_size": size}


def model_of(keys: dict[str, Any]) -> ModelConfig:
    """The derived architecture of flat keys that name it and `vocab_size`."""
    run = {"seq_length": keys["max_position_embeddings"], "train_micro_batch_size_per_gpu": 1}
    return derive(NeoXArgs.from_saved({**run, **keys}), Facts(vocab_size=keys["vocab_size"])).model


def rules_of(source: HuggingFaceFolder, family: str, model: ModelConfig) -> dict[str, Rule]:
    """The family's table by our names, with the names that this source has. Its tensors are exactly those there."""
    entry = FAMILIES[family]
    if reasons := entry.refusals(model):
        raise UserError(f"{source.path}: {entry.architecture} with {'; '.join(reasons)} cannot be converted")
    there = set(source.tensors)
    rules: dict[str, Rule] = {}
    wanted: set[str] = set()
    for rule in entry.rules(model):
        if isinstance(rule, Constant):
            raise ValueError(f"{family}: a model read from {entry.architecture} leaves {rule.theirs} out")
        rules[rule.ours] = rule.among(there)
        wanted.update(rules[rule.ours].theirs)
    extra = there - wanted
    if model.ties_head:
        extra -= _tied_heads(source, extra, rules[WORD_EMBEDDINGS].theirs[0])
    missing = sorted(wanted - there)
    if missing or extra:
        parts = [
            f"{what}: {', '.join(list(names)[:8])}"
            for what, names in (("missing", missing), ("not known", sorted(extra)))
            if names
        ]
        raise UserError(f"{source.path} does not hold the tensors of its config.json; {'; '.join(parts)}")
    return rules


def _tied_heads(source: HuggingFaceFolder, names: set[str], embedding: str) -> set[str]:
    """The output matrix among `names`, written out although the model is tied. Raises `UserError` when it differs."""
    heads = names & {"lm_head.weight", "embed_out.weight"}
    for name in heads:
        if not torch.equal(source.tensor(name), source.tensor(embedding)):
            raise UserError(
                f"{source.path}: config.json says that the embedding is the output matrix too (tie_word_embeddings), "
                f"but {name} is stored and differs from {embedding}; set tie_word_embeddings: false there to keep both"
            )
    return heads
