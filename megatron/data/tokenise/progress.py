"""Progress of work over a corpus: share done, time left, documents, bytes and tokens per second."""

from __future__ import annotations

import copy

from megatron.data.tokenise.encode import Tally
from megatron.log import ProgressBar


class TallyProgress:
    """A progress bar to call with the running totals.

    Args:
        what: what is being done.
        total_bytes: size of the input on disk, None when unknown.
        num_docs: expected number of documents; if given, share and time left go by it.
        log_interval: smallest number of documents between two updates.
        earlier: the totals of the interrupted run that this one resumes.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int | None,
        num_docs: int | None = None,
        log_interval: int = 1,
        earlier: Tally | None = None,
    ) -> None:
        self._by_docs, self._interval, self._shown_docs = bool(num_docs), log_interval, 0
        self._earlier = copy.deepcopy(earlier) if earlier else Tally.zero(1)
        self._tally = self._earlier
        goal, unit = (num_docs, " docs") if num_docs else (total_bytes, "B")
        self._bar = ProgressBar(what, goal, unit, before=self._done(self._earlier), rates=self._rates)

    def __enter__(self) -> TallyProgress:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        self._bar.__exit__(failure, *rest)

    def __call__(self, tally: Tally) -> None:
        """Show the running totals, when enough was done since the last time."""
        self._tally, docs = tally, max(tally.documents)
        if docs - self._shown_docs >= self._interval and self._bar.reach(self._done(tally)):
            self._shown_docs = docs

    def _done(self, tally: Tally) -> int:
        return max(tally.documents) if self._by_docs else tally.nbytes

    def _rates(self, seconds: float) -> str:
        now, earlier = self._tally, self._earlier
        docs, tokens = max(now.documents), sum(now.tokens)
        text = f"{docs} docs ({(docs - max(earlier.documents)) / seconds:.0f} docs/s), "
        text += f"{(now.nbytes - earlier.nbytes) / seconds / 1e6:.1f} MB/s"
        return text + (f", {tokens} tokens ({(tokens - sum(earlier.tokens)) / seconds:.2e} tokens/s)" if tokens else "")
