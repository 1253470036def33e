"""The initial value of every parameter, from its declaration and the seed, whatever the layout."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.random import stable_seed
from megatron.mpu.sharding import ParamSpec, named_parameters, shard, spec_of
from megatron.mpu.state import ParallelState

# Elements: a parameter that is drawn faster than it is sent (two milliseconds) is drawn by every rank.
WORTH_SENDING = 2**18
# Parameters that a rank draws at the same time: each is a full one in memory.
AT_A_TIME = 4

T = TypeVar("T")


@torch.no_grad()
def initialize(module: nn.Module, seed: int, state: ParallelState) -> None:
    """Fill every parameter of a bound module with its initial value.

    A value depends on (seed, canonical or tied name, full shape) only, so no layout and no padding changes it. Each
    parameter is drawn whole in fp32 on the CPU by one thread and cut. Experts are drawn one by one, each from (seed,
    name, its number). As many are alive at a time as torch has threads here, at most `AT_A_TIME`.

    Ranks that hold parts or copies of the same parameters draw different ones and send each other the parts: collective
    over the groups "model" and "data" of the state, if it has them. So give it as many layers at once as there are.
    """
    dealt: list[tuple[str, nn.Parameter]] = []
    for key, local in named_parameters(module):
        spec = spec_of(local)
        if spec.experts:
            _draw_experts(local, spec, key, seed, state)
        elif math.prod(spec.shape) < WORTH_SENDING:
            local.copy_(_initial_shard(spec, key, seed, state))
        else:
            dealt.append((key, local))
    _draw_together(dealt, seed, state)


def first_expert(experts: int, state: ParallelState) -> int:
    """Number of the first of the consecutive experts that this rank holds, of `experts` in all.

    Tensor-parallel rank r holds part r of tp; of that part, rank e of the group "expert" holds part e of ep.
    """
    return (state.tp_rank * state.ep_size + state.ep_rank) * (experts // (state.tp_size * state.ep_size))


def _draw_experts(local: Tensor, spec: ParamSpec, key: str, seed: int, state: ParallelState) -> None:
    """Each of the ranks with the same experts draws some of them."""
    first = first_expert(spec.shape[0], state)
    group = state.group("expert_data") if local.numel() >= WORTH_SENDING else None
    ranks, mine = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    bounds = [i * len(local) // ranks for i in range(ranks + 1)]

    def drawn(i: int) -> tuple[int, Tensor]:
        expert = torch.empty(spec.shape[1:], dtype=torch.float32)
        spec.init(expert, torch.Generator("cpu").manual_seed(stable_seed(seed, key, first + i)))
        return i, expert

    for i, expert in _ahead(drawn, range(bounds[mine], bounds[mine + 1])):
        local[i].copy_(expert)
    for source in range(ranks):
        if group is not None and (part := local.detach()[bounds[source] : bounds[source + 1]]).numel():
            dist.broadcast(part, group=group, group_src=source)


def _draw_together(named: Sequence[tuple[str, nn.Parameter]], seed: int, state: ParallelState) -> None:
    """Each rank draws some of the parameters, round by round; between two rounds all send what they have drawn."""
    model, data = state.group("model"), state.group("data")
    width = 1 if model is None else state.tp_size
    ranks = width * (1 if data is None else state.dp_size)
    me = (0 if data is None else state.dp_rank * width) + (0 if model is None else state.tp_rank)
    hands = deal([math.prod(spec_of(local).shape) for _, local in named], ranks)

    def drawn(number: int) -> list[Tensor]:
        return _initial_parts(*named[number], seed, state, everybodys=model is not None)

    mine = _ahead(drawn, hands[me])
    for numbers in zip_longest(*hands):
        parts = [] if numbers[me] is None else [part.to(state.device).contiguous() for part in next(mine)]
        for owner, number in enumerate(numbers):
            if number is None:
                continue
            local, (copy, part) = named[number][1].detach(), divmod(owner, width)
            if owner == me and model is None:
                local.copy_(parts[0])
            if model is not None and copy == me // width:
                dist.scatter(local, parts if owner == me else None, group=model, group_src=part)
            if data is not None:
                dist.broadcast(local, group=data, group_src=copy)


def _ahead(draw: Callable[[int], T], numbers: Iterable[int]) -> Iterator[T]:
    """What `draw` makes of each number, in order, while other threads make the next ones (torch lets go of Python)."""
    threads = min(torch.get_num_threads(), AT_A_TIME)
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[T]] = deque()
        for number in numbers:
            waiting.append(pool.submit(draw, number))
            if len(waiting) == threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the parameters of these sizes that each rank draws: the largest first, to who has least so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        hands[least].append(number)
        loads[least] += sizes[number]
    return hands


def _initial_parts(key: str, local: nn.Parameter, seed: int, state: ParallelState, *, everybodys: bool) -> list[Tensor]:
    """The parts of all tensor-parallel ranks, or of this one alone, where the parameter is."""
    spec = spec_of(local)
    if not everybodys:
        return [_initial_shard(spec, key, seed, state)]
    full = initial_value(spec, key, seed)
    return [shard(full, spec, rank, state.tp_size) for rank in range(state.tp_size)]


def _initial_shard(spec: ParamSpec, key: str, seed: int, state: ParallelState) -> Tensor:
    return shard(initial_value(spec, key, seed), spec, state.tp_rank, state.tp_size)


def initial_value(spec: ParamSpec, key: str, seed: int) -> Tensor:
    """The full parameter called `key`, fp32 on the CPU, that a model of this seed begins with; none of experts."""
    full = torch.empty(spec.shape, dtype=torch.float32)
    spec.init(full, torch.Generator("cpu").manual_seed(stable_seed(seed, key)))
    return full
