"""Tokenise chats into `.bin`/`.idx` datasets, with labels that train only the model's turns."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.chat.columns import Columns, find_columns
from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import load_template
from megatron.data.chat.tokenizer import chat_tokenizer, tokenizer_folder
from megatron.data.tokenise.command import Result, tokenise_files, trained_share, write_metadata
from megatron.data.tokenise.flags import add_output_arguments, check_output, command_options, start_command
from megatron.data.tokenise.inputs import find_inputs
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.view.decode import bracket_trained
from megatron.errors import UserError, run_cli
from megatron.flags import Parser

EXAMPLES = """
examples:
  # chats under "messages" (found in the data): data/chats_messages_document and data/chats_messages_label_document
  python tools/datasets/preprocess_data_with_chat_template.py --input chats.jsonl --output-prefix data/chats \\
      --tokenizer-path models/my-tokenizer --workers 8

  # prompt and answer in two columns of a parquet file
  python tools/datasets/preprocess_data_with_chat_template.py --input qa.parquet --prompt-key question \\
      --completion-key answer --output-prefix data/qa --tokenizer-path models/my-tokenizer

  # preference pairs: data/pairs_chosen_document, data/pairs_chosen_label_document, the same for rejected
  python tools/datasets/preprocess_data_with_chat_template.py --input pairs.jsonl --chosen-key chosen \\
      --rejected-key rejected --output-prefix data/pairs --tokenizer-path models/my-tokenizer

  # a template of your own for a tokenizer that has none
  python tools/datasets/preprocess_data_with_chat_template.py --input chats.jsonl --output-prefix data/chats \\
      --tokenizer-path models/base --chat-template chatml.jinja

output:  <output-prefix>_<key>_document           tokens of the rendered chats
         <output-prefix>_<key>_label_document     the same where trained, -100 elsewhere
         <output-prefix>_<key>_reward_document    with --reward-key: one number per chat (per pair, of the key "chosen")
         In the run's YAML: "train_data_paths": ["<output-prefix>_<key>_document"],
                            "train_label_data_paths": ["<output-prefix>_<key>_label_document"]
         pairs:             "pos_train_data_paths": ["<output-prefix>_chosen_document"], "neg_train_data_paths": ...
guide:   documentation/chat_data.md
"""

SHOWN = 2000  # tokens of the first chat


def parser() -> Parser:
    """GPT-NeoX's flags, and those for other shapes of data."""
    flags = Parser(description=__doc__, epilog=EXAMPLES)
    group = flags.add_argument_group("input")
    group.add_argument("--input", required=True, nargs="+", metavar="A[,B...]", help="files, lists, globs or folders")
    group.add_argument(
        "--jsonl-keys", nargs="+", metavar="KEY", help="columns with chats (default: found in the first record)"
    )
    group.add_argument("--prompt-key", metavar="KEY", help="column of a prompt: text, or messages")
    group.add_argument("--completion-key", metavar="KEY", help="column of its completion: text, or messages")
    group.add_argument("--chosen-key", "--chosen", metavar="KEY", help="column of the better chat of a pair")
    group.add_argument("--rejected-key", "--rejected", metavar="KEY", help="column of the worse chat of a pair")
    group.add_argument("--tools-key", default="tools", metavar="KEY", help="column of JSON schemas of tools (tools)")
    group.add_argument("--reward-key", metavar="KEY", help="column with a reward per chat, or a margin per pair")
    group.add_argument("--binary-reward", action="store_true", help="rewards become +1 (above zero) or -1")
    group.add_argument("--skip-bad-lines", action="store_true", help="leave out and count unusable records")
    group.add_argument("--max-length", type=int, metavar="N", help="the most tokens of a chat")
    group.add_argument(
        "--too-long",
        choices=["drop", "cut", "refuse"],
        default="drop",
        help="longer chats: leave their record out, cut off their end, or stop (drop)",
    )
    group = flags.add_argument_group("what is trained")
    group.add_argument(
        "--generation-role",
        nargs="+",
        default=["assistant"],
        metavar="ROLE",
        help="whose turns are trained (assistant)",
    )
    group.add_argument("--only-last", action="store_true", help="train only the last of these turns")
    group.add_argument("--no-mask", action="store_true", help="train every token")
    group.add_argument("--for-rm", action="store_true", help="for a reward model: train only the end")
    group.add_argument(
        "--continue-final-message", action="store_true", help="leave the last message open: without an end of turn"
    )
    group = flags.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-path", required=True, metavar="PATH", help="Hugging Face folder, or a Hub name")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template (default: the tokenizer's own)")
    group.add_argument(
        "--template-kwargs", metavar="JSON", help="variables for it, such as '{\"enable_thinking\": false}'"
    )
    group.add_argument(
        "--parse-tool-arguments", action="store_true", help="parse arguments of tool calls that are JSON text"
    )
    group.add_argument("--ftfy", action="store_true", help="repair broken Unicode with ftfy first")
    add_output_arguments(flags)
    return flags


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags given. Raises `UserError` for impossible values."""
    args = parser().parse_args(argv)
    check_output(args)
    if args.max_length is not None and args.max_length < 1:
        raise UserError(f"--max-length {args.max_length}: give at least 1")
    return args


def chat_options(args: argparse.Namespace, columns: Columns) -> ChatOptions:
    """The flags as options, with the columns that were found."""
    return ChatOptions(
        **asdict(columns),
        tools_key=args.tools_key,
        reward_key=args.reward_key,
        binary_reward=args.binary_reward,
        roles=tuple(args.generation_role),
        only_last=args.only_last,
        no_mask=args.no_mask,
        for_rm=args.for_rm,
        leave_open=args.continue_final_message,
        parse_arguments=args.parse_tool_arguments,
        max_length=args.max_length,
        too_long=args.too_long,
        ftfy=args.ftfy,
        skip_bad=args.skip_bad_lines,
    )


def template_variables(text: str | None) -> dict[str, Any]:
    """The object in `--template-kwargs`."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--template-kwargs {text}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"--template-kwargs {text}: not a JSON object")
    return found


