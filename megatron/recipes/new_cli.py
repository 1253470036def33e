"""`deepy new`: from a folder of text to a run that trains a model of it."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.data.tokenise.flags import start_command
from megatron.data.tokenise.inputs import find_inputs
from megatron.errors import UserError, run_cli
from megatron.files import write_atomically
from megatron.flags import Parser
from megatron.home import HOME
from megatron.neox_arguments.lengths import parse_count
from megatron.neox_arguments.yaml_files import CONFIG_DIR
from megatron.recipes import scaling
from megatron.recipes.corpus import RECORD, Corpus, Source, make_tokenizer, open_tokenizer, tokenise
from megatron.recipes.run_file import Places, sections, write_yaml
from megatron.recipes.scaling import Training, plan_training, run_tokens
from megatron.recipes.shapes import FAMILIES, Shape, read_recipe, scaled, width_for
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.recipes.machine import Machine

EXAMPLES = """
examples:
  # a folder of .txt, .md, .py, ... files (each a document), or .jsonl, .jsonl.zst, .parquet with a key "text"
  deepy new --data ./texts --family llama --size 60M -o run.yml
  deepy train run.yml

  # what this machine can do in two hours
  deepy new --data ./texts --family qwen3 --size 20M --hours 2 -o run.yml

  # a tokenizer that exists, another key, 100 tokens a parameter
  deepy new --data corpus.jsonl --key content --tokenizer tokenizer.json --size 125M --tokens 100x -o run.yml

--size is the one dial: depth, width, vocabulary, context, batch, learning rate, weight decay, warm-up and length follow
from it, the data and the machine, by published rules that the file names. Called again after it was stopped, the
command continues. The file is yours to edit.
"""


@dataclass(frozen=True)
class Asked:
    """Flags, read: a number of tokens for `tokens`, or so many `per_parameter`; `valid` is a share."""

    size: int
    tokens: float | None
    per_parameter: float | None
    valid: float


def parser() -> Parser:
    """The flags."""
    found = Parser(prog="deepy new", description=__doc__, epilog=EXAMPLES)
    add = found.add_argument
    add("--data", required=True, nargs="+", metavar="PATH", help="folders or files of text")
    add("--size", required=True, metavar="N", help="parameters, embeddings among them: 300K, 60M, 1.3B")
    add("-o", "--output", type=Path, default=Path("run.yml"), metavar="FILE", help="the run's YAML (default: run.yml)")
    add("--family", default="llama", choices=list(FAMILIES), help="the kind of network (default: llama)")
    add("--tokens", metavar="N", help="length: 2B tokens, or 20x the parameters (default: 20x, at most four epochs)")
    add("--hours", type=float, metavar="H", help="at most what this machine trains in so many hours")
    add(
        "--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json or .model file, or a folder (default: trained)"
    )
    add("--vocab-size", type=int, metavar="N", help="entries of a trained tokenizer (default: by the size)")
    add("--valid", default="1%", metavar="SHARE", help="share of the documents for validation (default: 1%%)")
    add("--key", default="text", metavar="KEY", help="key or column of the text in .jsonl and .parquet (default: text)")
    add("--skip-bad-lines", action="store_true", help="leave out and count unusable records")
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenise (default: 1, on all cores)")
    add("--seed", type=int, default=1234, metavar="N", help="of the split and the run (default: 1234)")
    add("--force", action="store_true", help="replace an existing file")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make the data, plan the run, write the file. Returns the exit code."""
    args = parser().parse_args(argv)
    logger = start_command("new")
    asked = _read(args)
    output: Path = args.output
    if output.exists() and not args.force:
        raise UserError(f"{output} exists; --force replaces it, -o names another")
    if output.suffix not in (".yml", ".yaml"):
        raise UserError(f"-o {output}: give a name that ends with .yml")
    folder = output.with_suffix("")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UserError(f"-o {output}: {there} is no folder to write in")
    files = find_inputs(args.data, texts=True, without=_made(args.data, folder))
    source = Source(files, args.key, args.skip_bad_lines)
    base = read_recipe(args.family, HOME / "configs")
    tokenizer = _tokenizer(args, asked, source, base, folder)
    shape = scaled(base, asked.size, tokenizer.vocab_size)
    corpus = tokenise(source, tokenizer, folder / "data", valid=asked.valid, seed=args.seed, workers=args.workers)
    from megatron.recipes.machine import look  # it loads torch, which help and wrong input can do without

    machine = look(shape.keys["hidden_size"], shape.keys["seq_length"])
    training = _plan(asked, shape, corpus, machine, args.hours)
    machine = machine.dividing(training.batch)
    text = _write(args, shape, training, corpus, machine, tokenizer)
    write_atomically(output, text)
    for line in _advice(asked, shape, training, corpus, machine):
        logger.info(line)
    named = shlex.quote(str(output))
    sys.stdout.write(
        f"{output} is written. Next:\n"
        f"  deepy train {named} --dry-run\n"
        f"  deepy train {named}\n"
        f'  deepy generate {named} --prompt "Once"\n'
    )
    return 0


