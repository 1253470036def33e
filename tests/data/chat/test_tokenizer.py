"""Where the tokenizer of chats comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.chat.conversation import Conversation
from megatron.data.chat.template import load_template
from megatron.data.chat.tokenizer import chat_tokenizer, tokenizer_folder
from megatron.errors import UserError
from tests.data.chat.chats import THREE, documents, encoder, rows
from tests.data.chat.templates import INST, SPECIAL, backend, write_folder
from tests.data.hub_server import Hub, Repo
from tests.tools.command import ROOT

pytestmark = pytest.mark.cpu

FROM_HUB = """
import sys
from megatron.data.chat.conversation import Conversation
from megatron.data.chat.tokenizer import chat_tokenizer, tokenizer_folder
from megatron.data.chat.template import load_template
from megatron.errors import run_cli

def main():
    template = load_template(tokenizer_folder("lab/chat"))
    print(chat_tokenizer("lab/chat").vocab_size, template.eos_id(chat_tokenizer("lab/chat")), template.source[:10])

run_cli(main)
"""


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", "chatml")
    for path in (folder, folder / "tokenizer.json"):
        assert tokenizer_folder(str(path)) == folder
        assert chat_tokenizer(str(path)).vocab_size == backend().get_vocab_size()


WITHOUT_TORCH = """
import sys
from pathlib import Path
from tests.data.chat.chats import THREE, encoder, rows
encoder(Path(sys.argv[1]), "chatml").encode(rows({"messages": THREE}))
print("torch" in sys.modules)
"""


def test_chats_are_rendered_without_torch(tmp_path: Path) -> None:
    """Which costs seconds to import."""
    command = [sys.executable, "-c", WITHOUT_TORCH, str(write_folder(tmp_path / "t", "chatml"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "False", done.stderr


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--tokenizer-path .*tokenizer\.json"):
        chat_tokenizer(str(tmp_path))


def test_a_name_on_the_hub(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", "chatml")
    with Hub() as hub:
        hub.models["lab/chat"] = Repo({path.name: path.read_bytes() for path in folder.iterdir()})
        env = hub.environment(tmp_path / "home")

        def fetch(**more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", FROM_HUB]
            return subprocess.run(
                command, cwd=ROOT, env=env | more, capture_output=True, text=True, timeout=60, check=False
            )

        done = fetch()
        assert done.stdout == f"{backend().get_vocab_size()} 4 {{% for mes\n", done.stderr
    # The second time it is cached: no network is needed.
    assert fetch(HF_HUB_OFFLINE="1").stdout == done.stdout
    lost = fetch(HF_HOME=str(tmp_path / "other"), HF_HUB_OFFLINE="1")
    assert lost.returncode == 2
    assert "--tokenizer-path lab/chat: " in lost.stderr


def test_a_tokenizer_that_marks_blanks(tmp_path: Path) -> None:
    """SentencePiece's way: a blank is part of the word behind it, unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    tokens = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    learnt.pre_tokenizer = pre_tokenizers.Metaspace()
    learnt.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=tokens, show_progress=False)
    learnt.train_from_iterator(["Hello, one two [INST] [/INST] second paragraph indented\n"] * 9, trainer)
    folder = write_folder(tmp_path / "t", "inst")
    learnt.save(str(folder / "tokenizer.json"))
    made, theirs = encoder(folder, "inst"), AutoTokenizer.from_pretrained(str(folder))
    encoded = made.encode(rows({"messages": THREE}))
    found, labels = documents(encoded, 0)[0], documents(encoded, 1)[0]
    assert found == theirs.apply_chat_template(THREE, return_dict=False)
    assert load_template(folder).source == INST
    runs, at = [], 0
    while at < len(found):
        end = next((i for i in range(at, len(found)) if (labels[i] >= 0) != (labels[at] >= 0)), len(found))
        if labels[at] >= 0:
            runs.append(made.tokenizer.detokenize(found[at:end]).strip())
        at = end
    assert runs == [message["content"].strip() + " </s>" for message in THREE[1::2]]


def test_an_eos_that_no_file_names_is_the_end_of_document(tmp_path: Path) -> None:
    """Not nothing, which is what an undefined name writes."""
    backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content + eos_token }}")
    template = load_template(tmp_path, str(tmp_path / "mine.jinja"))
    assert template.render(Conversation(THREE)) == "Hi there<|endoftext|>"
    backend(("<s>",)).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="eos_token"):
        load_template(tmp_path, str(tmp_path / "mine.jinja"))
