"""The live line, on a real pseudo-terminal; and GPT-NeoX's line wherever there is none."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron import log
from megatron.callbacks import RunContext, build_callbacks
from megatron.callbacks.live_line import LiveLine
from megatron.mpu.state import ParallelState
from megatron.training.callback import Callback
from tests.callbacks.fakes import GoesBack, args_of, batches, out, run_and_go_back, trainer_of

pytestmark = pytest.mark.cpu


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Iterator[list[str]]:
    """stdout and stderr are a terminal; what was written is in the list afterwards."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(master, 4096):
                pieces.append(piece)
        except OSError:  # nobody writes any more
            pass

    reader, text = threading.Thread(target=read), []
    reader.start()
    with os.fdopen(slave, "w", buffering=1, closefd=True) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        try:
            yield text
        finally:
            stream.flush()
    reader.join(10)
    os.close(master)
    text.append(b"".join(pieces).decode())


class Takes(Callback):
    """A step takes a quarter of a second by a clock of its own; each fourth has a checkpoint of five signs."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock

    def before_step(self, trainer: Any) -> None:
        self.clock.now += 0.25

    def after_step(self, trainer: Any, result: Any) -> None:
        if trainer.step % 4 == 0:
            with trainer.progress.during("checkpoint"):
                for _ in range(4):
                    self.clock.now += 1.0
                    trainer.progress.beat()
            trainer.call("saved", f"somewhere/global_step{trainer.step}")


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(log, "time", fake)
    monkeypatch.setattr("megatron.training.progress.time", fake)
    return fake


def train(clock: Clock, file: Path | None = None, begin: int = 0, chosen: Any = None, back: Any = None) -> None:
    keys = {"log_interval": 5, "eval_interval": 5, "eval_iters": 2, "peak_theoretical_tflops": 1e-5}
    context = RunContext(args_of(**keys, callbacks=chosen), ParallelState.single("cpu"), 37, None, {"valid": batches})
    log.configure(file=file)
    trainer = trainer_of([Takes(clock), *build_callbacks(context)], [out(3.25)] * 10, **keys)
    trainer.step = begin
    if back is None:
        trainer.run()
    else:
        trainer.callbacks.append(GoesBack(back[0]))
        run_and_go_back(trainer, back[1])
    log.configure()


def shown(text: str) -> list[str]:
    """The states of the last line in turn, without what moves the cursor."""
    return [re.sub(r"\x1b\[\w+", "", one).strip() for one in re.split(r"[\r\n]+", text)]


def test_a_terminal_has_a_line_that_moves_and_the_log_file_gpt_neox_s(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with terminal(monkeypatch) as text:
        train(clock, tmp_path / "rank_0.log")
    states = shown(text[0])
    # 4 samples of 8 tokens in a quarter of a second; the FLOPs of a step against 1e7 a second
    speed = r"128 tokens/s, MFU \d+\.\d%"
    (line,) = {one for one in states if one.startswith("3/10")}
    assert re.fullmatch(rf"3/10 30%, loss 3\.2500, lr 5\.00e-01, {speed}, ETA \d\d:\d\d, elapsed \d\d:\d\d", line)
    assert any(one.startswith("10/10 100%") for one in states)
    assert any(re.match(r"checkpoint: 3part", one) for one in states)  # how many there are is known of the next one
    assert any(re.match(r"checkpoint:  60%.* 3/5 ", one) for one in states)
    assert any(one.startswith("validation at step 5: lm_loss 3, lm_loss_ppl 20.086") for one in states)
    assert "saved checkpoint somewhere/global_step4" in states
    assert "samples/sec" not in text[0]
    kept = (tmp_path / "rank_0.log").read_text()
    assert len(re.findall(r"samples/sec: .*iteration +\d+/ +10 .*lm_loss: 3\.250000E\+00", kept)) == 2
    assert "validation results at iteration 5 |" in kept


def test_a_resumed_run_counts_on_and_a_narrow_terminal_is_not_overrun(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch, 60) as text:
        train(clock, begin=6)
    states = [one for one in shown(text[0]) if re.match(r"\d+/10 ", one)]
    assert states[0].startswith("6/10 60%") and states[-1].startswith("10/10 100%")
    assert max(map(len, states)) <= 60


def test_the_line_of_a_run_that_goes_back_begins_anew_and_hears_of_checkpoints(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as text:
        train(clock, chosen={"live_line": True}, back=(6, 4))
    states = shown(text[0])
    again = max(i for i, one in enumerate(states) if one.startswith("4/10 "))
    assert any(one.startswith("5/10 ") for one in states[:again])
    assert any(re.match(r"checkpoint:.* 3/5 ", one) for one in states[again:])
    assert text[0].count("training: done") == 1


def test_no_live_line_where_it_is_switched_off_or_nobody_watches(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal(monkeypatch) as text:
        train(clock, chosen={"live_line": False})
    assert text[0].count("samples/sec") == 2 and "ETA" not in text[0]
    train(clock)
    printed = capsys.readouterr()
    assert printed.out.count("samples/sec") == 2 and "elapsed 0" not in printed.out + printed.err
    context = RunContext(args_of(), ParallelState.single("cpu"), 37)
    assert LiveLine.build(context) is None


def test_an_error_leaves_the_terminal_in_order(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Callback):
        def before_step(self, trainer: Any) -> None:
            if trainer.step == 3:
                raise RuntimeError("no more")

    with terminal(monkeypatch) as text:
        context = RunContext(args_of(), ParallelState.single("cpu"), 37)
        trainer = trainer_of([Takes(clock), Fails(), *build_callbacks(context)])
        with pytest.raises(RuntimeError, match="no more"):
            trainer.run()
        print("the end", file=sys.stderr)
    assert re.search(r"3/10 30%, [^\n]*\n[\r ]*the end", text[0].replace("\r\n", "\n"))
