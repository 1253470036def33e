"""One HTML page about some runs, which needs neither a network nor a server: the data and a small script are in it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megatron.checkpoint.run_metrics import LOSS
from megatron.files import number
from megatron.monitor.history import History, spikes, thin

PAGE = Path(__file__).with_name("report_page.html")
POINTS = 2000  # of a metric of a run: more than a screen has columns
PER_PARAMETER = 16  # of the metrics of one kind (norms of each parameter, losses of each task) without a pattern

# title of a section -> the patterns of its metrics; a metric is in the first that fits.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Loss": (LOSS, "train/*loss", "loss/*", "train/*_acc*"),
    "Learning rate": ("train/learning_rate", "train/loss_scale", "train/batch_size", "train/seq_length"),
    "Evaluation": ("validation/*", "test/*", "eval_tasks/*", "eval/*"),
    "Norms": ("train/grad_norm", "*norm*/*", "*/*norm*"),
    "Throughput": ("runtime/*", "timers/*"),
    "Steps without an update": ("train/skipped", "train/nan", "optim/*", "spike/*", "health/*"),
    "Everything else": ("*",),
}
_FEW = ("train/tokens", "train/trained_tokens")  # counts: they are an axis, not a curve


def build_page(
    histories: Sequence[History], patterns: Sequence[str] = (), samples: Sequence[Mapping[str, str]] = ()
) -> str:
    """The page.

    Args:
        patterns: the metrics that it shows, as in `gradient_norms/*`; default: all, of one kind a few.
        samples: of each run, the pages with the samples of a step: {step: address}.
    """
    chosen = choose_metrics(histories, patterns)
    names = short_names(histories)
    data = {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [_run(one, name, {m for ms in chosen.values() for m in ms}) for one, name in zip(histories, names)],
        "samples": [dict(one) for one in samples] if any(samples) else [],
        "sections": [{"title": title, "metrics": metrics} for title, metrics in chosen.items()],
    }
    # Inside a script element nothing is escaped, and only the end of the element would end it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("/*DATA*/", text)


def choose_metrics(histories: Sequence[History], patterns: Sequence[str] = ()) -> dict[str, list[str]]:
    """The metrics of each section that any run has, in the order of their patterns."""
    names = sorted({name for one in histories for name in one.series if name not in single(one)} - set(_FEW))
    if patterns:
        names = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    left, found = dict.fromkeys(names), {}
    for title, wanted in SECTIONS.items():
        of = [name for pattern in wanted for name in list(left) if fnmatch(name, pattern)]
        of = list(dict.fromkeys(of))
        for name in of:
            del left[name]
        found[title] = of if patterns else _few_of_each(of)
    return {title: of for title, of in found.items() if of}


def single(run: History) -> dict[str, float | None]:
    """The metrics of a run that were measured once: numbers of the table, not curves."""
    return {name: points[0].value for name, points in run.series.items() if len(points) == 1 and name != LOSS}


def _few_of_each(names: Sequence[str]) -> list[str]:
    """The first of each kind, which is what stands before the first slash."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.split("/", 1)[0], []).append(name)
    return [name for of in kinds.values() for name in of[:PER_PARAMETER]]


def short_names(histories: Sequence[History]) -> list[str]:
    """The runs' names; with as much of the folder as tells those of the same name apart."""
    names = [one.name for one in histories]
    return [
        name if names.count(name) == 1 else f"{name} ({one.path})" for name, one in zip(names, histories, strict=True)
    ]


def _run(run: History, name: str, metrics: set[str]) -> dict[str, Any]:
    loss, tokens = run.series.get(LOSS, []), run.series.get("train/tokens", [])
    begin = min(run.metrics.times.values(), default=0.0)
    series = {}
    for metric in sorted(metrics & run.series.keys()):
        points = thin(run.series[metric], POINTS)
        series[metric] = {"x": [one.step for one in points], "y": [_rounded(one.value) for one in points]}
    return {
        "name": name,
        "facts": facts(run),
        "texts": [[str(one.get("prompt")), str(one.get("text"))] for one in run.texts],
        "series": series,
        "restarts": run.metrics.restarts,
        "spikes": spikes(loss),
        # axes other than the step: what each step is there
        "axes": {
            "tokens": _axis({one.step: one.value for one in tokens}),
            "hours": _axis({step: (at - begin) / 3600 for step, at in run.metrics.times.items()}),
        },
    }


def _axis(at: dict[int, float | None]) -> dict[str, list[float | None]]:
    points = sorted((step, value) for step, value in at.items() if value is not None)
    kept = points[:: max(1, len(points) // POINTS)]
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return {"x": [step for step, _ in kept], "y": [_rounded(value) for _, value in kept]}


def facts(run: History) -> dict[str, str]:
    """What the table says of a run."""
    repeated = run.metrics.repeated
    status, loss = run.status, [one.value for one in run.series.get(LOSS, []) if one.value is not None]
    evaluated = {
        name.removesuffix("/lm_loss"): min(one.value for one in points if one.value is not None)
        for name, points in run.series.items()
        if name.startswith("validation") and name.endswith("/lm_loss") and any(p.value is not None for p in points)
    }
    tokens = [one.value for one in run.series.get("train/tokens", []) if one.value is not None]
    speed = [one.value for one in run.series.get("runtime/tokens_per_sec", []) if one.value is not None]
    step = max(run.metrics.logged, default=0)
    total = number(status.get("train_iters"))
    found = {
        "state": str(status.get("state", "unknown")) + (f": {status['reason']}" if status.get("reason") else ""),
        "step": f"{step:,}" + (f" of {total:,.0f}" if total else ""),
        "loss": f"{loss[-1]:.4f} (lowest {min(loss):.4f})" if loss else "",
        "best validation": ", ".join(f"{value:.4f} {_set(name)}".strip() for name, value in evaluated.items()),
        "tokens": _large(tokens[-1]) if tokens else "",
        "tokens/s (median)": _large(sorted(speed)[len(speed) // 2]) if speed else "",
        "time": f"{int(run.seconds // 3600)}:{int(run.seconds % 3600 // 60):02}:{int(run.seconds % 60):02}",
        "restarts": str(len(run.metrics.restarts)) + (f" ({repeated} logs repeated)" if repeated else ""),
        "spikes": str(len(spikes(run.series.get(LOSS, [])))),
        "folder": str(run.path),
    }
    found |= {name: "not finite" if value is None else f"{value:.6g}" for name, value in single(run).items()}
    return found | ({"unreadable lines": str(run.damage)} if run.damage else {})


def _set(name: str) -> str:
    return name.removeprefix("validation").removeprefix("/")


def _large(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _rounded(value: float | None) -> float | None:
    """As many digits as a screen can show, for a smaller page."""
    return None if value is None else float(f"{value:.7g}")
