"""The tokenizer of a prepared dataset (a file, a folder or a repository on the Hugging Face Hub) and its encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import ChatTemplate, load_template
from megatron.data.hub.retry import Backoff
from megatron.data.hub.source import sha256_file
from megatron.data.tokenise.chunks import Chunk
from megatron.data.tokenise.encode import ChunkEncoder
from megatron.data.tokenise.encode_text import EncodeOptions, TextEncoder, texts_of
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, choose_encoder, create_tokenizer
from megatron.tokenizer.hub import require_hub
from megatron.tokenizer.hugging_face import LibraryTokenizer

# What makes a tokenizer and its chat template; weights stay where they are.
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template*", "*.jinja"]
TOKENIZER_FILES += ["vocab.json", "merges.txt", "config.json", "generation_config.json", "added_tokens.json"]


@dataclass(frozen=True)
class TokenizerChoice:
    """`--vocab-file` (makes the ids) and `--hf-tokenizer` (has the chat template); either alone serves for both."""

    vocab_file: str | None
    hf_tokenizer: str | None

    def resolve(self, backoff: Backoff) -> tuple[Tokenizer, Path]:
        """The tokenizer that makes the ids, and the folder whose chat template goes with it.

        Raises `UserError`: neither is given, nothing of that name, or two that do not have the same ids.
        """
        folder = self._hf_folder(backoff) if self.hf_tokenizer else None
        if self.vocab_file is None:
            if folder is None:
                raise UserError(
                    "a tokenizer is needed: --vocab-file tokenizer.json (or a folder), or --hf-tokenizer with a folder "
                    "or a name on the Hub. Without one, --skip-count --skip-tokenize exports the text only"
                )
            return create_tokenizer("HFTokenizer", str(folder)), folder
        tokenizer = create_tokenizer("HFTokenizer", self.vocab_file)
        if folder is None:
            vocab = Path(self.vocab_file).expanduser()
            # Only a file that kept its usual name belongs to the files around it.
            return tokenizer, vocab.parent if vocab.name == "tokenizer.json" else vocab
        other = create_tokenizer("HFTokenizer", str(folder))
        if other.fingerprint() != tokenizer.fingerprint():
            raise UserError(
                f"--vocab-file {self.vocab_file} and --hf-tokenizer {self.hf_tokenizer} do not have the same ids; give "
                "one of them, or two that belong together"
            )
        return tokenizer, folder

    def _hf_folder(self, backoff: Backoff) -> Path:
        name = str(self.hf_tokenizer)
        path = Path(name).expanduser()
        if path.exists():
            return path
        if name.startswith((".", "/", "~")):
            raise UserError(f"--hf-tokenizer {name}: no such file or folder")
        from huggingface_hub import constants, snapshot_download

        try:
            if not constants.HF_HUB_OFFLINE:
                require_hub()
            return Path(backoff(name, lambda: snapshot_download(name, allow_patterns=TOKENIZER_FILES)))
        except UserError:
            raise
        # As for datasets, what the client raises is a long and changing list.
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"--hf-tokenizer {name}: no such folder, and the Hub does not give it ({reason}). Name a folder with "
                "tokenizer.json instead"
            ) from error


@dataclass(frozen=True)
class TextEncoding:
    """Texts: `{"text": ...}` becomes a document."""

    tokenizer: Tokenizer

    def prove(self, sample: Chunk) -> None:
        """Take the fastest encoder that gives the same ids, tried on the first lines of the export too."""
        choose_encoder(self.tokenizer, sample=texts_of([sample]))

    def encoder(self, append_eod: bool) -> ChunkEncoder:
        """`append_eod` ends every document with eod. Raises `UserError` when the tokenizer has none."""
        return TextEncoder(self.tokenizer, EncodeOptions(("text",), append_eod=append_eod))

    def describe(self) -> dict[str, Any]:
        """What the ids depend on, beside the text."""
        return {"tokenizer": _identity(self.tokenizer), "eod": self.tokenizer.eod}

    def added(self) -> int:
        """How many tokens the tokenizer's own template adds to every text (a begin token)."""
        return len(self.tokenizer.tokenize(""))


@dataclass(frozen=True)
class ChatEncoding:
    """Chats: `{"messages": [...]}` becomes a document and its labels, which train what the assistant says."""

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
        """Chats need offsets, which only the library itself gives."""

    def encoder(self, append_eod: bool) -> ChunkEncoder:
        """The template says how a chat ends, counted or written."""
        return ChatEncoder(self.tokenizer, self.template, ChatOptions(("messages",), skip_bad=self.skip_bad), self.eos)

    def describe(self) -> dict[str, Any]:
        """What the ids and labels depend on, beside the chat."""
        return {
            "tokenizer": _identity(self.tokenizer),
            "template": self.template.digest(),
            "eos": self.eos,
            "skip_bad": self.skip_bad,
        }

    def added(self) -> int:
        """Nothing: all tokens are the template's."""
        return 0


def _identity(tokenizer: Tokenizer) -> list[Any]:
    """The id map, and the content of the files: merges and normalisers are not in the map."""
    files = {name: sha256_file(path) for name, path in tokenizer.files().items()}
    return [tokenizer.fingerprint().to_dict(), files]
