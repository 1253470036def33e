"""What messages hold is in what is trained, or it is refused, or counted and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from megatron.data.chat.conversation import BadChat, conversation
from megatron.data.chat.template import ChatTemplate
from megatron.data.chat.turns import Rendered, TurnFinder
from megatron.data.tokenise.encode import write_datasets
from tests.data.chat.chats import THREE, Message, encoder, rows, say, template
from tests.data.chat.templates import CHATML, SPECIAL, TAGGED, TOOLS, write_folder

pytestmark = pytest.mark.cpu

# As published with DeepSeek-V3.
DEEPSEEK = ChatTemplate((Path(__file__).parent / "deepseek_v3.jinja").read_text(encoding="utf-8"), {"bos_token": "<s>"})
# Two that know nothing of calls: the shape of Llama 3's, and the same with tags.
HEADS = (
    "{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot|>' }}{% endfor %}"
)
TAGGED_HEADS = HEADS.replace(
    "{{ m['content'] | trim + '<|eot|>' }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot|>' }}{% endif %}",
)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


PARIS, ROME = call("weather", {"city": "Paris"}), call("weather", {"city": "Rome"})


def calling(*calls: Any, **more: Any) -> list[Message]:
    return [*say(("user", "Weather?")), {"role": "assistant", **more, "tool_calls": list(calls)}]


def found(source: str | ChatTemplate, messages: list[Message]) -> tuple[Rendered, list[str]]:
    """The rendering, and its trained pieces."""
    made = source if isinstance(source, ChatTemplate) else ChatTemplate(source)
    rendered = TurnFinder(made, added_tokens=(*SPECIAL, "<｜tool▁call▁end｜>", "<｜end▁of▁sentence｜>")).find(
        conversation(messages)
    )
    return rendered, [rendered.text[turn.start : turn.end] for turn in rendered.turns]


# ---- calls


@pytest.mark.parametrize("source", [HEADS, TAGGED_HEADS])
def test_a_template_that_drops_calls_is_refused(source: str) -> None:
    assert found(source, say(("user", "a"), ("assistant", "b")))[1] == ["b<|eot|>"]
    with pytest.raises(BadChat, match="tool calls of message 2"):
        found(source, calling(PARIS, content=""))
    with pytest.raises(BadChat, match="tool calls of message 2"):
        found(source, calling(PARIS, content="I look it up."))


@pytest.mark.parametrize(
    "change",
    [
        ("{%- for call in message.tool_calls or [] %}", "{%- for call in (message.tool_calls or [])[:1] %}"),
        ("call.arguments | tojson", "'{}'"),
        ("call.name", "'tool'"),
    ],
    ids=["only the first", "no arguments", "no name"],
)
def test_a_template_that_drops_a_part_of_the_calls_is_refused(change: tuple[str, str]) -> None:
    assert change[0] in TOOLS
    with pytest.raises(BadChat, match="tool calls of message 2"):
        found(TOOLS.replace(*change), calling(PARIS, ROME))


@pytest.mark.parametrize(
    "change",
    [
        ("call.arguments | tojson", "call.arguments | tojson(ensure_ascii=True)"),
        ("call.name", "('weather' if call.name == 'weather' else raise_exception('unknown'))"),
    ],
    ids=["escapes", "knows its tools"],
)
def test_calls_that_cannot_be_marked_are_found_by_their_text(change: tuple[str, str]) -> None:
    rendered, trained = found(TOOLS.replace(*change), calling(call("weather", {"city": 'Zü"rich\n'})))
    assert "weather" in trained[0] and "rich" in trained[0]
    assert rendered.lost == ()


CALLING = (  # the model's part in double brackets
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}[[{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + ' ' + (c.function.arguments | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}]]{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VALUES = st.sampled_from(["Paris", "", "<|im_end|>", 'a "b"', "x\ny ", " z", 3, True, None, [], ["Rome", {"k": 1}], {}])
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "<|im_end|>", "name", "k "]), VALUES, max_size=3)
CALLS = st.lists(ARGUMENTS.map(lambda arguments: call("weather", arguments)), min_size=1, max_size=2)


@settings(max_examples=40, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=3), st.sampled_from([None, "", "I look it up."]))
def test_derived_turns_of_calls_are_those_of_the_same_template_with_tags(calls: list[Any], content: str | None) -> None:
    """Also where an argument holds what ends a turn."""
    plain, tagged = CALLING.replace("[[", "").replace("]]", ""), CALLING
    for mark, tag in (("[[", "{% generation %}"), ("]]", "{% endgeneration %}")):
        tagged = tagged.replace(mark, tag)
    messages = say(("user", "Weather?"))
    for some in calls:
        messages += [{"role": "assistant", "content": content, "tool_calls": some}, *say(("tool", "20"))]
    messages += say(("assistant", "done"))
    texts, spans = render_jinja_template([messages], chat_template=tagged, return_assistant_tokens_mask=True)
    rendered, trained = found(plain, messages)
    assert rendered.text == texts[0]
    assert trained == [texts[0][start:end] for start, end in spans[0]]


def test_calls_outside_the_tags_are_counted() -> None:
    source = TAGGED.replace(
        "{% endgeneration %}{{ '\\n' }}", "{% endgeneration %}{{ message.tool_calls | tojson }}{{ '\\n' }}"
    )
    assert source != TAGGED
    rendered, trained = found(source, calling(PARIS, content="I look it up."))
    assert trained == ["I look it up.<|im_end|>"]
    assert len(rendered.lost) == 1 and rendered.lost[0].startswith("tool_calls")


# ---- no content


def test_null_next_to_calls_is_what_deepseek_v3_writes_them_for() -> None:
    one = call("weather", '{"city": "Paris"}')
    messages = [*calling(one, content=None), *say(("tool", "20"), ("assistant", "20 degrees."))]
    texts, _ = render_jinja_template([messages], chat_template=DEEPSEEK.source, bos_token="<s>")
    rest = {key: value for key, value in messages[1].items() if key != "content"}
    for content in ({"content": None}, {"content": ""}, {}):
        messages[1] = {**rest, **content}
        rendered, trained = found(DEEPSEEK, messages)
        assert rendered.text == texts[0]
        assert trained == [
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```'
            "<｜tool▁call▁end｜>",
            "20 degrees.<｜end▁of▁sentence｜>",
        ]
    messages[1] = {**rest, "content": "I look it up."}
    with pytest.raises(BadChat, match="tool calls of message 2"):
        found(DEEPSEEK, messages)


def test_no_content_next_to_calls_for_a_template_that_needs_a_text(tmp_path: Path) -> None:
    """As Qwen3's does, which fails for a message without content."""
    from transformers import AutoTokenizer

    needs = TOOLS.replace("{%- for message in messages %}", "{%- for message in messages %}{{- message.content[:0] }}")
    assert needs != TOOLS
    write_folder(tmp_path / "t", "tools")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "t"))
    expected = theirs.apply_chat_template(calling(PARIS, content=""), chat_template=needs, tokenize=False)
    for messages in (calling(PARIS, content=None), calling(PARIS)):
        with pytest.raises(Exception, match="content"):
            theirs.apply_chat_template(messages, chat_template=needs, tokenize=False)
        rendered, trained = found(needs, messages)
        assert rendered.text == expected
        assert trained == ['<call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</call><|im_end|>']


