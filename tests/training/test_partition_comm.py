"""When data-parallel ranks exchange gradients and weights, how many bytes, and how many gradients live at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from megatron.mpu.product_sums import offer_sum
from megatron.mpu.sharding import named_parameters
from megatron.training import partition_comm, setup, setup_deepspeed
from megatron.training.compile import compile_blocks
from tests.distributed import run_distributed
from tests.model import networks
from tests.product_sums import summing
from tests.training import tiny
from tests.training.tiny import LLAMA, NEOX, Layout, build, step_batch, train

pytestmark = pytest.mark.cpu

ELEMENTS = 3000  # of a bucket: the tiny models have about ten
KEYS = {**NEOX, "precision": "bfloat16"}
ENGINES = [
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=1, engine="native"),
    pytest.param(Layout(pp=2, dp=2, zero=1), marks=pytest.mark.full),
]
Events = list[tuple[str, Any]]


class Recorder:
    """Stands in for the two collectives: they are done, and written down with their waits and bytes."""

    def __init__(self) -> None:
        self.events: Events = []
        self.count = itertools.count()

    def wrap(self, kind: str, collective: Callable[..., dist.Work]) -> Callable[..., Any]:
        def recorded(output: Tensor, source: Tensor, **named: Any) -> Any:
            number = next(self.count)
            whole = max(output, source, key=Tensor.numel)
            self.events.append((kind, (number, whole.numel() * whole.element_size())))
            work = collective(output, source, **named)
            return mock.Mock(wait=lambda: (self.events.append(("wait", number)), work.wait()))

        return recorded

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as patches:
            for kind, name in (("reduce", "_reduce_scatter"), ("gather", "all_gather")):
                wrapped = self.wrap(kind, getattr(partition_comm, name))
                patches.enter_context(mock.patch.object(partition_comm, name, wrapped))
            all_reduce = dist.all_reduce

            def recorded(*given: Any, group: Any = None, **named: Any) -> Any:
                self.events.append(("sum", group))
                return all_reduce(*given, group=group, **named)

            patches.enter_context(mock.patch.object(dist, "all_reduce", recorded))
            yield


def in_buckets(layout: Layout) -> Any:
    given = layout.keys()
    given["zero_optimization"] = {**given["zero_optimization"], "reduce_bucket_size": ELEMENTS}
    return mock.patch.object(Layout, "keys", lambda self: given)


def record(rank: int, world: int, layout: Layout) -> tuple[list[Events], int, list[str], list[str]]:
    """(events of two steps, elements of this rank's model, names of its layers, of the parameters)."""
    recorder = Recorder()
    with in_buckets(layout), recorder.recording():
        engine, args, lr = build(rank, KEYS, layout)
        names = list(engine.params())
        for name, p in engine.params().items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: recorder.events.append(("gradient", name)))
        layers = engine.stage_layers()
        for index, layer in enumerate(layers):
            layer.register_forward_hook(lambda *_, index=index: recorder.events.append(("forward", index)))
        steps = []
        for step in range(2):
            recorder.events.clear()
            engine.train_batch(step_batch(step, args, engine.state), lr(step))
            data = engine.state.group("data")
            steps.append([(kind, what is data if kind == "sum" else what) for kind, what in recorder.events])
        elements = sum(p.numel() for p in engine.params().values())
        return steps, elements, [str(index) for index in range(len(layers))], names


@pytest.mark.parametrize("layout", ENGINES, ids=lambda x: f"{x.engine}-{x.name}")
def test_gradients_leave_during_the_last_backward_pass_and_weights_arrive_during_the_forward_pass(layout):
    for steps, elements, layers, names in run_distributed(record, layout.world, layout, timeout=110):
        for number, events in enumerate(steps):
            kinds = [kind for kind, _ in events]
            gradients = [i for i, kind in enumerate(kinds) if kind == "gradient"]
            reductions = [i for i, kind in enumerate(kinds) if kind == "reduce"]
            gathers = [i for i, kind in enumerate(kinds) if kind == "gather"]
            before = gradients[-len(names) - 1]  # the last gradient of the pass before
            assert len(gradients) % len(names) == 0 and len(gradients) > len(names), "one micro-batch: shows nothing"
            # None before the last pass, most of them before its last gradient.
            assert reductions[0] > before and len(reductions) > 4
            early = [i for i in reductions if i < gradients[-1]]
            assert len(early) >= len(reductions) - 2
            assert gathers[0] > reductions[-1] and len(gathers) == len(reductions)
            # A communicator works in order: what follows the gathers waits for them, and so would the next step.
            sums = [i for i, (kind, of_data_ranks) in enumerate(events) if kind == "sum" and of_data_ranks]
            assert gathers[0] > sums[-1] > reductions[-1]
            # Four bytes of each parameter for the sums, two for the weights, and a little alignment.
            for found, each in ((reductions, 4), (gathers, 2)):
                size = sum(events[i][1][1] for i in found)
                assert each * elements <= size < each * elements * 1.05
            if number == 1:
                waits = [i for i, kind in enumerate(kinds) if kind == "wait" and i < before]
                forwards = [i for i, kind in enumerate(kinds) if kind == "forward"]
                assert waits[0] < forwards[0] < waits[-1] < forwards[len(layers) - 1], "all waited for at once"


