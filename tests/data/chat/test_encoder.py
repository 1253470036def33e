"""From records to data sets of chats, labels and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import ChatTemplate
from megatron.data.tokenise.encode import write_datasets
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.labels import check_labels
from megatron.data.tokens.manifest import verify
from megatron.errors import UserError
from tests.data.chat.chats import THREE, documents, encoder, rows, say, trained_texts
from tests.data.chat.templates import write_folder

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


def made(folder: Path, template: str = "chatml", **options: Any) -> ChatEncoder:
    return encoder(folder / template.replace(" ", "_"), template, ChatOptions(**options))


def texts(built: ChatEncoder, *records: dict[str, Any], output: int = 0) -> list[list[str]]:
    """Decoded trained runs of every record."""
    encoded = built.encode(rows(*records))
    pairs = zip(documents(encoded, output), documents(encoded, output + 1))
    return [trained_texts(built, tokens, labels) for tokens, labels in pairs]


def test_the_decoded_trained_text_is_the_answers(folder: Path) -> None:
    """Known faults 9 and 10: no token of a prompt or header, every answer with its end."""
    for template, end in {"chatml": "<|im_end|>", "zephyr": "</s>", "tagged": "<|im_end|>"}.items():
        built = made(folder, template)
        assert texts(built, {"messages": THREE}) == [[message["content"] + end for message in THREE[1::2]]]


def test_the_tokens_that_end_a_trained_turn_are_recorded(folder: Path) -> None:
    written = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|im_end|>{% endfor %}"
    chatml = ("chatml", "chatml of a base model", "tagged", "stripping", "reasoning", "tools")
    ends = dict.fromkeys(chatml, "<|im_end|>")
    ends |= {"headers": "<|eot|>", "instruct": "<|endoftext|>", "channels": "<|return|>"}
    ends |= dict.fromkeys(("zephyr", "bare", "inst"), "</s>")
    for name, expected in ends.items():
        built = made(folder, name)
        ids = [built.tokenizer.backend.token_to_id(expected)]
        assert [output.extra["turn_ends"] for output in built.outputs] == [ids, ids], name
    # The template's own end, and the eos after it, where both are trained.
    built = made(folder, "instruct")
    both = ChatEncoder(built.tokenizer, ChatTemplate(written, {}), ChatOptions(), built.rules.eos)
    ids = sorted(built.tokenizer.backend.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert both.outputs[0].extra["turn_ends"] == ids
    for option in ("leave_open", "for_rm"):
        assert made(folder, "chatml", **{option: True}).outputs[0].extra["turn_ends"] == []


def test_a_prompt_and_its_answer(folder: Path) -> None:
    """Known fault 13: exactly the tokens of the answer and the eos that ends it."""
    built = made(folder, "instruct", prompt_key="q", completion_key="a", keys=())
    encoded = built.encode(rows({"q": "ab", "a": "cd"}))
    tokens, labels = documents(encoded, 0)[0], documents(encoded, 1)[0]
    encode = built.tokenizer.backend.encode
    assert tokens == encode("<|user|>\nab\n<|assistant|>\ncd<|endoftext|>", add_special_tokens=False).ids
    answer = encode("cd<|endoftext|>", add_special_tokens=False).ids
    assert labels == [-100] * (len(tokens) - len(answer)) + answer
    assert [output.suffix for output in built.outputs] == ["_a_document", "_a_label_document"]


def test_an_eos_that_ends_the_only_end_of_turn_there_is(folder: Path) -> None:
    built = made(folder, "bare")
    assert texts(built, {"messages": THREE[:2]}) == [["Hello, one.\n\n</s>"]]


def test_what_the_tokenizer_does_to_texts_is_not_done_to_chats(tmp_path: Path) -> None:
    """No begin token in front of the template's, and offsets with the blanks that belong to a token."""
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "t", "bare")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    backend.save(str(folder / "tokenizer.json"))
    built, theirs = encoder(folder, "bare"), AutoTokenizer.from_pretrained(str(folder))
    messages = say(("user", "q"), ("assistant", " yes  "), ("user", "q"), ("assistant", "no"))
    assert theirs("q")["input_ids"][0] == backend.token_to_id("<s>")
    tokens = documents(built.encode(rows({"messages": messages})), 0)[0]
    assert tokens[:-1] == theirs.apply_chat_template(messages, return_dict=False)
    assert texts(built, {"messages": messages}) == [[" yes  ", "no\n\n</s>"]]


