"""`tools/report.py`: what the page holds, read back from it."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from megatron.api import runs
from megatron.errors import UserError
from megatron.monitor.history import Point, read_history, spikes, thin
from megatron.monitor.report import build_page, choose_metrics, facts
from megatron.monitor.report_cli import main
from tests.callbacks.fakes import out
from tests.monitor.runs import train
from tests.training.runs import corpus
from tests.training.tiny import LLAMA

pytestmark = pytest.mark.cpu


def page_data(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def write(folder: Path, lines: list[Any], **status: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (folder / "status.json").write_text(json.dumps({"version": 1, "state": "ended", **status}))
    return folder


def logs(steps: range, loss: float = 2.0, begin: float = 1000.0) -> list[dict[str, Any]]:
    return [{"step": s, "time": begin + s, "train/lm_loss": loss, "train/tokens": 64.0 * s} for s in steps]


def test_a_real_run_that_was_killed_and_resumed_is_one_curve(tmp_path: Path, capsys: Any) -> None:
    """Ten steps, killed after the seventh; the checkpoint was of step 4."""
    run = tmp_path / "run"
    train(run, outs=[out(float(10 - i)) for i in range(7)], train_iters=7)
    train(run, outs=[out(float(i)) for i in range(6)], start=4)
    history = read_history(run)
    losses = [(one.step, one.value) for one in history.series["train/lm_loss"]]
    assert losses == [(1, 10), (2, 9), (3, 8), (4, 7), (5, 0), (6, 1), (7, 2), (8, 3), (9, 4), (10, 5)]
    assert (history.metrics.restarts, history.metrics.repeated, history.damage) == ([4], 3, 0)
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"{run}/report.html: 1 run," in shown
    page = (run / "report.html").read_text()
    (one,) = page_data(page)["runs"]
    assert one["series"]["train/lm_loss"]["y"] == [10, 9, 8, 7, 0, 1, 2, 3, 4, 5] and one["restarts"] == [4]
    assert one["facts"]["step"] == "10 of 10" and one["facts"]["restarts"] == "1 (3 logs repeated)"
    assert one["facts"]["best validation"].startswith("3.0000") and one["facts"]["loss/init"] == "10"  # measured once
    assert not any("loss/init" in section["metrics"] for section in page_data(page)["sections"])
    titles = [section["title"] for section in page_data(page)["sections"]]
    assert titles[:2] == ["Loss", "Learning rate"] and {"Evaluation", "Norms", "Throughput"} <= set(titles)


def test_the_page_asks_for_nothing_and_text_of_a_run_ends_no_element(tmp_path: Path) -> None:
    run = write(tmp_path / "run", logs(range(1, 3)), reason="</script><img src=x> & so on", state="failed")
    texts = [{"step": step, "prompt": "a", "text": f"</script>{step}"} for step in (1, 2)]
    (run / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    page = build_page([read_history(run)])
    assert page_data(page)["runs"][0]["texts"] == [["a", "</script>2"]]
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(
        r"<(img|link|iframe)|@import|url\(|fetch\(|XMLHttpRequest|src=(?!x>)", page.split("<script id")[0]
    )
    assert page.count("</script>") == 2
    assert page_data(page)["runs"][0]["facts"]["state"] == "failed: </script><img src=x> & so on"


def test_runs_of_the_same_name_are_told_apart_and_laid_over_each_other(tmp_path: Path) -> None:
    for which in ("a", "b"):
        write(tmp_path / which / "run", logs(range(1, 4), loss=len(which)))
    assert main([str(tmp_path), "-o", str(tmp_path / "new" / "all.html"), "--metrics", "train/lm*"]) == 0
    data = page_data((tmp_path / "new" / "all.html").read_text())
    assert len({run["name"] for run in data["runs"]}) == 2
    assert data["sections"] == [{"title": "Loss", "metrics": ["train/lm_loss"]}]


def test_older_runs_without_lines_for_starts(tmp_path: Path) -> None:
    lines = [*logs(range(1, 8)), {"step": 4, "validation/lm_loss": 5.0}, *logs(range(5, 9), 1.0, 5000.0)]
    history = read_history(write(tmp_path / "run", lines))
    assert (
        history.metrics.restarts == [4]
        and [one.value for one in history.series["train/lm_loss"]] == [2.0] * 4 + [1.0] * 4
    )
    assert history.seconds == 3 + 3  # not the 4000 between the starts
    assert [one.step for one in history.series["validation/lm_loss"]] == [4]


def test_logs_of_steps_that_forget_alone_are_logs(tmp_path: Path) -> None:
    forgets = {"time": 3.0, "train/learning_rate": 0.5, "train/ga_actual_loss": 1.5}
    lines = [
        *logs(range(1, 3)),
        {"step": 3, **forgets},
        {"step": 2, "time": 9.0, "start": True},
        {"step": 3, **forgets},
    ]
    history = read_history(write(tmp_path / "run", lines))
    assert history.metrics.repeated == 1 and facts(history)["step"] == "3"


def test_what_is_damaged_is_counted_and_a_folder_without_metrics_is_a_sentence(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [*logs(range(1, 3)), ["no", "object"], {"no": "step"}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lm_loss": null}\n{"step": 4, "tra')
    history = read_history(run)
    assert history.damage == 3 and history.series["train/lm_loss"][-1] == Point(3, None)
    with pytest.raises(UserError, match=f"{tmp_path}/none: .*metrics.jsonl"):
        main([str(tmp_path / "none")])


def test_spikes_are_those_of_numpy() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(3.0, 0.1, 600)
    values[[100, 101, 400]] += 2.0
    values[10] += 2.0  # too early to tell
    expected = [
        i
        for i in range(16, 600)
        if values[i] > values[max(0, i - 128) : i].mean() + 6 * values[max(0, i - 128) : i].std()
    ]
    points = [Point(i, float(v)) for i, v in enumerate(values)]
    points[300] = Point(300, None)
    assert set(expected) >= {100, 400}
    assert spikes(points) == sorted([*expected, 300])
    assert spikes([Point(i, 2.0) for i in range(99)]) == []


def test_thinning_keeps_ends_peaks_and_gaps() -> None:
    values: list[float | None] = [math.sin(i / 50) for i in range(100_000)]
    values[31_234], values[77_777], values[50_001] = 9.0, -9.0, None
    few = thin([Point(i, v) for i, v in enumerate(values)], 2000)
    assert len(few) <= 2001 and [few[0].step, few[-1].step] == [0, 99_999]
    assert {Point(31_234, 9.0), Point(77_777, -9.0), Point(50_001, None)} <= set(few)


def test_a_large_run_is_read_in_seconds_into_a_small_page(tmp_path: Path) -> None:
    lines = [
        {"step": s, "time": s, "train/lm_loss": 2.0, **{f"gradient_norms/{i}": 1.0 for i in range(40)}}
        for s in range(3000)
    ]
    began = time.process_time()
    history = read_history(write(tmp_path / "run", lines))
    page = build_page([history])
    assert time.process_time() - began < 20 and len(page) < 2e6
    assert len(choose_metrics([history])["Norms"]) == 16
    assert len(choose_metrics([history], ["gradient_norms/*"])["Norms"]) == 40


def test_pages_of_the_samples_of_steps_are_linked(tmp_path: Path, capfd: Any) -> None:
    """In a process of its own, by the run's resolved config; without its data the run and the step are named."""
    run = write(tmp_path / "run", logs(range(1, 4)))
    data = corpus(tmp_path / "data")
    keys = {**LLAMA, "train_data_paths": [data], "tokenizer_type": "CharLevelTokenizer", "train_iters": 4}
    (run / "resolved.yml").write_text(yaml.safe_dump(keys))
    assert main([str(run), "--iterations", "2", "3"]) == 0
    (pages,) = page_data((run / "report.html").read_text())["samples"]
    assert list(pages) == ["2", "3"]
    for step, page in pages.items():
        assert f"step {int(step) - 1} (iteration {step} of the log)" in (run / page).read_text()
    with pytest.raises(UserError, match=rf"(?s)--iterations: .* iteration 9 of {run} cannot be shown: .*steps 0\.\.3"):
        main([str(run), "--iterations", "9"])


def test_runs_print_as_tables(tmp_path: Path) -> None:
    for name, loss in (("a", 2.5), ("<b>", 1.25)):
        write(tmp_path / name, logs(range(1, 4), loss), step=3, train_iters=3)
    found = runs(tmp_path)
    assert {row.loss for row in found} == {2.5, 1.25}
    title, *lines = repr(found).splitlines()
    assert title.split()[:4] == ["job", "state", "experiment", "iteration"] and len(lines) == 2
    page = ElementTree.fromstring(found._repr_html_())
    assert [len(line) for line in page] == [len(page[0])] * 3
    assert {"2.5000", "1.2500"} < {cell.text for line in page for cell in line}
