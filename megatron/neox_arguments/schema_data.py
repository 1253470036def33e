"""The keys about text and tokens: `args.tokenizer` and `args.data`."""

# ruff: noqa: RUF009  (key() returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys import key


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer, from which files, and how the vocabulary is padded in memory."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "CharLevelTokenizer",
        "TiktokenTokenizer",
        "bytes",
    ] = key("GPT2BPETokenizer", "Tokenizer class.", registry="tokenizer_type")
    vocab_file: str | None = key(
        None, "Vocabulary file (tokenizer.json, vocab.json, .model) or name, by class.", path=True
    )
    merge_file: str | None = key(None, "BPE merges file, for the classes that have one.", path=True)
    vocab_size: int | None = key(
        None,
        "Tokens of the model, where it has rows for more ids than the tokenizer (published models often do).",
        new=True,
    )
    model_tokens: dict[str, Any] | None = key(
        None,
        "The ids that start, end and pad the model's texts, as its config.json (`config`) and generation_config.json "
        "(`generation`) have them: written by conversion, inherited by checkpoints, exported as they are; "
        "`trained_ends`: ends of turns that training added. Default: what the tokenizer's files declare, and the end "
        "of document.",
        new=True,
    )
    make_vocab_size_divisible_by: int = key(
        128, "The vocabulary is padded in memory to a multiple of this times model_parallel_size."
    )
    padded_vocab_size: int | None = key(
        None,
        "Rows of the embedding in memory. Padding never enters a loss, a norm, a sample or an export.",
        derived="recompute",
        differs="padded rows are excluded from the training softmax",
    )


