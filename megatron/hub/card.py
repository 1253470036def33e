"""The card of a published model: README.md with its metadata, the training curve, and the configuration as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.files import read_json, write_atomically
from megatron.home import installs
from megatron.hub.private import dump_yaml, share_text
from megatron.hub.run_facts import TRAIN, VALID, RunFacts, Scores
from megatron.log import get_logger

logger = get_logger(__name__)

CARD, CURVE, CONFIG = "README.md", "training_curve.png", "deepy_config.yml"
_ROWS = 12  # of the table of losses


@dataclass(frozen=True)
class CardContext:
    """Where a card is read.

    Attributes:
        repo: `owner/name` of the model.
        raw: `owner/name` of its raw checkpoints; None when they are not published.
        experiment: the run's name.
        revision: the branch of this step.
        base_model: what the training began from, an id of the Hub.
        difference: largest difference of any logit between the training code and transformers; None: not compared.
    """

    repo: str
    raw: str | None
    experiment: str
    revision: str
    base_model: str | None = None
    difference: float | None = None


def write_card(folder: Path, facts: RunFacts, context: CardContext, scores: Scores | None = None) -> None:
    """Write card, curve and configuration into the Hugging Face folder. `scores`: measured on it, at this step."""
    write_atomically(folder / CONFIG, dump_yaml(facts.config))
    curve = draw_curve(folder / CURVE, facts.losses)
    measured = [(facts.step, scores)] if scores else []
    if facts.scores and facts.scored_at is not None and (not scores or facts.scored_at != facts.step):
        measured.append((facts.scored_at, facts.scores))
    model = read_json(folder / "config.json")
    about = _about(facts, context, model, count_parameters(folder))
    parts = [
        _metadata(context, model, measured, facts.step),
        f"# {context.repo.partition('/')[2]}",
        f"Step {facts.step:,}" + (f" of {facts.train_iters:,}" if facts.train_iters else "") + " of a training run.",
        _table(("", ""), about),
        "## Use\n\n" + _usage(context),
        _training(facts, curve),
        _data(facts),
        *(_evaluation(step, found) for step, found in measured),
        f"## Configuration\n\nAll keys: [{CONFIG}]({CONFIG}). Those that were set:\n\n<details>\n\n"
        f"```yaml\n{dump_yaml(facts.changed)}```\n\n</details>",
    ]
    write_atomically(folder / CARD, "\n\n".join(part for part in parts if part) + "\n")


def early_card(context: CardContext, facts: RunFacts) -> str:
    """The card of `main` until the last step is there."""
    last = f"step {facts.train_iters:,}" if facts.train_iters else "its last step"
    return (
        f"{_metadata(context, {}, [], facts.step)}\n\n# {context.repo.partition('/')[2]}\n\n"
        f"This branch gets the weights when training has reached {last}. Those of earlier steps have branches of "
        f"their own:\n\n{_usage(context)}\n"
    )


def raw_card(context: CardContext) -> str:
    """The card of the repository of raw checkpoints."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(tags=["deepy", "checkpoint"], base_model=context.base_model)
    return (
        f"---\n{data.to_yaml()}\n---\n\n# Checkpoints of {context.repo.partition('/')[2]}\n\nEach branch "
        f"`global_step<N>` is a checkpoint from which training can be resumed; `main` is the last one, once the run "
        f"has ended. The model for transformers: "
        f"[{context.repo}](https://huggingface.co/{context.repo}).\n\n"
        f"```bash\nhf download {context.raw} --revision {context.revision} --local-dir checkpoints/{context.revision}\n"
        "```\n"
    )


