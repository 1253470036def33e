"""A checkpoint of any TP x PP → a Hugging Face folder: streamed, checked, published only when it is right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.convert.drafts import check_free, draft_of, publish
from megatron.convert.families import choose_family
from megatron.convert.hf.check import compare
from megatron.convert.hf.safetensors_writer import Planned, write_safetensors
from megatron.convert.hf.streamed import auto_class
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds
from megatron.convert.precision import dtype_of
from megatron.convert.settings import Reference, Settings, open_source
from megatron.convert.tokenizer_files import LEAVE_OUT, open_tokenizer, save_tokenizer
from megatron.errors import UserError
from megatron.log import get_logger, progress
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.tokenizer.model_tokens import BOS, EOS, FIELDS, GENERATION, PAD, ModelTokens, read_generation

logger = get_logger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@dataclass(frozen=True)
class Exported:
    """What `export` made.

    Attributes:
        folder: the Hugging Face folder.
        architecture: its class in transformers.
        largest_difference: of any logit in fp32; None when the check was switched off.
    """

    folder: Path
    architecture: str
    largest_difference: float | None


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    config_files: Sequence[str] = (),
    iteration: int | None = None,
    reference: Reference | None = None,
    averaged: bool = False,
    precision: str = "auto",
    architecture: str | None = None,
    families: Sequence[str] = (),
    tokenizer: bool = True,
    vocab_is_hf: bool = False,
    pad_token_id: int | None = None,
    check: bool = True,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Convert a checkpoint to a folder that `AutoModelForCausalLM` (of a reward model
    `AutoModelForSequenceClassification`) and `AutoTokenizer` open.

    Args:
        checkpoint: a `global_step<N>` folder, or a `save` folder (its latest).
        output: the folder to make.
        config_files: YAML of the run; its tokenizer keys win over the checkpoint's own config, its architecture must
            agree with it.
        iteration: which checkpoint of a `save` folder; None for the latest.
        reference: the published model it should be, with the tokenizer to write; its network must agree too.
        averaged: the moving averages of the weights (`ema_decay`) in their place.
        precision: `auto` (as trained), `fp16`, `bf16` or `fp32`.
        architecture: a name of `FAMILIES` (`neox`, `llama`, ...); None takes the first that can express the model.
        families: the only architectures that will do; () takes all.
        tokenizer: whether to write the tokenizer's files.
        vocab_is_hf: `vocab_file` is a Hugging Face tokenizer folder.
        pad_token_id: for the config; None keeps the model's, else the tokenizer's.
        check: compare logits with our own model and refuse to publish when they differ.
        overwrite: replace an earlier export that is at `output`; anything else there is always refused.

    Raises `UserError` naming what cannot be expressed, does not fit or differs; then no folder is left behind.
    """
    output = Path(output)
    check_free(output, "config.json", overwrite)
    reader, settings = open_source(
        checkpoint, config_files, vocab_is_hf=vocab_is_hf, iteration=iteration, reference=reference
    )
    if averaged:
        reader.use_averages()
    family = choose_family(settings.model, architecture, families)
    table = family.rules(settings.model)
    _check_names(reader, table)
    dtype = dtype_of(precision, reader.dtype(WORD_EMBEDDINGS))
    with draft_of(output, "--output_dir") as draft:
        kept, tokens = _write_tokenizer(reader, settings, draft, tokenizer, vocab_is_hf, pad_token_id)
        _check_ids(tokens, settings, reader, pad_token_id)
        if settings.model.output_head == "reward":
            _check_padding(tokens)
        _write_config(draft, family, settings.model, reader, tokens, dtype)
        kept.pop("transformers_version", None)
        _write_json(draft / GENERATION, {**kept, **tokens.generation})
        plan = _plan(reader, table)
        if check:  # without it nothing here waits for transformers
            _check_plan(draft, reader, table, settings.model)
        write_safetensors(draft, plan, _tensors(reader, table), dtype, max_shard_bytes)
        difference = compare(reader, settings.model, draft, dtype).accept("the exported copy") if check else None
        publish(draft, output)
    return Exported(output, family.class_of(settings.model), difference)


def _check_names(reader: CheckpointReader, table: list[Rule | Constant]) -> None:
    """The table covers exactly what the checkpoint holds."""
    ours = {rule.ours for rule in table if isinstance(rule, Rule)}
    stored = set(reader.names())
    problems = [
        f"{what}: {', '.join(sorted(names)[:8])}"
        for what, names in (("not in the checkpoint", ours - stored), ("without a place in it", stored - ours))
        if names
    ]
    if problems:
        raise UserError(f"{reader.folder} does not fit its config: {'; '.join(problems)}")


