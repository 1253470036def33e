"""From a dataset of preferences to the files that the recipes of this folder are tokenised from.

Every record has two answers to a prompt, a better and a worse one. Written are, for train, val and test:

    data/pairwise/NAME_dpo_SPLIT_filtered.jsonl   chosen, rejected: both chats (DPO and reward models), and their margin
    data/sft/NAME_sft_SPLIT_filtered.jsonl        messages: the better chat
    data/kto/NAME_kto_SPLIT_filtered.jsonl        messages, reward: both chats, +1 and -1

The names are GPT-NeoX's. Records whose answers are equal are left out and counted; val are the last records of the
training data, which then lacks them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.chat.conversation import BadChat, column, conversation, join_prompt
from megatron.data.hub.dataset_loader import Loader
from megatron.data.hub.records import Request, Stamps
from megatron.data.hub.retry import Backoff
from megatron.data.tokenise.chunks import Fault
from megatron.data.tokenise.flags import start_command
from megatron.errors import UserError, cannot_write, run_cli
from megatron.flags import Parser

EXAMPLES = """
examples:
  # UltraFeedback, as GPT-NeoX's recipes use it (from the Hub)
  python post-training/llama_data.py

  # your own pairs: chosen and rejected are lists of messages, or texts after the prompt in another column
  python post-training/llama_data.py --dataset pairs.jsonl --name mine --val 100

next:     the tokenising commands in post-training/README.md
"""
KINDS = {
    "pairwise": "pairwise/{}_dpo_{}_filtered.jsonl",
    "sft": "sft/{}_sft_{}_filtered.jsonl",
    "kto": "kto/{}_kto_{}_filtered.jsonl",
}


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, epilog=EXAMPLES)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--dataset",
        default="HuggingFaceH4/ultrafeedback_binarized",
        metavar="NAME",
        help="name on the Hub, local file, glob or folder (HuggingFaceH4/ultrafeedback_binarized)",
    )
    group.add_argument("--train-split", metavar="S", help="split to train on (local files: train; else train_prefs)")
    group.add_argument("--test-split", metavar="S", help="split to test on (local files: none; else test_prefs)")
    group.add_argument("--prompt-key", metavar="KEY", help="column of the prompt, where the answers are texts")
    group.add_argument("--chosen-key", default="chosen", metavar="KEY", help="column of the better answer (chosen)")
    group.add_argument("--rejected-key", default="rejected", metavar="KEY", help="column of the worse one (rejected)")
    group.add_argument("--margin-key", metavar="KEY", help="column with the margin (score_chosen - score_rejected)")
    group.add_argument("--skip-bad-lines", action="store_true", help="leave out and count unusable records")
    group = parser.add_argument_group("output")
    group.add_argument("--name", default="llama3", help="start of the names of the files (llama3)")
    group.add_argument("--output", default="data", metavar="DIR", help="folder to write to (data)")
    group.add_argument("--val", type=int, default=1000, metavar="N", help="records to hold out of train (1000)")
    args = parser.parse_args()
    if args.val < 0:
        raise UserError(f"--val {args.val}: give 0 or more")
    local = Path(args.dataset).expanduser().exists() or "*" in args.dataset
    args.train_split = args.train_split or ("train" if local else "train_prefs")
    args.test_split = args.test_split or (None if local else "test_prefs")
    return args


def pairs(args: argparse.Namespace, split: str, left_out: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The usable records of a split: chosen, rejected (lists of messages) and perhaps a margin."""
    loader = Loader(Backoff(), workers=4, batch_size=1000, stamps=Stamps())
    records = loader.load(Request(args.dataset, split=split))
    for record in (one for piece in records.pieces() for one in records.read(piece, None)):
        try:
            if isinstance(record, Fault):
                raise BadChat(record.reason)
            found = pair(record.value, args)
        except BadChat as error:
            if not args.skip_bad_lines:
                raise UserError(f"{record.where}: {error}. (--skip-bad-lines leaves such records out)") from error
            left_out["unusable"] += 1
            continue
        if found["chosen"] == found["rejected"]:
            left_out["equal"] += 1
            continue
        yield found


def pair(record: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Both chats of a record. Raises `BadChat`."""
    found: dict[str, Any] = {}
    for side, key in (("chosen", args.chosen_key), ("rejected", args.rejected_key)):
        value = column(record, key)
        if isinstance(value, str) and args.prompt_key is None:
            raise BadChat(f"key {key!r} is a text: name the column of its prompt (--prompt-key)")
        prompt = None if args.prompt_key is None else column(record, args.prompt_key)
        chat = conversation(value) if prompt is None else join_prompt(prompt, value)
        if not chat.messages:
            raise BadChat(f"key {key!r} has no messages")
        found[side] = chat.messages
    scores = [record.get("score_chosen"), record.get("score_rejected")]
    if args.margin_key is not None:
        found["margin"] = column(record, args.margin_key)
    elif all(isinstance(score, int | float) for score in scores):
        found["margin"] = scores[0] - scores[1]
    return found


class Files:
    """The three files of a split, each under a temporary name until all are whole."""

    def __init__(self, folder: Path, name: str, split: str) -> None:
        self.paths = {kind: folder / path.format(name, split) for kind, path in KINDS.items()}
        self.count = 0
        self._open: dict[str, TextIO] = {}

    def add(self, found: Mapping[str, Any]) -> None:
        """Write a pair. Raises `UserError` or `MachineError`."""
        try:
            for kind, path in self.paths.items():
                if kind not in self._open:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._open[kind] = _temporary(path).open("w", encoding="utf-8")
            self._write("pairwise", found)
            self._write("sft", {"messages": found["chosen"]})
            self._write("kto", {"messages": found["chosen"], "reward": 1})
            self._write("kto", {"messages": found["rejected"], "reward": -1})
        except OSError as error:
            raise cannot_write(error, f"{self.paths['sft'].parent}: cannot be written: {error.strerror}") from error
        self.count += 1

    def _write(self, kind: str, value: Mapping[str, Any]) -> None:
        self._open[kind].write(json.dumps(value, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Give the files their names."""
        for kind, file in self._open.items():
            file.close()
            _temporary(self.paths[kind]).replace(self.paths[kind])

    def remove(self) -> None:
        """Remove what is not whole."""
        for path in self.paths.values():
            _temporary(path).unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def main() -> None:
    """Write the files; print how many records each has."""
    logger = start_command("llama_data")
    args = parse_args()
    left_out = {"equal": 0, "unusable": 0}
    with ExitStack() as stack:
        files = {split: Files(Path(args.output), args.name, split) for split in ("train", "val", "test")}
        for one in files.values():
            stack.callback(one.remove)
        held: deque[dict[str, Any]] = deque()
        for found in pairs(args, args.train_split, left_out):
            held.append(found)
            if len(held) > args.val:
                files["train"].add(held.popleft())
        for found in held:
            files["val"].add(found)
        for found in pairs(args, args.test_split, left_out) if args.test_split else ():
            files["test"].add(found)
        if not files["train"].count:
            raise UserError(
                f"--val {args.val}: there are {files['val'].count} usable records, none is left to train on"
            )
        for one in files.values():
            one.close()
    if any(left_out.values()):
        logger.info(f"left out: {left_out['equal']} with equal answers, {left_out['unusable']} unusable records")
    for one, path in itertools.product(files.values(), KINDS):
        if one.count:
            print(f"{one.paths[path]}: {one.count * (1 + (path == 'kto'))} records")


if __name__ == "__main__":
    run_cli(main)
