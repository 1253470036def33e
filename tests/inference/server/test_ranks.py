"""A server as a user starts it, on real ranks: its answers, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from megatron.home import HOME
from tests.inference.server.models import client_of, served, write_model

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(400)]

CHAT = [{"role": "user", "content": "Hello, how are you?"}]


@contextmanager
def deepy_serve(folder: Path, *argv: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`deepy serve ...` in a folder, as soon as it answers: its address, and the process."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-m", "megatron.commands.cli", "serve", *argv, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    late = threading.Timer(300, process.kill)
    late.start()
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address, line + process.stderr.read()
        yield address[0], process
    finally:
        late.cancel()
        process.kill()  # its ranks end with it
        process.communicate()


def test_a_server_on_four_ranks_answers_as_one_rank_and_ends_at_sigterm(tmp_path: Path):
    keys = write_model(tmp_path)
    with served(tmp_path, keys) as (address, _):
        alone = client_of(address).chat.completions.create(
            model="checkpoints/global_step1", messages=CHAT, temperature=0, max_tokens=20, logprobs=True
        )
    layout = ("model_parallel_size=2", "pipe_parallel_size=2")
    with deepy_serve(tmp_path, "checkpoints", *layout) as (address, process):
        client = client_of(address)
        model = client.models.list().data[0].id
        assert model == "checkpoints/global_step1"

        def ask(number: int) -> openai.types.chat.ChatCompletion:
            more = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
            return client.chat.completions.create(model=model, messages=CHAT, max_tokens=20, logprobs=True, **more)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, range(4)))
        for answer in found[1::2]:
            assert answer.choices[0].message == alone.choices[0].message and answer.usage == alone.usage
            theirs = [one.logprob for one in alone.choices[0].logprobs.content]
            assert [one.logprob for one in answer.choices[0].logprobs.content] == pytest.approx(theirs, abs=1e-3)
        assert found[0].choices[0].message.content == ask(0).choices[0].message.content

        begun = threading.Event()

        def long_stream() -> list[str]:
            body = {"prompt": "Hello", "max_tokens": 100, "stream": True, "temperature": 0}
            lines = []
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=100) as stream:
                for line in stream.iter_lines():
                    begun.set()
                    lines.append(line)
            return [line for line in lines if line]

        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(long_stream)
            begun.wait(60)
            process.send_signal(signal.SIGTERM)
            lines = stream.result()
        assert lines[-1] == "data: [DONE]" and '"finish_reason": null' not in lines[-2]  # it had the time to end
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


def test_a_killed_rank_ends_the_server(tmp_path: Path):
    write_model(tmp_path)
    with deepy_serve(tmp_path, "run.yml", "model_parallel_size=2") as (_, process):
        tree = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
        )
        first, last = sorted(map(int, tree.stdout.split()))[:2]
        os.kill(last, signal.SIGKILL)
        assert process.wait(60) == 5
        deadline = time.monotonic() + 20
        while Path(f"/proc/{first}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{first}").exists()
