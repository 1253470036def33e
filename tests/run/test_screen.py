"""What a person sees of a run, on terminals of 80 and 120 columns and through a pipe, against texts in `screens/`; and
the commands that its end shows, pasted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.training.runs import KEYS, corpus
from tests.warm_python import WarmPython

pytestmark = pytest.mark.cpu

SCREENS = Path(__file__).parent / "screens"
ROOT = SCREENS.parents[2]
ROWS = 24  # of the smallest terminal
RUN = {**KEYS, "train_iters": 4, "eval_interval": 4, "eval_iters": 1, "log_interval": 2, "exit_interval": 2}
_NAMES = ("loss ", "_ppl ", "_byte ", "value: ", "lm_loss: ", "norm: ", "/sec: ", "(ms): ", "resident: ")
CHANGING = {
    r"\d+:\d\d(:\d\d)?": "<time>",
    r"[\d,.]+(?= tokens/s)": "<n>",
    "|".join(rf"(?<={re.escape(name)})[\d.E+-]+" for name in _NAMES): "<x>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    corpus(folder / "data")
    (folder / "run.yml").write_text(yaml.safe_dump({**RUN, "data_path": "data/text_document", "save": "out"}))
    for name in ("deepy.py", "train.py", "generate.py", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "other").mkdir()
    (folder / "other" / "deepy").touch(mode=0o755)
    return folder


def on_terminal(warm: WarmPython, folder: Path, columns: int, command: str) -> list[str]:
    """The lines that stay on a terminal that wide when the command has ended."""
    script = f"script -qec 'stty cols {columns}; {command}' /dev/null"
    done = warm.run(script, folder, TERM="xterm")
    assert done.returncode == 0, done.stdout
    drawn = [line.rstrip("\r") for line in done.stdout.split("\n")]
    # A bar of ours begins with \r\r; spaces over one, and up to the one above.
    kept = [line for line in drawn if not re.search(r"\r(\r[^\r]*|\s*(\x1b\[A)?)$", line)]
    return [line.rsplit("\r", 1)[-1] for line in kept if line]


def commands(lines: list[str]) -> list[str]:
    """What the end of a run says to type."""
    (at,) = [number for number, line in enumerate(lines) if line.startswith("report ")]
    return [line[11:] for line in lines[at : at + 4]]


def compare(name: str, lines: list[str]) -> None:
    """From the block of the start on; what is noted before it depends on the config and the data."""
    (at,) = [number for number, line in enumerate(lines) if line.startswith("run  ")]
    lines = lines[at:]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    for pattern, instead in CHANGING.items():
        text = re.sub(pattern, instead, text)
    assert text == (SCREENS / f"{name}.txt").read_text(), text


@pytest.mark.timeout(400)
def test_a_run_is_started_stopped_resumed_and_what_its_end_says_works(folder: Path, warm_python: WarmPython) -> None:
    # A `deepy` of another environment comes first on the path: the end names scripts, and then, without it, `deepy`.
    first = on_terminal(warm_python, folder, 80, "PATH=$PWD/other:$PATH python deepy.py train.py run.yml")
    compare("start_80", first)
    begins = first[: first.index("saved checkpoint out/global_step2")]
    assert sum(-(-len(line) // 80) for line in begins) < ROWS
    second = on_terminal(warm_python, folder, 120, commands(first)[1])
    compare("resume_120", second)
    # What the terminal did not show is in the log, and what bars drew is not.
    log = (folder / "out/logs/rank_0.log").read_text()
    assert re.findall(r"iteration +(\d)/ +4 .*lm_loss: ", log) == ["2", "4"] and "parameters: " in log
    assert not re.search(r"%\||ETA|\r|\x1b", log)
    for command in commands(second):
        done = warm_python.run(command, folder)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    for made in ("report.html", "hf/model.safetensors", "global_step6/manifest.json"):
        assert (folder / "out" / made).exists(), made


def test_through_a_pipe_there_are_plain_lines(folder: Path, warm_python: WarmPython) -> None:
    done = warm_python.run("python deepy.py train.py run.yml save=piped 2>&1 | cat", folder)
    assert done.returncode == 0, done.stdout
    compare("pipe", done.stdout.splitlines())
    assert "\r" not in done.stdout and "\x1b" not in done.stdout