def test_a_refusal_that_is_not_about_contents_keeps_its_reason() -> None:
    with pytest.raises(BadChat, match="roles must alternate"):
        found(template("inst"), [{"role": "assistant", "tool_calls": [PARIS]}])


# ---- other fields


THINKING = [*THREE[:1], {"role": "assistant", "reasoning_content": "Two and two.", "content": "4.", "name": "bot"}]


def test_reasoning_that_the_template_does_not_write_is_counted() -> None:
    rendered, trained = found(CHATML, THINKING)
    assert trained == ["4.<|im_end|>"]
    assert sorted(rendered.lost) == ["name", "reasoning_content"]
    rendered, trained = found(template("reasoning"), THINKING)
    assert trained == ["<think>\nTwo and two.\n</think>\n\n4.<|im_end|>"]
    assert rendered.lost == ("name",)
    # After another question this template drops it, as Qwen3's does; the name of a user is written by none.
    later = [*THINKING, {"role": "user", "content": "?", "name": "U", "weight": 1}, *THREE[1:2]]
    assert sorted(found(template("reasoning"), later)[0].lost) == ["name", "name", "reasoning_content", "weight"]


def test_contents_are_counted_too() -> None:
    thoughts = say(("user", "a"), ("assistant", "<think>\nx\n</think>\n\nb"), ("user", "c"), ("assistant", "d"))
    rendered, trained = found(template("stripping"), thoughts)
    assert trained == ["b<|im_end|>", "d<|im_end|>"]
    assert len(rendered.lost) == 1 and rendered.lost[0].startswith("content")
    no_system = CHATML.replace("{{ '<|im_start|>'", "{% if message.role != 'system' %}{{ '<|im_start|>'")
    no_system = no_system.replace("'\\n' }}{% endfor", "'\\n' }}{% endif %}{% endfor")
    rendered, _ = found(no_system, say(("system", "Be kind.")) + THREE[:2])
    assert "Be kind." not in rendered.text
    assert len(rendered.lost) == 1 and rendered.lost[0].startswith("content")


def test_a_tagged_answer_of_which_nothing_is_written_is_refused() -> None:
    drops = TAGGED.replace("{{ message['content'] + '<|im_end|>' }}{% endg", "{{ '<|im_end|>' }}{% endg")
    assert drops != TAGGED
    with pytest.raises(BadChat, match=r"message 2 \(assistant\)"):
        found(drops, THREE[:2])


def test_templates_in_use_lose_nothing_of_plain_chats() -> None:
    for name in ("chatml", "headers", "zephyr", "instruct", "tagged", "stripping", "reasoning", "tools", "channels"):
        assert found(template(name), THREE)[0].lost == ()


def test_the_tool_names_what_is_lost_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built = encoder(tmp_path / "t", "chatml")
    chunks = [rows({"messages": THINKING}, {"messages": THREE}), rows({"messages": THINKING})]
    _, total = write_datasets(iter(chunks), built, str(tmp_path / "out"))
    assert total.lost == {"name": 2, "reasoning_content": 2}
    total.log_left_out()
    named = [record.getMessage() for record in caplog.records if "reasoning_content" in record.getMessage()]
    assert len(named) == 1 and "reasoning_content in 2" in named[0]
