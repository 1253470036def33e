"""The optimizer state in GPT-NeoX's checkpoints, by parameter: what DeepSpeed's optimizers write, joined again.

| optimizer                | file                                               | fp32 masters in                 |
|--------------------------|----------------------------------------------------|---------------------------------|
| ZeRO stage 1 and 2       | `[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt` | single_partition_of_fp32_groups |
| BF16_Optimizer (stage 0) | `bf16_zero_pp_rank_D_mp_rank_MM_optim_states.pt`   | single_partition_of_fp32_groups |
| FP16_Optimizer (stage 0) | `mp_rank_MM_model_states.pt`, entry `optimizer`    | fp32_groups_flat                |
| none (fp32, stage 0)     | the same                                           | the weights themselves          |

The moments are in `base_optimizer_state`, `optimizer_state_dict` or (last row) the entry itself, as torch keeps them.
D is the data-parallel rank, MM counts over pipe x model. All but the last keep each parameter group as one flat vector:
its parameters one after the other, then padding, cut into as many equal parts as there are data ranks. Each part has
the vector and moments of its length. The order of the parameters is in the state file (`param_shapes`), else in the
names of the parts (`param_slice_mappings`), else it is the model's: GPT-NeoX makes a group of what decays and one of
biases and norms, or a single one without weight decay.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.foreign import load_foreign
from megatron.checkpoint.neox_folder import FRESH_MOMENTS, NeoXFiles
from megatron.checkpoint.neox_names import decays
from megatron.checkpoint.plain import StandIn
from megatron.errors import UserError

Place = tuple[int, str]
"""A parameter: number of its layer, its name there as it is stored."""
_PREFIX = re.compile(r"^(?:module\.)?(?:sequential\.)?(?:tied_modules\.embed\.|(\d+)\.)(.+)$")
_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_WEIGHT = "weight"


@dataclass(frozen=True)
class _Slot:
    """Where a parameter is: its group, its number in the group, where it begins in the group's flat vector."""

    group: int
    number: int
    start: int
    shape: tuple[int, ...]