def _metadata(
    context: CardContext, model: Mapping[str, Any], measured: Sequence[tuple[int, Scores]], own_step: int
) -> str:
    """The YAML at the top; only scores of this very step are listed as the model's."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=task,
            dataset_name=task,
            metric_type=metric,
            metric_value=value,
        )
        for step, scores in measured
        if step == own_step
        for task, metrics in scores.items()
        for metric, value in metrics.items()
        if "stderr" not in metric
    ]
    kind = model.get("model_type")
    data = ModelCardData(
        model_name=context.repo.partition("/")[2],
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=context.base_model,
        tags=["deepy", *([str(kind)] if kind else [])],
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _about(facts: RunFacts, context: CardContext, model: Mapping[str, Any], parameters: int) -> list[tuple[str, str]]:
    config = facts.config
    shape = {
        "layers": config.get("num_layers"),
        "hidden size": config.get("hidden_size"),
        "heads": config.get("num_attention_heads"),
        "sequence length": config.get("seq_length"),
    }
    sizes = {"tensor": "model_parallel_size", "pipeline": "pipe_parallel_size"}
    ranks = [f"{name} {config[key]}" for name, key in sizes.items() if config.get(key)]
    batch = config.get("train_batch_size")
    rows = [
        ("experiment", share_text(context.experiment)),
        ("parameters", f"{parameters:,}"),
        ("architecture", ", ".join(map(str, model.get("architectures") or ()))),
        ("shape", ", ".join(f"{name} {value:,}" for name, value in shape.items() if isinstance(value, int))),
        ("stored type", str(model.get("dtype") or "")),
        ("tokens seen", f"{facts.tokens:,}" if facts.tokens else ""),
        ("global batch", f"{batch:,} samples" if isinstance(batch, int) else ""),
        ("ranks in training", ", ".join(ranks)),
        ("code", facts.git or ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
        (
            "largest logit difference",
            "" if context.difference is None else f"{context.difference:.1e} (training code and transformers, fp32)",
        ),
        ("raw checkpoints", f"[{context.raw}](https://huggingface.co/{context.raw})" if context.raw else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _usage(context: CardContext) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{context.repo}", revision="{context.revision}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{context.repo}", revision="{context.revision}")\n```'
    )


def _training(facts: RunFacts, curve: bool) -> str:
    steps = sorted({step for values in facts.losses.values() for step in values})
    if not steps:
        return ""
    evaluated = sorted(facts.losses.get(VALID, {}))
    kept = {steps[0], steps[-1], *_spread(evaluated, _ROWS // 2)}
    kept |= set(_spread([step for step in steps if step not in kept], _ROWS - len(kept)))
    names = {TRAIN: "training loss", VALID: "validation loss"}
    shown = [name for name in names if facts.losses.get(name)]
    rows = []
    for step in sorted(kept):
        values = [facts.losses[name].get(step) for name in shown]
        rows.append((f"{step:,}", *("" if value is None else f"{value:.4f}" for value in values)))
    picture = f"![loss by step]({CURVE})\n\n" if curve else ""
    return f"## Training\n\n{picture}{_table(('step', *(names[name] for name in shown)), rows)}"


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round((index + 0.5) * len(steps) / count - 0.5)] for index in range(count)]


def _data(facts: RunFacts) -> str:
    if not facts.sources:
        return ""
    rows = []
    for source in facts.sources:
        weight = " > ".join(f"{weight:.3g}" for weight in source.weights)
        seen = f"{facts.tokens * source.weights[0]:,.0f}" if facts.tokens and len(source.weights) == 1 else ""
        rows.append((share_text(source.name), weight, f"{source.tokens:,}" if source.tokens else "", seen))
    return f"## Data\n\n{_table(('source', 'weight', 'tokens', 'tokens seen, by weight'), rows)}"


def _evaluation(step: int, scores: Scores) -> str:
    rows = []
    for task, metrics in scores.items():
        for metric, value in metrics.items():
            if "_stderr" not in metric:
                name, _, chosen = metric.partition(" ")
                error = metrics.get(f"{name}_stderr {chosen}".strip())
                rows.append((share_text(task), metric, f"{value:.4f}" + (f" ± {error:.4f}" if error else "")))
    return f"## Evaluation at step {step:,}\n\n{_table(('task', 'metric', 'value'), rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def count_parameters(folder: Path) -> int:
    """Of a Hugging Face folder, from the headers of its safetensors files."""
    import math

    from safetensors import safe_open

    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def draw_curve(path: Path, losses: Mapping[str, Mapping[int, float]]) -> bool:
    """Draw losses over steps into a PNG; False when there are none, or when matplotlib is not installed."""
    if not losses:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info(f"no picture of the training curve: {installs('publish')}")
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for name, values in losses.items():
        axes.plot(list(values), list(values.values()), label=name.partition("/")[0], linewidth=1.2)
    axes.legend()
    axes.grid(alpha=0.3)
    draft = path.with_name(f".{path.name}.tmp")
    FigureCanvasAgg(figure).print_figure(draft, format="png", dpi=110, metadata={"Software": None})
    draft.replace(path)
    return True
