"""Write the config of a fine-tuning run that starts from a checkpoint: its architecture, its step, chats as data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.find import Checkpoint, find_checkpoint
from megatron.checkpoint.tokenizer_identity import check_tokenizer as check_checkpoint
from megatron.data.order.sources import names_of
from megatron.data.tokenise.flags import start_command
from megatron.data.tokens.labels import check_labels, find_labels
from megatron.data.tokens.manifest import check_tokenizer
from megatron.data.tokens.token_files import TokenFiles
from megatron.errors import UserError, cannot_write, run_cli
from megatron.files import write_atomically
from megatron.flags import Parser
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.groups import GROUPS
from megatron.neox_arguments.keys import group_keys
from megatron.tokenizer import Tokenizer, create_tokenizer

EXAMPLES = """
examples:
  # Dolci and multiple-choice questions on top of a midtrained model:
  # configs/sft/sft_dolci_mcqa_instruct_unfiltered_synthetic_alignment_mid.yml
  python post-training/make_sft_config.py --from checkpoints/mid --filtering unfiltered \\
      --variant synthetic_alignment_mid --data-root data --tokenizer data/neox_tokenizer_instruct/tokenizer.json \\
      --output-dir configs/sft

  # your own chats on top of any checkpoint, the model's turns trained
  python post-training/make_sft_config.py --from checkpoints/tiny --name my_sft --data data/chats_messages_document

recipes:  post-training/recipes.yml. The file is checked as the run will check it.
"""
RECIPES = Path(__file__).with_name("recipes.yml")
# Of the checkpoint's configuration: what the model is, how it is divided, and what its optimizer was.
INHERITED = ("model", "parallel", "optimizer")
ALSO = ("tokenizer_type", "merge_file", "make_vocab_size_divisible_by", "train_micro_batch_size_per_gpu")
ALSO += ("train_batch_size", "checkpoint_activations", "num_workers")
SET_HERE = ("optimizer", "lr", "optimizer_type", "weight_decay", "betas", "eps", "momentum")


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, epilog=EXAMPLES)
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--from", dest="base", required=True, metavar="DIR", help="`save` of a run, or a checkpoint in it"
    )
    group.add_argument("--iteration", type=int, metavar="N", help="its step (the latest)")
    group.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json of the chats (the checkpoint's)")
    group = parser.add_argument_group("a recipe by name")
    group.add_argument("--filtering", metavar="F", help="unfiltered or filtered")
    group.add_argument("--variant", metavar="V", help="the midtraining that the model had")
    group = parser.add_argument_group("data of your own")
    group.add_argument("--data", nargs="+", metavar="PATH[=WEIGHT]", help="tokenised chats, and their weights (equal)")
    group.add_argument("--name", metavar="NAME", help="of the run and of the file")
    group = parser.add_argument_group("both")
    group.add_argument("--data-root", metavar="DIR", help="folder that data paths start from (the current one)")
    group.add_argument(
        "--labels",
        action=argparse.BooleanOptionalAction,
        help="train the model's turns alone, by the labels next to the data (your own data: yes; by name: no)",
    )
    group.add_argument("--train-iters", type=int, metavar="N", help="steps, instead of what the recipe says")
    group.add_argument("--lr", type=float, metavar="X", help="learning rate, instead of the recipe's")
    group.add_argument("--output-dir", "-o", default=".", metavar="DIR", help="where to write the file (.)")
    args = parser.parse_args()
    by_name, own = args.filtering or args.variant, args.data or args.name
    if bool(by_name) == bool(own):
        raise UserError("give --filtering and --variant for the recipe by name, or --data and --name for your own data")
    if by_name and not (args.filtering and args.variant):
        raise UserError("the recipe needs both --filtering and --variant")
    if own and not (args.data and args.name):
        raise UserError("data of your own need both --data and --name")
    return args


def saved_config(checkpoint: Checkpoint) -> NeoXArgs:
    """The configuration of a checkpoint; GPT-NeoX's is in the files beside it."""
    if not checkpoint.by_neox:
        return NeoXArgs.from_saved(checkpoint.manifest.config, f"{checkpoint.path}/resolved config")
    files = sorted(str(path) for path in (checkpoint.path / "configs").glob("*.yml"))
    if not files:
        raise UserError(f"{checkpoint.path}: it has no configs/*.yml, so its architecture is not known")
    return NeoXArgs.from_files(files, stored=True)


