"""The metrics and the console line, against values reckoned by hand."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.callbacks.console import Console, training_line
from megatron.callbacks.evaluator import Evaluator
from megatron.callbacks.flops import Flops, device_peak
from megatron.callbacks.meter import Meter
from megatron.callbacks.stop_on_signal import StopOnSignal
from megatron.neox_arguments.formulas import flops_per_token
from megatron.training.settled import Unsettled
from tests.callbacks.fakes import GoesBack, Log, args_of, batches, out, run_and_go_back, trainer_of

pytestmark = pytest.mark.cpu

# What users of GPT-NeoX grep its logs with.
GREPS = [r"iteration.*lm_loss", r"iteration\s+[0-9]+/\s*[0-9]+ .*lm_loss:\s*[0-9.E+-]+"]
UNHEALTHY = re.compile(r"traceback|exception|error:", re.IGNORECASE)
FLOPS = Flops(per_step=6e12, world_size=3, peak=8e12, recompute_factor=4 / 3)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    thread_time = monotonic


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("megatron.training.progress.time", made)
    return made


class Works(Log):
    """Each step takes half a second, however long it really takes, and what follows it 100 seconds."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def before_update(self, trainer):
        self.clock.now += 0.5

    def after_step(self, trainer, out):
        self.clock.now += 100.0


def run(clock, outs, interval=2, **keys):
    log, meter = Works(clock), Meter(interval, FLOPS)
    trainer_of([meter, log], outs, **keys).run()
    return log.logged_


def test_metrics_by_hand(clock):
    """Evaluation and saving happen after the step; they do not make the steps look slow."""
    outs = [out(3.0, 0.5, tokens=30), out(2.0, 0.25, tokens=20)]
    (step, metrics), *_ = run(clock, outs, train_iters=2)
    assert step == 2
    assert metrics == pytest.approx(
        {
            "train/learning_rate": 0.5,
            "train/lm_loss": 2.5,
            "train/grad_norm": 0.25,
            "train/skipped": 0,
            "train/nan": 0,
            "train/tokens": 2 * 4 * 8,
            "train/trained_tokens": 50,
            "runtime/samples_per_sec": 4 / 0.5,
            "runtime/iteration_time": 0.5,
            "runtime/steps_per_sec": 2.0,
            "runtime/tokens_per_sec": 4 * 8 / 0.5,
            "runtime/flops_per_sec_per_gpu": 6e12 / 0.5 / 3,
            "runtime/model_flops_utilization": 0.5,
            "runtime/hardware_flops_utilization": 0.5 * 4 / 3,
            "loss/init": 3.0,
        }
    )


def test_padding_is_no_throughput(clock):
    (_, metrics), *_ = run(clock, [out(padding=5), out(padding=7)], train_iters=2)
    assert metrics["runtime/tokens_per_sec"] == pytest.approx((2 * 4 * 8 - 12) / (2 * 0.5))
    assert metrics["train/tokens"] == 2 * 4 * 8


def test_skipped_steps_are_counted_and_left_out_of_the_loss(clock):
    outs = [out(4.0), out(float("nan"), float("nan"), skipped=True), out(0.0, None, skipped=True, tokens=0), out(2.0)]
    (_, metrics), *_ = run(clock, outs, interval=4, train_iters=4)
    assert metrics["train/lm_loss"] == 3.0
    assert (metrics["train/skipped"], metrics["train/nan"], metrics["train/trained_tokens"]) == (2, 1, 96)


def test_loss_scale_and_the_first_loss_are_logged_once(clock):
    first, second = run(clock, [out(5.0, loss_scale=scale) for scale in (1024.0, 512.0, 512.0, 256.0)], train_iters=4)
    assert first[1]["loss/init"] == 5.0 and "loss/init" not in second[1]
    assert (first[1]["train/loss_scale"], second[1]["train/loss_scale"]) == (512.0, 256.0)


@pytest.mark.parametrize("interval", [0, -1])
def test_no_log_interval_no_log(clock, interval):
    assert run(clock, [], interval=interval) == []


def test_values_of_an_accelerator_are_read_one_step_later():
    """The log of step 2 comes with step 3, that of the last step at the end; each keeps its own numbers."""
    heard = []

    class Listen(Log):
        def logged(self, trainer, metrics, step):
            heard.append((trainer.step, step, metrics["train/lm_loss"]))

    meter = Meter(2, FLOPS)
    trainer = trainer_of([meter, Listen()], [out(float(i)) for i in (1, 3, 5, 7)], train_iters=4)
    trainer.late = True
    trainer.run()
    assert heard == [(3, 2, 2.0), (4, 4, 6.0)]


