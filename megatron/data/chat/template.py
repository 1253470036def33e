"""A tokenizer's chat template: found in its folder, rendered by `transformers` itself.

Importing the rendering alone costs a fraction of a second and no torch (measured), and it is what
`AutoTokenizer.apply_chat_template` calls, so the text is identical.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.data.chat.conversation import BadChat, Conversation
from megatron.data.chat.limits import TooMuch, limits
from megatron.errors import UserError, nearest
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer, create_tokenizer

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
logger = get_logger(__name__)

TOOL_USE = "tool_use"  # the name under which some tokenizers keep a second template for chats with tools


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and its variables.

    `source`: for chats; `tool_source`: for chats with tools, when the tokenizer has one of its own; `tokens`: special
    tokens by name (`eos_token`); `extra`: further variables (`enable_thinking`); `origin`: what to call it in messages.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    origin: str = "the chat template"

    def render(self, chat: Conversation, *, add_generation_prompt: bool = False, leave_open: bool = False) -> str:
        """The text of a chat. `leave_open`: stop where the content of the last message ends.

        Raises `BadChat` with the template's message when it refuses the chat, `TooMuch` when it does not end.
        """
        text, _ = self._render(chat, add_generation_prompt, leave_open, False)
        return text

    def render_tagged(self, chat: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat and the spans of characters that the template's `{% generation %}` tags enclose."""
        return self._render(chat, False, False, True)

    def eos_id(self, tokenizer: Tokenizer) -> int | None:
        """The id that ends a chat: of the token that the tokenizer's files call eos, else its end of document."""
        name = self.tokens.get("eos_token")
        found = [i for i, token in tokenizer.id_map().items() if token == name] if name else []
        return found[0] if found else tokenizer.eod

    def digest(self) -> str:
        """Hash of everything that shapes a rendering."""
        described = [self.source, self.tool_source, dict(self.tokens), dict(self.extra)]
        return hashlib.sha256(json.dumps(described, sort_keys=True, default=repr).encode()).hexdigest()[:16]

    def is_tagged(self, chat: Conversation) -> bool:
        """Whether the template for this chat has `{% generation %}` tags."""
        return bool(GENERATION_TAG.search(self._source(chat)))

    def _source(self, chat: Conversation) -> str:
        return self.tool_source if chat.tools and self.tool_source else self.source

    def _render(
        self, chat: Conversation, add_generation_prompt: bool, leave_open: bool, tagged: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limits(self.origin):
                rendered: Any = render_jinja_template(
                    conversations=[chat.messages],
                    tools=chat.tools,
                    chat_template=self._source(chat),
                    return_assistant_tokens_mask=tagged,
                    continue_final_message=leave_open,
                    add_generation_prompt=add_generation_prompt,
                    **{**self.tokens, **self.extra},
                )
        except TooMuch:
            raise
        # A template is somebody else's program and may raise anything.
        except Exception as error:
            raise BadChat(f"the chat template refuses it: {error or type(error).__name__}") from error
        texts, spans = rendered
        return texts[0], spans[0] if tagged else []


def load_template(folder: Path, choice: str | None = None, extra: Mapping[str, Any] | None = None) -> ChatTemplate:
    """The chat template of a tokenizer folder.

    Args:
        folder: with tokenizer.json, and `chat_template.jinja` or `chat_template` in tokenizer_config.json.
        choice: a file with a Jinja template to use instead, or the name of one of several that the tokenizer has.
        extra: variables for the template.

    Raises `UserError` when there is none.
    """
    found = _templates(folder)
    template = _choose(found, choice, folder)
    if template is None:
        known = f" It has templates named {', '.join(found)}: pick one with --chat-template NAME." if found else ""
        raise UserError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json).{known} "
            "Give a file with a Jinja template: --chat-template FILE."
        )
    tokens = _special_tokens(folder)
    missing = [name for name in NAMED_TOKENS if name not in tokens and re.search(rf"\b{name}\b", template.source)]
    if missing or "eos_token" not in tokens:
        tokens = {**_tokens_by_class(folder), **tokens}
    if "eos_token" in missing and "eos_token" not in tokens:
        tokens["eos_token"] = _end_of_document(folder)  # else the template writes nothing for it
    origin = f"the chat template of {folder}" if choice is None or choice in found else f"--chat-template {choice}"
    return replace(template, tokens=tokens, extra=dict(extra or {}), origin=origin)


def _choose(found: dict[str, str], choice: str | None, folder: Path) -> ChatTemplate | None:
    if choice is None:
        if "default" not in found:
            return None
        return ChatTemplate(found["default"], tool_source=found.get(TOOL_USE))
    if choice in found:
        return ChatTemplate(found[choice])
    path = Path(choice).expanduser()
    if not path.is_file():
        known = f" {folder} has templates named {', '.join(found)}." if found else ""
        raise UserError(f"--chat-template {choice}: no such file.{nearest(choice, list(found))}{known}")
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"--chat-template {choice}: not a text file ({error})") from error


def _templates(folder: Path) -> dict[str, str]:
    """The templates by name: "default", and others that the tokenizer has. A file wins over an entry of the JSON."""
    stored = read_json(folder / "tokenizer_config.json").get("chat_template")
    found: dict[str, str] = {}
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, list):
        found.update({str(entry["name"]): entry["template"] for entry in stored if isinstance(entry, dict)})
    elif isinstance(stored, dict):
        found.update(stored)
    single = folder / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by name, from the files next to tokenizer.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json(folder / name)
        own = content.get("extra_special_tokens")
        for key, value in [*content.items(), *(own.items() if isinstance(own, dict) else ())]:
            value = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found


def _tokens_by_class(folder: Path) -> dict[str, str]:
    """The special tokens of the tokenizer's class in `transformers`, which needs a slow import."""
    if "tokenizer_class" not in read_json(folder / "tokenizer_config.json"):
        return {}
    from transformers import AutoTokenizer

    try:
        given = {"local_files_only": True, "trust_remote_code": False}
        tokens = AutoTokenizer.from_pretrained(str(folder), **given).special_tokens_map
    # It fails in as many ways as there are classes, and these are only defaults.
    except Exception:
        return {}
    return {key: str(value) for key, value in tokens.items() if isinstance(value, str)}


def _end_of_document(folder: Path) -> str:
    """The text of the end-of-document token, for a template with an eos_token that no file defines."""
    tokenizer = create_tokenizer("HFTokenizer", str(folder))
    token = tokenizer.id_map()[tokenizer.require_eod("the chat template (eos_token)")]
    logger.info(f"eos_token of the chat template: {token} (no file next to tokenizer.json defines it)")
    return token


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
