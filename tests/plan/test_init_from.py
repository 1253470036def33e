"""A run that begins from another's checkpoint, as `--dry-run`, `--prepare` and inspect.py see it; its documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.plan.inspect_run import open_run
from megatron.plan.prepare import prepare
from tests.plan.test_planner import dry_run, rows, section
from tests.training.runs import KEYS, Report, corpus, digest, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

TEXT = (Path(__file__).resolve().parents[2] / "documentation" / "runs.md").read_text()
EXAMPLES = [text for text in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL) if "init_from" in text]
NAMES = ("web", "code", "math")
STEPS = 4


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Report]:
    """(folder of what the text speaks of, keys of phase 1, report of it); it trained on two of three sources."""
    folder = tmp_path_factory.mktemp("phases")
    (folder / "data").mkdir()
    for seed, name in enumerate(NAMES):
        made = corpus(folder / name, seed)
        for suffix in (".bin", ".idx"):
            (folder / "data" / f"{name}_text_document{suffix}").symlink_to(made + suffix)
    keys = {
        **KEYS,
        **Layout().keys(),
        "train_data_paths": [f"{folder}/data/{name}_text_document" for name in NAMES[:2]],
        "train_data_weights": [2, 1],
        "train_iters": STEPS,
    }
    save = str(folder / "runs" / "phase1" / "checkpoints")
    report = run({**keys, "save": save})[0]
    assert report.exit_code == 0
    return folder, keys, report


def config(first: tuple[Path, dict[str, Any], Report], path: Path, **more: Any) -> Path:
    """A YAML file of phase 1's keys and some more."""
    path.write_text(yaml.safe_dump({**first[1], **more}))
    return path


def init(first: tuple[Path, dict[str, Any], Report], **inner: Any) -> dict[str, Any]:
    return {"path": str(first[0] / "runs" / "phase1" / "checkpoints"), **inner}


@pytest.mark.parametrize("number", range(5))
def test_every_example_dry_runs_and_trains(first: Any, tmp_path: Path, monkeypatch: Any, number: int) -> None:
    """With steps of this test: phase 1 ended at 4 where the text says 1000, and 200 more are 2."""
    monkeypatch.chdir(first[0])
    example = EXAMPLES[number].replace("1000", str(STEPS)).replace("1200", str(STEPS + 2))
    keys = yaml.safe_load(re.sub(r"train_iters: \d\d\d", "train_iters: 2", example))
    assert len(EXAMPLES) == 5
    keys = {"lr_decay_iters": None, **keys}
    written = config(first, tmp_path / "run.yml", **keys)
    text = dry_run(written)
    told = [line for line in section(text, "checkpoints") if line.startswith("starting from runs/phase1")]
    assert len(told) == 1
    report = run({**first[1], **keys, "save": str(tmp_path / "save")})[0]
    assert report.exit_code == 0 and len(report.steps) == 2, report.error
    if "cooldown" in example:
        assert report.lr == pytest.approx([1e-3, 5e-4])


def test_the_message_looks_as_in_the_text(first: Any, tmp_path: Path) -> None:
    shown = re.search(r"```\n(starting from .*?)\n```", TEXT, flags=re.DOTALL).group(1)
    text = dry_run(config(first, tmp_path / "run.yml", init_from=init(first), train_iters=9, save="x"))

    def shape(line: str) -> str:
        return re.sub(r"from \S*runs", "from runs", re.sub(r"\d+(,\d+)?", "N", line))

    told = section(text, "checkpoints")
    assert shape(shown) in [shape(line) for line in told]
    assert next(line for line in told if line.startswith("saves to ")).endswith("after steps 6, 9 (2 checkpoints)")


def test_the_dry_run_counts_what_was_read(first: Any, tmp_path: Path) -> None:
    """Samples and weights of both runs, the border at the first step of this one."""
    more = {
        "train_data_paths": [f"{first[0]}/data/{name}_text_document" for name in NAMES],
        "train_data_weights": [1, 1, 2],
    }
    for step, iters in (("continue", 6), ("restart", 2)):
        text = dry_run(config(first, tmp_path / "run.yml", init_from=init(first, step=step), train_iters=iters, **more))
        table = rows(text, "data", "role")[:3]
        samples = [float(row[-3]) for row in table]
        assert samples == pytest.approx([32 * 2 / 3 + 4, 32 / 3 + 4, 8], abs=1)
    anew = init(first, data="restart")
    text = dry_run(config(first, tmp_path / "run.yml", init_from=anew, train_iters=6, **more))
    assert [float(row[-3]) for row in rows(text, "data", "role")[:3]] == [4, 4, 8]