def test_pairs_train_what_differs(folder: Path) -> None:
    built = made(folder, chosen_key="better", rejected_key="worse", keys=())
    record = {
        "better": [*THREE[:3], *say(("assistant", "good"))],
        "worse": [*THREE[:3], *say(("assistant", "bad"), ("user", "!"), ("assistant", "sorry"))],
    }
    suffixes = ["_chosen_document", "_chosen_label_document", "_rejected_document", "_rejected_label_document"]
    assert [output.suffix for output in built.outputs] == suffixes
    assert texts(built, record) == [["good<|im_end|>"]]
    assert texts(built, record, output=2) == [["bad<|im_end|>", "sorry<|im_end|>"]]


def test_pairs_over_a_prompt(folder: Path) -> None:
    built = made(folder, chosen_key="chosen", rejected_key="rejected", prompt_key="prompt", keys=())
    encoded = built.encode(rows({"prompt": "q", "chosen": "good", "rejected": THREE[:1] + say(("assistant", "bad"))}))
    expected = {0: "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\ngood<|im_end|>\n"}
    assert built.tokenizer.detokenize(documents(encoded, 0)[0]) == expected[0]


def test_both_sides_of_a_pair_are_left_out_together(folder: Path) -> None:
    built = made(folder, chosen_key="c", rejected_key="r", keys=(), max_length=30)
    good, bad = say(("user", "q"), ("assistant", "good")), say(("user", "q"), ("assistant", "bad"))
    long = say(("user", "q"), ("assistant", "x " * 60))
    encoded = built.encode(
        rows(
            {"c": good, "r": bad},
            {"c": good, "r": long},
            {"c": good, "r": good},
            {"c": [], "r": bad},
            {"c": bad, "r": good},
        )
    )
    assert [len(lengths) for lengths in encoded.lengths] == [2] * 4
    assert encoded.tally.empty == [3, 0, 0, 0]
    reasons = [(fault.where, fault.reason.partition(":")[2].strip()) for fault in encoded.tally.first_faults]
    assert reasons[0][0] == "memory, row 1" and "--max-length" in reasons[0][1]
    assert reasons[1][0] == "memory, row 2" and "answer" in reasons[1][1]


def test_long_texts_are_cut_or_refused(folder: Path) -> None:
    """On both sides of a pair by itself, labels too; what is left out for having no answer any more is counted."""
    good, long = say(("user", "q"), ("assistant", "good")), say(("user", "q"), ("assistant", "x " * 60))
    lost = say(("user", "q " * 60), ("assistant", "x"))
    records = rows({"c": good, "r": long}, {"c": long, "r": lost}, {"c": long, "r": good})
    whole = made(folder, chosen_key="c", rejected_key="r", keys=()).encode(records)
    built = made(folder, chosen_key="c", rejected_key="r", keys=(), max_length=30, too_long="cut")
    encoded = built.encode(records)
    assert (encoded.tally.cut, encoded.tally.empty) == (4, [1, 0, 0, 0])
    for output in range(4):
        expected = [one[:30] for i, one in enumerate(documents(whole, output)) if i != 1]
        assert documents(encoded, output) == expected
    with pytest.raises(UserError, match=r"memory, row 0: key 'rejected': \d+ tokens, .*--max-length 30"):
        made(folder, chosen_key="c", rejected_key="r", keys=(), max_length=30, too_long="refuse").encode(records)


def test_a_pair_has_a_margin(folder: Path) -> None:
    built = made(folder, chosen_key="c", rejected_key="r", keys=(), reward_key="m", for_rm=True)
    assert built.outputs[4].suffix == "_chosen_reward_document"
    good, bad = say(("user", "q"), ("assistant", "good")), say(("user", "q"), ("assistant", "bad"))
    encoded = built.encode(
        rows({"c": good, "r": bad, "m": 0.5}, {"c": good, "r": [], "m": 1}, {"c": bad, "r": good, "m": 2})
    )
    assert encoded.ids[4].tolist() == [0.5, 2.0]
    eos = built.rules.eos
    for output in (1, 3):  # the end alone is read
        assert all(one[-1] == eos and set(one[:-1]) == {-100} for one in documents(encoded, output))


