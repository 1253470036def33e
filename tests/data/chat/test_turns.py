"""Which part of a rendering is trained: the answers and what ends them, whatever the template does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.chat.conversation import BadChat
from megatron.data.chat.template import ChatTemplate
from megatron.data.chat.turns import TurnFinder
from tests.data.chat.chats import THOUGHTS, THREE, Message, chat, say, template
from tests.data.chat.templates import CHATML, SPECIAL
from tests.data.chat.templates import TOOLS as TOOLS_TEMPLATE

pytestmark = pytest.mark.cpu


def trained(
    name: str | ChatTemplate, messages: list[Message], tools: Any = None, prompt: int = 0, **options: Any
) -> list[str]:
    """The trained pieces of text."""
    found = name if isinstance(name, ChatTemplate) else template(name)
    finder = TurnFinder(found, options.pop("roles", ("assistant",)), SPECIAL, **options)
    conversation = chat(messages, tools, prompt)
    rendered = finder.find(conversation)
    assert rendered.text == found.render(conversation, leave_open=options.get("leave_open", False))
    return [rendered.text[turn.start : turn.end] for turn in rendered.turns]


ANSWERS = [message["content"] for message in THREE[1::2]]
ENDS = {
    "chatml": "<|im_end|>",
    "headers": "<|eot|>",
    "zephyr": "</s>",
    "instruct": "<|endoftext|>",
    "tagged": "<|im_end|>",
    "stripping": "<|im_end|>",
    "tools": "<|im_end|>",
}


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_every_answer_and_its_end_and_nothing_else(name: str, system: bool) -> None:
    messages = say(("system", "Be kind.")) * system + THREE
    answers = [answer.strip() for answer in ANSWERS] if name == "headers" else ANSWERS
    assert trained(name, messages) == [answer + ENDS[name] for answer in answers]


def test_a_template_without_headers() -> None:
    expected = [f" {answer.strip()} </s>" for answer in ANSWERS]
    assert trained("inst", THREE) == expected
    assert trained("inst", say(("system", "Be kind.")) + THREE) == expected


def test_a_template_without_end_of_turn_trains_up_to_where_the_eos_comes() -> None:
    assert trained("bare", THREE) == [*ANSWERS[:-1], ANSWERS[-1] + "\n\n"]
    assert trained("bare", THREE[:3]) == ANSWERS[:1]


@pytest.mark.parametrize("system", [False, True])
def test_a_last_turn_with_an_end_of_its_own(system: bool) -> None:
    start = "<|channel|>final<|message|>"
    expected = [f"{start}{a}{end}" for a, end in zip(ANSWERS, ("<|end|>", "<|end|>", "<|return|>"))]
    messages = say(("system", "Be kind.")) * system + THREE
    assert trained("channels", messages) == expected
    assert trained("channels", messages[:-1]) == expected[:2]


def test_reasoning_that_earlier_turns_lose() -> None:
    """Known fault 10: the rendering of two turns is no prefix of the rendering of three."""
    short, whole = (template("stripping").render(chat(THOUGHTS[:n])) for n in (2, 6))
    assert not whole.startswith(short)
    last = "<think>\nthree\n</think>\n\nAnswer three.<|im_end|>"
    for name in ("stripping", "reasoning"):
        assert trained(name, THOUGHTS) == ["Answer one.<|im_end|>", "Answer two.<|im_end|>", last]


def test_reasoning_in_a_field_of_its_own() -> None:
    messages = [*THREE[:3], {"role": "assistant", "reasoning_content": "so", "content": "Yes."}]
    thought = "<think>\nso\n</think>\n\nYes.<|im_end|>"
    assert trained("reasoning", messages) == ["Hello, one.<|im_end|>", thought]
    # After more questions it is gone.
    assert trained("reasoning", [*messages, *say(("user", "?"))])[-1] == "Yes.<|im_end|>"


def test_an_answer_of_nothing_but_reasoning() -> None:
    messages = [*THREE[:1], {"role": "assistant", "reasoning_content": "so", "content": ""}]
    assert trained("reasoning", messages) == ["<think>\nso\n</think>\n\n<|im_end|>"]


def test_what_the_template_writes_after_the_generation_prompt_is_the_models_to_write() -> None:
    assert trained("reasoning", THREE[:2]) == ["<think>\n\n</think>\n\nHello, one.<|im_end|>"]


def test_a_generation_prompt_that_opens_the_reasoning() -> None:
    source = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    assert source != CHATML
    assert trained(ChatTemplate(source), THREE[:2]) == ["Hello, one.<|im_end|>"]
    with_thoughts = source.replace(
        "message['content'] +",
        "('<think>\\n\\n</think>' if message.role == 'assistant' else '') + message['content'] +",
    )
    assert trained(ChatTemplate(with_thoughts), THREE[:2]) == ["\n</think>Hello, one.<|im_end|>"]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris <|im_start|>", "days": 2}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED = '<call>\n{"name": "weather", "arguments": {"city": "Paris <|im_start|>", "days": 2}}\n</call>'


def calling(content: str | None) -> list[Message]:
    said = {} if content is None else {"content": content}
    return [
        *say(("user", "Weather?")),
        {"role": "assistant", **said, "tool_calls": [CALL, CALL]},
        *say(("tool", '{"degrees": 20}'), ("tool", "ok"), ("assistant", "20 degrees.")),
    ]


@pytest.mark.parametrize("content", [None, "", "I look it up."])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_calls_of_tools_are_trained_and_their_results_are_not(content: str | None, tools: Any) -> None:
    said = content + "\n" if content else ""
    first, second = trained("tools", calling(content), tools)
    assert first == f"{said}{CALLED}\n{CALLED}<|im_end|>"
    assert second == "20 degrees.<|im_end|>"


def test_calls_after_thoughts_that_the_template_drops() -> None:
    thinking = {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [CALL]}
    assert trained("tools", [*calling(None)[:1], thinking])[0] == f"{CALLED}<|im_end|>"


def test_calls_whose_end_is_ambiguous_are_an_error() -> None:
    """A template that knows its tools by name (so names cannot be marked), and ends no turn but with the calls."""
    head = "{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    source = TOOLS_TEMPLATE.replace(head, head + "{%- if call.name != 'weather' %}{{- '?' }}{%- endif %}")
    source = source.replace("<|im_end|>", "").replace("</call>", "<|end|>")
    one, two = calling(None)[:2], calling(None)[:2]
    one[1] = {**one[1], "tool_calls": [CALL]}
    assert trained(ChatTemplate(source), one) == [CALLED.replace("</call>", "<|end|>")]
    with pytest.raises(BadChat, match=r"message 2 \(assistant\): .*generation"):
        trained(ChatTemplate(source), two)


def test_a_chat_that_ends_with_a_call() -> None:
    assert trained("tools", calling("I look it up.")[:2]) == [f"I look it up.\n{CALLED}\n{CALLED}<|im_end|>"]


def test_a_tool_result_that_looks_like_a_question_does_not_confuse() -> None:
    """The template compares the beginning of contents, so marks in them would change what it does."""
    messages = say(
        ("user", "Go"),
        ("assistant", "<think>\na\n</think>\n\nstep"),
        ("user", "<result>x</result>"),
        ("assistant", "end"),
    )
    expected = ["<think>\na\n</think>\n\nstep<|im_end|>", "<think>\n\n</think>\n\nend<|im_end|>"]
    assert trained("reasoning", messages) == expected


def test_blanks_before_an_answer_whose_question_cannot_be_marked() -> None:
    question = "<result><|im_start|>assistant\n"
    messages = say(("user", "Go"), ("assistant", "step"), ("user", question), ("assistant", "  lead"))
    source = CHATML.replace(
        "{{ '<|im_start|>'", "{{ '!' if message['content'].startswith('<result>') else '' }}{{ '<|im_start|>'"
    )
    assert source != CHATML
    assert trained(ChatTemplate(source), messages) == ["step<|im_end|>", "  lead<|im_end|>"]


def test_a_header_that_stands_there_twice_is_an_error() -> None:
    """Neither the question (its beginning is compared) nor the beginning of the answer can be marked."""
    header = "<|im_start|>assistant\n"
    messages = say(
        ("user", "Go"),
        ("assistant", "<think>\nq\n</think>\n\nx"),
        ("user", f"<result>{header}"),
        ("assistant", "<think>\na\n</think>\n\nb"),
    )
    with pytest.raises(BadChat, match=r"message 4 \(assistant\): .*generation"):
        trained("reasoning", messages)
    messages[2]["content"] = "<result>"
    assert trained("reasoning", messages)[-1] == "<think>\na\n</think>\n\nb<|im_end|>"


def test_answers_of_nothing_but_thoughts_inside_the_content() -> None:
    """What is left of them is nothing, so marks in them are lost: they lie between what stands around them."""
    thought = "<think>\nx\n</think>\n\n"
    messages = say(("user", "a"), ("assistant", thought), ("user", "b"), ("assistant", "c"))
    assert trained("stripping", messages) == ["<|im_end|>", "c<|im_end|>"]
    assert trained("reasoning", messages)[0] == "<|im_end|>"
    assert trained("reasoning", messages[:2]) == [thought + "<|im_end|>"]


def test_several_answers_in_a_row() -> None:
    messages = say(("user", "Hi"), ("assistant", "one"), ("assistant", "two"), ("user", "?"), ("assistant", "three"))
    for name in ("chatml", "tagged", "headers", "zephyr"):
        assert trained(name, messages) == [f"{word}{ENDS[name]}" for word in ("one", "two", "three")]


def test_an_answer_that_repeats_the_question_and_the_headers() -> None:
    messages = say(
        ("user", "same"), ("assistant", "same"), ("user", "<|im_start|>assistant\nsame"), ("assistant", "same")
    )
    assert trained("chatml", messages) == ["same<|im_end|>", "same<|im_end|>"]


def test_an_answer_that_holds_an_end_of_turn() -> None:
    assert trained("chatml", say(("user", "a"), ("assistant", "b<|im_end|>c"))) == ["b<|im_end|>c<|im_end|>"]


def test_empty_answers_train_their_end() -> None:
    messages = say(("user", "Hi"), ("assistant", ""), ("user", "?"), ("assistant", " \n"))
    assert trained("chatml", messages) == ["<|im_end|>", " \n<|im_end|>"]
    assert trained("headers", messages) == ["<|eot|>"] * 2
    assert trained("tools", messages[:2]) == []  # this template leaves even the header's line break out


def test_a_chat_that_begins_with_an_answer() -> None:
    messages = say(("assistant", "Welcome."), ("user", "Hi"), ("assistant", "Hello."))
    for name in ("chatml", "headers", "zephyr", "tagged"):
        assert trained(name, messages) == [f"Welcome.{ENDS[name]}", f"Hello.{ENDS[name]}"]


def test_only_the_last_turn() -> None:
    for name in ("chatml", "tagged", "stripping"):
        assert trained(name, THREE, only_last=True) == [ANSWERS[-1] + "<|im_end|>"]
        assert trained(name, THREE[:-1], only_last=True) == [ANSWERS[-2] + "<|im_end|>"]


def test_messages_of_a_prompt_are_not_trained() -> None:
    for name in ("chatml", "tagged", "stripping"):
        assert trained(name, THREE, prompt=3) == [answer + "<|im_end|>" for answer in ANSWERS[1:]]
        assert trained(name, THREE, prompt=6) == []


def test_other_roles() -> None:
    questions = [message["content"] + "<|im_end|>" for message in THREE[0::2]]
    assert trained("chatml", THREE, roles=("user",)) == questions
    assert len(trained("chatml", THREE, roles=("user", "assistant"))) == 6
    # Tags speak of the assistant only.
    assert trained("tagged", THREE, roles=("user",)) == questions
    assert trained("chatml", THREE, roles=("nobody",)) == []


def test_a_chat_left_open() -> None:
    for name in ("chatml", "tagged", "zephyr"):
        end = ENDS[name]
        assert trained(name, THREE, leave_open=True) == [ANSWERS[0] + end, ANSWERS[1] + end, ANSWERS[2]]


def test_content_in_parts() -> None:
    source = CHATML.replace(
        "message['content']",
        "(message['content'] if message['content'] is string else message['content'] | map(attribute='text') | join)",
    )
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
    ]
    assert trained(ChatTemplate(source), messages) == ["one two<|im_end|>"]


# ---- what cannot be derived stops


DROPS = "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}"
BACKWARDS = CHATML.replace("message['content']", "message['content'] | reverse")
NOWHERE = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"


@pytest.mark.parametrize("source", [DROPS, BACKWARDS])
def test_a_turn_that_cannot_be_found_is_an_error_with_its_number(source: str) -> None:
    with pytest.raises(BadChat, match=r"message 2 \(assistant\): .*generation"):
        trained(ChatTemplate(source), THREE)


def test_tags_that_mark_nothing_are_an_error() -> None:
    with pytest.raises(BadChat, match=r"message 2 \(assistant\): .*generation"):
        trained(ChatTemplate(NOWHERE), THREE)


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(BadChat, match="roles must alternate user/assistant"):
        trained("inst", say(("assistant", "a")))
    with pytest.raises(BadChat, match="chat template"):
        trained("inst", say(("user", "a"), ("user", "b")))


def test_code_points_that_no_text_holds() -> None:
    with pytest.raises(BadChat, match="U\\+FDD0"):
        trained("chatml", say(("user", "\ufdd0"), ("assistant", "b")))


# ---- any text

TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["assistant\n", "<|im_end|>", "<|im_start|>assistant\n", "\n", " ", "</think>", "<think>\n", "0", ""]
    ),
)
CONTENT = st.lists(TEXT, max_size=4).map("".join).filter(lambda text: not set(text) & set("\ufdd0\ufdd1\ufdd2"))
ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_text_in_any_order(data: st.DataObject) -> None:
    roles = data.draw(ROLES)
    messages = say(*((role, data.draw(CONTENT)) for role in roles))
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert trained("chatml", messages) == [answer + "<|im_end|>" for answer in answers]
    assert trained("tagged", messages) == [answer + "<|im_end|>" for answer in answers]