def inherited(config: NeoXArgs) -> dict[str, Any]:
    """The keys that the new run takes over, as far as they are not at their defaults."""
    names = [name for group in INHERITED for name in group_keys(GROUPS[group], group)]
    values = config.to_dict()
    return {name: values[name] for name in (*names, *ALSO) if config.is_set(name) and name not in SET_HERE}


def recipe(args: argparse.Namespace) -> tuple[str, dict[str, float], dict[str, Any]]:
    """Name of the run, data paths with weights, and keys."""
    known = yaml.safe_load(RECIPES.read_text(encoding="utf-8"))
    if args.data:
        weights = dict(_weight(one) for one in args.data)
        return args.name, weights, dict(known["chats"]["keys"])
    found = known["dolci_mcqa"]
    if args.filtering not in found["filtering"]:
        raise UserError(f"--filtering {args.filtering}: give one of {', '.join(found['filtering'])}")
    name = found["name"].format(filtering=args.filtering, variant=args.variant)
    return name, dict(found["data"]), dict(found["keys"])


def _weight(given: str) -> tuple[str, float]:
    path, equals, weight = given.rpartition("=")
    if not equals:
        return given, 1.0
    try:
        return path, float(weight)
    except ValueError as error:
        raise UserError(f"--data {given}: {weight!r} is not a weight") from error


def data_keys(args: argparse.Namespace, weights: dict[str, float], tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys about data; each dataset is opened and compared with the tokenizer."""
    root, labels = Path(args.data_root or "."), []
    wanted = args.labels if args.labels is not None else bool(args.data)
    for path in weights:
        data = TokenFiles().open(root / path)
        check_tokenizer(data, tokenizer)
        found = find_labels(str(data.prefix))
        if wanted and found is None:
            raise UserError(f"{data.prefix}: there are no labels next to it; --no-labels trains whole texts")
        if wanted and found is not None:
            check_labels(data, TokenFiles().open(found))
            labels.append(str(Path(found).relative_to(root)) if args.data_root else found)
    keys: dict[str, Any] = {"data_root": args.data_root} if args.data_root else {}
    keys |= {"train_data_paths": list(weights), "train_data_names": names_of(list(weights))}
    if len(weights) > 1:
        keys["train_data_weights"] = list(weights.values())
    return keys | ({"train_label_data_paths": labels} if labels else {})


def main() -> None:
    """Write the file, or say that it is there already."""
    logger = start_command("make_sft_config")
    args = parse_args()
    checkpoint = find_checkpoint(args.base, args.iteration, "--from")
    config = saved_config(checkpoint)
    tokenizer_type, own = config.tokenizer.tokenizer_type, config.tokenizer
    file = args.tokenizer or own.vocab_file
    tokenizer = create_tokenizer("HFTokenizer" if args.tokenizer else tokenizer_type, file, own.merge_file)
    check_checkpoint(checkpoint, tokenizer)
    name, weights, keys = recipe(args)
    lr = args.lr or keys.pop("lr")
    if args.train_iters:
        keys.pop("train_epochs", None)
        keys["train_iters"] = args.train_iters
    if "train_iters" in keys:
        keys["lr_decay_iters"] = keys["train_iters"]
    optimizer = config.to_dict().get("optimizer") or {"type": config.optimizer.optimizer_type, "params": {}}
    values = inherited(config) | data_keys(args, weights, tokenizer)
    values |= {"vocab_file": file, "tokenizer_type": "HFTokenizer" if args.tokenizer else tokenizer_type}
    values |= {"optimizer": {**optimizer, "params": {**optimizer.get("params", {}), "lr": lr}}, **keys}
    values |= {"eval_iters": 0, "load": str(checkpoint.path.parent), "iteration": checkpoint.manifest.step}
    values |= {"finetune": True, "save": str(checkpoint.path.parent.with_name(name))}
    head = f"# {name}: starts from {checkpoint.path}. Written by post-training/make_sft_config.py.\n"
    text = head + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)
    path = Path(args.output_dir) / f"{name}.yml"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{path} exists and is another config; remove it, or write elsewhere (--output-dir)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise cannot_write(error, f"{path}: cannot be written: {error.strerror}") from error
    for note in derive(NeoXArgs.from_files([str(path)]), Facts(vocab_size=tokenizer.vocab_size)).notes:
        logger.info(note)
    print(path)


if __name__ == "__main__":
    run_cli(main)
