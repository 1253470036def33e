"""One checkpoint of a run to the Hub: converted, checked, uploaded, verified. Each part that is done is not repeated.

    <owner>/<model>            revision global_step<N>; the last step of the run is `main` too
    <owner>/neox-ckpt-<model>  the raw checkpoint, likewise

`main` exists from the first checkpoint on, with a card. What was converted is known by `deepy.json` in the folder, what
was uploaded by the hashes that the Hub lists; so a publication that was killed resumes when it is started again.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint
from megatron.convert.drafts import publish
from megatron.errors import UserError
from megatron.files import read_json, write_atomically
from megatron.hub.card import CARD, CardContext, early_card, raw_card, write_card
from megatron.hub.names import Names, raw_repo
from megatron.hub.private import share_value
from megatron.hub.push import MAIN, push_folder
from megatron.hub.raw import stage_raw
from megatron.hub.record import RECORD, Published, Record, fingerprint, hash_files
from megatron.hub.retry import Retry
from megatron.hub.run_facts import RunFacts, Scores, parse_scores, read_facts
from megatron.log import get_logger, result

logger = get_logger(__name__)

SCORES = "eval_results.json"
RANDOM_DELAY = 12 * 3600.0  # seconds: the longest of `--upload-delay random`


@dataclass(frozen=True)
class Options:
    """How to publish; the flags of `huggingface/upload_checkpoint.py` by their names.

    Attributes:
        delay: seconds to wait before the first upload; None: a random time of at most `RANDOM_DELAY`.
        model, raw: whether to publish the Hugging Face folder, and the raw checkpoint.
        skip_complete: leave what the Hub has completely as it is, without converting anything.
        tasks: of lm-evaluation-harness, to evaluate the Hugging Face folder; () evaluates nothing.
        wandb: `project` and `entity` that the harness logs to; {} logs nowhere.
        replace: another checkpoint that the Hub has in the place of this one.
        delete_local: remove the converted folder when the Hub has all of it.
    """

    private: bool = True
    retry: Retry = field(default_factory=Retry)
    delay: float | None = 0.0
    model: bool = True
    raw: bool = True
    skip_complete: bool = False
    tasks: tuple[str, ...] = ()
    task_include_path: str | None = None
    eval_batch_size: str = "8"
    wandb: Mapping[str, str | None] = field(default_factory=dict)
    replace: bool = False
    delete_local: bool = False
    tokenizer: str | None = None
    architecture: str | None = None
    precision: str = "auto"
    base_model: str | None = None
    config_files: tuple[str, ...] = ()

    @property
    def conversion(self) -> dict[str, str]:
        """What decides the content of the converted folder."""
        files = {"tokenizer": [self.tokenizer] if self.tokenizer else [], "config_files": self.config_files}
        named = {name: " ".join(map(_identify, paths)) for name, paths in files.items()}
        chosen = {"architecture": self.architecture, "precision": self.precision, **named}
        return {name: value for name, value in chosen.items() if value}


class Publication:
    """What happens to one checkpoint.

    Args:
        experiment: name of the run.
        owner: user or organization on the Hub.
        output: folder in which `<model>/global_step<N>` is made.
    """

    def __init__(
        self, checkpoint: Checkpoint, experiment: str, owner: str, names: Names, output: Path, options: Options
    ) -> None:
        self.checkpoint = checkpoint
        self.experiment, self.options = experiment, options
        model = names.model(experiment)
        self.repo, self.raw_repo = f"{owner}/{model}", raw_repo(owner, model)
        self.revision = checkpoint.path.name
        self.folder = output / model / self.revision
        self.raw_folder = output / model / "raw" / self.revision
        self._waited = False

    @cached_property
    def facts(self) -> RunFacts:
        """Of the checkpoint and its run."""
        from megatron.convert.settings import read_neox_config  # imports torch, which a dry run can do without

        by_neox = self.checkpoint.by_neox
        return read_facts(
            self.checkpoint, read_neox_config(self.checkpoint, self.options.config_files) if by_neox else None
        )

    @cached_property
    def source(self) -> str:
        return fingerprint(self.checkpoint)

    @property
    def plan(self) -> list[str]:
        """What would be done, in words."""
        also = f" and {MAIN}" if self.facts.is_final else ""
        lines = [f"{self.checkpoint.path}: step {self.facts.step} of {self.facts.train_iters or 'an unknown number'}"]
        if self.options.model:
            lines += [f"  convert to {self.folder}", f"  upload to {self.repo}, revision {self.revision}{also}"]
        if self.options.raw:
            lines.append(f"  upload the raw checkpoint to {self.raw_repo}, revision {self.revision}{also}")
        if self.options.model and self.options.tasks:
            lines.append(f"  evaluate {', '.join(self.options.tasks)} on {self.folder}")
        if self.options.model and self.options.delete_local:
            lines.append(f"  delete {self.folder}, once the Hub has all of it")
        return lines

    def is_complete(self) -> bool:
        """Whether the Hub has everything of this checkpoint; nothing large is read or downloaded."""
        return (not self.options.model or self._is_model_complete()) and (
            not self.options.raw or self._is_raw_complete()
        )

    def check(self) -> None:
        """Raise `UserError` when the Hub has another run or checkpoint in the place of this one."""
        for repo, wanted in ((self.repo, self.options.model), (self.raw_repo, self.options.raw)):
            if wanted:
                self._check(repo)

    def _check(self, repo: str) -> None:
        branches = () if self.options.replace else self._branches
        Published(repo, self.options.retry).check(self.experiment, self.source, branches)

    @property
    def _branches(self) -> list[str]:
        """Those that this checkpoint becomes; main last."""
        return [self.revision, *([MAIN] if self.facts.is_final else [])]

    def run(self) -> None:
        """Publish what is not there yet. Raises `UserError` and `MachineError`."""
        skip = self.options.skip_complete
        if self.options.model:
            if skip and self._is_model_complete():
                logger.info(f"{self.repo} ({self.revision}) is complete, nothing is done")
            else:
                self._publish_model()
        if self.options.raw:
            if skip and self._is_raw_complete():
                logger.info(f"{self.raw_repo} ({self.revision}) is complete, nothing is done")
            else:
                self._publish_raw()

    # -- the Hugging Face folder --------------------------------------------------------------------

    def _is_model_complete(self) -> bool:
        there = Published(self.repo, self.options.retry)
        return all(
            there.is_complete(branch, self.source, self.options.conversion, self.options.tasks)
            for branch in self._branches
        )

    def _publish_model(self) -> None:
        self._check(self.repo)
        self._convert()
        self._complete_folder()
        self._push_model()
        if self.options.tasks and self._evaluate():
            self._complete_folder()
            self._push_model()
        if self.options.delete_local:  # push_folder has compared every hash
            shutil.rmtree(self.folder)
            logger.info(f"deleted {self.folder}: the Hub has all of it")

    def _convert(self) -> None:
        """Make the Hugging Face folder, unless it was made from this checkpoint before. It has its record at once."""
        from megatron.convert.hf.export_hf import export  # torch takes seconds to import

        known = Record.read(self.folder)
        if known is not None and known.fits(self.source, self.options.conversion):
            logger.info(f"{self.folder} was converted before")
            return
        _check_ours(self.folder)
        made = self.folder.with_name(f".{self.folder.name}.converted")
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="deepy-") as scratch:
            done = export(
                self.checkpoint.path,
                made,
                config_files=self._config_files(Path(scratch)),
                architecture=self.options.architecture,
                precision=self.options.precision,
                overwrite=True,
            )
        difference = f"{done.largest_difference:.1e}"  # it was compared
        Record(self.experiment, self.source, self.options.conversion, difference).write(made)
        publish(made, self.folder)
        logger.info(f"converted to {self.folder} ({done.architecture}); largest logit difference {difference}")

    def _config_files(self, scratch: Path) -> list[str]:
        """The files of `--config_file`; with `--tokenizer` one that names it and extends them."""
        files = list(self.options.config_files)
        if self.options.tokenizer is None:
            return files
        if self.checkpoint.by_neox and not files:  # it has no other configuration, and files replace it
            files = sorted(map(str, (self.checkpoint.path / layout.CONFIGS).glob("*.y*ml")))
        path = Path(self.options.tokenizer)
        named = str(path.resolve()) if path.exists() else self.options.tokenizer
        config = scratch / "tokenizer.json"
        keys = {"extends": [str(Path(file).absolute()) for file in files]} if files else {}
        text = json.dumps({**keys, "tokenizer_type": "HFTokenizer", "vocab_file": named})
        config.write_text(text, encoding="utf-8")
        return [str(config)]

    def _complete_folder(self) -> None:
        """Write the card and the hashes."""
        known = Record.read(self.folder)
        assert known is not None  # `_convert` wrote it
        difference = None if known.largest_difference is None else float(known.largest_difference)
        write_card(self.folder, self.facts, self._context(difference), self._own_scores())
        replace(known, tasks=self._evaluated_tasks(), files=hash_files(self.folder)).write(self.folder)

    def _context(self, difference: float | None = None) -> CardContext:
        raw = self.raw_repo if self.options.raw else None
        return CardContext(self.repo, raw, self.experiment, self.revision, self.options.base_model, difference)

    def _push_model(self) -> None:
        self._wait()
        if not self.facts.is_final:
            self._push_cards(self.repo, early_card(self._context(), self.facts))
        self._push(self.folder, self.repo, self.revision)
        if self.facts.is_final:
            self._push(self.folder, self.repo, None)

    def _push_cards(self, repo: str, card: str) -> None:
        """Make `main` with a card, unless it has one."""
        if CARD in Published(repo, self.options.retry).list_files():
            return
        with tempfile.TemporaryDirectory(prefix="deepy-") as scratch:
            folder = Path(scratch, "card")
            folder.mkdir()
            write_atomically(folder / CARD, card)
            Record(self.experiment).write(folder)
            self._push(folder, repo, None)

    def _push(self, folder: Path, repo: str, revision: str | None) -> None:
        result(push_folder(folder, repo, revision=revision, private=self.options.private, retry=self.options.retry))

    def _wait(self) -> None:
        """Before the first upload."""
        if self._waited:
            return
        self._waited = True
        delay = self.options.delay
        seconds = random.uniform(0, RANDOM_DELAY) if delay is None else delay
        if seconds:
            until = time.strftime("%d %b %H:%M:%S", time.localtime(time.time() + seconds))
            logger.info(f"waiting {seconds:.0f} s before the upload, until {until}")
            time.sleep(seconds)

    # -- evaluation ---------------------------------------------------------------------------------

    def _evaluated_tasks(self) -> tuple[str, ...]:
        path = self.folder / SCORES
        return tuple(read_json(path).get("tasks", ())) if path.is_file() else ()

    def _own_scores(self) -> Scores | None:
        path = self.folder / SCORES
        return parse_scores(path) if path.is_file() else None

    def _evaluate(self) -> bool:
        """Run lm-evaluation-harness on the folder; whether it has new results. A failure is a warning."""
        if not set(self.options.tasks) - set(self._evaluated_tasks()):
            return False
        with tempfile.TemporaryDirectory(prefix="deepy-") as scratch:
            command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={self.folder}"]
            command += ["--tasks", ",".join(self.options.tasks), "--batch_size", self.options.eval_batch_size]
            command += ["--output_path", scratch]
            if self.options.task_include_path:
                command += ["--include_path", self.options.task_include_path]
            if self.options.wandb:
                named = {**self.options.wandb, "name": f"{self.experiment}_{self.revision}"}
                command += ["--wandb_args", ",".join(f"{key}={value}" for key, value in named.items() if value)]
            logger.info(f"evaluating {', '.join(self.options.tasks)} on {self.folder}")
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
            found = sorted(Path(scratch).rglob("*.json"))
            if done.returncode != 0 or not found or not parse_scores(found[-1]):
                logger.warning(
                    f"the evaluation of {self.revision} failed (exit code {done.returncode}); the model is published "
                    "without its results"
                )
                return False
            self._keep_scores(found[-1])
        return True

    def _keep_scores(self, path: Path) -> None:
        """The results in the folder, without what the harness adds about machine and user."""
        content = read_json(path)
        names = ("results", "groups", "n-shot", "versions", "n-samples")
        kept = {"tasks": list(self.options.tasks), **{name: content[name] for name in names if name in content}}
        write_atomically(self.folder / SCORES, json.dumps(share_value(kept), indent=1) + "\n")

    # -- the raw checkpoint -------------------------------------------------------------------------

    def _is_raw_complete(self) -> bool:
        there = Published(self.raw_repo, self.options.retry)
        return all(there.is_complete(branch, self.source, {}) for branch in self._branches)

    def _publish_raw(self) -> None:
        self._check(self.raw_repo)
        _check_ours(self.raw_folder)
        shutil.rmtree(self.raw_folder, ignore_errors=True)
        self.raw_folder.mkdir(parents=True)
        Record(self.experiment).write(self.raw_folder)  # it is ours, if we are killed now
        stage_raw(self.checkpoint, self.raw_folder)
        Record(self.experiment, self.source, files=hash_files(self.raw_folder)).write(self.raw_folder)
        self._wait()
        self._push_cards(self.raw_repo, raw_card(self._context()))
        self._push(self.raw_folder, self.raw_repo, self.revision)
        if self.facts.is_final:
            self._push(self.raw_folder, self.raw_repo, None)
        shutil.rmtree(self.raw_folder)  # links and small texts; after a failure they serve to resume
        for folder in (self.raw_folder.parent, self.raw_folder.parent.parent):
            with suppress(OSError):  # it holds something
                folder.rmdir()


def _check_ours(folder: Path) -> None:
    """Raise `UserError` unless a folder that is to be replaced is of publishing's making (it has a record) or empty."""
    is_free = not folder.exists() or folder.is_dir() and not any(folder.iterdir())
    if not is_free and Record.read(folder) is None:
        raise UserError(
            f"{folder} exists and was not made by publishing (it has no {RECORD}): choose another --output-dir"
        )


def _identify(path: str) -> str:
    """A file's or folder's name and a hash of what is in it; of an id on the Hub the id."""
    place = Path(path)
    if not place.exists():
        return path
    digest = hashlib.sha256()
    for file in sorted(each for each in place.rglob("*") if each.is_file()) if place.is_dir() else [place]:
        digest.update(file.name.encode() + file.read_bytes())
    return f"{place.name}:{digest.hexdigest()[:16]}"


def check_experiments(names: Names, root: Path) -> None:
    """Raise `UserError` when another run next to that in the folder `root` would get its names."""
    experiment, base = layout.run_name(root), root.parent if layout.run_name(root) == root.name else root.parent.parent
    folders = [folder for path in base.glob("*/") for folder in (path, path / "checkpoints")]
    names.check(experiment, sorted({layout.run_name(each) for each in folders if any(each.glob("global_step*"))}))
