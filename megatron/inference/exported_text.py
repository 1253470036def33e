"""The tokenizer of our model as the harness's own adapter has it, when it opens the exported folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.model_tokens import ModelTokens

logger = get_logger(__name__)


@dataclass(frozen=True)
class ExportedText:
    """What a score depends on besides the logits.

    Attributes:
        prefix: the token before a text that has nothing before it: the tokenizer's bos, else its eos.
        eot: the tokenizer's eos.
        ends: where `transformers` stops in a text of the exported model, and `eot`, which the adapter stops at itself.
        decode: the text of new tokens, without special ones.
        tokenizer: what `AutoTokenizer` makes of the exported files; None when it cannot open them.
    """

    prefix: int
    eot: int
    ends: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    tokenizer: Any = None

    def require_chat_template(self, key: str) -> None:
        """Raise `UserError`, naming the key that asks for it, when the tokenizer has none."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"{key}: the tokenizer has no chat template: put a chat_template.jinja next to its "
                "tokenizer.json, or leave the key out"
            )

    def write_chat(
        self,
        turns: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat by the tokenizer's template; without a prompt for more, its last turn stays open.

        `tools`: those that the model may call, as JSON schemas.
        """
        text = self.tokenizer.apply_chat_template(
            list(turns),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)


def as_exported(tokenizer: Tokenizer, model_tokens: Mapping[str, Any] | None) -> ExportedText:
    """Of a tokenizer and the key `model_tokens` of its model.

    A tokenizer that `transformers` cannot open (an export has no adapter then) speaks for itself. Raises `UserError`
    when it has no end of document.
    """
    ends = ModelTokens.of(tokenizer, model_tokens).exported_ends()
    theirs = _open_in_transformers(tokenizer)
    if theirs is None or theirs.eos_token_id is None:
        eod = tokenizer.require_eod("evaluation")
        bos, eos = tokenizer.declared_id("bos_token"), tokenizer.declared_id("eos_token")
        eot = eod if eos is None else eos
        return ExportedText(eot if bos is None else bos, eot, ends | {eot}, tokenizer.detokenize)
    eot, bos = theirs.eos_token_id, theirs.bos_token_id

    def decode(ids: Sequence[int]) -> str:
        return str(theirs.decode(list(ids), skip_special_tokens=True))

    return ExportedText(eot if bos is None else bos, eot, ends | {eot}, decode, theirs)


def _open_in_transformers(tokenizer: Tokenizer) -> Any:
    """What `AutoTokenizer` makes of the files that an export writes; None when it cannot."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="deepy-") as folder:
        if not tokenizer.export(Path(folder)):
            return None
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # It fails in as many ways as there are tokenizer classes.
        except Exception as error:
            logger.debug(f"transformers does not open {tokenizer.describe()}: {error}")
            return None
