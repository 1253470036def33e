"""The configuration of a run on a Hugging Face model that a key like `load` names: what its files say, where the user
does not.

The key `hf_model` keeps it with the run's checkpoints, so that later starts need the model's files no more.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import layout
from megatron.checkpoint.compare import ARCHITECTURE
from megatron.checkpoint.find import Checkpoint
from megatron.convert.families import FAMILIES
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.convert.published.reader import HuggingFaceReader, keys_of, model_of
from megatron.convert.ready_config import LONGEST, tokenizer_keys
from megatron.convert.settings import MODEL_TOKENS, TOKENIZER_KEYS
from megatron.errors import DeepyError, UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.groups import GROUPS
from megatron.neox_arguments.keys import group_keys
from megatron.tokenizer.model_tokens import inherit

KEY = "hf_model"
TOKENIZER = "tokenizer"
_OF_A_MODEL = {*group_keys(GROUPS["model"], "model"), *group_keys(GROUPS["tokenizer"], "tokenizer")}
_OF_A_MODEL |= {"precision", "train_impl"}
_PRECISION = {torch.float16: "fp16", torch.bfloat16: "bfloat16"}


def read_published(checkpoint: Checkpoint) -> dict[str, Any]:
    """The key `hf_model` of a Hugging Face model: `from`, what names it; `architecture`, the class of transformers;
    `keys`, what it says of a run.

    Opens the headers of its files. Raises `UserError` when one is missing or damaged, or the model is not known here.
    """
    folder = HuggingFaceFolder(checkpoint.path)
    reader = HuggingFaceReader(folder)
    _, keys = keys_of(folder)
    kinds = {stored.dtype for stored in folder.tensors.values()}
    found = {
        **keys,
        "seq_length": min(keys["max_position_embeddings"], LONGEST),
        "precision": _PRECISION.get(kinds.pop(), "fp32") if len(kinds) == 1 else "fp32",
        **tokenizer_keys(folder.path, str(folder.path)),
        MODEL_TOKENS: folder.model_tokens(),
    }
    return {"from": checkpoint.published, "architecture": FAMILIES[reader.family].architecture, "keys": found}


def described(checkpoint: Checkpoint) -> Checkpoint:
    """A Hugging Face model with a configuration and shapes in its manifest, as a checkpoint of Deepy has them; a
    checkpoint as it is."""
    if checkpoint.published is None:
        return checkpoint
    keys = read_published(checkpoint)["keys"]
    run = {"train_micro_batch_size_per_gpu": 1, **keys}
    config = derive(NeoXArgs.from_saved(run, str(checkpoint.path)), Facts(vocab_size=keys["vocab_size"])).to_dict()
    reader = HuggingFaceReader(HuggingFaceFolder(checkpoint.path))
    return replace(checkpoint, manifest=replace(reader.manifest, config=config))


def keep_tokenizer(save: str | Path, checkpoint: Checkpoint, own: str | None = None) -> None:
    """Copy the tokenizer of a Hugging Face model to `<save>/tokenizer`, where later starts and exports look for it.

    Another one that is there, of a start with another model, is put aside; but not `own`, the config's. Raises
    `OSError`.
    """
    place = Path(save) / TOKENIZER
    if own is not None and place.exists() and place.resolve() in (Path(own).resolve(), *Path(own).resolve().parents):
        return
    draft = place.with_name(f".{TOKENIZER}.new")
    shutil.rmtree(draft, ignore_errors=True)
    HuggingFaceFolder(checkpoint.path).copy_tokenizer(draft)
    if draft.is_dir() and not (place.exists() and _content(place) == _content(draft)):
        if place.exists():
            number = next(n for n in count(1) if not place.with_name(f"{TOKENIZER}.{n}").exists())
            place.rename(place.with_name(f"{TOKENIZER}.{number}"))
        draft.rename(place)
    shutil.rmtree(draft, ignore_errors=True)


def _content(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def with_kept_tokenizer(args: NeoXArgs) -> NeoXArgs:
    """The config of a run whose tokenizer `keep_tokenizer` has copied, if it is that of the model."""
    place, own = Path(str(args.checkpoint.save)) / TOKENIZER, (args.checkpoint.hf_model or {}).get("keys", {})
    if args.checkpoint.save is None or own.get("vocab_file") != args.tokenizer.vocab_file or not place.is_dir():
        return args
    return args.replace("the checkpoint", **tokenizer_keys(place, str(place)))


def with_model(args: NeoXArgs, checkpoint: Checkpoint, *, grows: bool = False) -> NeoXArgs:
    """A config that is not derived yet, with what the model says that a run starts from: a Hugging Face model, or a
    checkpoint of a run that began with one.

    `grows`: blocks and vocabulary may be others (`init_from`). Raises `UserError` naming every key of the config that
    describes another model.
    """
    origin: dict[str, Any] | None
    if checkpoint.published is not None:
        origin, where = read_published(checkpoint), str(checkpoint.path / "config.json")
    else:
        origin, where = _kept(checkpoint), f"{KEY} in {checkpoint.path}"
    if not origin:
        return args
    keys = origin["keys"]
    free = grows or checkpoint.published is None or args.checkpoint.allow_config_changes
    if wrong := [] if free else _contradictions(args, keys):
        raise UserError(
            f"{origin['from']} is another model than the config describes: {'; '.join(wrong)}. Leave these keys out: "
            "they come with the model"
        )
    typed = NeoXArgs.from_saved(keys, where)
    changes = {name: typed.get(name) for name in keys if name != MODEL_TOKENS and not _given(args, name)}
    changes[MODEL_TOKENS] = inherit(args.tokenizer.model_tokens, keys.get(MODEL_TOKENS))
    return args.replace(where, **changes).replace(where, **{KEY: origin})


def _kept(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What a checkpoint's run began with; its tokenizer where that is now, which may be beside the checkpoint.

    The checkpoint may be somebody else's, so only what a model says of itself is taken from it.
    """
    config = checkpoint.manifest.config
    origin = config.get(KEY)
    if not origin:
        return None
    tokenizer = {name: config.get(name) for name in TOKENIZER_KEYS}
    tokenizer["vocab_file"] = layout.find_vocab_file(tokenizer["vocab_file"], checkpoint.path)
    kept = {name: value for name, value in tokenizer.items() if value is not None}
    keys = {name: value for name, value in origin["keys"].items() if name in _OF_A_MODEL}
    return {**origin, "keys": {**keys, **kept, MODEL_TOKENS: config.get(MODEL_TOKENS)}}