def test_several_keys_stay_aligned(folder: Path) -> None:
    built = made(folder, keys=("a", "b"))
    two = say(("user", "q"), ("assistant", "yes"))
    encoded = built.encode(rows({"a": two, "b": two}, {"a": two, "b": two[:1]}, {"a": THREE, "b": two}))
    assert [len(lengths) for lengths in encoded.lengths] == [2] * 4
    assert documents(encoded, 2)[0] == documents(encoded, 2)[1] == documents(encoded, 0)[0]


@pytest.mark.parametrize(
    ("value", "binary", "expected"),
    [
        (0.25, False, 0.25),
        (3, False, 3.0),
        ([0.5], False, 0.5),
        (-2, True, -1),
        (0, True, -1),
        (True, True, 1),
        (0.1, True, 1),
    ],
)
def test_rewards(folder: Path, value: Any, binary: bool, expected: float) -> None:
    """A fraction is not cut to an integer, and -1 is not true."""
    built = made(folder, reward_key="score", binary_reward=binary)
    encoded = built.encode(rows({"messages": THREE, "score": value}))
    assert built.outputs[2].suffix == "_messages_reward_document"
    assert encoded.ids[2].dtype == built.outputs[2].dtype == (np.int32 if binary else np.float32)
    assert documents(encoded, 2) == [[expected]]


@pytest.mark.parametrize("value", ["high", None, float("nan"), [1.0, 2.0], {}])
def test_unusable_rewards(folder: Path, value: Any) -> None:
    built = made(folder, reward_key="score")
    with pytest.raises(UserError, match=r"memory, row 0: key 'score': .*reward"):
        built.encode(rows({"messages": THREE, "score": value}))


def test_for_a_reward_model(folder: Path) -> None:
    """Nothing is trained but one eos whose input is the eos at the end."""
    built = made(folder, "zephyr", for_rm=True)
    encoded = built.encode(rows({"messages": THREE}, {"messages": THREE[:1]}))
    for tokens, labels in zip(documents(encoded, 0), documents(encoded, 1)):
        eos = built.tokenizer.backend.token_to_id("</s>")
        assert tokens[-2:] == [eos, eos]
        assert labels == [-100] * (len(tokens) - 1) + [eos]


def test_without_a_mask_everything_is_trained(folder: Path) -> None:
    built = made(folder, no_mask=True)
    encoded = built.encode(rows({"messages": THREE}, {"messages": THREE[:1]}))
    assert documents(encoded, 0) == documents(encoded, 1)
    assert built.outputs[1].extra["no_mask"] is True


def test_left_open(folder: Path) -> None:
    built = made(folder, leave_open=True)
    encoded = built.encode(rows({"messages": THREE[:2]}))
    text = built.tokenizer.detokenize(documents(encoded, 0)[0])
    assert text == "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nHello, one."
    assert texts(built, {"messages": THREE[:2]}) == [["Hello, one."]]


def test_unusable_records(folder: Path) -> None:
    records = [{"messages": THREE}, {"mesages": THREE}, {"messages": "text"}, {"messages": [{"role": "user"}]}]
    expected = "memory, row 1: no key 'messages'. Did you mean 'mesages'?"
    with pytest.raises(UserError, match=expected.replace("?", r"\?")):
        made(folder).encode(rows(*records))
    tally = made(folder, skip_bad=True).encode(rows(*records)).tally
    assert (tally.documents, tally.faults) == ([1, 1], 3)
    assert "message 1 (user): no content" in tally.first_faults[2].reason
    with pytest.raises(UserError, match=r"row 0: key 'messages': .*alternate"):
        made(folder, "inst").encode(rows({"messages": say(("assistant", "a"))}))


