"""Vocabularies of every kind that models use, trained here on text of this machine: one per way of cutting text."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPECIAL = ("<|endoftext|>", "<|padding|>")
OTHER_SCRIPTS = (
    "Die Größe der Straße, naïve café; Ελληνικά και κυριλλица, 中文测试没有空格。日本語のテキスト 한국어 हिन्दी العربية "
    "🤖👍🏽 I'll you're HE'S don't we've 1234567 3.14   \n\n\t x == y != z;\r\n"
)


@cache
def training_text() -> list[str]:
    """About 300 kB of Python and English, and a little of other scripts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = ["argparse.py", "textwrap.py", "statistics.py", "pydoc.py", "LICENSE.txt"]
    return [(root / name).read_text(encoding="utf-8") for name in files if (root / name).exists()] + [
        OTHER_SCRIPTS
    ] * 20


def _trained(tokenizer: Tokenizer, byte_level: bool = True, size: int = 1500) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer=trainer)
    return tokenizer


def _byte_level(*patterns: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    return tokenizer


def gpt2() -> Tokenizer:
    """As GPT-2."""
    return _trained(_byte_level())


def neox() -> Tokenizer:
    """As GPT-NeoX-20B: NFC, and runs of spaces as ordinary added tokens."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    _trained(tokenizer)
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True, special=False) for n in range(24, 1, -1)])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def llama3() -> Tokenizer:
    """As Llama 3: its pattern, whole words first, a token before every text."""
    tokenizer = _trained(_byte_level(LLAMA3))
    tokenizer.model.ignore_merges = True
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]),
        ]
    )
    return tokenizer


def qwen2() -> Tokenizer:
    """As Qwen 2: NFC, digits one by one, special tokens and ordinary added ones."""
    tokenizer = _byte_level(QWEN2)
    tokenizer.normalizer = normalizers.NFC()
    _trained(tokenizer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<tool_call>", "</tool_call>", "<think>")])
    return tokenizer


def normalized() -> Tokenizer:
    """Added tokens that are looked for after normalisation, which can change their last character."""
    tokenizer = qwen2()
    tokenizer.add_tokens([AddedToken("<result>", normalized=True)])
    return tokenizer


def o200k() -> Tokenizer:
    """As GPT-4o: words by case."""
    return _trained(_byte_level(O200K))


def deepseek() -> Tokenizer:
    """As DeepSeek V3: three patterns, one after the other."""
    return _trained(_byte_level(*DEEPSEEK))


def word_characters() -> Tokenizer:
    r"""A pattern of `\w`, which every library understands and no two alike."""
    return _trained(_byte_level(r" ?\w+|\s+|[^\s\w]+"))


def llama2() -> Tokenizer:
    """As Llama 2: SentencePiece's way with a space mark, unknown characters as bytes, a token before every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False, max_token_length=16)
    pieces = [line for text in training_text() for line in text.split("\n") if line]
    tokenizer.train_from_iterator(pieces, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _as_ordinary(tokenizer, keep=("<unk>", "<s>", "</s>"))


def metaspace() -> Tokenizer:
    """As Mistral's later files: a Metaspace pre-tokenizer in place of the normaliser."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(training_text(), trainer=trainer)
    return _as_ordinary(tokenizer, keep=("<unk>", "<s>", "</s>"))


def stripping() -> Tokenizer:
    """Added tokens that swallow spaces, or stand only as whole words, or are looked for after normalisation."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    _trained(tokenizer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<end>", rstrip=True)])
    tokenizer.add_tokens([AddedToken("word", single_word=True), AddedToken("ﬁne", normalized=True)])
    return tokenizer


def prefix_space() -> Tokenizer:
    """As RoBERTa-like files that put a space before every text."""
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _trained(tokenizer)


def digits() -> Tokenizer:
    """As StarCoder: digits one by one before GPT-2's pattern."""
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return _trained(tokenizer)


def lowercase() -> Tokenizer:
    """A normaliser that changes case and drops accents."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    )
    return _trained(tokenizer)


def wordpiece() -> Tokenizer:
    """As BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=1000, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer=trainer)
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=1000, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer=trainer)
    return tokenizer


def _as_ordinary(tokenizer: Tokenizer, keep: tuple[str, ...]) -> Tokenizer:
    """The byte pieces stay in the vocabulary, but are not looked for in text."""
    import json

    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in keep]
    return Tokenizer.from_str(json.dumps(content))


KINDS = (gpt2, neox, llama3, qwen2, normalized, o200k, deepseek, word_characters, llama2, metaspace, stripping)
OTHERS = (prefix_space, digits, lowercase, wordpiece, unigram)
ZOO: dict[str, Callable[[], Tokenizer]] = {make.__name__: make for make in (*KINDS, *OTHERS)}
