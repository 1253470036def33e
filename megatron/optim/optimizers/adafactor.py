"""Adafactor, whatever ranks have of a matrix.

Legend: m, n rows and columns of a whole matrix; k rows of which this rank has elements, w columns of its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron.mpu.sharding import ParamSpec, shard, spec_of, zeros
from megatron.optim.matrices import WHOLE, Held, WholeMatrices, held_in
from megatron.optim.optimizers import OPTIMIZERS, Groups

ROW, COLUMN, EACH = f"{WHOLE}row_var", f"{WHOLE}col_var", "variance"


@dataclass(frozen=True)
class _Piece:
    """What this rank has of a parameter: some elements of a tensor that the optimizer updates."""

    tensor: Tensor
    held: Held
    group: dict[str, Any]

    def of(self, tensor: Tensor) -> Tensor:
        """Its elements of a tensor like `tensor`: a view, 1-D."""
        return tensor.view(-1)[self.held.offset : self.held.offset + len(self.held.mine)]

    def rows(self, tensor: Tensor) -> tuple[range, Tensor]:
        """The rows of the part in which its elements lie, and these [k, w]; zero where another rank has them."""
        width, mine, flat = self.held.parameter.shape[-1], self.held.mine, self.of(tensor)
        rows = range(mine.start // width, -(-mine.stop // width))
        if len(rows) * width != len(mine):
            padded = flat.new_zeros(len(rows) * width)
            padded[mine.start - rows.start * width :][: len(mine)] = flat
            flat = padded
        return rows, flat.view(-1, width)

    def from_rows(self, rows: range, values: Tensor) -> Tensor:
        """The way back: its elements of [k, w]."""
        mine = self.held.mine
        return values.view(-1)[mine.start - rows.start * values.shape[-1] :][: len(mine)]


class Adafactor(Optimizer):
    """torch.optim.Adafactor (Shazeer & Stern 2018, arXiv 1804.04235; of a matrix of two dimensions the row and column
    means R [m, 1] and C [1, n] of squared gradients are kept, of another parameter each squared gradient):

        R, C <- lerp to the means by t^beta2_decay;  U = g / max(sqrt(R C / max(mean R, eps1)), eps1)
        w -= lr decay w;  w -= max(eps2, RMS w) min(lr, 1 / sqrt(t)) U / max(1, RMS(U) / d)

    All means are those of whole parameters: sums of the parts that ranks have are added up, in two exchanges of a step.

    Attributes:
        kept: what is kept of each parameter: R and C on every rank, or the elements that this rank has, 1-D.
    """

    def __init__(self, groups: Groups, lr: float, params: dict[str, Any]) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.params = params
        self.kept: dict[Parameter, dict[str, Tensor]] = {}
        self._places: dict[Parameter, tuple[Tensor, Tensor]] = {}  # of rows and columns of a part in the whole

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        matrices: WholeMatrices = self.param_groups[0]["matrices"]
        self._divided = any(hasattr(tensor, "held") for tensor in tensors)
        step = self.state[tensors[0]].get("step", 0) + 1
        for tensor in tensors:
            self.state[tensor]["step"] = step
        pieces = {piece.held.parameter: piece for piece in self._pieces()}
        idle = {p for p, piece in pieces.items() if piece.tensor.grad is None}  # on all ranks
        members = [p for p in matrices.parameters if p not in idle]
        share = step ** self.params["beta2_decay"]
        self._update_factors(members, pieces, matrices, share)
        sums = torch.zeros(len(members), 2, device=tensors[0].device)  # squares of U and of weights
        for total, p in zip(sums, members, strict=True):
            if (piece := pieces.get(p)) is None:
                continue
            update = piece.of(piece.tensor.grad)  # type: ignore[arg-type]
            update.copy_(self._normalised(p, piece, share))
            if _counts(spec_of(p), matrices):
                total += torch.stack([update.square().sum(), piece.of(piece.tensor).square().sum()])
        self._add_up(sums, matrices)
        for total, p in zip(sums, members, strict=True):
            if (piece := pieces.get(p)) is not None:
                self._move(piece, (total / math.prod(spec_of(p).shape)).sqrt(), step)

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for tensor in group["params"]:
                for held in held_in(tensor):
                    if held.mine:
                        yield _Piece(tensor, held, group)

    def _add_up(self, sums: Tensor, matrices: WholeMatrices) -> None:
        """Over all ranks that have a part of the same parameters."""
        for name in ("data", "model") if self._divided else ("model",):
            if (group := matrices.state.group(name)) is not None:
                dist.all_reduce(sums, group=group)

    def _update_factors(
        self, members: list[Parameter], pieces: dict[Parameter, _Piece], matrices: WholeMatrices, share: float
    ) -> None:
        """R and C of all matrices."""
        found = {p: spec_of(p).shape for p in members if _is_factored(spec_of(p))}
        sizes = [length + 1 for shape in found.values() for length in shape]  # the last takes what is padding
        sums = torch.zeros(sum(sizes), device=matrices.state.device)
        places = iter(sums.split(sizes))
        for p in found:
            in_rows, in_columns = next(places), next(places)
            if (piece := pieces.get(p)) is None or not _counts(spec_of(p), matrices):
                continue
            rows, gradient = piece.rows(piece.tensor.grad)  # type: ignore[arg-type]
            squares, (row, column) = gradient.square(), self._place(p, matrices)
            in_rows.index_add_(0, row[rows.start : rows.stop], squares.sum(1))
            in_columns.index_add_(0, column, squares.sum(0))
        self._add_up(sums, matrices)
        places = iter(sums.split(sizes))
        for p, (m, n) in found.items():
            in_rows, in_columns = next(places), next(places)
            if p not in self.kept:
                self.kept[p] = {ROW: sums.new_zeros(m, 1), COLUMN: sums.new_zeros(1, n)}
            self.kept[p][ROW].lerp_(in_rows[:m, None] / n, share)
            self.kept[p][COLUMN].lerp_(in_columns[None, :n] / m, share)
        for p in members:
            if p not in self.kept:
                mine = len(pieces[p].held.mine) if p in pieces else 0
                self.kept[p] = {EACH: sums.new_zeros(mine)}

    def _place(self, p: Parameter, matrices: WholeMatrices) -> tuple[Tensor, Tensor]:
        """Where rows and columns of this rank's tensor-parallel part are in the whole; beyond its end: padding."""
        if p not in self._places:
            spec, rank, ranks = spec_of(p), matrices.state.tp_rank, matrices.state.tp_size
            self._places[p] = tuple(  # type: ignore[assignment]
                _places(spec, dim, rank, ranks).to(matrices.state.device) for dim in (0, 1)
            )
        return self._places[p]

    def _normalised(self, p: Parameter, piece: _Piece, share: float) -> Tensor:
        """U of this rank's elements."""
        eps, gradient = self.params["eps1"], piece.of(piece.tensor.grad)  # type: ignore[arg-type]
        if EACH in self.kept[p]:
            squares = self.kept[p][EACH].lerp_(gradient.square(), share)
            return gradient * squares.clamp(min=eps**2).rsqrt_()
        (m, n), (row, column) = spec_of(p).shape, self._place(p, piece.group["matrices"])
        rows, gradient = piece.rows(piece.tensor.grad)  # type: ignore[arg-type]
        by_row = self.kept[p][ROW] / self.kept[p][ROW].mean().clamp_(min=eps)
        squares = (
            by_row[row[rows.start : rows.stop].clamp(max=m - 1)] * self.kept[p][COLUMN][:, column.clamp(max=n - 1)]
        )
        return piece.from_rows(rows, squares.clamp_(min=eps**2).rsqrt_().mul_(gradient))

    def _move(self, piece: _Piece, means: Tensor, step: int) -> None:
        """`means`: RMS of U and of the weights."""
        weights, update, lr = piece.of(piece.tensor), piece.of(piece.tensor.grad), piece.group["lr"]  # type: ignore[arg-type]
        size = means[1].clamp(min=self.params["eps2"]) * min(lr, 1 / math.sqrt(step))
        clip = (means[0] / self.params["d"]).clamp(min=1.0)
        weights.mul_(1 - lr * piece.group["weight_decay"]).sub_(update * (size / clip))