def _made(data: Sequence[str], folder: Path) -> list[Path]:
    """What this command made below the folders of `data`, for the run in `folder` and others, and what these wrote."""
    marks = (mark for name in data if os.path.isdir(name) for mark in Path(name).rglob(RECORD))
    runs = {folder, *(mark.parents[1] for mark in marks)}
    made = (f"{run}{end}" for run in runs for end in (".yml", ".yaml", "/tokenizer", "/data", "/checkpoints"))
    return [Path(os.path.realpath(one)) for one in made]


def _read(args: argparse.Namespace) -> Asked:
    size = _number(args.size, "--size", "params")
    tokens = per_parameter = None
    if args.tokens is not None:
        times = re.fullmatch(r"([\d.]+)x", args.tokens.strip())
        if times:
            per_parameter = _number(times[1], "--tokens", "")
        else:
            tokens = _number(args.tokens, "--tokens", "token")
    if args.hours is not None and not args.hours > 0:
        raise UserError(f"--hours {args.hours:g}: give a number above 0")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: give at least 1")
    share = args.valid.strip()
    try:
        valid = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        valid = -1
    if not 0 <= valid <= 0.5:
        raise UserError(f"--valid {args.valid}: give a share from 0 to 50%, such as 1% or 0.01")
    return Asked(int(size), tokens, per_parameter, valid)


def _number(text: str, flag: str, unit: str) -> float:
    try:
        return parse_count(text, unit)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from error


def _tokenizer(
    args: argparse.Namespace, asked: Asked, source: Source, base: Mapping[str, Any], folder: Path
) -> Tokenizer:
    """The one given, or one of a size that fits that of the model and of the corpus."""
    if args.tokenizer is not None:
        if args.vocab_size is not None:
            raise UserError(f"--vocab-size {args.vocab_size} with --tokenizer: a tokenizer that exists has its size")
        return open_tokenizer(args.tokenizer)
    width = round(width_for(base, asked.size))
    fitting = scaling.vocabulary_size(asked.size, width, source.text_bytes)
    size = fitting if args.vocab_size is None else args.vocab_size
    return make_tokenizer(source, folder / "tokenizer", size)


def _plan(asked: Asked, shape: Shape, corpus: Corpus, machine: Machine, hours: float | None) -> Training:
    """The training. Raises `UserError` when there is no sample in the data."""
    parameters, context = shape.count.total, shape.keys["seq_length"]
    if corpus.train_tokens <= context:
        raise UserError(
            f"--data: {corpus.train_tokens:,} tokens are less than one sample of {context}; a model of {parameters:,} "
            f"parameters wants about {scaling.TOKENS_PER_PARAMETER * parameters / scaling.MOST_EPOCHS:,.0f}"
        )
    wanted = asked.per_parameter * parameters if asked.per_parameter else asked.tokens
    limit = hours * 3600 * machine.flops / shape.flops if hours else None
    tokens = run_tokens(parameters, corpus.train_tokens, wanted, limit)
    return plan_training(parameters, shape.outside_embeddings, context, tokens, corpus.train_tokens)


def _write(
    args: argparse.Namespace,
    shape: Shape,
    training: Training,
    corpus: Corpus,
    machine: Machine,
    tokenizer: Tokenizer,
) -> str:
    """The text of the YAML."""
    output: Path = args.output
    valid_samples = corpus.valid_tokens // training.context
    vocab_file = args.tokenizer.absolute() if args.tokenizer else f"{CONFIG_DIR}/{output.stem}/tokenizer"
    places = Places(
        data_path=f"{CONFIG_DIR}/{output.stem}/data/{Path(corpus.prefix).name}",
        split=corpus.split,
        tokenizer_type=tokenizer.name,
        vocab_file=str(vocab_file),
        save=f"{CONFIG_DIR}/{output.stem}/checkpoints",
    )
    millions = f"{shape.count.total / 1e6:.3g} million parameters"
    head = f"{millions} of the family {args.family}, planned by `deepy new`.\n\n  deepy train {output.name}"
    found = sections(shape, training, machine, valid_samples)
    found["data"] = {"seed": args.seed, "data_impl": "mmap"}
    return write_yaml(found, _comments(args.family, shape, training, corpus, machine), head, places)


