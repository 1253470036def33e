"""The encoder of chats: tokens, labels and rewards of the conversations in a corpus."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from megatron.data.chat.conversation import (
    BadChat,
    Conversation,
    column,
    common_start,
    conversation,
    join_prompt,
    map_content,
    map_text,
)
from megatron.data.chat.labelling import LabelRules, label
from megatron.data.chat.template import ChatTemplate
from megatron.data.chat.turns import Rendered, TurnFinder
from megatron.data.tokenise.chunks import Chunk, Fault, replace_surrogates
from megatron.data.tokenise.encode import Encoded, Output, Tally
from megatron.data.tokenise.texts import text_fixer
from megatron.data.tokens.indexed import DTYPES, token_dtype
from megatron.data.tokens.manifest import TURN_ENDS
from megatron.data.tokens.pairs import SIDES
from megatron.errors import UserError
from megatron.tokenizer.hugging_face import LibraryTokenizer

INT32, FLOAT32 = DTYPES[4], DTYPES[6]


@dataclass(frozen=True)
class ChatOptions:
    """Which conversations of a record are used, and how.

    Attributes:
        keys: columns with a chat; each makes its own data sets.
        prompt_key, completion_key: columns of a prompt and its completion, instead of `keys`.
        chosen_key, rejected_key: columns of a preference pair, instead of `keys`; `prompt_key` may name their prompt.
        tools_key: column with the functions that may be called; records may lack it.
        reward_key: column with a number per record, of a pair its margin; `binary_reward` makes it +1 or -1.
        roles: whose turns are trained.
        only_last: train only the last of these turns.
        no_mask, for_rm, leave_open: see `LabelRules`.
        parse_arguments: arguments of tool calls that are JSON text become objects.
        max_length: the most tokens of a chat; `too_long` says what becomes of others: `drop` leaves their record out,
            `cut` loses their end, `refuse` stops.
        ftfy: repair broken Unicode first.
        skip_bad: leave out and count unusable records instead of stopping.
    """

    keys: tuple[str, ...] = ("messages",)
    prompt_key: str | None = None
    completion_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    tools_key: str = "tools"
    reward_key: str | None = None
    binary_reward: bool = False
    roles: tuple[str, ...] = ("assistant",)
    only_last: bool = False
    no_mask: bool = False
    for_rm: bool = False
    leave_open: bool = False
    parse_arguments: bool = False
    max_length: int | None = None
    too_long: str = "drop"
    ftfy: bool = False
    skip_bad: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that conversations are read from, in the order of `names`."""
        others = (self.chosen_key, self.rejected_key, self.completion_key)
        return tuple(key for key in others if key) or self.keys

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a record's conversations in the names of data sets."""
        return SIDES if self.chosen_key else self.columns

    def description(self) -> str:
        """What is trained, in a few words."""
        if self.no_mask:
            return "every token"
        if self.for_rm:
            return "only the end, for a reward model"
        return f"{'the last turn' if self.only_last else 'turns'} of {' and '.join(self.roles)}"

    def manifest_entries(self) -> dict[str, Any]:
        """What the manifests record."""
        flags = ("only_last", "no_mask", "for_rm", "leave_open", "max_length", "too_long", "ftfy")
        return {"roles": list(self.roles), **{name: getattr(self, name) for name in flags}}


@dataclass
class _Row:
    """A record in work: the renderings of its conversations, and its reward."""

    where: str
    rendered: list[Rendered]
    reward: float | None


