"""Our model as lm-evaluation-harness sees it. Only rank 0 has it; the other ranks serve the team (evaluation_team.py).

Texts are encoded as the harness's own Hugging Face model encodes them, or scores would differ from everybody's:
trailing spaces of a context move to the continuation, the two are encoded together and then split, an empty context is
the tokenizer's begin-of-text token (else what it calls eos), and rolling windows begin with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.errors import UserError
from megatron.inference.exported_text import ExportedText
from megatron.inference.scoring import Score
from megatron.inference.team import Team
from megatron.log import Once, get_logger
from megatron.tokenizer import Tokenizer

logger = get_logger(__name__)

DEFAULT_NEW_TOKENS = 256  # the harness's own, for tasks that set none
_NEW_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class _TooLong(Exception):
    """A request's number, and the tokens of its continuation: more than the model's positions."""


@dataclass(frozen=True)
class Request:
    """What a task's generation options mean.

    Attributes:
        until: stop sequences; the harness's tasks give none, one string or a list.
        new_tokens: most tokens to write.
        temperature, top_k, top_p: as in `Sampling`; temperature 0 unless the task samples.
    """

    until: tuple[str, ...]
    new_tokens: int
    temperature: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Request:
        until = options.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        given = [options[key] for key in _NEW_TOKENS_KEYS if options.get(key) is not None]
        samples = options.get("do_sample")
        temperature = options.get("temperature")
        if temperature is None:
            temperature = 1.0 if samples else 0.0
        return cls(
            tuple(stop for stop in until if stop),
            int(given[0]) if given else DEFAULT_NEW_TOKENS,
            float(temperature) if samples is not False else 0.0,
            int(options.get("top_k") or 0),
            float(options.get("top_p") or 0.0),
        )


@contextlib.contextmanager
def own_progress() -> Iterator[None]:
    """The harness draws no bars, of which each task has three, and prints nothing: ours show the work."""
    task, metrics, bars = (import_module(name) for name in ("lm_eval.api.task", "lm_eval.api.metrics", "tqdm"))
    theirs = task.tqdm, bars.tqdm  # `metrics` imports `tqdm.tqdm` when it needs it, `ProgressBar` the one it is made of
    task.tqdm = bars.tqdm = lambda items, **looks: items  # type: ignore[attr-defined]
    metrics.print = lambda *words: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        task.tqdm, bars.tqdm = theirs  # type: ignore[attr-defined]
        del metrics.print


class HarnessModel(TemplateLM):
    """The harness's view of a team's model: log-likelihoods, rolling log-likelihoods, generation.

    To the harness it is one process: requests are dealt to the copies of the model in here, so that no document is
    counted twice and no copy waits for another.

    Args:
        exported: what its own adapter would have.
        info: the results file's entries about the model.
    """

    def __init__(
        self, team: Team, tokenizer: Tokenizer, exported: ExportedText, info: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.team = team
        self.text = tokenizer
        self.info = dict(info or {})
        self.max_length = team.stage.max_positions
        self._once = Once(logger)
        self._exported = exported
        start, self._end = tokenizer.added
        self._start = list(start)

    @property
    def eot_token_id(self) -> int:
        return self._exported.eot

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        return self._exported.prefix

    def get_model_info(self) -> dict[str, Any]:
        """For the results file."""
        return self.info

    @property
    def tokenizer_name(self) -> str:
        return self.text.describe()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, as the harness's own adapter writes it."""
        from jinja2.exceptions import TemplateError

        try:
            return self._exported.write_chat(chat_history, add_generation_prompt)
        except TemplateError:
            self._once.warning("the chat template takes no system turn: evaluating without it")
            turns = [turn for turn in chat_history if turn["role"] != "system"]
            return self._exported.write_chat(turns, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text that is continued, so without the tokenizer's end; without its start if asked for, or if the
        text itself begins with that."""
        ids = self.text.tokenize(string)
        ids = ids[: len(ids) - len(self._end)]
        if not self._start:
            return ids
        written = string.startswith(self.text.detokenize([self._exported.prefix]))
        plain = add_special_tokens is False or (add_special_tokens is None and written)
        return ids[len(self._start) :] if plain and ids[: len(self._start)] == self._start else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """Scores of continuations. Raises `UserError` naming task and document of one that the model cannot take."""
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        except _TooLong as error:
            number, tokens = error.args
            request = requests[number]
            raise UserError(
                f"{request.task_name}, document {request.doc_id}: a continuation of {tokens} tokens does not fit the "
                f"model's {self.max_length} positions ({str(request.args[1])[:60]!r}...). Leave this task out, or "
                "evaluate a model with more positions"
            ) from None

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Score]:
        for number, (_, _, rest) in enumerate(requests):
            if len(rest) > self.max_length:  # the harness's own adapter fails for it, too
                raise _TooLong(number, len(rest))
        longest = max((len(context) + len(rest) for _, context, rest in requests), default=0)
        if longest > self.max_length + 1:
            self._once.warning(
                f"some texts are longer than the model's {self.max_length} positions (up to {longest} tokens): "
                "their context is cut on the left"
            )
        # A context of spaces alone has moved to the continuation whole.
        pairs = [(context or [self.prefix_token_id], rest) for _, context, rest in requests]
        return self.team.ask("score", pairs, {"what": "scoring continuations"})

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: every token once, each with at least half a window before it where there is.

        Windows are the harness's: disjoint predictions, as much context as fits.
        """
        owners, pairs = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                [*self.tok_encode(text), *self._end],  # a whole text, with its end
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                owners.append(number)
                pairs.append(window)
        totals = [0.0] * len(requests)
        for number, (total, _) in zip(owners, self.team.ask("score", pairs, {"what": "scoring texts"}), strict=True):
            totals[number] += total
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts after each context, up to a stop sequence. Contexts that are too long are cut on the left."""
        groups: dict[Request, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(Request.of(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for options, numbers in groups.items():
            new_tokens = min(options.new_tokens, self.max_length // 2)
            if new_tokens < options.new_tokens:
                self._once.warning(
                    f"{options.new_tokens} new tokens leave no room in the model's {self.max_length} positions: "
                    f"at most {new_tokens} are written"
                )
            room = self.max_length - new_tokens
            items = [(i, self.tok_encode(requests[i].args[0])[-room:]) for i in numbers]
            asked = {
                "what": "generating",
                "until": list(options.until),
                "new_tokens": new_tokens,
                "temperature": options.temperature,
                "top_k": options.top_k,
                "top_p": options.top_p,
            }
            for i, text in zip(numbers, self.team.ask("complete", items, asked), strict=True):
                texts[i] = text
        return texts