def wire_bytes(rank: int, world: int, keys: dict[str, Any], own: bool) -> int:
    """Bytes that a rank sends in the second step, for gradients and weights: a ring, over which an all-reduce goes
    twice."""
    layout, sent = Layout(dp=2, zero=1), []

    def count(times: int, position: int, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*tensors: Any, **named: Any) -> Any:
            x = named["tensor"] if "tensor" in named else tensors[position]
            if x.numel() > 50:  # not losses, norms and counts
                sent.append(times * x.numel() * x.element_size() * (world - 1) // world)
            return collective(*tensors, **named)

        return counted

    with contextlib.ExitStack() as patches:
        engine_owns = setup_deepspeed.owns_reduction if own else lambda config: False
        for place in ("megatron.training.setup_deepspeed", "megatron.training.engine_deepspeed"):
            patches.enter_context(mock.patch(f"{place}.owns_reduction", engine_owns))
        engine, args, lr = build(rank, {**KEYS, **keys}, layout)
        for module, name, times, position in (
            (dist, "all_reduce", 2, 0),
            (partition_comm, "_reduce_scatter", 1, 1),
            (partition_comm, "all_gather", 1, 0),
        ):
            patches.enter_context(mock.patch.object(module, name, count(times, position, getattr(module, name))))
        engine.train_batch(step_batch(0, args, engine.state), lr(0))
    return round(sum(sent) / sum(p.numel() for p in engine.params().values()) * world / (world - 1), 1)


def test_bytes_of_a_step_per_parameter():
    """Gradients in fp32 into their owners' parts (4) and weights (2), against DeepSpeed's all-reduce in fp32 (8)."""
    counted = [run_distributed(wire_bytes, 2, {}, own)[0] for own in (True, False)]
    assert counted == [pytest.approx(6, rel=0.02), pytest.approx(10, rel=0.02)]
    in_bf16 = run_distributed(wire_bytes, 2, {"fp32_allreduce": False}, True)[0]
    assert in_bf16 == pytest.approx(6, rel=0.02)


def live_gradients(rank: int, world: int, layout: Layout) -> tuple[int, int, int]:
    """(most bytes of gradients alive at a time, bytes of the largest one, of all)."""
    args = tiny.tiny_args(KEYS, layout)
    process = tiny.process_of(rank, args, layout)
    model = setup.build_model(process, 1)
    params, most = list(model.parameters()), []

    def look(p: Tensor) -> None:
        most.append(sum(p.grad.numel() * p.grad.element_size() for p in params if p.grad is not None))

    for p in params:
        p.register_post_accumulate_grad_hook(look)  # before the engine's
    engine = setup.build_engine(process, model)
    for step in range(2):
        engine.train_batch(step_batch(step, args, engine.state), 1e-3)
        look(params[0])
        assert most.pop() == 0
    sizes = [p.numel() * p.element_size() for p in params]
    return max(most), max(sizes), sum(sizes)


@pytest.mark.parametrize(
    "layout",
    [Layout(zero=1), Layout(dp=2, engine="native"), pytest.param(Layout(pp=2, zero=1), marks=pytest.mark.full)],
    ids=lambda x: f"{x.engine}-{x.name}",
)
def test_one_gradient_in_bf16_lives_at_a_time(layout):
    for most, largest, everything in run_distributed(live_gradients, layout.world, layout):
        assert 0 < most <= largest < everything / 3


def sums_of_missing(rank: int, world: int, silent: bool) -> tuple[list[float], list[int]]:
    """Sums of three parameters in three buckets of two passes: one has no gradient in the last, on rank 1 if `silent`;
    one none at all."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    order: list[int] = []

    class One:
        def __init__(self, index: int) -> None:
            self.index, self.totals = index, [(params[index], torch.full((4,), 7.0))]

        def start_reduction(self) -> None:
            order.append(self.index)

        def wait(self) -> None: ...

    buckets = [One(index) for index in range(3)]
    sums = partition_comm.GradientSums(buckets, passes=2)
    for last in (False, True):
        used = params[:1] if last and silent and rank else params[:2]
        sum(p.sum() for p in used).backward()
        sums.end_pass()
    with pytest.raises(RuntimeError, match="2 backward passes"):
        sums.end_pass()
    return [float(bucket.totals[0][1][0]) for bucket in buckets], order


def test_reductions_begin_in_the_same_order_whichever_parameters_have_no_gradient():
    for silent in (False, True):
        both = [sums_of_missing(rank, 2, silent) for rank in range(2)]
        assert both == [([2.0, 2.0, 0.0], [0, 1, 2]), ([2.0, 1.0 if silent else 2.0, 0.0], [0, 1, 2])]


def _note(alone: set[str], name: str, p: Parameter) -> None:
    if p.grad is not None:
        alone.add(name)


@pytest.mark.parametrize(
    ("policy", "compiled"),
    [
        ("none", False),
        ("full", False),
        ("selective", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("none", True), ("full", True), ("selective", False))
        ),
    ],
)
def test_products_add_the_gradients_of_matrices(policy: str, compiled: bool) -> None:
    """Every sum is what autograd's gradients give, of two passes; no matrix of a block has a gradient of its own."""
    torch._dynamo.reset()
    tokens, positions, targets = networks.batch()
    labels = (targets, torch.ones(targets.shape), torch.tensor([1 / targets.numel()]))
    found: list[dict[str, Tensor]] = []
    for summed in (False, True):
        network = networks.build(networks.tiny(**networks.LLAMA, checkpoint_policy=policy)).bfloat16()
        params = dict(named_parameters(network))
        totals = {name: torch.full(p.shape, torch.nan) for name, p in params.items()}
        bucket = mock.Mock(totals=[(p, totals[name]) for name, p in params.items()])
        alone: set[str] = set()
        with summing() if summed else contextlib.nullcontext([]) as products:
            for name, p in params.items():
                p.register_post_accumulate_grad_hook(partial(_note, alone, name))
            sums = partition_comm.GradientSums([bucket], passes=2)
            if compiled:
                assert compile_blocks(network, backend="aot_eager") == (2, 0, 0)
            for last in (False, True):
                network((tokens, positions), labels)[0].backward()
                assert bucket.start_reduction.called == last
                sums.end_pass()
        between = {name for name in params if ".attention." in name or ".mlp." in name}
        assert len(between) == 8 and alone == set(params) - (between if summed else set())
        assert sorted(len(shape) for shape in products) == (8 * [3] + 10 * [4] if summed else [])  # the head's are 2
        found.append(totals)
    for name, total in found[0].items():
        assert (found[1][name] - total).abs().max() < 0.02 * total.abs().max(), name


def curve_with_sums(rank: int, world: int, layout: Layout, summed: bool) -> tuple[dict[str, list[float]], int]:
    """Training with products of a CPU, which round as autograd's do, and how many weights they are of."""
    with mock.patch.object(partition_comm, "sums_products", lambda device: summed), in_buckets(layout):
        found = []
        offer = mock.patch.object(partition_comm, "offer_sum", lambda *row: (found.append(row), offer_sum(*row))[1])
        with offer:
            return train(rank, world, KEYS, layout, 3), len(found)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=1, engine="native"),
        pytest.param(Layout(dp=2, zero=1), marks=pytest.mark.full),
        pytest.param(Layout(pp=2, zero=1, micro=1), marks=pytest.mark.full),
        pytest.param(Layout(tp=2, zero=1, sequence_parallel=True, engine="native"), marks=pytest.mark.full),
    ],
    ids=lambda layout: layout.name,
)
def test_a_run_whose_products_add_has_the_same_curve(layout: Layout) -> None:
    plain, summed = (run_distributed(curve_with_sums, 2, layout, summed) for summed in (False, True))
    for (curve, none), (again, offered) in zip(plain, summed, strict=True):
        assert none == 0 and offered >= 8 // layout.pp
        assert again == curve