def _given(args: NeoXArgs, name: str) -> bool:
    """Whether the user has said it, perhaps in another way."""
    if name == "precision":
        return any(args.is_set(key) for key in ("precision", "fp16", "bf16"))
    if name in TOKENIZER_KEYS:
        return any(args.is_set(key) for key in TOKENIZER_KEYS)
    return args.is_set(name)


def _contradictions(args: NeoXArgs, keys: Mapping[str, Any]) -> list[str]:
    """What the user's keys, each alone, change in the network that `keys` describe."""
    names = [*group_keys(GROUPS["model"], "model"), "vocab_size"]
    given = {name: value for name, value in args.to_dict().items() if name in names and args.is_set(name)}
    there = model_of(dict(keys))
    wrong = []
    for name, value in given.items():
        differs = _differs(name, value, keys, there)
        if differs is not None:
            wrong.append(f"{args.source(name)}: {name}: {value!r}, the model has {differs!r}")
    return wrong


def _differs(name: str, value: Any, keys: Mapping[str, Any], there: Any) -> Any:
    """What the model has in the place of `value`, where that is another network; None where it is the same."""
    if name == "vocab_size":
        return None if value == keys["vocab_size"] else keys["vocab_size"]
    own = keys.get(name, getattr(there, name))
    try:
        here = model_of({**keys, name: value})
    except DeepyError:
        return own if name in keys or name in ARCHITECTURE else None
    changed = [key for key in ARCHITECTURE if _plain(getattr(here, key)) != _plain(getattr(there, key))]
    return own if changed else None


def _plain(value: Any) -> Any:
    """A list of mixers with one name for full attention, however it is computed."""
    return tuple("global" if one == "flash" else one for one in value) if isinstance(value, tuple) else value