def _comments(family: str, shape: Shape, training: Training, corpus: Corpus, machine: Machine) -> dict[str, str]:
    """What stands above each section."""
    seconds = training.tokens * shape.flops / machine.flops
    return {
        "network": f"network: configs/{FAMILIES[family]} made wider and deeper, depth as width^(2/3): from LLaMA-60M "
        "(arXiv 2307.05695) to LLaMA-7B (arXiv 2302.13971)",
        "training": "optimizer: rate by Step Law (arXiv 2503.04715), of AdamW, which Muon shares (arXiv 2502.16982); "
        "decay by Power Lines (arXiv 2505.13738), warm-up by arXiv 1910.04209, then in a straight line to zero (arXiv "
        "2502.15938)",
        "length": f"{training.batch} samples of {training.context} tokens per step (Step Law), "
        f"{training.tokens / 1e6:,.3g}M tokens in all: {training.tokens / shape.count.total:.3g} per parameter (20 "
        f"make the most of compute, arXiv 2203.15556), {training.epochs:.3g} epochs (up to 4 are nearly as good as new "
        "text, arXiv 2305.16264)",
        "machine": f"machine: {machine.name}, about {_duration(seconds)}. On others set precision and micro-batch; "
        "batch and result stay the same at any number of ranks",
        "evaluation": "validation, checkpoints, logging",
        "data": f"data: {corpus.train_tokens:,} tokens to train on; the last {corpus.valid_documents:,} documents, or "
        f"pieces of long ones, {corpus.valid_tokens:,} tokens, validate (all lie in an order of chance, so this is a "
        "fair sample)",
    }


def _advice(asked: Asked, shape: Shape, training: Training, corpus: Corpus, machine: Machine) -> list[str]:
    """What was planned in a few lines, and what is unusual about it."""
    parameters, tokens = shape.count.total, training.tokens
    seconds = tokens * shape.flops / machine.flops
    keys = shape.keys
    embeddings = (shape.count.embedding + shape.count.head) / parameters
    lines = [
        f"model: {parameters / 1e6:,.4g}M parameters, {keys['num_layers']} layers of {keys['hidden_size']}, "
        f"{shape.vocab_size:,} tokens, context {training.context}",
        f"data: {corpus.train_tokens:,} tokens to train on, {corpus.valid_tokens:,} to validate",
        f"training: {training.steps:,} steps of {training.batch} samples, {tokens:,} tokens "
        f"({tokens / parameters:.3g} per parameter, {training.epochs:.3g} epochs), about {_duration(seconds)} "
        f"on {machine.name}",
    ]
    usual = scaling.TOKENS_PER_PARAMETER
    if tokens < 0.5 * usual * parameters:
        fits = f"--size {_size(tokens / usual)} fits data and time; or " if tokens / usual > 2e5 else ""
        lines.append(
            f"little: {tokens / parameters:.2g} tokens per parameter, where {usual:g} make the most of the compute: "
            f"{fits}give more text, tokens or hours"
        )
    if training.epochs > 1.1 * scaling.MOST_EPOCHS:
        lines.append(
            f"often: {training.epochs:.3g} epochs; beyond {scaling.MOST_EPOCHS:g}, text read again teaches little "
            "(watch the validation loss)"
        )
    if embeddings > 0.5:
        lines.append(
            f"embeddings are {embeddings:.0%} of the parameters: a tokenizer of fewer than {shape.vocab_size:,} "
            "tokens leaves more to the layers"
        )
    if abs(math.log(parameters / asked.size)) > 0.1:
        lines.append(f"size: {parameters:,} is the nearest to {asked.size:,} that this family and vocabulary have")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 90:
        return "a minute"
    if seconds < 5400:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.3g} hours" if seconds < 48 * 3600 else f"{seconds / 86400:.3g} days"


def _size(parameters: float) -> str:
    unit, name = next(
        (unit, name) for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if parameters >= unit or unit == 1e3
    )
    return f"{float(f'{parameters / unit:.2g}'):g}{name}"


if __name__ == "__main__":
    run_cli(main)