def answers_end(encoder: ChatEncoder, labels: np.ndarray) -> bool:
    """Whether every trained run of `labels` `[n]` ends with a token that is not plain text."""
    trained = labels >= 0
    last = labels[np.flatnonzero(trained & ~np.append(trained[1:], False))]
    return {int(token) for token in last} <= {*encoder.tokenizer.backend.get_added_tokens_decoder(), encoder.rules.eos}


def report(result: Result, encoder: ChatEncoder, logger: Logger) -> None:
    """Log the first chat with its trained parts in brackets; print how much of each data set is trained."""
    options = encoder.options
    print(result.summary())
    prefixes = [name for name in result.datasets if name.endswith("_label_document")]
    for name, prefix in zip(options.names, prefixes):
        labels = IndexedDataset(prefix)
        if not len(labels):  # a shard without chats
            continue
        data = IndexedDataset(prefix.removesuffix("_label_document") + "_document")
        # Cut: finding the borders of parts decodes everything before them.
        ids, marks = data.get(0, 0, min(SHOWN, int(data.sizes[0]))), labels.get(0)[:SHOWN]
        more = f"\n... and {int(data.sizes[0]) - SHOWN} tokens more" if data.sizes[0] > SHOWN else ""
        logger.info(f"first of {name} (⟦trained⟧):\n{bracket_trained(encoder.tokenizer, ids, marks)}{more}")
        whole = options.no_mask or options.for_rm or options.leave_open
        if not whole and not answers_end(encoder, labels.get(0)):
            logger.warning("not every answer ends with a special token: the model may not learn to stop")
        print(trained_share(prefix, labels))


def main(argv: Sequence[str] | None = None) -> None:
    """Check everything, then tokenise."""
    args = parse_args(argv)
    logger = start_command("preprocess_data_with_chat_template")
    job = command_options(args, os.environ)
    paths = find_inputs(args.input)
    columns = find_columns(
        paths, args.jsonl_keys, args.prompt_key, args.completion_key, args.chosen_key, args.rejected_key
    )
    options = chat_options(args, columns)
    tokenizer = chat_tokenizer(args.tokenizer_path)
    template = load_template(
        tokenizer_folder(args.tokenizer_path), args.chat_template, template_variables(args.template_kwargs)
    )
    eos = template.eos_id(tokenizer)
    encoder = ChatEncoder(tokenizer, template, options, eos)
    logger.info(f"tokenizer: {tokenizer.describe()}, vocabulary {tokenizer.vocab_size}, end of a chat {eos}")
    logger.info(f"chats: {columns.description()}; trained: {options.description()}")
    settings = {**asdict(options), "chat_template": template.digest(), "eos": eos}
    result = tokenise_files(paths, encoder, args.output_prefix, job, settings=settings, skip_bad=args.skip_bad_lines)
    write_metadata(job.prefix(args.output_prefix), vars(args), result)
    report(result, encoder, logger)


if __name__ == "__main__":
    run_cli(main)
