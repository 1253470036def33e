"""How often the answers of one model beat those of another, by a judge of your own.

    python deepy.py generate.py ours.yml   text_gen_type=input-file -i prompts.jsonl -o ours.jsonl
    python deepy.py generate.py theirs.yml text_gen_type=input-file -i prompts.jsonl -o theirs.jsonl
    python post-training/win_rate.py ours.jsonl theirs.jsonl --prompts prompts.jsonl --plugin judge.py --judge polite

The judge is a reward (documentation/post_training.md): a function of one answer, its prompt and the other fields of its
line; the higher number wins. `rollout.fields["other"]` is the other model's answer, for a judge that compares: it is
asked about both, so that it cannot prefer a place. Answers that it fails on are counted and left out. Printed is JSON,
with the range in which the true rate lies with 95 % (Wilson's).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import UserError, run_cli
from megatron.files import json_lines
from megatron.flags import Parser
from megatron.inference.inputs import read_objects
from megatron.inference.rewards import REWARDS, Rollout, judge_with
from megatron.log import progress
from megatron.neox_arguments.plugin_key import import_named

Z = 1.959964  # of 95 %


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("answers", type=Path, help="what generate.py wrote for the prompts")
    parser.add_argument("against", type=Path, help="the same of the other model")
    parser.add_argument("--prompts", type=Path, required=True, help="the lines of JSON that both answered")
    parser.add_argument("--judge", required=True, metavar="NAME", help="reward of the library (exact) or of a plugin")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE", help="Python file that registers it")
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    import_named(options.plugin, "--plugin")
    reward, files = REWARDS[options.judge], (options.answers, options.against)
    prompts = read_objects(str(options.prompts), "--prompts", REWARDS.row(options.judge).get("reads", ()))
    sides = [read_answers(path, len(prompts), options.prompts) for path in files]
    counts = dict.fromkeys(("wins", "ties", "losses", "failed"), 0)
    asked = list(zip(prompts, *sides, strict=True))
    for line, ((prompt, fields), *answers) in enumerate(progress(asked, what="judging", unit="prompt"), start=1):
        texts = [str(answer["text"]) for answer in answers]
        numbers = []
        for file, text, other, answer in zip(files, texts, reversed(texts), answers, strict=True):
            judge = judge_with(reward, f"{file}:{line}: the judgement {options.judge}")
            rollout = Rollout(prompt, text, bool(answer.get("finished", True)), {**fields, "other": other})
            numbers += judge([rollout])
        counts[outcome(*numbers)] += 1
    judged = len(prompts) - counts["failed"]
    if judged == 0:
        raise UserError(f"--judge {options.judge}: it gave no answer to any of {len(prompts)} prompts a number")
    print(json.dumps(counts | win_rate(counts["wins"] + counts["ties"] / 2, judged)))


def read_answers(path: Path, wanted: int, prompts: Path) -> list[dict[str, Any]]:
    """The records of a file of answers, one for each prompt."""
    try:
        with path.open("rb") as lines:
            found = list(json_lines(lines))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    for number, record in enumerate(found, start=1):
        if record is None or not isinstance(record.get("text"), str):
            raise UserError(f"{path}:{number}: no answer: a line is an object with `text`, as generate.py writes them")
    if len(found) != wanted:
        raise UserError(f"{path}: {len(found)} answers to the {wanted} prompts of {prompts}; generate from that file")
    return [record for record in found if record is not None]


def outcome(ours: float | None, theirs: float | None) -> str:
    """What the numbers of the two answers to a prompt come to, seen from the first."""
    if ours is None or theirs is None:
        return "failed"
    return "wins" if ours > theirs else "losses" if ours < theirs else "ties"


def win_rate(won: float, judged: int) -> dict[str, float]:
    """The rate, and the range of Wilson's score interval."""
    rate, spread = won / judged, Z * Z / judged
    middle = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    return {"win_rate": rate, "low": middle - half, "high": middle + half}


if __name__ == "__main__":
    run_cli(main)
