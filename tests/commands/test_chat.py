"""`deepy chat` against a server of a small model: through a pipe, and as somebody at a terminal types."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from megatron.commands.chat_client import Answer, Model, server_at
from megatron.home import HOME
from megatron.inference.server.desk import Desk
from megatron.inference.server.replies import Writing
from tests.inference.server.models import served, write_model

pytestmark = pytest.mark.cpu

COMMAND = [sys.executable, "-m", "megatron.commands.cli", "chat"]
TOOL = {"name": "weather", "description": "Of a city.", "parameters": {}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Desk]]:
    folder = tmp_path_factory.mktemp("chat")
    with served(folder, write_model(folder), top_k=1, maximum_tokens=16) as found:
        yield found


def chat(address: str, typed: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [*COMMAND, "--url", address, *flags]
    return subprocess.run(
        command, input=typed, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def said(address: str, *messages: tuple[str, str]) -> str:
    """The server's greedy answer."""
    with server_at(address) as http:
        turns = [{"role": role, "content": text} for role, text in messages]
        return "".join(Model(http).say(turns, None, Answer()))


def test_every_line_of_a_pipe_is_a_turn_of_one_conversation(server: tuple[str, Desk], tmp_path: Path):
    address, _ = server
    typed = "Hello, how\n\n/retry\n and?\n/save talk.jsonl\n/undo\n/save talk.jsonl\n/reset\n/system Other.\nHello\n"
    done = chat(address, typed, tmp_path, "--system", "Be brief.")
    assert done.returncode == 0, done.stderr
    system, first = ("system", "Be brief."), ("user", "Hello, how")
    answer = said(address, system, first)
    second = said(address, system, first, ("assistant", answer), ("user", " and?"))
    other = said(address, ("system", "Other."), ("user", "Hello"))
    assert done.stdout == f"{answer}\n{answer}\n{second}\n{other}\n" and answer != second
    longer, shorter = [json.loads(line)["messages"] for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [turn["content"] for turn in longer] == ["Be brief.", "Hello, how", answer, " and?", second]
    assert shorter == longer[:3]


def test_without_a_template_a_text_goes_on_as_far_as_the_server_allows(server: tuple[str, Desk]):
    with server_at(server[0]) as http:
        model = Model(http)
        model.facts = {**model.facts, "chat_template": False}
        answer = Answer()
        list(model.say([{"role": "user", "content": "Hello"}], None, answer))
        asked = {"prompt": "Hello", "max_tokens": 16}  # as many as the server's maximum_tokens
        whole = http.post("v1/completions", json=asked).json()["choices"][0]
    assert (answer.text, answer.reason) == (whole["text"], whole["finish_reason"]) and answer.text


def test_calls_of_tools_are_shown_and_answered(server: tuple[str, Desk], tmp_path: Path, monkeypatch):
    """What the model writes first is given here: a call."""
    address, _ = server
    written = ['<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>']
    split = Writing._split
    monkeypatch.setattr(Writing, "_split", lambda self, text: split(self, written.pop() if written else text))
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    done = chat(address, "Hello\n/tool rain\n/save talk.jsonl\n", tmp_path, "--tools", "tools.json")
    assert done.returncode == 0, done.stderr
    assert '[calls weather({"city": "Köln"})]\n' in done.stdout
    saved = json.loads((tmp_path / "talk.jsonl").read_text())
    assert [turn["role"] for turn in saved["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert saved["tools"] == [{"type": "function", "function": TOOL}]


@pytest.mark.parametrize(
    ("typed", "flags", "words"),
    [
        ("/undo\n", (), "nothing has been said yet"),
        ("/tool x\n", (), "has not called a tool"),
        ("/save\n", (), "name a file"),
        ("/nothing\n", (), "/nothing is no command"),
        ("a b " * 300 + "\n", (), "the model takes 256"),
        ("", ("--tools", "nowhere.json"), "nowhere.json cannot be read"),
        ("", ("run.yml",), "give a checkpoint or a config, or --url"),
    ],
)
def test_what_goes_wrong_in_a_pipe_ends_it_with_code_2(server: tuple[str, Desk], tmp_path, typed, flags, words):
    done = chat(server[0], typed, tmp_path, *flags)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends(server: tuple[str, Desk], tmp_path: Path, monkeypatch):
    address, desk = server
    written, step = list[Any](), desk.decoder.step

    def slow(*work: Any) -> Any:
        time.sleep(0.5)
        written.extend(step(*work))
        return written[-1:]

    monkeypatch.setattr(desk.decoder, "step", slow)
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*COMMAND, "--url", address],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HOME), "TERM": "dumb"},
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    screen = ""

    def await_text(text: str) -> None:
        nonlocal screen
        deadline = time.monotonic() + 60
        while text not in screen:
            assert time.monotonic() < deadline, screen
            if select.select([ours], [], [], 1.0)[0]:
                screen += os.read(ours, 4096).decode(errors="replace")
        screen = screen.partition(text)[2]

    try:
        await_text(">>> ")
        os.write(ours, b"Hello, how\n")
        await_text("Hello, how\r\n")
        while not written:
            time.sleep(0.01)
        os.write(ours, b"\x03")
        await_text("(stopped)")
        await_text(">>> ")
        os.write(ours, b"/nothing\n")
        await_text("is no command")
        await_text(">>> ")
        os.write(ours, b"\x03")  # while nothing is being written
        await_text("(Ctrl-D ends)")
        await_text(">>> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
        while desk.decoder._rows:
            time.sleep(0.01)
        assert 0 < len(written) < 16  # it was not written to its end
    finally:
        process.kill()
        process.wait()
        os.close(ours)