class NeoXOptimizer:
    """The optimizer state of one checkpoint folder.

    Args:
        files: the folder's files.
        parameters: `parameters(tp_rank)` gives {place: shape} of all stored parameters, in the model's order.

    Raises `UserError` when files are missing, or are in a form that is not read. Files are opened when they are needed.
    """

    def __init__(self, files: NeoXFiles, parameters: Callable[[int], dict[Place, tuple[int, ...]]]) -> None:
        self._files, self._folder, self._parameters = files, files.folder, parameters
        self._opened: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._slots: dict[int, dict[Place, tuple[int, _Slot]]] = {}  # by tensor-parallel rank: (model rank, slot)
        written = self._open(layout.state_file(0)).get("dp_world_size")
        self._parts = files.check_optimizer(written if isinstance(written, int) else None)

    def read(self, place: Place, tp_rank: int) -> dict[str, Tensor]:
        """Moments of one rank's shard, and its fp32 master as `weight` where there is one.

        They are views of the mapped files, except where several parts hold the parameter: not to be written to.
        """
        if tp_rank not in self._slots:
            self._slots[tp_rank] = dict(self._find_slots(tp_rank))
        if place not in self._slots[tp_rank]:
            raise UserError(
                f"{self._folder} has no optimizer state for {place[0]}.{place[1]} of tensor-parallel rank {tp_rank}. "
                f"{FRESH_MOMENTS}"
            )
        model_rank, slot = self._slots[tp_rank][place]
        first = self._part(model_rank, 0)
        return self._of_flat_group(model_rank, slot) if first.masters else self._of_parameter(first, slot)

    def scalars(self) -> dict[str, Any]:
        """Update count and loss scale, as `Engine.load_scalars` takes them."""
        part = self._part(0, 0)
        counts = [state["step"] for state in part.states.values() if "step" in state]
        counts += [group["step"] for group in part.groups if "step" in group]
        count = next(iter(counts), part.content.get("base_optimizer_state_step"))
        if count is None and any("exp_avg" in state for state in part.states.values()):
            raise UserError(f"{part.path} does not say how many updates its optimizer made. {FRESH_MOMENTS}")
        scaler = part.content.get("loss_scaler")
        scale = scaler.state if isinstance(scaler, StandIn) else part.content
        return {
            "optimizer_steps": float(count or 0),
            "loss_scaler": {key: scale[key] for key in _SCALER if key in scale},
        }

    def _of_flat_group(self, model_rank: int, slot: _Slot) -> dict[str, Tensor]:
        """A parameter's share of its group's flat vectors, from the parts that hold it."""
        found: dict[str, list[Tensor]] = {}
        # Every part but the last holds as much as the first; the last may come without its padding.
        size = self._part(model_rank, 0).masters[slot.group].numel()
        position, end = slot.start, slot.start + prod(slot.shape)
        while position < end:
            rank = position // size if size else 0
            part = self._part(model_rank, rank)
            length = min(end, (rank + 1) * size) - position
            for key, vector in part.vectors(slot.group):
                if position - rank * size + length > vector.numel():
                    raise UserError(
                        f"{part.path}: {key} of parameter group {slot.group} has {vector.numel()} numbers, too few for "
                        "the parameters that the checkpoint lists: it is damaged, or of another checkpoint"
                    )
                found.setdefault(key, []).append(vector.narrow(0, position - rank * size, length))
            position += length
        joined = {key: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for key, pieces in found.items()}
        if uneven := [key for key, value in joined.items() if value.numel() != prod(slot.shape)]:
            raise UserError(f"{part.path}: parameter group {slot.group} has no {uneven[0]}, other parts of it have")
        return {key: value.view(slot.shape) for key, value in joined.items()}

    def _of_parameter(self, part: _Part, slot: _Slot) -> dict[str, Tensor]:
        """A parameter's own tensors."""
        state = part.states.get(part.groups[slot.group]["params"][slot.number], {})
        found = {key: value for key, value in state.items() if isinstance(value, Tensor) and key != "step"}
        for key, value in found.items():
            if tuple(value.shape) != slot.shape:
                raise UserError(
                    f"{part.path}: {key} of parameter {slot.number} of group {slot.group} is {list(value.shape)}, this "
                    f"model has {list(slot.shape)} there: the optimizer's parameters are in another order than the "
                    f"model's. {FRESH_MOMENTS}"
                )
        return found

    def _find_slots(self, tp_rank: int) -> Iterator[tuple[Place, tuple[int, _Slot]]]:
        left = list(self._parameters(tp_rank).items())
        shapes = dict(left)
        for model_rank in range(tp_rank, self._files.model_ranks, self._files.tp_size):
            for number, group in enumerate(self._groups(model_rank, left)):
                start = 0
                for i, place in enumerate(group):
                    if place not in shapes:
                        raise UserError(
                            f"{self._part(model_rank, 0).path} has optimizer state for {place[0]}.{place[1]}, which no "
                            "file of weights holds"
                        )
                    yield place, (model_rank, _Slot(number, i, start, shapes[place]))
                    start += prod(shapes[place])
                self._check_size(model_rank, number, start, len(group))

    def _check_size(self, model_rank: int, group: int, numbers: int, parameters: int) -> None:
        """The parameters found are those that a group has, as far as its size tells."""
        part = self._part(model_rank, 0)
        if part.masters:
            size, parts = part.masters[group].numel(), max(1, self._parts)
            has = numbers if size == numbers else size * parts
            fits = numbers <= has <= numbers + max(64, 4 * parts)  # padding: 2 per data rank
        else:
            has, numbers = len(part.groups[group]["params"]), parameters
            fits = has == numbers
        if not fits:
            raise UserError(
                f"{part.path}: parameter group {group} has {has} {'numbers' if part.masters else 'parameters'} in all "
                f"parts, the parameters that it should hold have {numbers}: the file is of another checkpoint, or its "
                f"optimizer is not one of GPT-NeoX's. {FRESH_MOMENTS}"
            )

    def _groups(self, model_rank: int, left: list[tuple[Place, tuple[int, ...]]]) -> list[list[Place]]:
        """The parameters of one model rank by group, in the order of the optimizer.

        `left`: of the model's parameters those that no earlier stage took; what this one takes is removed.
        """
        part = self._part(model_rank, 0)
        shapes = self._open(layout.state_file(model_rank)).get("param_shapes")
        if isinstance(shapes, Mapping):
            shapes = [shapes]  # of DeepSpeed before it listed them by group
        if shapes:
            return [[_place(name, part.path) for name in group] for group in shapes]
        mappings = [self._part(model_rank, rank).content.get("param_slice_mappings") for rank in range(self._parts)]
        if mappings and all(mappings):
            names = [
                dict.fromkeys(name for one in mappings for name in one[group]) for group in range(len(part.groups))
            ]
            return [[_place(name, part.path) for name in group] for group in names]
        taken = self._of_stage(model_rank, left)
        if len(part.groups) == 1:
            return [taken]
        return [[place for place in taken if decays(place[1]) is wanted] for wanted in (True, False)]

    def _of_stage(self, model_rank: int, left: list[tuple[Place, tuple[int, ...]]]) -> list[Place]:
        """The next parameters of the model's order that fill the groups of one stage.

        The last of several stages has the tied embedding in front of its own.
        """
        part = self._part(model_rank, 0)
        if part.masters:
            room, sizes = sum(vector.numel() for vector in part.masters), [prod(shape) for _, shape in left]
        else:
            room, sizes = sum(len(group["params"]) for group in part.groups), [1] * len(left)
        last = model_rank >= self._files.model_ranks - self._files.tp_size
        if last:
            taken, left[:] = [place for place, _ in left], []
            if sum(sizes) < room and model_rank >= self._files.tp_size:
                embedding = next(iter(self._parameters(model_rank % self._files.tp_size)))
                taken = [embedding, *taken]
            return taken
        count = 0
        while count < len(left) and room > 0:
            room -= sizes[count]
            count += 1
        taken, left[:] = [place for place, _ in left[:count]], left[count:]
        return taken

    def _part(self, model_rank: int, data_rank: int) -> _Part:
        if not self._parts:
            name = layout.state_file(model_rank)
            content = self._open(name).get("optimizer")
        else:
            name = self._files.optimizer[data_rank, model_rank]
            content = self._open(name).get("optimizer_state_dict")
        return _Part.of(self._folder / name, content)

    def _open(self, name: str) -> dict[str, Any]:
        """A file's content, mapped; those that neighbouring parameters need stay open."""
        if name not in self._opened:
            self._opened[name] = load_foreign(self._folder / name)
            if len(self._opened) > 4 * self._files.tp_size:
                self._opened.popitem(last=False)
        self._opened.move_to_end(name)
        return self._opened[name]