def _is_factored(spec: ParamSpec) -> bool:
    return len(spec.shape) == 2 and min(spec.shape) > 1


def _counts(spec: ParamSpec, matrices: WholeMatrices) -> bool:
    """Whether this tensor-parallel rank's part is one of those that are added up."""
    return spec.split_dim is not None or matrices.state.tp_rank == 0


def _places(spec: ParamSpec, dim: int, rank: int, ranks: int) -> Tensor:
    """Of a rank's entries along a dimension: where they are in the whole; at its end where they are padding."""
    size, numbers = spec.shape[dim], torch.arange(1, spec.shape[dim] + 1)
    if spec.split_dim != dim:
        return numbers - 1
    one = ParamSpec(shape=(size,), init=zeros, split_dim=0, blocks=spec.blocks, padded=spec.padded)
    mine = shard(numbers, one, rank, ranks)
    return torch.where(mine > 0, mine - 1, size)


@OPTIMIZERS.register(
    "adafactor",
    moments=0,
    matrices="all",
    params={"beta2_decay": -0.8, "eps1": 1.1920928955078125e-07, "eps2": 1e-3, "d": 1.0},
)
def adafactor(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Second moments of matrices by the means of their rows and columns; updates as large as the weights."""
    return Adafactor(groups, lr, params)
