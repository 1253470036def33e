"""Tokenizers on the `tokenizers` library, against `transformers` and the library itself."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tokenizers import processors

from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer
from tests.tokenizer.vocabularies import HOSTILE, byte_level, write_gpt2, write_json

pytestmark = pytest.mark.cpu


def test_gpt2_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2TokenizerFast

    vocab, merges = write_gpt2(tmp_path)
    reference = GPT2TokenizerFast.from_pretrained(str(tmp_path))
    texts = [
        *HOSTILE,
        "x<|endoftext|>y",
        " <|endoftext|> \n<|endoftext|><|endoftext|>.",
        "<|endoftext",
        "<|ENDOFTEXT|>",
    ]
    ours = create_tokenizer("GPT2BPETokenizer", str(vocab), str(merges))
    assert ours.tokenize_batch(texts) == [reference(text)["input_ids"] for text in texts]
    assert [ours.tokenize(text) for text in texts] == ours.tokenize_batch(texts)
    assert [ours.detokenize(ours.tokenize(text)) for text in texts] == texts


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HFGPT2Tokenizer"])
def test_the_end_of_document_in_a_text_is_one_id(tmp_path: Path, kind: str) -> None:
    tokenizer = create_tokenizer(kind, *map(str, write_gpt2(tmp_path)))
    ids = tokenizer.tokenize("x<|endoftext|>y")
    assert ids == [*tokenizer.tokenize("x"), tokenizer.eod, *tokenizer.tokenize("y")]
    assert tokenizer.detokenize(ids) == "x<|endoftext|>y"
    assert pickle.loads(pickle.dumps(tokenizer)).tokenize("x<|endoftext|>y") == ids  # as a worker gets it


def test_gpt2_kinds_have_the_sizes_of_neox(tmp_path: Path) -> None:
    vocab, merges = write_gpt2(tmp_path)
    neox = create_tokenizer("GPT2BPETokenizer", str(vocab), str(merges))
    hub = create_tokenizer("HFGPT2Tokenizer", str(vocab), str(merges))
    assert (neox.vocab_size, neox.eod, neox.pad) == (265, 264, None)
    assert (hub.vocab_size, hub.eod, hub.pad) == (266, 264, 265)  # adds <|padding|>


@pytest.mark.parametrize("text", HOSTILE)
def test_a_tokenizer_json_gives_the_ids_of_transformers(tmp_path: Path, text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    path = write_json(tmp_path / "tokenizer.json")
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path))
    ours = create_tokenizer("HFTokenizer", str(path))
    assert ours.tokenize(text) == reference(text)["input_ids"]
    assert ours.detokenize(ours.tokenize(text)) == text


def test_a_folder_is_its_tokenizer_json_or_its_vocab_and_merges(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "tokenizer.json")
    write_gpt2(tmp_path / "b")
    assert create_tokenizer("HFTokenizer", str(tmp_path / "a")).eod == 0
    assert create_tokenizer("HFTokenizer", str(tmp_path / "b")).eod == 264


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    ours = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json", backend)))
    assert len(ours.tokenize("abcdefgh")) == 8
    assert [len(ids) for ids in ours.tokenize_batch(["abcdefgh", "a"])] == [8, 1]


def test_the_template_of_the_file_applies(tmp_path: Path) -> None:
    backend = byte_level(("<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ours = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json", backend)))
    assert ours.tokenize("a")[0] == 0
    assert ours.tokenize_batch(["a"]) == [ours.tokenize("a")]


def test_vocab_size_counts_added_tokens_and_gaps(tmp_path: Path) -> None:
    added = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "a.json", byte_level(added=["<tool>", "<end>"]))))
    assert added.vocab_size == 2 + 256 + 8 + 2
    assert max(added.tokenize("x<tool><end>")) == added.vocab_size - 1
    text = write_json(tmp_path / "b.json", byte_level(added=["<tool>"])).read_text()
    (tmp_path / "gap.json").write_text(text.replace('"id": 266', '"id": 300'))
    gap = create_tokenizer("HFTokenizer", str(tmp_path / "gap.json"))
    assert gap.vocab_size == max(gap.id_map()) + 1 > len(gap.id_map()) - 1


END = {"tokenizer_config": {"eos_token": "<|im_end|>"}}
EOD_CASES = {
    "the token of neox": ((("<|endoftext|>",), {}), "<|endoftext|>"),
    "neox before an instruct eos": ((("<|im_end|>", "<|endoftext|>"), END), "<|endoftext|>"),
    "declared": ((("<|im_start|>", "<|im_end|>", "</s>"), END), "<|im_end|>"),
    "declared as an object": (
        (("<s>", "</q>", "</s>"), {"tokenizer_config": {"eos_token": {"content": "</q>", "special": True}}}),
        "</q>",
    ),
    "special tokens map": ((("<s>", "</q>"), {"special_tokens_map": {"eos_token": "</q>"}}), "</q>"),
    "model config": ((("<s>", "</q>"), {"config": {"eos_token_id": 1}}), "</q>"),
    "generation config": ((("<s>", "</q>"), {"generation_config": {"eos_token_id": [1, 0]}}), "</q>"),
    "known name": ((("<s>", "</s>"), {}), "</s>"),
    "declared but absent": ((("<s>", "</s>"), {"tokenizer_config": {"eos_token": "<no>"}}), "</s>"),
    "none": ((("<s>",), {}), None),
}


@pytest.mark.parametrize("case", EOD_CASES)
def test_eod_comes_from_the_files(tmp_path: Path, case: str) -> None:
    (special, others), expected = EOD_CASES[case]
    path = write_json(tmp_path / "tokenizer.json", byte_level(special), **others)
    for given in (path, tmp_path):  # the file or its folder
        ours = create_tokenizer("HFTokenizer", str(given))
        assert ours.eod == (None if expected is None else special.index(expected))


def test_a_renamed_file_does_not_take_its_neighbours_eod(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json", byte_level(("<s>", "<|im_end|>")), **END)
    other = write_json(tmp_path / "20B_tokenizer.json", byte_level(("</s>", "<|im_end|>")))
    assert create_tokenizer("HFTokenizer", str(other)).eod == 0


def test_an_ordinary_word_is_no_eod(tmp_path: Path) -> None:
    path = write_json(tmp_path / "tokenizer.json", byte_level(("<s>",), added=["</s>"]))
    assert create_tokenizer("HFTokenizer", str(path)).eod is None


def test_a_needed_eod_that_is_not_there_is_explained(tmp_path: Path) -> None:
    path = write_json(tmp_path / "tokenizer.json", byte_level(("<s>",)))
    with pytest.raises(UserError, match="--append-eod needs an end-of-document token") as caught:
        create_tokenizer("HFTokenizer", str(path)).require_eod("--append-eod")
    assert str(path) in str(caught.value)
    assert "eos_token" in str(caught.value)


def test_pad_is_found_or_none(tmp_path: Path) -> None:
    def pad(*special: str, **others: dict) -> int | None:
        return create_tokenizer(
            "HFTokenizer", str(write_json(tmp_path / "tokenizer.json", byte_level(special), **others))
        ).pad

    assert pad("a", "<|padding|>") == 1
    assert pad("a", "<pad>") == 1
    assert pad("a") is None
    assert pad("a", "[P]", tokenizer_config={"pad_token": "[P]"}) == 1


@pytest.mark.parametrize("kind", ["json", "gpt2", "hfgpt2"])
def test_export_opens_in_transformers_with_the_same_ids(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    vocab, merges = write_gpt2(tmp_path / "gpt2")
    if kind == "json":
        path = write_json(tmp_path / "source" / "tokenizer.json")
        (path.parent / "chat_template.jinja").write_text("{{ messages }}")
        ours = create_tokenizer("HFTokenizer", str(path))
        assert set(ours.files()) == {"tokenizer.json", "chat_template.jinja"}
    else:
        name = {"gpt2": "GPT2BPETokenizer", "hfgpt2": "HFGPT2Tokenizer"}[kind]
        ours = create_tokenizer(name, str(vocab), str(merges))
    written = ours.export(tmp_path / "out")
    assert all(path.exists() for path in written)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert [theirs(text)["input_ids"] for text in HOSTILE[:4]] == ours.tokenize_batch(HOSTILE[:4])
    assert theirs.eos_token_id == ours.eod
    assert theirs.pad_token_id == ours.pad
    if kind == "json":
        assert theirs.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("kind", "vocab", "merges", "said"),
    [
        ("HFTokenizer", None, None, "^vocab_file .*set: HFTokenizer"),
        ("HFTokenizer", "absent.json", None, "vocab_file: no such file: absent.json"),
        ("HFTokenizer", "empty", None, "holds neither tokenizer.json nor vocab.json"),
        ("HFTokenizer", "vocab.json", None, "GPT2BPETokenizer and merge_file"),
        ("GPT2BPETokenizer", None, None, "^vocab_file .*set: GPT2BPETokenizer.*tokenizer_type: HFTokenizer"),
        ("GPT2BPETokenizer", "vocab.json", None, "^merge_file .*set: GPT2BPETokenizer"),
        ("GPT2BPETokenizer", "vocab.json", "absent.txt", "merge_file: no such file"),
        ("GPT2BPETokenizer", "merges.txt", "vocab.json", "not a BPE vocabulary"),
        ("HFGPT2Tokenizer", None, None, "vocab_file: cannot fetch tokenizer.json"),
        ("HFTokenzer", None, None, "Did you mean 'HFTokenizer'"),
    ],
)
def test_what_is_wrong_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, vocab: str | None, merges: str | None, said: str
) -> None:
    write_gpt2(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match=said):
        create_tokenizer(kind, vocab, merges)


def test_damaged_json_in_the_same_folder_is_named(tmp_path: Path) -> None:
    path = write_json(tmp_path / "tokenizer.json", byte_level(("<s>",)))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not valid JSON"):
        create_tokenizer("HFTokenizer", str(path))
