"""How a prepared dataset is encoded: its tokenizer (file, folder or Hub repository), texts and chats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import ChatTemplate, load_template
from megatron.data.chat.tokenizer import download_tokenizer
from megatron.data.hub.retry import Backoff
from megatron.data.tokenise.chunks import Chunk
from megatron.data.tokenise.command import tokenizer_identity
from megatron.data.tokenise.encode import ChunkEncoder
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder, texts_of
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer, choose_encoder, create_tokenizer
from megatron.tokenizer.hugging_face import LibraryTokenizer

logger = get_logger(__name__)

# That of GPT-NeoX's fork, whose documents call the command without naming one.
DEFAULT_TOKENIZER = "geodesic-research/gpt-neox-instruct-tokenizer"


@dataclass(frozen=True)
class TokenizerChoice:
    """`--vocab-file` (makes the ids) and `--hf-tokenizer` (has the chat template); either alone does both, and
    `DEFAULT_TOKENIZER` where neither is given."""

    vocab_file: str | None
    hf_tokenizer: str | None

    def resolve(self, backoff: Backoff) -> tuple[Tokenizer, Path]:
        """The tokenizer that makes the ids, and the folder with the chat template.

        Raises `UserError` when one does not exist, and when their ids differ.
        """
        folder = self._hf_folder(backoff) if self.hf_tokenizer else None
        if self.vocab_file is None:
            if folder is None:
                logger.info(f"tokenizer: {DEFAULT_TOKENIZER} (no --vocab-file and no --hf-tokenizer was given)")
                folder = download_tokenizer(DEFAULT_TOKENIZER, "the default of --hf-tokenizer", backoff)
            return create_tokenizer("HFTokenizer", str(folder)), folder
        tokenizer = create_tokenizer("HFTokenizer", self.vocab_file)
        if folder is None:
            vocab = Path(self.vocab_file).expanduser()
            # Only a file with its usual name belongs to the files next to it.
            return tokenizer, vocab.parent if vocab.name == "tokenizer.json" else vocab
        other = create_tokenizer("HFTokenizer", str(folder))
        if other.fingerprint() != tokenizer.fingerprint():
            raise UserError(
                f"--vocab-file {self.vocab_file} and --hf-tokenizer {self.hf_tokenizer} have different ids: give one "
                "of them, or two that belong together"
            )
        return tokenizer, folder

    def _hf_folder(self, backoff: Backoff) -> Path:
        name = str(self.hf_tokenizer)
        path = Path(name).expanduser()
        if path.exists():
            return path
        if name.startswith((".", "/", "~")):
            raise UserError(f"--hf-tokenizer {name}: no such file or folder")
        return download_tokenizer(name, "--hf-tokenizer", backoff)


@dataclass(frozen=True)
class TextEncoding:
    """Of texts: `{"text": ...}` becomes a document."""

    tokenizer: Tokenizer

    def prove(self, sample: Chunk) -> None:
        """Choose the fastest encoder that gives the same ids, tried on the first lines of the export too."""
        choose_encoder(self.tokenizer, sample=texts_of([sample]))

    def encoder(self, append_eod: bool) -> ChunkEncoder:
        """`append_eod` ends every document with eod. Raises `UserError` when the tokenizer has none."""
        return TextEncoder(self.tokenizer, EncodeOptions(("text",), append_eod=append_eod))

    def describe(self) -> dict[str, Any]:
        """What the ids depend on, besides the text."""
        return {"tokenizer": tokenizer_identity(self.tokenizer), "eod": self.tokenizer.eod}

    def count_added(self) -> int:
        """How many tokens the tokenizer's own template adds to every text (such as a begin token)."""
        return len(self.tokenizer.tokenize(""))


@dataclass(frozen=True)
class ChatEncoding:
    """Of chats: `{"messages": [...]}` becomes a document and its labels, which train the assistant's turns."""

    tokenizer: LibraryTokenizer
    template: ChatTemplate
    eos: int | None
    skip_bad: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path, chosen: str | None, skip_bad: bool) -> ChatEncoding:
        """`chosen`: `--chat-template`. Raises `UserError` when there is no chat template."""
        assert isinstance(tokenizer, LibraryTokenizer), "HFTokenizer is one"
        template = load_template(folder, chosen)
        return cls(tokenizer, template, template.eos_id(tokenizer), skip_bad)

    def prove(self, sample: Chunk) -> None:
        """No choice: chats need offsets, which only the library itself gives."""

    def encoder(self, append_eod: bool) -> ChunkEncoder:
        """The template defines how a chat ends, whatever `append_eod`."""
        return ChatEncoder(self.tokenizer, self.template, ChatOptions(("messages",), skip_bad=self.skip_bad), self.eos)

    def describe(self) -> dict[str, Any]:
        """What the ids and labels depend on, besides the chat."""
        return {
            "tokenizer": tokenizer_identity(self.tokenizer),
            "template": self.template.digest(),
            "eos": self.eos,
            "skip_bad": self.skip_bad,
        }

    def count_added(self) -> int:
        """0: all tokens are the template's."""
        return 0