@dataclass(frozen=True)
class DataConfig:
    """Token files, their mixture, and how samples are cut and loaded."""

    data_path: str | None = key(None, "One token file (prefix of .bin/.idx), divided by `split`.", path=True)
    split: str = key(
        "969, 30, 1",
        "Proportions of data_path used to train, validate and test.",
        differs="never gives an empty or overlapping range a negative start",
    )
    chats: tuple[str, ...] | None = key(
        None,
        "Files of conversations (.jsonl, .parquet, ...) to fine-tune on: tokenised before ranks start into a cache, "
        "with the model's own tokenizer and chat template; what the assistant says is trained. It becomes "
        "train_data_paths and train_label_data_paths; what else the config does not say follows published fine-tuning.",
        path=True,
        new=True,
    )
    chats_found: dict[str, Any] | None = key(
        None, "How many `chats`, and tokens of them, there are: written by the start.", new=True
    )
    train_data_paths: tuple[str, ...] | None = key(
        None, "Token files to train on, mixed by train_data_weights.", path=True
    )
    valid_data_paths: tuple[str, ...] | None = key(None, "Token files to validate on.", path=True)
    test_data_paths: tuple[str, ...] | None = key(None, "Token files to test on.", path=True)
    train_data_weights: tuple[float, ...] | tuple[tuple[int, tuple[float, ...]], ...] | None = key(
        None,
        "Mixture weights of train_data_paths (default: equal), or of each phase: [[0, weights], [step, weights], ...]. "
        "A source that is 0 throughout is a validation set.",
    )
    valid_data_weights: tuple[float, ...] | None = key(None, "Mixture weights of valid_data_paths (default: equal).")
    test_data_weights: tuple[float, ...] | None = key(None, "Mixture weights of test_data_paths (default: equal).")
    train_label_data_paths: tuple[str | None, ...] | None = key(
        None, "Labels of train_data_paths, token by token: -100 is not trained; null: that source has none.", path=True
    )
    valid_label_data_paths: tuple[str | None, ...] | None = key(None, "Labels of valid_data_paths.", path=True)
    test_label_data_paths: tuple[str | None, ...] | None = key(None, "Labels of test_data_paths.", path=True)
    weight_by_num_documents: bool = key(False, "Take the mixture weights from the document counts.")
    weighted_sampler_alpha: float = key(1.0, "Exponent of weight_by_num_documents; below 1 favours small sources.")
    mixture: str | dict[str, Any] | None = key(
        None,
        "Sources, weights and validation sets by name, or the name of a file with them (documentation/mixtures.md). "
        "Fills in the keys about training data.",
        new=True,
    )
    data_root: str | None = key(
        None, "Folder that relative data paths start from (default: the current one).", new=True, path=True
    )
    train_data_names: tuple[str, ...] | None = key(
        None, "Names of train_data_paths in tables, messages and metrics (default: those of the files).", new=True
    )
    train_data_max_epochs: float | tuple[float | None, ...] | None = key(
        None,
        "Cap on the epochs of each source of training, one number or one per source; such a source is read epoch by "
        "epoch. A run that needs more is refused before it starts.",
        new=True,
    )
    train_data_on_cap: Literal["error", "redistribute"] = key(
        "error",
        "What to do about a source that train_data_max_epochs does not let last: refuse the run, or lower its weight "
        "and share the rest among the other sources.",
        new=True,
    )
    train_data_max_tokens: int | tuple[int | None, ...] | None = key(
        None, "Use only the first documents of each source of training, at most so many tokens.", new=True
    )
    train_data_holdout: int | tuple[int | None, ...] | None = key(
        None,
        "Hold the last documents of each source of training, at least so many samples, out as a validation set of its "
        "name.",
        new=True,
    )
    target_budget: int | None = key(
        None,
        "Simulated epoching: tokens of the large run that this small one simulates. Every source of training is cut "
        "to experiment_budget / target_budget of its tokens, so that it repeats as often as there.",
        new=True,
    )
    experiment_budget: int | None = key(
        None, "Tokens of this run, for target_budget (default: train_iters x batch x sequence).", new=True
    )
    valid_sets: dict[str, Any] | None = key(
        None,
        "Validation sets by name: {name: path} or {name: {path, labels, tags}}. Each is evaluated for itself, on the "
        "same samples every time, as validation/<name>/lm_loss, and the sets of a tag together.",
        new=True,
    )
    data_impl: Literal["infer", "mmap", "cached", "lazy"] = key(
        "infer",
        "Format of the token files. Whatever is written here, the files themselves tell: mmap, or the older one of "
        "cached and lazy.",
        differs="infer, cached and lazy work",
    )
    pack_impl: str = key(
        "packed",
        "How documents become samples (documentation/packing.md).",
        registry="pack_impl",
        differs="documents are kept to their split, no token of the next document is read, best_fit is new",
    )
    allow_chopped: bool = key(
        True,
        "Documents longer than seq_length + 1 tokens are cut to it (best_fit: into several pieces); false: left out. "
        "packed cuts everywhere.",
    )
    dataset_impl: Literal["gpt2", "pairwise", "online"] = key(
        "gpt2", "Kind of samples: documents, preference pairs, or completions of data servers."
    )
    train_reward_data_paths: tuple[str | None, ...] | None = key(
        None, "Rewards of train_data_paths: one number for each text; for each pair its margin.", path=True
    )
    valid_reward_data_paths: tuple[str | None, ...] | None = key(None, "Rewards of valid_data_paths.", path=True)
    test_reward_data_paths: tuple[str | None, ...] | None = key(None, "Rewards of test_data_paths.", path=True)
    pos_train_data_paths: tuple[str, ...] | None = key(
        None, "Chosen texts of the pairs to train on (dataset_impl: pairwise).", path=True
    )
    neg_train_data_paths: tuple[str, ...] | None = key(
        None, "Rejected texts: item i belongs to item i of pos_train_data_paths.", path=True
    )
    pos_train_label_data_paths: tuple[str | None, ...] | None = key(
        None, "Labels of pos_train_data_paths; without any, what both texts begin with is not trained.", path=True
    )
    neg_train_label_data_paths: tuple[str | None, ...] | None = key(None, "Labels of neg_train_data_paths.", path=True)
    pos_valid_data_paths: tuple[str, ...] | None = key(
        None, "Chosen texts of the pairs to validate on (dataset_impl: pairwise).", path=True
    )
    neg_valid_data_paths: tuple[str, ...] | None = key(
        None, "Rejected texts: item i belongs to item i of pos_valid_data_paths.", path=True
    )
    pos_valid_label_data_paths: tuple[str | None, ...] | None = key(
        None, "Labels of pos_valid_data_paths; without any, what both texts begin with is not trained.", path=True
    )
    neg_valid_label_data_paths: tuple[str | None, ...] | None = key(None, "Labels of neg_valid_data_paths.", path=True)
    pos_test_data_paths: tuple[str, ...] | None = key(
        None, "Chosen texts of the pairs to test on (dataset_impl: pairwise).", path=True
    )
    neg_test_data_paths: tuple[str, ...] | None = key(
        None, "Rejected texts: item i belongs to item i of pos_test_data_paths.", path=True
    )
    pos_test_label_data_paths: tuple[str | None, ...] | None = key(
        None, "Labels of pos_test_data_paths; without any, what both texts begin with is not trained.", path=True
    )
    neg_test_label_data_paths: tuple[str | None, ...] | None = key(None, "Labels of neg_test_data_paths.", path=True)
    precompute_model_name: str | None = key(
        None,
        "The reference model's log-probabilities are in the files <data path>_<this>: float32, for each text those of "
        "its tokens from the second on. Without it the run computes them (reference_path).",
        differs="in every packing of whole documents",
    )
    eod_mask_loss: bool = key(False, "No loss at positions whose input token is end-of-document.")
    num_workers: int = key(
        2, "Background workers per rank that read samples; 0 reads in the training process.", most=1_000
    )
    mmap_warmup: bool = key(False, "Read the token files once at start, to fill the page cache.")
    use_shared_fs: bool = key(
        True, "All nodes see the same files: the sample index is built once; false: once per node."
    )
    data_cache_path: str | None = key(
        None,
        "Folder for the sample indices, for example when the data's own folder cannot be written "
        "(default: index_cache next to each token file).",
        new=True,
        path=True,
    )
    npy_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = key(
        None, "Type of the ids in raw .npy token files, which do not record it (default: detected).", new=True
    )
    npy_eod: int | None = key(
        None, "The id that ends a document in .npy token files (default: the tokenizer's end-of-document).", new=True
    )
    online_dataserver_ips: str | tuple[str, ...] = key(
        "localhost",
        "Hosts of the data servers of dataset_impl: online, one for each of the ports or one for all.",
        differs="JSON over HTTP; every server gives its part of a step",
    )
    online_dataserver_ports: int | tuple[int, ...] = key(10000, "Their ports.")

    # unlearning: documentation/post_training.md
    ga_dataset: str | None = key(
        None,
        "Data to forget. Some steps of the run (ga_mode) raise the loss on them instead of lowering that of the "
        "training data.",
        path=True,
        differs="read in an order of its own, each pass shuffled anew, from where the checkpoint left off",
    )
    ga_dataset_impl: Literal["infer", "mmap", "cached", "lazy"] = key(
        "mmap", "Format of ga_dataset. Whatever is written here, the files themselves tell."
    )
    ga_label_dataset: str | None = key(
        None, "Labels of ga_dataset, token by token: -100 is not forgotten.", path=True, new=True
    )
    gd_retain_dataset: str | None = key(None, "Data to retain in the steps that forget (gd_mode).", path=True)
    gd_retain_dataset_impl: Literal["infer", "mmap", "cached", "lazy"] = key(
        "mmap", "Format of gd_retain_dataset. Whatever is written here, the files themselves tell."
    )
    gd_retain_label_dataset: str | None = key(None, "Labels of gd_retain_dataset.", path=True, new=True)
