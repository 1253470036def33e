"""`deepy chat`: a conversation with a model in the terminal, or through a pipe, where each line is a turn."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from megatron.commands.chat_client import Answer, Model, ServerEnded, ServerFailed, own_server, server_at
from megatron.errors import UserError
from megatron.files import write_atomically
from megatron.flags import Parser

_EXAMPLES = """\
examples:
  with the newest checkpoint of a run, or with a Hugging Face model:
    deepy chat checkpoints/tuned
    deepy chat ./hf --system "Answer in one sentence." temperature=0.7 maximum_tokens=300
  with the checkpoint of a config, on four ranks:
    deepy chat run.yml model_parallel_size=2 pipe_parallel_size=2
  with tools, whose calls are shown:
    deepy chat checkpoints/tuned --tools tools.json
  with a server that runs already, ours or another that speaks OpenAI's language:
    deepy chat --url http://127.0.0.1:8000
  one question from a script:
    echo "What is the capital of France?" | deepy chat checkpoints/tuned
guide: documentation/generation_and_evaluation.md
"""
# What serve.py's command line has besides, and a conversation would wait for ever with.
_NOT_HERE = ("host", "port", "serve_host", "serve_port", "dry_run", "prepare", "explain")
_HELP = """\
/reset        begin a new conversation
/system TEXT  what the system says first, from now on; without TEXT: show it
/undo         take back the last question and its answer
/retry        another answer to the last question
/tool TEXT    the result of the tool that the model has called
/save FILE    add the conversation to a file, as a line of JSON (`messages`)
/help         this text
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer, Ctrl-D ends.
"""


def parser() -> Parser:
    """The flags; all else is the command line of serve.py."""
    flags = Parser(
        description="Talk to a model: the checkpoint of a folder or a config, a Hugging Face model, or a server.",
        usage="%(prog)s CHECKPOINT_OR_CONF [CONF ...] [key=value ...] [flags]",
        epilog=_EXAMPLES + "\nin the conversation:\n" + _HELP,
        allow_abbrev=False,
    )
    flags.add_argument("--system", metavar="TEXT", help="what the system says first")
    flags.add_argument("--tools", metavar="FILE", help="JSON list of the tools that the model may call")
    flags.add_argument("--url", metavar="URL", help="a server that runs already, instead of a checkpoint")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Talk until the end of input."""
    known, rest = parser().parse_known_args(argv)
    if bool(rest) == bool(known.url):
        raise UserError("deepy chat: give a checkpoint or a config, or --url (see deepy chat --help)")
    if of_serve := [word for word in rest if word.split("=")[0].lstrip("-").replace("-", "_") in _NOT_HERE]:
        raise UserError(
            f"deepy chat: {of_serve[0]} is not for a conversation, whose server listens to it alone; start "
            "`deepy serve` for others, and talk to that with --url"
        )
    tools = _read_tools(known.tools) if known.tools else None
    if known.url:
        with server_at(known.url) as http:
            _talk(http, known.system, tools)
        return 0
    if sys.stdin.isatty():
        print("loading the model ...", file=sys.stderr)
    try:
        with own_server(rest) as http:
            _talk(http, known.system, tools)
    except ServerEnded as end:
        return end.exit_code  # it has said why
    return 0


def _talk(http: httpx.Client, system: str | None, tools: list[dict[str, Any]] | None) -> None:
    model = Model(http)
    if sys.stdin.isatty():
        print(f"{model.name}. /help lists what you can type; Ctrl-D ends.", file=sys.stderr)
    if not model.chats:
        note = "its tokenizer has no chat template: what you type is continued, and every line is a new text"
        print(f"{model.name}: {note}", file=sys.stderr)
    Conversation(model, system, tools).run(_lines())


def _read_tools(file: str) -> list[dict[str, Any]]:
    try:
        tools = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--tools: {file} cannot be read: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"--tools: {file} is not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _lines() -> Iterator[str]:
    """What the user types, without line breaks at the ends."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (`input` edits lines, and remembers them, with it)
    while True:
        try:
            line = input(">>> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("... ")
            yield line
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


class Conversation:
    """The turns with a model, and the commands about them.

    Raises `UserError` where a command or a turn fails and nobody is at a terminal to try again.
    """

    def __init__(self, model: Model, system: str | None, tools: list[dict[str, Any]] | None) -> None:
        self.model, self.system, self.tools = model, system, tools
        self.turns: list[dict[str, Any]] = []
        self.commands: dict[str, Callable[[str], None]] = {
            "/reset": lambda text: self.turns.clear(),
            "/system": self._set_system,
            "/undo": lambda text: self._take_back(),
            "/retry": self._retry,
            "/tool": self._give_result,
            "/save": self._save,
            "/help": lambda text: print(_HELP, end="", file=sys.stderr),
        }

    def run(self, lines: Iterator[str]) -> None:
        """Until the lines end."""
        for line in lines:
            try:
                self.take(line)
            except (UserError, ServerFailed) as problem:
                if not sys.stdin.isatty():
                    raise UserError(str(problem)) from problem
                print(f"error: {problem}", file=sys.stderr)

    def take(self, line: str) -> None:
        """A command, or what the user says."""
        name, _, text = line.strip().partition(" ")
        if not line.strip():
            return
        if name in self.commands:
            self.commands[name](text.strip())
        elif line.startswith("/"):
            raise UserError(f"{name} is no command; /help lists them (a blank before / makes it a text)")
        else:
            self._ask({"role": "user", "content": line})

    def messages(self) -> list[dict[str, Any]]:
        """All turns, that of the system included."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def _ask(self, turn: dict[str, Any]) -> None:
        self.turns.append(turn)
        answer = Answer()
        try:
            for piece in self.model.say(self.messages(), self.tools, answer):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            answer.reason = "stopped"
        except ServerFailed:
            self.turns.pop()
            raise
        print(flush=True)
        for call in answer.calls:
            print(f"[calls {call['function']['name']}({call['function']['arguments']})]", flush=True)
        if answer.reason in ("stopped", "length"):
            cut = "stopped" if answer.reason == "stopped" else "cut off: no more tokens are allowed"
            print(f"({cut})", file=sys.stderr)
        self.turns.append(answer.turn)

    def _set_system(self, text: str) -> None:
        if text:
            self.system = text
        else:
            print(self.system or "(the system says nothing)", file=sys.stderr)

    def _take_back(self) -> dict[str, Any]:
        """Up to the last turn that is no answer; returns that."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] != "assistant":
                return turn
        raise UserError("nothing has been said yet")

    def _retry(self, text: str) -> None:
        self._ask(self._take_back())

    def _give_result(self, text: str) -> None:
        calls = self.turns[-1].get("tool_calls") if self.turns else None
        if not calls:
            raise UserError("/tool: the model has not called a tool")
        self._ask({"role": "tool", "content": text, "tool_call_id": calls[0]["id"]})

    def _save(self, text: str) -> None:
        if not text:
            raise UserError("/save: name a file")
        file = Path(text).expanduser()
        line = json.dumps({"messages": self.messages(), **({"tools": self.tools} if self.tools else {})})
        try:
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            write_atomically(file, before + line + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"/save: {file} cannot be written: {error}") from error
        print(f"saved to {file}", file=sys.stderr)