@pytest.mark.parametrize(
    ("inner", "more", "message"),
    [
        ({}, {"train_iters": 4}, r"train_iters: 4 .*step 4\b"),
        ({"iteration": 2}, {}, "iteration 2 in "),
        ({}, {"seed": 5}, r"data order: seed(.|\n)*init_from=.*data: restart"),
        (
            {},
            {"train_data_weights": None, "train_data_paths": None, "data_path": "web_text_document"},
            "code_text_document: is no longer among the 1 sources",
        ),
        (
            {"data": "restart"},
            {"optimizer": {"type": "sgd"}},
            r"optimizer: optimizer_type(.|\n)*init_from=.*optimizer: reset",
        ),
        ({"data": "restart", "optimizer": "reset"}, {"num_layers": 3}, "architecture: num_layers"),
        (
            {"data": "restart", "optimizer": "reset"},
            {"use_checkpoint_lr_scheduler": True},
            "use_checkpoint_lr_scheduler",
        ),
        ({}, {"load": "elsewhere"}, "load: init_from is set too"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_any_rank_starts(
    first: Any, tmp_path: Path, monkeypatch: Any, inner: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(first[0] / "data")
    written = config(first, tmp_path / "run.yml", **{"init_from": init(first, **inner), "train_iters": 8, **more})
    with pytest.raises(UserError, match=message):
        dry_run(written)
    if "data_path" not in more:
        with pytest.raises(UserError, match=message):
            prepare(NeoXArgs.from_files([str(written)]), 1, "train.py")


def test_another_tokenizer_is_refused(first: Any, tmp_path: Path) -> None:
    """Of the same kind, with other ids: only the fingerprint in the checkpoint shows it."""
    from tokenizers import Tokenizer, models

    for name, vocabulary in (
        ("one", {"<|endoftext|>": 0, "a": 1, "b": 2}),
        ("two", {"<|endoftext|>": 0, "b": 1, "a": 2}),
    ):
        Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>")).save(str(tmp_path / f"{name}.json"))
    letters = {
        "tokenizer_type": "HFTokenizer",
        "train_data_paths": [ids_below_three(tmp_path)],
        "train_data_weights": None,
    }
    save = str(tmp_path / "one")
    one = {**first[1], **letters, "vocab_file": str(tmp_path / "one.json"), "train_iters": 1}
    assert run({**one, "save": save})[0].exit_code == 0
    two = {**one, "vocab_file": str(tmp_path / "two.json"), "train_iters": 2}
    for inner in ({}, {"data": "restart", "optimizer": "reset", "step": "restart"}):
        keys = {**two, "init_from": {"path": save, **inner}}
        refused = run(keys)[0]
        assert refused.exit_code == 2 and "trained with another tokenizer" in refused.error
        (tmp_path / "two.yml").write_text(yaml.safe_dump(keys))
        with pytest.raises(UserError, match="trained with another tokenizer"):
            dry_run(tmp_path / "two.yml")
        with pytest.raises(UserError, match="trained with another tokenizer"):
            prepare(NeoXArgs.from_files([str(tmp_path / "two.yml")]), 1, "train.py")


def ids_below_three(folder: Path) -> str:
    from tests.data.corpus import write

    return write(folder / "letters", [[1 + (i * i + d) % 2 for i in range(40)] + [0] for d in range(20)])


@pytest.mark.parametrize("step", ["continue", "restart"])
def test_what_is_prepared_is_what_the_run_reads(first: Any, tmp_path: Path, step: str) -> None:
    begun = STEPS if step == "continue" else 0
    keys = {"init_from": init(first, step=step), "train_iters": begun + 200, "data_cache_path": str(tmp_path / "cache")}
    written = config(first, tmp_path / "run.yml", lr_decay_style="constant", **keys)
    text = prepare(NeoXArgs.from_files([str(written)]), 1, "train.py")
    assert "data continued after 32 samples" in text
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert made
    report = run({**first[1], "lr_decay_style": "constant", **keys, "exit_interval": begun + 2})[0]
    assert report.exit_code == 0 and len(report.steps) == 2
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == made


@pytest.mark.parametrize("data", ["continue", "restart"])
@pytest.mark.parametrize("step", ["continue", "restart"])
def test_inspect_shows_what_the_run_reads(first: Any, tmp_path: Path, step: str, data: str) -> None:
    """Before the first start, and behind a checkpoint of its own; in batches of another size than phase 1's."""
    begun = STEPS if step == "continue" else 0
    keys = {
        "init_from": init(first, step=step, data=data),
        "train_batch_size": 4,
        "train_iters": begun + 4,
        "save": str(tmp_path / "save"),
        "checkpoint_factor": 1,
        "lr_decay_style": "constant",
    }
    written = config(first, tmp_path / "run.yml", **keys)
    whole = run({**first[1], **keys, "save": None})[0]
    for stop in (0, 2):
        if stop:
            assert run({**first[1], **keys, "exit_interval": begun + 2})[0].steps == [begun + 1, begun + 2]
        train = open_run(NeoXArgs.from_files([str(written)]), 1).role("train")
        numbers = list(train.samples_of(range(begun, begun + 4)))
        inputs = [torch.tensor(train.dataset[number].tokens[:-1].astype("int64")) for number in numbers]
        assert [digest(one) for one in inputs] == [sample for step in whole.tokens for sample in step]
        assert [train.place(number).step for number in numbers[::4]] == list(range(begun, begun + 4))
        assert train.last_step == begun + 3
        if data == "continue":
            assert numbers[0] == 32
            with pytest.raises(UserError, match=f"run started at step {begun}, after 32 samples"):
                train.place(0)
        if begun:
            with pytest.raises(UserError, match=f"step 3: .* at step {begun}"):
                list(train.samples_of(range(3, 4)))