def test_a_run_that_goes_back_logs_what_it_trains_again_alone(clock):
    """The log of step 4 is still to be read when step 4 is known to be bad: step 3 comes again, with other numbers."""
    log, losses = Works(clock), [1, 3, 5, 900, 900, 7, 9, 11, 13]
    trainer = trainer_of([GoesBack(4), Meter(2, FLOPS), log], [out(float(x)) for x in losses], train_iters=6)
    trainer.late = True
    run_and_go_back(trainer, 2)
    assert [(step, metrics["train/lm_loss"]) for step, metrics in log.logged_] == [(2, 2.0), (4, 8.0), (6, 12.0)]
    first, second, _ = (metrics["runtime/iteration_time"] for _, metrics in log.logged_)
    assert first == second  # what was trained in between does not count


class Elsewhere(torch.Tensor):
    """A tensor of another device, which goes into no operation together with those of the CPU."""

    device = torch.device("meta")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        parts = args[0] if func is torch.stack else ()
        if len({isinstance(x, cls) for x in parts}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("late", [False, True])
def test_a_callback_s_values_may_lie_on_another_device_than_the_loss(late):
    class Adds(Log):
        def after_step(self, trainer, out):
            for name, value in (("first", 1.0), ("second", 2.0)):
                trainer.metrics[f"here/{name}"] = torch.tensor([value])
                trainer.metrics[f"there/{name}"] = torch.tensor(10 * value).as_subclass(Elsewhere)
            trainer.metrics["number"] = 7

    log = Log()
    trainer = trainer_of([Adds(), Meter(2, FLOPS), log], [out(3.0), out(5.0)], train_iters=2)
    trainer.late = late
    trainer.run()
    ((_, metrics),) = log.logged_
    wanted = {"here/first": 1, "here/second": 2, "there/first": 10, "there/second": 20, "number": 7}
    assert metrics.items() >= {**wanted, "train/lm_loss": 4, "train/learning_rate": 0.5}.items()


def test_the_last_value_of_another_callback_is_logged_once():
    class Adds(Log):
        def after_step(self, trainer, out):
            if trainer.step < 4:
                trainer.metrics["mine/step"] = torch.tensor(float(trainer.step))

    log, meter = Log(), Meter(2, FLOPS)
    trainer_of([Adds(), meter, log], train_iters=6).run()
    assert [(step, metrics.get("mine/step")) for step, metrics in log.logged_] == [(2, 2.0), (4, 3.0), (6, None)]


LAUNCH, DEVICE, OTHER = 0.002, 0.05, 100.0


class Behind:
    """A device that takes `DEVICE` seconds for what the host gives it in `LAUNCH`, one step after the other."""

    def __init__(self, clock, monkeypatch):
        self.clock, self.done = clock, 0.0

        class Step(Unsettled):
            def __init__(this, step, out):
                super().__init__(step, out)
                this.done = self.done

            def settle(this):
                clock.now = max(clock.now, this.done)
                return super().settle()

        monkeypatch.setattr("megatron.training.trainer.Unsettled", Step)

    def launch(self):
        self.clock.now += LAUNCH
        self.done = max(self.done, self.clock.now) + DEVICE

    def drain(self):
        self.clock.now = max(self.clock.now, self.done)


@pytest.fixture
def device(clock, monkeypatch):
    return Behind(clock, monkeypatch)


def run_behind(device, callbacks):
    """Twelve steps on such a device; an evaluation waits for it and takes `OTHER` seconds."""
    trainer = trainer_of(callbacks, train_iters=12)
    trainer.late = True
    train, evaluate = trainer.engine.train_batch, trainer.engine.eval_batch

    def train_batch(batch, lr):
        device.launch()
        return train(batch, lr)

    def eval_batch(batch):
        device.drain()
        device.clock.now += OTHER
        return evaluate(batch)

    trainer.engine.train_batch, trainer.engine.eval_batch = train_batch, eval_batch
    trainer.run()
    return trainer


@pytest.mark.parametrize("every", [0, 1, 2, 3, 5])
def test_steps_of_an_accelerator_count_whole_whatever_waits_for_it_between_them(device, every):
    """The host launches the next one while the device works, unless the device was drained before."""
    log = Log()
    run_behind(device, [Meter(3, FLOPS), Evaluator(every, 1, batches, None), log])
    assert len(log.logged_) == 4
    for step, metrics in log.logged_:
        idle = sum(n == 1 or (every > 0 and (n - 1) % every == 0) for n in range(step - 2, step + 1))
        seconds = DEVICE + idle / 3 * LAUNCH
        assert metrics["runtime/iteration_time"] == pytest.approx(seconds)
        assert metrics["runtime/model_flops_utilization"] == pytest.approx(6e12 / 3 / 8e12 / seconds)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_callback_that_waits_for_the_device_by_itself_counts_as_part_of_its_step(device, every):
    class Waits(Log):
        def after_step(self, trainer, out):
            if trainer.step % every == 0:
                device.drain()
                device.clock.now += 1.0

    log = Waits()
    run_behind(device, [Meter(4, FLOPS), log])
    seconds = sum(4 * metrics["runtime/iteration_time"] for _, metrics in log.logged_)
    assert seconds == pytest.approx(12 * DEVICE + 12 / every + 12 / every * LAUNCH)


def test_a_stop_is_given_the_time_of_whole_steps(device):
    """With an evaluation after each step the host never waits for one in the step that follows."""

    class Saves(Log):
        def after_step(self, trainer, out):
            trainer.progress.save_seconds = 0.5

    trainer = run_behind(device, [Evaluator(1, 1, batches, None), Saves(), StopOnSignal()])
    assert trainer.progress.stop_seconds == pytest.approx(2 * (LAUNCH + DEVICE) + OTHER + 0.5)


def test_training_line_is_gpt_neox_s(clock):
    (step, metrics), *_ = run(
        clock, [out(2.5, 0.25, loss_scale=512.0), out(2.5, 0.25, loss_scale=512.0)], train_iters=2
    )
    line = training_line(metrics, step, 300)
    assert line == (
        " samples/sec: 8.000 | iteration        2/     300 | elapsed time per iteration (ms): 500.0 | "
        "learning rate: 5.000E-01 | approx flops per GPU: 4.0TFLOPS | MFU: 50.00% | HFU: 66.67% | "
        "lm_loss: 2.500000E+00 | loss scale: 512.0 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | tokens/sec: 64.0 | grad norm: 0.250 |"
    )
    for pattern in GREPS:
        assert re.search(pattern, line)


@pytest.mark.parametrize("loss", [2.5, 1e-9, 12345.0, float("nan"), float("inf")])
def test_a_log_without_faults_looks_healthy(capsys, caplog, loss):
    """Scripts take these words for the end of a run."""
    caplog.set_level("INFO", "deepy")
    meter = Meter(1, Flops(1e9, 1, None))
    trainer = trainer_of([meter, Console()], [out(loss, loss)], train_iters=1)
    trainer.call("evaluated", "validation", {"lm_loss": loss, "lm_loss_ppl": loss})
    trainer.run()
    trainer.call("evaluated", "test", {"lm_loss": loss, "lm_loss_ppl": loss})
    trainer.call("saved", "somewhere/global_step1")
    shown = capsys.readouterr().out
    assert re.search(GREPS[0], shown) and "MFU" not in shown
    line = f" validation results at iteration 0 | lm_loss value: {loss:.6E} | lm_loss_ppl value: {loss:.6E} |"
    assert line in shown
    grepped = [line for line in shown.splitlines() if re.search(GREPS[0], line)]
    assert re.search(GREPS[0], grepped[-1]) and "test results at the end of training for test data" in shown
    assert " lm_loss: " in grepped[-1]  # a training line, after the last evaluation too
    assert not UNHEALTHY.search(shown + caplog.text)


def test_flops_of_a_llama_by_hand():
    """Per token 6 x (parameters in matrix products) + 12 L h s (full attention); GQA and gate counted as they are."""
    no_bias = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    gated = {"activation": "swiglu", "intermediate_size": 24, "gated_width_rule": "final"}
    args = args_of(norm="rmsnorm", pos_emb="rotary", **gated, **no_bias)
    qkv, dense, mlp, norms = 16 * (16 + 8 + 8), 16 * 16, 16 * 24 * 3, 2 * 16
    matrices = 2 * (qkv + dense + mlp + norms) + 16 + 37 * 16
    assert flops_per_token(args.model, 37) == 6 * matrices + 12 * 2 * 16 * 8


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2500e12),
        ("Tesla T4", None),
    ],
)
def test_peak_of_a_device(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    gpu = torch.device("cuda")
    assert device_peak(gpu, None) == expected
    assert device_peak(gpu, 100.0) == 1e14  # peak_theoretical_tflops wins
    assert device_peak(torch.device("cpu"), None) is None and device_peak(torch.device("cpu"), 2.0) == 2e12


def test_metrics_of_the_objective_are_means_over_the_steps_that_have_them():
    """As the loss: steps without an update do not count, nor those in which nothing of the kind was there."""
    reported = [{"margin": 1.0, "rare": 5.0}, {"margin": 2.0}, {"margin": 100.0, "rare": 100.0}, {"margin": 3.0}]
    outs = [
        out(skipped=step == 2, metrics={name: torch.tensor(x) for name, x in metrics.items()})
        for step, metrics in enumerate(reported)
    ]
    log = Log()
    trainer = trainer_of([Meter(4, FLOPS), log], outs, train_iters=4)
    trainer.run()
    ((_, metrics),) = log.logged_
    assert (metrics["train/margin"], metrics["train/rare"]) == (2.0, 5.0)
