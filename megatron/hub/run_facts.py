"""What a run left next to its checkpoints that others want to know: configuration, losses, data, scores. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.run_metrics import FILE, read_metrics
from megatron.errors import UserError
from megatron.files import read_json
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import rows_per_sample
from megatron.neox_arguments.mixtures import weight_phases

logger = get_logger(__name__)

TRAIN, VALID = "train/lm_loss", "validation/lm_loss"
Scores = Mapping[str, Mapping[str, float]]
"""Metrics by task."""


@dataclass(frozen=True)
class Source:
    """A set of token files: `name` without its folders, `weights` in each phase, `tokens` None where not recorded."""

    name: str
    weights: tuple[float, ...]
    tokens: int | None


@dataclass(frozen=True)
class RunFacts:
    """A checkpoint's place in its run.

    Attributes:
        step, train_iters: optimizer steps, and how many the run has (None: unknown).
        config: flat keys, all of them where the checkpoint has its resolved configuration.
        changed: those that differ from the default.
        tokens: trained on so far; None: unknown.
        losses: by metric (`TRAIN`, `VALID`) and step, up to `step`.
        scores: of tasks, and the step they were measured at; the newest up to `step`.
    """

    step: int
    train_iters: int | None
    config: Mapping[str, Any]
    changed: Mapping[str, Any]
    tokens: int | None
    git: str | None
    versions: Mapping[str, str]
    losses: Mapping[str, Mapping[int, float]]
    sources: tuple[Source, ...]
    scores: Scores = field(default_factory=dict)
    scored_at: int | None = None

    @property
    def is_final(self) -> bool:
        """Whether this is the last checkpoint of the run."""
        return self.step == self.train_iters


def read_facts(checkpoint: Checkpoint, stored: NeoXArgs | None) -> RunFacts:
    """Of a checkpoint and its run folder. `stored`: the configuration that a GPT-NeoX folder keeps, if any."""
    manifest = checkpoint.manifest
    config = dict(manifest.config) or ({} if stored is None else stored.to_dict())
    standard = NeoXArgs.from_saved({}).to_dict()
    train_iters = config.get("train_iters")
    length, batch = config.get("seq_length"), config.get("train_batch_size")
    rows = rows_per_sample({**standard, **config}.get)
    samples = manifest.consumed or (manifest.step * batch if checkpoint.by_neox and isinstance(batch, int) else 0)
    folder = checkpoint.path.parent
    scores, scored_at = _read_scores(folder / "eval_results", manifest.step)
    return RunFacts(
        step=manifest.step,
        train_iters=train_iters if isinstance(train_iters, int) else None,
        config=config,
        changed={key: value for key, value in config.items() if key not in standard or value != standard[key]},
        tokens=samples * rows * length if samples and isinstance(length, int) else None,
        git=manifest.git or config.get("git_hash"),
        versions=manifest.versions,
        losses=read_losses(folder / FILE, manifest.step),
        sources=_read_sources(config),
        scores=scores,
        scored_at=scored_at,
    )


def read_losses(path: Path, until: int) -> dict[str, dict[int, float]]:
    """Losses of `metrics.jsonl` up to a step; of a step that was trained twice the later one. {} without a file."""
    metrics = {step: values for step, values in read_metrics(path).by_step().items() if 0 < step <= until}
    found = {name: {step: v[name] for step, v in metrics.items() if name in v} for name in (TRAIN, VALID)}
    return {name: values for name, values in found.items() if values}


def _read_sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    paths = config.get("train_data_paths") or ([config["data_path"]] if config.get("data_path") else [])
    given = config.get("train_data_weights")
    if given is None and not config.get("weight_by_num_documents"):
        given = [1.0] * len(paths)
    phases = [inner for _, inner in weight_phases(given) or () if len(inner) == len(paths) and math.fsum(inner)]
    names = config.get("train_data_names") or [Path(str(path)).name for path in paths]
    sources = []
    for index, path in enumerate(paths):
        weights = tuple(inner[index] / math.fsum(inner) for inner in phases)
        sources.append(Source(Path(str(names[index])).name, weights, _count_tokens(str(path))))
    return tuple(sources)


def _count_tokens(prefix: str) -> int | None:
    """As the manifest next to the token files says."""
    try:
        tokens = read_json(Path(f"{prefix}.manifest.json")).get("tokens")
    except (OSError, UserError):
        return None
    return tokens if isinstance(tokens, int) else None


def _read_scores(folder: Path, until: int) -> tuple[Scores, int | None]:
    """The newest results in `folder` up to a step."""
    found = {
        int(match[1]): path for path in folder.glob("*.json") if (match := re.match(r"iteration_(\d+)\.j", path.name))
    }
    for step in sorted((step for step in found if step <= until), reverse=True):
        if scores := parse_scores(found[step]):
            return scores, step
    return {}, None


def parse_scores(path: Path) -> Scores:
    """Metrics by task and group in a file of results of lm-evaluation-harness; {} for a file that cannot be read."""
    try:
        content = read_json(path)
    except (OSError, UserError) as error:
        logger.warning(f"no scores: {error}")
        return {}
    scores: dict[str, dict[str, float]] = {}
    for group in ("results", "groups"):
        tasks = content.get(group)
        for task, values in tasks.items() if isinstance(tasks, dict) else ():
            for name, value in values.items():
                metric, _, chosen = name.partition(",")  # `acc,none`: the metric and the filter of answers
                if isinstance(value, float | int) and chosen:
                    scores.setdefault(task, {})[metric + (f" ({chosen})" if chosen != "none" else "")] = float(value)
    return scores