@dataclass(frozen=True)
class _Part:
    """The optimizer state of one file.

    Attributes:
        masters: the flat fp32 vector of each parameter group (this data rank's part); empty: the weights are it.
        groups: torch's parameter groups; without flat vectors, with the ids of their parameters in `params`.
        states: what the optimizer keeps, by id.
    """

    path: Path
    content: Mapping[str, Any]
    masters: Sequence[Tensor]
    groups: Sequence[Mapping[str, Any]]
    states: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, path: Path, content: Any) -> _Part:
        if not isinstance(content, Mapping) or not content:
            raise UserError(f"{path} holds no optimizer state. {FRESH_MOMENTS}")
        masters = next((content[key] for key in _MASTERS if key in content), ())
        base = content.get("base_optimizer_state", content.get("optimizer_state_dict", content))
        if isinstance(base, Mapping) and "param_groups" in base and "state" in base:
            groups, states = base["param_groups"], base["state"]
        elif isinstance(base, list) and len(base) == len(masters):  # "elastic": each group's state alone
            groups, states = [{"params": [i]} for i in range(len(base))], dict(enumerate(base))
        else:
            version = content.get("ds_version", "an unknown version")
            raise UserError(
                f"{path}: the optimizer state is in a form that is not read (of DeepSpeed {version}; it has "
                f"{', '.join(map(str, list(content)[:8]))}). {FRESH_MOMENTS}"
            )
        if not all(isinstance(vector, Tensor) for vector in masters):
            raise UserError(f"{path}: the fp32 weights of FP16_UnfusedOptimizer are not read. {FRESH_MOMENTS}")
        return cls(path, content, masters, groups, states)

    def vectors(self, group: int) -> Iterator[tuple[str, Tensor]]:
        """The flat vectors of a group: masters as `weight`, and the moments by name."""
        masters = self.masters[group].flatten()
        yield _WEIGHT, masters
        for key, value in self.states.get(self.groups[group]["params"][0], {}).items():
            if isinstance(value, Tensor) and key != "step" and value.numel() >= masters.numel():
                yield key, value.flatten()


def _place(name: str, path: Path) -> Place:
    match = _PREFIX.match(name)
    if match is None:
        raise UserError(f"{path}: {name} is not a parameter of a numbered layer")
    return int(match[1] or 0), match[2]
