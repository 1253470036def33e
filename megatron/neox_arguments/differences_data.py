"""The deliberate differences from GPT-NeoX that concern data: how it is made, cut, mixed and read."""

from __future__ import annotations

from functools import partial

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.difference import Difference as _Difference
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts

Difference = partial(_Difference, section="Data")


def _packs(args: NeoXArgs) -> bool:
    return args.data.pack_impl != "packed" and not trains_on_rollouts(args.get)


def _pads(args: NeoXArgs) -> bool:
    return _packs(args) and args.data.pack_impl in ("pack_until_overflow", "unpacked")


def _pairs(args: NeoXArgs) -> bool:
    return args.data.dataset_impl == "pairwise"


def untrained_tokens(args: NeoXArgs) -> bool:
    """Whether micro-batches may train different numbers of tokens."""
    return args.data.eod_mask_loss or args.data.train_label_data_paths is not None or _packs(args)


DATA: tuple[_Difference, ...] = (
    Difference(
        "split",
        "small or zero proportions give negative starts and shared documents",
        "ranges never overlap; an empty one is empty",
    ),
    Difference(
        "sample index cache",
        "named by few of its inputs: a stale one is reused silently",
        "keyed by the content it depends on",
    ),
    Difference("data_impl infer, cached, lazy", "fail in training", "the files tell their format, all are read"),
    Difference(
        "resume",
        "continues at iteration x accumulation of the loader; another batch size or rank count repeats or skips data",
        "continues at the number of consumed samples, whatever the layout",
    ),
    Difference(
        "several passes",
        "batches of the first pass are kept in memory and repeated",
        "the sample order covers all epochs and nothing is kept",
    ),
    Difference(
        "preprocess_data --jsonl-keys",
        "every key gets the same text; a text without tokens crashes with --append-eod, else is a document of length 0",
        "each key its own; a text without characters (as in GPT-NeoX) or tokens is skipped and counted",
    ),
    Difference(
        "train_tokenizer",
        "the tokenizer normalises texts (nfkc), which changes some for good",
        "keeps texts exact, which also lets fast encoders work; --normalizer nfkc is GPT-NeoX's",
    ),
    Difference(
        "last sample of a dataset",
        "never used: the length is one too small",
        "used; the order of all others is the same",
    ),
    Difference(
        "a sample number past the end",
        "wraps around with a line on the console",
        "cannot happen: asking for it is an error",
    ),
    Difference(
        "data of another tokenizer",
        "trained on as it is",
        "refused by the fingerprint next to the data; without one, a warning and a check of the ids",
    ),
    Difference(
        "end-of-document token",
        "SentencePiece without one uses unk; a template's own eod is doubled by --append-eod",
        "comes from the tokenizer's files or is an error; never doubled, also where a text itself ends with it",
    ),
    Difference(
        "start and end that a tokenizer adds",
        "not recorded; doubled where a text has them; the end closes prompts",
        "written once, recorded with data and checkpoints, other forms are refused; prompts and contexts stay open",
    ),
    Difference(
        "truncation and padding stored in a tokenizer.json",
        "applied to documents",
        "ignored",
    ),
    Difference(
        "damaged or cut-short compressed input",
        "less data",
        "an error",
    ),
    Difference(
        "padding in samples",
        "one token of the next document is read before it, and trained unless it is labelled -100",
        "nothing but padding",
        _pads,
    ),
    Difference(
        "split with pack_impl",
        "ignored but for packed: training sees the documents of validation and test",
        "honoured in every packing",
        lambda args: _pads(args) and args.data.data_path is not None,
    ),
    Difference(
        "first token of a document",
        "the target of the document before it",
        "never a target, also in best_fit",
        _packs,
    ),
    Difference(
        "documents without a trained token",
        "looked for among inputs: one whose only trained label is the last target is lost",
        "looked for among targets; documents of a single token are left out too",
        _packs,
    ),
    Difference(
        "last sample of pack_until_overflow",
        "holds only the document that opened it",
        "filled like the others",
    ),
    Difference(
        "pack_impl when nothing is left to train on",
        "an endless loop or IndexError",
        "one message, exit 2",
    ),
    Difference(
        "unpacked without labels",
        "AttributeError",
        "works",
    ),
    Difference(
        "a run made longer",
        "everything is shuffled again",
        "the past stays as it was; what is missing is appended",
    ),
    Difference(
        "sources of weight 0",
        "listed, never drawn",
        "a validation set of that name",
    ),
    Difference(
        "validation sets",
        "new samples at every validation",
        "sets with names (valid_sets) give the same samples every time, each once; lists stay as in GPT-NeoX",
    ),
    Difference(
        "sources with train_data_max_epochs",
        "no such key: all epochs of a run are shuffled together",
        "read epoch by epoch; without it as in GPT-NeoX",
    ),
    Difference(
        "data or weights changed on resume",
        "another order, silently",
        "the past is kept and checked, the future may change, anything else is refused",
    ),
    Difference(
        "labels of chats",
        "the rendering of the first turns is assumed to begin that of all; line breaks after a turn are trained",
        "each turn is labelled where the chat has it, with its end-of-turn token, or the tool stops and names it",
    ),
    Difference(
        "end of a chat",
        "one eos is always appended, doubled where the template ends with it",
        "appended only where it is missing, trained when the token before it is",
    ),
    Difference(
        "preprocess_data_with_chat_template --no-mask, --reward-key",
        "fails; rewards are cut to integers",
        "work; rewards are float32, with --binary-reward +1 and -1",
    ),
    Difference(
        "preprocess_data_with_mask",
        "works only for the key text and with the option given",
        "every key has its own text and labels; the delimiter may be a string; texts without it are counted",
    ),
    Difference(
        "dataset_impl: pairwise",
        "pack_until_overflow with allow_chopped: false skips the short pairs; unpacked needs labels; one token of the "
        "next text is read",
        "like other data: weights, epochs, caps and validation sets; items are checked to be pairs",
        _pairs,
    ),
    Difference(
        "pairs without labels",
        "AttributeError with pack_impl: unpacked, else every token is trained, prompts too",
        "what both texts begin with is not trained",
        lambda args: (
            _pairs(args) and args.data.train_label_data_paths is None and args.model.output_head == "vocabulary"
        ),
    ),
    Difference(
        "several pairs in a row",
        "chosen and rejected texts in rows of their own; all texts of a row count as one answer",
        "both texts of a pair are in one row, each an answer; needs intra_document_masking",
        lambda args: _pairs(args) and args.data.pack_impl != "unpacked",
    ),
    Difference(
        "preference pairs",
        "made by two runs of preprocess_data_with_chat_template: a text left out on one side shifts all later pairs",
        "one run writes both sides, and leaves a record out of both (two runs work as well, and lengths are compared)",
    ),
    Difference(
        "reward data",
        "one value for each token; only with pack_impl: unpacked",
        "one number for each text, in every packing of whole documents; with pairs it is the margin",
        lambda args: args.data.train_reward_data_paths is not None,
    ),
    Difference(
        "labels next to the data that the config does not name",
        "ignored silently",
        "logged at start",
    ),
    Difference(
        "merge_datasets",
        "fails on mmap data, and would lose document borders",
        "joins shards, labels and rewards into the bytes of one run, or refuses",
    ),
    Difference(
        "dataset_impl: online",
        "unpickles what a socket sends, so that whoever has the port runs code; sends weights out by CUDA-IPC",
        "JSON over HTTP, which is only parsed; or the ranks write the completions themselves (rollout_prompts)",
        lambda args: args.data.dataset_impl == "online",
    ),
)