def test_broken_unicode(folder: Path) -> None:
    half = json.loads('"a \\ud83d b"')
    assert texts(made(folder), {"messages": say(("user", half), ("assistant", half))}) == [["a \ufffd b<|im_end|>"]]
    said = say(("user", "cafÃ©"), ("assistant", "cafÃ©"))
    assert texts(made(folder, ftfy=True), {"messages": said}) == [["café<|im_end|>"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chosen_key": "a", "keys": ()}, "--chosen-key.*--rejected-key"),
        ({"completion_key": "a", "keys": ()}, "--completion-key needs --prompt-key"),
        ({"prompt_key": "a"}, "--prompt-key needs --completion-key"),
        ({"binary_reward": True}, "--binary-reward needs --reward-key"),
        ({"reward_key": "r", "keys": ("a", "b")}, "--reward-key"),
        ({"too_long": "cut"}, "--max-length"),
        ({"too_long": "cut", "max_length": 9, "for_rm": True}, "--too-long cut"),
        ({"no_mask": True, "for_rm": True}, "--no-mask .*--for-rm"),
        ({"leave_open": True, "for_rm": True}, "--for-rm .*--continue-final-message"),
        ({"keys": ("a", "a")}, "--jsonl-keys a a"),
        ({"keys": ("a", "a_label")}, "--jsonl-keys a a_label"),
    ],
)
def test_options_that_exclude_each_other(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(folder, **options)


def test_a_tokenizer_without_eos(folder: Path) -> None:
    built = made(folder)
    tokens = documents(
        ChatEncoder(built.tokenizer, built.template, ChatOptions(), None).encode(rows({"messages": THREE})), 0
    )
    assert tokens == documents(built.encode(rows({"messages": THREE})), 0)
    with pytest.raises(UserError, match="--for-rm"):
        ChatEncoder(built.tokenizer, built.template, ChatOptions(for_rm=True), None)


def test_the_files_do_not_depend_on_the_workers(folder: Path, tmp_path: Path) -> None:
    many = [{"messages": THREE[: 2 + 2 * (i % 3)], "r": i / 7} for i in range(60)]
    chunks = [rows(*many[at : at + 7]) for at in range(0, 60, 7)]
    for workers in (1, 3):
        built = made(folder, "reasoning", reward_key="r")
        manifests, _ = write_datasets(chunks, built, str(tmp_path / f"w{workers}"), workers=workers)
        assert [manifest.documents for manifest in manifests] == [60] * 3
    for output in built.outputs:
        for end in (".bin", ".idx"):
            one, three = ((tmp_path / f"w{n}{output.suffix}{end}").read_bytes() for n in (1, 3))
            assert one == three
    data, labels, rewards = (IndexedDataset(f"{tmp_path / 'w3'}{output.suffix}") for output in built.outputs)
    check_labels(data, labels)
    assert labels.dtype == np.int32
    assert rewards.tokens.tolist() == np.float32([i / 7 for i in range(60)]).tolist()
    for output in built.outputs:
        manifest = verify(f"{tmp_path / 'w3'}{output.suffix}")
        assert manifest is not None
        assert (manifest.tokenizer is None) == output.suffix.endswith("_reward_document")


@pytest.mark.parametrize("join", ["+", "~"])
def test_parts_for_a_template_that_takes_only_texts(folder: Path, join: str) -> None:
    usual = made(folder)
    source = f"{{% for message in messages %}}{{{{ '<' {join} message.role {join} '>' {join} message.content }}}}"
    template = ChatTemplate(source + "<|im_end|>{% endfor %}")
    built = ChatEncoder(usual.tokenizer, template, ChatOptions(), usual.rules.eos)
    parts = [{"type": "text", "text": "No, "}, {"type": "text", "text": "one."}]
    asked, answered = say(("user", "Two?")), say(("assistant", "No, one."))
    listed = [{"role": "user", "content": ["Two?"]}]
    forms = [[*asked, *answered], [*listed, {"role": "assistant", "content": parts}], [*listed, *answered]]
    encoded = built.encode(rows(*({"messages": form} for form in forms)))
    for output in (0, 1):
        first, *others = documents(encoded, output)
        assert others == [first, first]
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}, *answered]
    with pytest.raises(UserError, match="message 1: .*content"):
        built.encode(rows({"messages": image}))
