"""A run's Hugging Face exports on the Hub: what is there, and the process that sends one."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cluster.exports import Exports, start_beside
from megatron.errors import UserError
from megatron.files import read_json, write_atomically
from megatron.home import HOME

TOOL = HOME / "tools" / "ckpts" / "upload.py"
MAIN = "main"
# Minutes, not hours: what fails is tried again after the next export, and the end of a run waits for it.
_RETRY = ("--max-retries=2", "--retry-min-wait=5", "--retry-max-wait=60")


@dataclass(frozen=True)
class Upload:
    """An export that goes to a branch; `made` tells it from one of the same step that took its place."""

    step: int
    branch: str
    made: int


@dataclass(frozen=True)
class Uploads:
    """Exports of a run in the repository `repo` of the Hub: branch `global_step<N>`, and `main` for the last step.

    `<folder of exports>/uploads.json` says which have arrived, whole and compared.
    """

    exports: Exports
    repo: str

    @property
    def log(self) -> Path:
        """What the processes printed."""
        return self.exports.folder / "upload.log"

    def pending(self, until: int, is_last: bool = False) -> list[Upload]:
        """What has not arrived of the steps up to `until`, oldest first; `is_last`: that one belongs into `main`."""
        found, there = [], self._read()
        for step in (step for step in self.exports.steps() if step <= until):
            folder = self.exports.of(step)
            with suppress(FileNotFoundError):  # it is being replaced
                made = (folder / "config.json").stat().st_mtime_ns
                for branch in (folder.name, *([MAIN] if is_last and step == until else [])):
                    found += [Upload(step, branch, made)] if there.get(branch) != [step, made] else []
        return found

    def arrived(self) -> list[str]:
        """The branches that the Hub has."""
        return [*self._read()]

    def note(self, one: Upload) -> None:
        """It has arrived."""
        record = {self.repo: {**self._read(), one.branch: [one.step, one.made]}}
        write_atomically(self.exports.folder / "uploads.json", json.dumps(record, indent=1) + "\n")

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, UserError):  # sent again: what the Hub has is compared, not sent
            found = read_json(self.exports.folder / "uploads.json").get(self.repo)
            return found if isinstance(found, dict) else {}
        return {}

    def command(self, one: Upload) -> list[str]:
        """Sends it, or what is missing of it, and compares it with what has arrived."""
        return [str(TOOL), str(self.exports.of(one.step)), self.repo, one.branch]

    def start(self, one: Upload) -> subprocess.Popen[bytes]:
        """Begin to send it. Raises `OSError`."""
        return start_beside([*self.command(one), *_RETRY], self.log)