def _write_tokenizer(
    reader: CheckpointReader,
    settings: Settings,
    draft: Path,
    wanted: bool,
    vocab_is_hf: bool,
    pad_token_id: int | None,
) -> tuple[dict[str, Any], ModelTokens]:
    """Write its files; what its generation_config.json holds, and the model's ids."""
    if not wanted:
        return {}, ModelTokens.of(None, settings.model_tokens, pad_token_id)
    opened = open_tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file, vocab_is_hf)
    check_tokenizer(reader.checkpoint, opened, way_out=LEAVE_OUT)
    save_tokenizer(opened, draft)
    return read_generation(opened) or {}, ModelTokens.of(opened, settings.model_tokens, pad_token_id)


def _check_ids(tokens: ModelTokens, settings: Settings, reader: CheckpointReader, pad_token_id: int | None) -> None:
    """Ids that were chosen here must be the model's; a published model's own are exported as they are."""
    chosen = {} if settings.model_tokens and "config" in settings.model_tokens else dict(tokens.config)
    if pad_token_id is not None:
        chosen[PAD] = pad_token_id
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    ids = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in chosen.items()}
    too_large = {name: found for name, found in ids.items() if any(i is not None and i >= vocab_size for i in found)}
    if too_large:
        raise UserError(f"special token ids beyond the model's {vocab_size} tokens: {too_large}. Is it its tokenizer?")


def _check_padding(tokens: ModelTokens) -> None:
    """transformers takes the reward at the last token that is not padding, which must be the end of the text."""
    pad, ends = tokens.config.get(PAD), tokens.config.get(EOS)
    if pad is None or pad in (ends if isinstance(ends, (list, tuple)) else [ends]):
        why = "has no padding token" if pad is None else f"has its end of text, {pad}, as padding token too"
        raise UserError(
            f"--pad-token-id: the model {why}: AutoModelForSequenceClassification takes the reward at the last token "
            "that is not padding; give the id of a token that no text ends with"
        )


def _write_config(
    draft: Path, family: Family, model: ModelConfig, reader: CheckpointReader, tokens: ModelTokens, dtype: torch.dtype
) -> None:
    ids = tokens.config
    fields = family.config(
        model, reader.entry(WORD_EMBEDDINGS).shape[0], TokenIds(ids.get(BOS), ids.get(EOS), ids.get(PAD))
    )
    name = str(dtype).removeprefix("torch.")
    config: dict[str, Any] = {
        "architectures": [family.class_of(model)],
        **(ONE_LABEL if model.output_head == "reward" else {}),
        **{field: value for field, value in fields.items() if field not in FIELDS or field in ids},
        "dtype": name,
        "torch_dtype": name,  # for transformers 4
    }
    _write_json(draft / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _plan(reader: CheckpointReader, table: list[Rule | Constant]) -> list[Planned]:
    """Names and shapes of all tensors, in the order of `_tensors`."""
    plan = []
    for rule in table:
        if isinstance(rule, Constant):
            plan.append(Planned(rule.theirs, rule.shape))
        else:
            parts = rule.transform.export(torch.empty(reader.entry(rule.ours).shape, device="meta"))
            plan += [Planned(name, tuple(part.shape)) for name, part in zip(rule.theirs, parts, strict=True)]
    return plan


def _tensors(reader: CheckpointReader, table: list[Rule | Constant]) -> Iterator[Tensor]:
    """The planned tensors; one of our parameters is in memory at a time."""
    for rule in progress(table, what="exporting", unit="parameters"):
        if isinstance(rule, Constant):
            yield torch.full(rule.shape, rule.value)
        else:
            yield from rule.transform.export(reader.weight(rule.ours))


def _check_plan(draft: Path, reader: CheckpointReader, table: list[Rule | Constant], model: ModelConfig) -> None:
    """The planned names and shapes are those of the architecture that config.json describes, built without memory."""
    from transformers import AutoConfig

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(draft, trust_remote_code=False)
        empty = auto_class(model.output_head == "reward").from_config(config, trust_remote_code=False)
    expected = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    if model.ties_head:
        head = empty.get_output_embeddings()
        for name in [f"{name}.weight" for name, module in empty.named_modules() if module is head]:
            del expected[name]  # the embedding under a second name
    running = [rule if isinstance(rule, Constant) else rule.among(expected) for rule in table]
    planned = {p.name: p.shape for p in _plan(reader, running)}
    if wrong := sorted(n for n in expected.keys() | planned.keys() if expected.get(n) != planned.get(n)):
        details = ", ".join(f"{n} (ours {planned.get(n)}, theirs {expected.get(n)})" for n in wrong[:4])
        raise UserError(f"the checkpoint does not fit the architecture its config describes: {details}")
