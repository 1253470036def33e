"""LLaMA and Mistral as their authors publish them: params.json, and consolidated.XX.pth of each model-parallel rank.

    tok_embeddings.weight                    split by columns (LLaMA 1 and 2) or by rows (Llama 3)
    layers.N.attention.{wq,wk,wv}.weight     split by rows; a head's rows are pairs that are rotated together
    layers.N.attention.wo.weight             split by columns
    layers.N.feed_forward.{w1,w3}.weight     gate and up, split by rows; w2 back, split by columns
    layers.N.{attention,ffn}_norm.weight, norm.weight    whole in every file
    output.weight                            split by rows

Ours rotates the first half of a head with the second half, so rows change places. Sources: the public reference code of
LLaMA (github.com/meta-llama/llama) and Mistral (github.com/mistralai/mistral-inference).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint.foreign import load_foreign
from megatron.convert.parts.family import WORD_EMBEDDINGS, Rule
from megatron.convert.parts.tensors import Stored
from megatron.convert.parts.transforms import Split
from megatron.errors import UserError
from megatron.files import refuse_lfs_pointer
from megatron.tokenizer.model_tokens import BOS, EOS

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

PARAMS, TOKENIZER_MODEL = "params.json", "tokenizer.model"
EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
_SAFETENSORS = "consolidated.safetensors"
_BY_ROWS = (".wq.weight", ".wk.weight", ".wv.weight", ".w1.weight", ".w3.weight", HEAD)
_BY_COLUMNS = (".wo.weight", ".w2.weight")
_COMPUTED = ("rope.freqs",)
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def shard_file(rank: int) -> str:
    return f"consolidated.{rank:02d}.pth"


def split_dim(name: str, embedding_dim: int) -> int | None:
    """The dimension along which a tensor is split; None when every file has all of it."""
    if name == EMBEDDING:
        return embedding_dim
    if name.endswith(_BY_ROWS):
        return 0
    return 1 if name.endswith(_BY_COLUMNS) else None


class RawFolder:
    """A folder with params.json and the weights. `tensors` has whole tensors by name; `tensor` reads and joins one.

    `flag`: what gave the folder. Raises `UserError` when a file is missing, damaged or unlike the others.
    """

    def __init__(self, path: Path, flag: str = "--input_dir") -> None:
        self.path = path
        self._flag = flag
        self.params = _read_params(path / PARAMS, flag)
        self._files = _weight_files(path, flag)
        contents = [_shapes(file) for file in self._files]
        for file, content in zip(self._files, contents, strict=True):
            if content.keys() != contents[0].keys():
                raise UserError(f"{flag}: {file} does not hold the same tensors as {self._files[0].name}")
        first = contents[0]
        self._embedding_dim = 0
        if EMBEDDING in first and first[EMBEDDING][0][1] * len(self._files) == self.params.get("dim"):
            self._embedding_dim = 1
        self.tensors = {name: self._whole(name, [c[name] for c in contents]) for name in first}

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in its stored type. Files are closed again, so that only its own pages stay in memory."""
        return self._join(name, torch.clone)

    def _join(self, name: str, take: Callable[[Tensor], Tensor]) -> Tensor:
        """What `take` copies of each file's part, side by side."""
        dim = split_dim(name, self._embedding_dim)
        files = self._files if dim is not None else self._files[:1]
        parts = [_load(file, name, take) for file in files]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim or 0)

    def is_repeated(self, name: str, other: str) -> bool:
        """Whether two tensors are equal. A few rows are compared first."""
        if self.tensors[name].shape != self.tensors[other].shape:
            return False
        first = [self._join(each, lambda part: part[:8].clone())[:8] for each in (name, other)]
        return torch.equal(*first) and torch.equal(self.tensor(name), self.tensor(other))

    def copy_tokenizer(self, target: Path) -> None:
        """The tokenizer of the folder, or of the one above it, into a new folder: sentencepiece's or tiktoken's."""
        if (file := self._tokenizer()) is not None:
            target.mkdir(parents=True, exist_ok=True)
            copy_tokenizer_model(file, target)

    def model_tokens(self) -> dict[str, Any] | None:
        """The key `model_tokens` of a Llama 3, whose published code ends texts at each of these; else None.

        The files are the same for base and chat models, so a base model has ends here that it never writes.
        """
        file = self._tokenizer()
        if file is None or (count := _count_tiktoken(file)) is None:
            return None
        ids = _llama3_description(count)["special_tokens"]
        ends = [ids[token] for token in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
        return {"config": {BOS: ids["<|begin_of_text|>"], EOS: ends}}

    def _tokenizer(self) -> Path | None:
        files = (folder / TOKENIZER_MODEL for folder in (self.path, self.path.parent))
        return next((file for file in files if file.is_file()), None)

    def _whole(self, name: str, parts: list[tuple[tuple[int, ...], torch.dtype]]) -> Stored:
        shape, dtype = parts[0]
        if any(part != parts[0] for part in parts):
            raise UserError(f"{self._flag}: {name} has other shapes in other files of {self.path}")
        dim = split_dim(name, self._embedding_dim)
        if dim is not None:
            shape = tuple(size * len(parts) if d == dim else size for d, size in enumerate(shape))
        return Stored(self._files[0].name, shape, dtype)


def copy_tokenizer_model(file: Path, target: Path) -> None:
    """A tokenizer.model into a folder, under the name that its kind has here: Llama 3's is a table of tiktoken's."""
    if (count := _count_tiktoken(file)) is not None:
        shutil.copyfile(file, target / "tokenizer.tiktoken")
        (target / "tokenizer.tiktoken.json").write_text(json.dumps(_llama3_description(count), indent=1) + "\n")
    else:
        shutil.copyfile(file, target / TOKENIZER_MODEL)


def _count_tiktoken(file: Path) -> int | None:
    """How many tokens a table of tiktoken's has; None for another kind of file. Raises `UserError` for none at all."""
    refuse_lfs_pointer(file)
    with open(file, "rb") as opened:
        if not opened.readline(256).endswith(b" 0\n"):  # "<base64 of a token> <its rank>"
            return None
        return 1 + sum(1 for _ in opened)


def _llama3_description(count: int) -> dict[str, Any]:
    """How Llama 3 splits text, and its 256 special tokens behind the `count` others (its published tokenizer code)."""
    named = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(2))]
    named += ["<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    named += ["<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    named += [f"<|reserved_special_token_{i}|>" for i in range(2, 2 + 256 - len(named))]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    return {"pat_str": pattern, "special_tokens": {token: count + i for i, token in enumerate(named)}}


@dataclass(frozen=True)
class RotatedPairs:
    """Fused QKV [Q | K | V] ↔ wq, wk, wv, in whose heads of Q and K rows 2i and 2i+1 are rotated together."""

    heads: int
    kv_heads: int
    head_dim: int

    def export(self, full: Tensor) -> list[Tensor]:
        q, k, v = full.split(self._sizes)
        return [self._move(q, self.heads, 2), self._move(k, self.kv_heads, 2), v]

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        q, k, v = parts
        half = self.head_dim // 2
        return torch.cat([self._move(q, self.heads, half), self._move(k, self.kv_heads, half), v])

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def _move(self, rows: Tensor, heads: int, first: int) -> Tensor:
        """A head's rows as a table of `first` lines, read column by column."""
        return rows.reshape(heads, first, self.head_dim // first, -1).transpose(1, 2).reshape(rows.shape)


def table(model: ModelConfig) -> list[Rule]:
    """Every tensor of a model, ours and theirs. A tied model has no output.weight here; its files may repeat it."""
    rules = [Rule(WORD_EMBEDDINGS, (EMBEDDING,))]
    qkv = RotatedPairs(model.num_attention_heads, model.num_kv_heads, model.head_dim)
    for block in range(model.num_layers):
        ours, theirs = f"{block + 2}.", f"layers.{block}."
        gated = tuple(f"{theirs}feed_forward.{name}.weight" for name in ("w3", "w1"))
        rules += [
            Rule(f"{ours}input_layernorm.scale", (f"{theirs}attention_norm.weight",)),
            Rule(f"{ours}post_attention_layernorm.scale", (f"{theirs}ffn_norm.weight",)),
            Rule(
                f"{ours}attention.query_key_value.weight",
                tuple(f"{theirs}attention.w{x}.weight" for x in "qkv"),
                qkv,
            ),
            Rule(f"{ours}attention.dense.weight", (f"{theirs}attention.wo.weight",)),
            Rule(f"{ours}mlp.linear1.weight", gated, Split((model.ffn_width, model.ffn_width))),
            Rule(f"{ours}mlp.linear2.weight", (f"{theirs}feed_forward.w2.weight",)),
        ]
    rules.append(Rule(f"{model.num_layers + 3}.norm.scale", ("norm.weight",)))
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", (HEAD,)))
    return rules


def _read_params(path: Path, flag: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{flag}: {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{flag}: {path} holds no parameters")
    return values


def _weight_files(path: Path, flag: str) -> list[Path]:
    if (path / _SAFETENSORS).is_file():
        return [path / _SAFETENSORS]
    found = sorted(path.glob("consolidated.*.pth"))
    if not found:
        raise UserError(f"{flag}: {path} holds no weights ({shard_file(0)}, ... or {_SAFETENSORS})")
    wanted = [path / shard_file(rank) for rank in range(len(found))]
    if missing := [file.name for file in wanted if file not in found]:
        raise UserError(f"{flag}: {path} lacks {', '.join(missing)}: its files are {', '.join(f.name for f in found)}")
    return wanted


def _shapes(file: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    refuse_lfs_pointer(file)
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        if other := sorted({kind for _, kind in found.values()} - _TYPES.keys()):
            raise UserError(f"{file} holds {', '.join(other)} tensors; quantised models are not converted")
        return {name: (shape, _TYPES[kind]) for name, (shape, kind) in found.items()}
    tensors = load_foreign(file)
    odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if odd:
        raise UserError(f"{file} holds {odd[0]}, which is no tensor: not a file of LLaMA's")
    return {n: (tuple(t.shape), t.dtype) for n, t in tensors.items() if not n.endswith(_COMPUTED)}


def _load(file: Path, name: str, take: Callable[[Tensor], Tensor]) -> Tensor:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            return take(opened.get_tensor(name))
    return take(load_foreign(file)[name])