@dataclass
class _Columns:
    """Values of a chunk for one output."""

    values: list[np.ndarray] = field(default_factory=list)

    def concatenate(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.array([len(value) for value in self.values], dtype=np.int64)
        return np.concatenate(self.values).astype(dtype) if self.values else np.empty(0, dtype), lengths


class ChatEncoder:
    """Tokenises the chats of chunks; see `encode.ChunkEncoder`.

    A record has the same item number in all data sets: one with an unusable conversation is left out of all of them.
    """

    def __init__(
        self, tokenizer: LibraryTokenizer, template: ChatTemplate, options: ChatOptions, eos: int | None
    ) -> None:
        """`eos`: the id that ends a chat. Raises `UserError` for options that exclude each other."""
        _check(options, eos)
        self.tokenizer, self.template, self.options = tokenizer, template, options
        self.rules = LabelRules(eos, options.no_mask, options.for_rm, options.leave_open)
        # Without its post-processor a byte-level tokenizer reports offsets that include a token's blanks.
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._backend.post_processor = processors.Sequence([])
        added = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        self._finder = TurnFinder(
            template, options.roles, added, only_last=options.only_last, leave_open=options.leave_open
        )
        self._fix = text_fixer(options.ftfy)
        extra = {**options.manifest_entries(), "chat_template": template.digest(), TURN_ENDS: self._turn_ends()}
        self.outputs = _outputs(options, token_dtype(tokenizer.vocab_size), extra)

    def _turn_ends(self) -> list[int]:
        """The tokens that these chats teach to end a turn with: those trained after the text of a single answer.

        There are none where turns are left open, end with plain text, or are not trained.
        """
        if self.options.leave_open or self.options.for_rm:
            return []
        chat = Conversation([{"role": "user", "content": "a"}, {"role": self.options.roles[0], "content": "b"}])
        try:
            rendered = self._finder.find(chat)
        except BadChat:
            return []
        (encoding,) = self._backend.encode_batch([rendered.text], add_special_tokens=False)
        _, labels = self._label(rendered, encoding, LabelRules(self.rules.eos))
        special = {*self._backend.get_added_tokens_decoder(), self.rules.eos}
        return sorted(set(takewhile(special.__contains__, map(int, labels[labels >= 0][::-1]))))

    def encode(self, chunk: Chunk) -> Encoded:
        """Render, tokenise and label the records of a chunk; those without a message are counted and left out."""
        tally, columns = Tally.zero(len(self.outputs), chunk.nbytes), [_Columns() for _ in self.outputs]
        rows = self._rows(chunk, tally)
        texts = [rendered.text for row in rows for rendered in row.rendered]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        for row in rows:
            values, nbytes = list[np.ndarray](), list[int]()
            for name, rendered in zip(self.options.names, row.rendered):
                both = self._label(rendered, next(encodings), self.rules)
                values += self._fit(f"{row.where}: key {name!r}", *both, tally)
                nbytes += [len(rendered.text.encode()), 0]
            if row.reward is not None:
                values.append(np.array([row.reward]))
                nbytes.append(0)
            if fault := self._fault_of(row, values):
                _leave_out(tally, fault)
                continue
            tally.count_lost(key for rendered in row.rendered for key in rendered.lost)
            for i, (into, value, size) in enumerate(zip(columns, values, nbytes)):
                into.values.append(value)
                tally.documents[i] += 1
                tally.tokens[i] += len(value) if size else 0  # labels and rewards are not counted as tokens
                tally.text_bytes[i] += size
        joined = [into.concatenate(output.dtype) for into, output in zip(columns, self.outputs)]
        return Encoded([ids for ids, _ in joined], [lengths for _, lengths in joined], tally)

    def _rows(self, chunk: Chunk, tally: Tally) -> list[_Row]:
        rows = []
        for record in chunk.records():
            if isinstance(record, Fault):
                tally.refuse(record, self.options.skip_bad)
                continue
            try:
                chats = self._conversations(record.value)
                if not all(chat.messages for chat in chats):
                    _leave_out(tally, None)
                    continue
                rendered = [self._render(name, chat) for name, chat in zip(self.options.names, chats)]
                rows.append(_Row(record.where, rendered, self._reward(record.value)))
            except BadChat as error:
                tally.refuse(Fault(record.where, str(error)), self.options.skip_bad)
        return rows

    def _conversations(self, record: Mapping[str, Any]) -> list[Conversation]:
        options, tools, parse = self.options, record.get(self.options.tools_key), self.options.parse_arguments
        prompt = column(record, options.prompt_key) if options.prompt_key else None
        whole = not (options.chosen_key or options.completion_key)
        found = []
        for key in options.columns:
            value = column(record, key)
            with _name_key(key):
                if whole:
                    found.append(conversation(value, tools, parse_arguments=parse))
                else:
                    found.append(join_prompt(prompt, value, tools, parse_arguments=parse))
        if options.chosen_key:  # messages that both sides share are not an answer to prefer
            shared = common_start(*(chat.messages for chat in found))
            found = [replace(chat, prompt=max(chat.prompt, shared)) for chat in found]
        return found

    def _render(self, name: str, chat: Conversation) -> Rendered:
        if self._fix:
            chat = map_content(chat, self._fix)
        with _name_key(name):
            rendered = self._finder.find(chat)
            if _is_text(rendered.text):
                return rendered
            messages, tools = map_text(chat.messages, replace_surrogates), map_text(chat.tools, replace_surrogates)
            return self._finder.find(replace(chat, messages=messages, tools=tools))

    def _label(
        self, rendered: Rendered, encoding: tokenizers.Encoding, rules: LabelRules
    ) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        spans = [(turn.start, turn.end) for turn in rendered.turns]
        return label(rendered.text, ids, offsets, spans, rules)

    def _fit(self, where: str, tokens: np.ndarray, labels: np.ndarray, tally: Tally) -> tuple[np.ndarray, np.ndarray]:
        """The chat, cut if it is too long and that is asked for. Raises `UserError` if none may be too long."""
        most = self.options.max_length
        if most is None or len(tokens) <= most or self.options.too_long == "drop":
            return tokens, labels
        if self.options.too_long == "refuse":
            raise UserError(f"{where}: {len(tokens)} tokens, more than --max-length {most} (--too-long drop or cut)")
        tally.cut += 1
        return tokens[:most], labels[:most]

    def _fault_of(self, row: _Row, values: list[np.ndarray]) -> Fault | None:
        names = self.options.names
        for name, tokens, labels in zip(names, values[0::2], values[1::2]):
            if self.options.max_length is not None and len(tokens) > self.options.max_length:
                return Fault(row.where, f"key {name!r}: {len(tokens)} tokens, more than --max-length")
            if not (labels >= 0).any():
                roles = " or ".join(self.options.roles)
                return Fault(row.where, f"key {name!r}: nothing in it is trained (it has no answer of {roles})")
        return None

    def _reward(self, record: Mapping[str, Any]) -> float | None:
        key = self.options.reward_key
        if key is None:
            return None
        value = column(record, key)
        value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadChat(f"key {key!r}: a reward must be one finite number per record, found {value!r}")
        if self.options.binary_reward:
            return 1.0 if value > 0 else -1.0
        return float(value)


@contextmanager
def _name_key(key: str) -> Iterator[None]:
    """Add the key to the message of a `BadChat`."""
    try:
        yield
    except BadChat as error:
        raise BadChat(f"key {key!r}: {error}") from error


def _leave_out(tally: Tally, why: Fault | None) -> None:
    """Count a record without anything to train, which is not a fault."""
    tally.empty[0] += 1
    if why is not None:
        tally.list_fault(why)


def _outputs(options: ChatOptions, dtype: np.dtype, extra: Mapping[str, Any]) -> tuple[Output, ...]:
    found = []
    for name in options.names:
        found.append(Output(f"_{name}_document", dtype, name, extra))
        found.append(Output(f"_{name}_label_document", INT32, name, {**extra, "labels": True}))
    if options.reward_key is not None:
        kind = INT32 if options.binary_reward else FLOAT32
        suffix = f"_{options.names[0]}_reward_document"
        found.append(Output(suffix, kind, options.reward_key, {"binary_reward": options.binary_reward}, False))
    return tuple(found)


def _check(options: ChatOptions, eos: int | None) -> None:
    if bool(options.chosen_key) != bool(options.rejected_key):
        raise UserError("a preference pair has two columns: give --chosen-key and --rejected-key")
    if options.completion_key and not options.prompt_key:
        raise UserError("--completion-key needs --prompt-key")
    if options.prompt_key and not options.completion_key and not options.chosen_key:
        raise UserError("--prompt-key needs --completion-key, or --chosen-key and --rejected-key")
    if options.binary_reward and not options.reward_key:
        raise UserError("--binary-reward needs --reward-key")
    if options.reward_key and len(options.names) > 1 and not options.chosen_key:
        raise UserError("--reward-key needs one chat per record, or one preference pair, not several keys")
    if options.too_long != "drop" and options.max_length is None:
        raise UserError(f"--too-long {options.too_long} needs --max-length")
    if options.too_long == "cut" and options.for_rm:
        raise UserError("--for-rm reads the reward at the end of a chat, which --too-long cut loses; use drop")
    if options.no_mask and options.for_rm:
        raise UserError("--no-mask trains everything, --for-rm only the end: give one of them")
    if options.leave_open and options.for_rm:
        raise UserError("--for-rm reads the reward at the end of a chat, --continue-final-message leaves it open")
    if options.for_rm and eos is None:
        raise UserError("--for-rm reads the reward at the end-of-sequence token, and this tokenizer has none")
    names = options.names
    if len(set(names)) < len(names):
        raise UserError(f"--jsonl-keys {' '.join(names)}: a key is given twice")
    for name in names:
        if f"{name}_label" in names or f"{name}_reward" in names:
            raise UserError(f"--jsonl-keys {' '.join(names)}: the names of {name}'s companion data sets are taken")


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
