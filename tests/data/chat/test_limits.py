"""A chat template that never ends, or takes all memory, ends the work with an error that names it: in every thread."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.data.chat import limits
from megatron.data.chat.conversation import BadChat, Conversation
from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import ChatTemplate, load_template
from megatron.data.chat.tokenizer import chat_tokenizer
from megatron.data.tokenise.encode import write_datasets
from megatron.errors import UserError
from tests.data.chat.chats import THREE, rows
from tests.data.chat.templates import write_folder

pytestmark = pytest.mark.cpu

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = Conversation(THREE)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.2)


def test_time_in_the_main_thread_and_in_another() -> None:
    template = ChatTemplate(ENDLESS, origin="the chat template of somebody")
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(UserError, match=r"the chat template of somebody takes more than 0\.2 s"):
        template.render(CHAT)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match=r"of somebody takes more than 0\.2 s"):
        pool.submit(template.render, CHAT).result()
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'x'|center(10**10) }}",
        "{{ '%99999999999d' % 1 }}",
    ],
)
def test_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError, match="the chat template takes more than 2 GiB"):
        ChatTemplate(source).render(CHAT)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_refusal_of_one_chat_is_still_one() -> None:
    with pytest.raises(BadChat, match="one chat only"):
        ChatTemplate("{{ raise_exception('one chat only') }}").render(CHAT)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_data_set_names_the_file_and_skips_no_chats_for_it(tmp_path: Path, workers: int) -> None:
    """The third chat is where this template never ends."""
    folder, file = write_folder(tmp_path / "tokenizer", "chatml"), tmp_path / "mine.jinja"
    file.write_text(
        f"{{% if messages[0]['content'] == 'stay' %}}{ENDLESS}{{% endif %}}" + "{{ messages[0]['content'] }}"
    )
    template = load_template(folder, str(file))
    encoder = ChatEncoder(chat_tokenizer(str(folder)), template, ChatOptions(no_mask=True, skip_bad=True), None)
    chats = [{"messages": [{"role": "assistant", "content": text}]} for text in ("a", "b", "stay", "c")]
    with pytest.raises(UserError, match=rf"--chat-template {file} takes more than 0\.2 s"):
        write_datasets([rows(chat) for chat in chats], encoder, str(tmp_path / "out"), workers=workers)
    assert not list(tmp_path.glob("out*"))


def test_an_operation_that_nothing_interrupts_ends_with_the_process() -> None:
    code = (
        "from megatron.data.chat import limits, template, conversation\n"
        "limits.SECONDS = 0.3\n"
        "chat = conversation.Conversation([{'role': 'user', 'content': 'a'}])\n"
        "template.ChatTemplate('{{ 1|round(-3 * 10**7) }}').render(chat)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGPROF, done.stderr
