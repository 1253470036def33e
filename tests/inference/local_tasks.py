"""Task files of the harness over a local file: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
    ],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
}
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": " ",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
    # The share of texts without one of these characters.
    "metric_list": [
        {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "regexes_to_ignore": ["[^!-;]"]}
    ],
}


def write_task(
    folder: Path,
    name: str,
    keys: dict[str, Any] | None = None,
    *,
    ending: str = "yaml",
    document: dict[str, Any] | None = None,
    missing: bool = False,
    number: int = 9,
) -> Path:
    """The file of a task over `number` documents. `document`: what all have; `missing`: their file is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    choices = {"choices": [" hello", "l", " world he", "\n"]}
    documents = [
        {
            "question": f"hello world {i * 7919}",
            "answer": i * i % 4 if "other" in name else i % 4,
            **choices,
            **(document or {}),
        }
        for i in range(number)
    ]
    data = folder / f"{name}.jsonl"
    if not missing:
        data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    common = {"task": name, "dataset_path": "json", "test_split": "train"}
    common |= {"dataset_kwargs": {"data_files": str(data), "cache_dir": str(folder / "cache")}}
    path = folder / f"{name}.{ending}"
    path.write_text(yaml.safe_dump({**common, **(keys or CHOICE)}))
    return path


def write_tasks(folder: Path) -> None:
    """Two tasks and their group, one that scores whole texts, one that writes."""
    write_task(folder, "local_choice")
    write_task(folder, "local_other")
    write_task(folder, "local_rolling", ROLLING)
    write_task(folder, "local_writing", WRITING)
    metrics = [{"metric": "acc", "weight_by_size": False}]
    group = {"group": "local_group", "task": ["local_choice", "local_other"], "aggregate_metric_list": metrics}
    (folder / "group.yaml").write_text(yaml.safe_dump(group))
