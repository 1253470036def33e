"""One declaration per parameter: its name, full shape, how it is split, how it starts.

Initialisation, gradient norms, parameter counts, checkpoints, conversion and Muon all read `parameter.spec`, so none
of them needs to know a layer's internals. "Full" means the logical tensor, without padding and unsplit; "local" means
what one tensor-parallel rank holds in memory, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.mpu.state import ParallelState

# Fills a full logical fp32 CPU tensor in place; draws only from the generator it is given.
InitFunction = Callable[[Tensor, torch.Generator], None]


def zeros(full: Tensor, generator: torch.Generator) -> None:
    """Initial value of biases."""
    full.zero_()


def ones(full: Tensor, generator: torch.Generator) -> None:
    """Initial value of norm weights."""
    full.fill_(1.0)


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """What a parameter is, independent of how many ranks share it.

    * `shape`: full logical shape; a vocabulary dimension is the real vocabulary.
    * `split_dim`: dimension split over tensor-parallel ranks; None = every rank holds all of it.
    * `blocks`: sizes along `split_dim` of parts that are split one by one (q, k, v or up, gate); () = one part.
    * `heads`: of blocks that are projections of attention heads, how many each has (of q, k, v); () = they are not.
    * `padded`: size of `split_dim` in memory, summed over ranks, if it is padded (vocabulary); the rest is zero.
    * `init`: fills the full tensor; `decay`: whether weight decay applies (default: not for vectors).
    * `tied`: canonical name of the parameter whose value this one shares, or None.
    * `sequence_reduced`: replicated, and its gradient is summed over tensor-parallel ranks under sequence parallelism.
    * `kind`: "matrix", "vector" or "embedding" (default from the number of dimensions); Muon and muP ask for it.
    * `experts`: dimension 0 counts the experts of a mixture: it is split over tensor-parallel ranks (`split_dim` 0),
      and each of these parts once more over the ranks of the group "expert". `init` then fills one expert at a time.
    * `expert_blocks`: of experts, sizes along dimension 1 of parts that are matrices of their own (up, gate).
    * `keep_fp32`: stays in fp32 where the model is in bf16 or fp16.
    * `name`: canonical name, NeoX's `"{layer_index}.{name in the layer}"`; set by `bind`.
    """

    shape: tuple[int, ...]
    init: InitFunction
    name: str = ""
    split_dim: int | None = None
    blocks: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    padded: int | None = None
    decay: bool | None = None
    tied: str | None = None
    sequence_reduced: bool = False
    kind: str = ""
    experts: bool = False
    expert_blocks: tuple[int, ...] = ()
    keep_fp32: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "kind", self.kind or ("matrix" if len(self.shape) > 1 else "vector"))
        if self.decay is None:
            object.__setattr__(self, "decay", self.kind != "vector")
        if self.kind not in ("matrix", "vector", "embedding"):
            raise ValueError(f"{self.name}: kind {self.kind!r} is not matrix, vector or embedding")
        if self.experts and (self.split_dim != 0 or self.blocks or self.padded):
            raise ValueError(f"{self.name}: experts are split along dimension 0, whole, without blocks and padding")
        if self.split_dim is None:
            if self.blocks or self.padded:
                raise ValueError(f"{self.name}: blocks and padded need a split_dim")
            return
        size = self.shape[self.split_dim]
        if self.blocks and sum(self.blocks) != size:
            raise ValueError(f"{self.name}: blocks {self.blocks} do not add up to {size}")
        if self.padded is not None and (self.blocks or self.padded < size):
            raise ValueError(f"{self.name}: padded size {self.padded} with size {size}, blocks {self.blocks}")

    @property
    def key(self) -> str:
        """The canonical name under which the value is initialised, saved and counted: that of the tied original."""
        return self.tied or self.name

    def local_blocks(self, tp_size: int) -> list[int]:
        """Sizes along `split_dim` of this parameter's parts on one rank. Raises `UserError` if they don't divide."""
        if self.split_dim is None:
            raise ValueError(f"{self.name} is not split")
        whole = [self.padded] if self.padded is not None else list(self.blocks or (self.shape[self.split_dim],))
        for size in whole:
            if size % tp_size:
                raise UserError(
                    f"{self.name or 'a parameter'} of shape {list(self.shape)}: {size} along dimension "
                    f"{self.split_dim} cannot be split over model_parallel_size={tp_size}; change the model's sizes or "
                    f"model_parallel_size"
                )
        return [size // tp_size for size in whole]

    def local_shape(self, tp_size: int, ep_size: int = 1) -> tuple[int, ...]:
        """Shape in memory on each of `tp_size` ranks, padding included; of experts on each of `tp_size * ep_size`."""
        if self.split_dim is None:
            return self.shape
        local = list(self.shape)
        local[self.split_dim] = sum(self.local_blocks(tp_size))
        if self.experts and ep_size > 1:
            if local[0] % ep_size:
                raise UserError(
                    f"{self.name or 'a parameter'} of shape {list(self.shape)}: {self.shape[0]} experts cannot be split"
                    f" over model_parallel_size={tp_size} x expert_parallel_size={ep_size}; change one of the three"
                )
            local[0] //= ep_size
        return tuple(local)

    def real_size(self, tp_rank: int, tp_size: int) -> int:
        """How many entries along `split_dim` rank `tp_rank` holds that are not padding (they come first)."""
        per_rank = sum(self.local_blocks(tp_size))
        if self.padded is None or self.split_dim is None:
            return per_rank
        return min(max(self.shape[self.split_dim] - tp_rank * per_rank, 0), per_rank)


def shard(full: Tensor, spec: ParamSpec, tp_rank: int, tp_size: int) -> Tensor:
    """The part of `full` (shape `spec.shape`) that rank `tp_rank` of `tp_size` holds; may be a view of `full`."""
    if tuple(full.shape) != spec.shape:
        raise UserError(f"{spec.name}: expected the shape {list(spec.shape)}, got {list(full.shape)}")
    if spec.split_dim is None or (tp_size == 1 and spec.local_shape(1) == spec.shape):
        return full
    dim, sizes = spec.split_dim, spec.local_blocks(tp_size)
    if spec.padded is not None:
        real = spec.real_size(tp_rank, tp_size)
        local = full.new_zeros(spec.local_shape(tp_size))
        local.narrow(dim, 0, real).copy_(full.narrow(dim, min(tp_rank * sizes[0], spec.shape[dim]), real))
        return local
    parts, start = [], 0
    for size in sizes:
        parts.append(full.narrow(dim, start + tp_rank * size, size))
        start += tp_size * size
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(locals_: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """The full tensor from what all tensor-parallel ranks hold, in rank order, without padding: undoes `shard`.

    May be a view of the one part that there is.
    """
    tp_size = len(locals_)
    expected = spec.local_shape(tp_size)
    for local in locals_:
        if tuple(local.shape) != expected:
            raise UserError(f"{spec.name}: expected {tp_size} parts of shape {list(expected)}, got {list(local.shape)}")
    if spec.split_dim is None:
        return locals_[0]
    dim = spec.split_dim
    if tp_size == 1:
        return locals_[0].narrow(dim, 0, spec.shape[dim])
    if spec.padded is not None:
        return torch.cat(list(locals_), dim).narrow(dim, 0, spec.shape[dim])
    split = [local.split(spec.local_blocks(tp_size), dim) for local in locals_]
    return torch.cat([parts[i] for i in range(len(split[0])) for parts in split], dim)


def parameter(spec: ParamSpec, state: ParallelState) -> nn.Parameter:
    """This rank's part of a parameter: zeros, fp32, on `state.device`, with `.spec`; `initialize` gives it its value.

    DeepSpeed counts a parameter on every tensor-parallel rank only if it carries `model_parallel = True`.
    """
    shape = spec.local_shape(state.tp_size, state.ep_size)
    local = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=state.device))
    local.spec = spec  # type: ignore[attr-defined]
    local.model_parallel = spec.split_dim is not None and state.tp_size > 1  # type: ignore[attr-defined]
    return local


def spec_of(local: nn.Parameter) -> ParamSpec:
    """The declaration of a parameter, for typed code; the same as `local.spec`."""
    spec = getattr(local, "spec", None)
    if not isinstance(spec, ParamSpec):
        raise ValueError(f"a parameter of shape {list(local.shape)} was not made by mpu.sharding.parameter")
    return spec


def block_of(local: nn.Parameter) -> int:
    """The number, from 0, of the block that a parameter belongs to."""
    return int(spec_of(local).name.partition(".")[0]) - 2  # GPT-NeoX's number of the layer, whose blocks start at 2


def bind(module: nn.Module, layer_index: int) -> None:
    """Give every parameter of a layer its canonical name `"{layer_index}.{name in the module}"`.

    A parameter that an earlier layer holds too keeps its first name, and must be declared tied.
    """
    for local_name, local in module.named_parameters():
        spec, name = spec_of(local), f"{layer_index}.{local_name}"
        if spec.name and spec.name != name:
            if spec.tied is None:
                raise ValueError(f"parameter {spec.name} is also {name}, but is not declared tied")
            continue
        local.spec = replace(spec, name=name)  # type: ignore[attr-defined]


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of every parameter of bound layers; a tied copy goes by its original's name."""
    seen: set[str] = set()
    for local_name, local in module.named_parameters():
        key = spec_of(local).key
        if not key:
            raise ValueError(f"parameter {local_name} has no canonical name yet: call mpu.sharding.bind on its layer")
        if key in seen:
            raise ValueError(f"two parameters of this module are called {key}")
        seen.add(key)
        yield key, local
