"""`chats`: a run that fine-tunes on a file of conversations, from the file to keys that a run has.

The file is tokenised before any rank starts. What the config does not say is set as fine-tuning is published:

* 3 epochs, AdamW at 2e-5 (betas 0.9 and 0.999, no weight decay), cosine to 0 after a warm-up over 3 %, about 128 chats
  a step: Taori et al. 2023, "Stanford Alpaca", for 7B, from the values of its README and its training command;
* adapters at 2e-4: Dettmers et al. 2023, "QLoRA", arXiv 2305.14314, for 7B and 13B;
* whole chats packed into rows, none of which sees another (packing.md).
"""

from __future__ import annotations

from typing import Any

from megatron.data.chat.cached import cache_chats
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs

KEY, FOUND = "chats", "chats_found"
SOURCE = "chats (documentation/chat_data.md)"
RATE, RATE_OF_ADAPTERS = 2e-5, 2e-4
_DATA = ("data_path", "train_data_paths", "mixture", "pos_train_data_paths")
_LENGTHS = ("train_iters", "train_epochs", "train_tokens", "train_flops")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def with_chats(args: NeoXArgs) -> NeoXArgs:
    """The config of a training run with the datasets that its `chats` became, and what it does not say; as it is
    without the key. Raises `UserError`."""
    files = args.data.chats
    if files is None:
        return args
    if others := [name for name in _DATA if args.is_set(name) and args.source(name) != SOURCE]:
        raise UserError(f"{args.source(KEY)}: chats: {others[0]} is set too; keep one of the two")
    tokenizer = args.tokenizer
    if tokenizer.tokenizer_type != "HFTokenizer" or not tokenizer.vocab_file:
        raise UserError(
            f"{args.source(KEY)}: chats: it takes a tokenizer with a chat template (tokenizer_type: HFTokenizer and "
            f"its folder as vocab_file, which a Hugging Face model in `load` brings), not {tokenizer.tokenizer_type}"
        )
    try:
        found = cache_chats(files, tokenizer.vocab_file, args.data.data_cache_path, args.data.use_shared_fs)
    except UserError as error:
        raise UserError(str(error).replace("--tokenizer-path", "vocab_file").replace("--input", KEY)) from error
    data = {"train_data_paths": (found.tokens,), "train_label_data_paths": (found.labels,), "train_data_names": (KEY,)}
    counts = {"chats": found.chats, "tokens": found.count}
    return args.replace(SOURCE, **data, **{FOUND: counts}, **_defaults(args))


def _defaults(args: NeoXArgs) -> dict[str, Any]:
    """Keys of published practice, as far as the user has not set them."""
    rate = RATE if args.post.lora_r is None else RATE_OF_ADAPTERS
    values: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.999], "eps": 1e-8}},
        "weight_decay": 0.0,
        "lr_decay_style": "cosine",
        "min_lr": 0.0,
        "warmup": 0.03,
        "pack_impl": "best_fit",
        "intra_document_masking": True,
        "eval_iters": 0,
    }
    if args.is_set("valid_data_paths") or args.is_set("valid_sets"):
        del values["eval_iters"]
    if not any(args.is_set(name) for name in _LENGTHS):
        values["train_epochs"] = 3
    if not any(args.is_set(name) for name in _BATCH):
        values["train_micro_batch_size_per_gpu"] = 1
    return {name: value for name, value in values.items() if not args.is_set(name)}