def test_a_gradient_behind_its_reduction_is_an_error():
    p = torch.nn.Parameter(torch.ones(2))
    p.spec = mock.Mock(key="some.weight")
    bucket = mock.Mock(totals=[(p, torch.zeros(2))])
    partition_comm.GradientSums([bucket], passes=1)
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"some\.weight"):
        p.sum().backward()


def test_large_parameters_have_buckets_of_their_own():
    assert partition_comm.most_elements(1) == 2**25
    assert partition_comm.most_elements(1024) == 2**30
    assert partition_comm.most_elements(1024, asked=5000) == 5000
    assert partition_comm.most_elements(8, asked=500_000_000) == 2**25, "what configs for DeepSpeed ask for"


class LateGather:
    """Stands in for an all-gather on another stream: it takes effect when it is waited for."""

    def __init__(self, *tensors: Tensor, group: Any, async_op: bool) -> None:
        self.tensors, self.group = [x.detach() for x in tensors], group

    def wait(self) -> None:
        GATHER(*self.tensors, group=self.group)


GATHER = partition_comm.all_gather


def cached_logits(rank: int, world: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """Logits of a forward pass with a cache right after a step, and again when all weights have arrived."""
    with mock.patch.object(partition_comm, "all_gather", LateGather):
        engine, args, _ = build(rank, {**LLAMA, "precision": "bfloat16"}, layout)
        engine.train_batch(step_batch(0, args, engine.state), 0.1)
        found = []
        for _ in range(2):
            with engine.evaluating():
                cache = KVCache(engine.stage_layers(), 8, None)
                carry = Carry(torch.arange(8)[None], torch.arange(8)[None])
                found.append(engine.run_stage(carry, cache, lambda out: out.logits()).float())
            engine.params()
        return found[0], found[1]


@pytest.mark.parametrize("engine", ["deepspeed", "native"])
def test_texts_of_a_run_are_those_of_weights_that_have_arrived(engine):
    for at_once, arrived in run_distributed(cached_logits, 2, Layout(dp=2, zero=1, engine=engine)):
        assert torch.equal(at_once, arrived)
