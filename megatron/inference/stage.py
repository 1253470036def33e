"""One pipeline stage of a model, run forward only, with point-to-point of its own.

Each rank holds just its stage's tensor-parallel shard: layers built for it, or those of a training engine. Ranks that
share experts (expert_parallel_size) hold one copy of the model together and work on the same texts.

Shapes: `b` sequences, `s` new tokens (the whole prompt first, then one), `t` = b·s, `h` hidden, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.inference.lockstep import Lockstep
from megatron.layers.carry import Carry
from megatron.layers.documents import Documents
from megatron.layers.kv_cache import KVCache
from megatron.log import progress
from megatron.model.head import LMOutput, Then
from megatron.model.recompute import Recompute
from megatron.model.sequential import run_stage
from megatron.mpu.state import ParallelState

Forward = Callable[[Carry, KVCache | None, Then | None], Any]
"""`forward(carry, cache, then)`: a stage's layers -> a `Carry`, or on the last stage what `then` makes of the
`LMOutput` inside the head's forward (the `LMOutput` itself without)."""


class Stage:
    """Runs this rank's layers and passes hidden states to the next stage. Its weights stay as they are.

    Args:
        layers: this stage's modules in order; the first stage starts with the embedding, the last ends with the head.
        state: this rank's place in the layout.
        hidden_size, dtype: of the hidden states between stages.
        max_positions: the longest sequence that the model can take.
        switch_length: beyond this length all positions of a text are rotated again, and a cache is invalid.
        forward: runs the layers; default: one after the other.
        lockstep: how the ranks of a run keep together; None where nobody asks them to stop.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        state: ParallelState,
        hidden_size: int,
        dtype: torch.dtype,
        max_positions: int,
        switch_length: int | None = None,
        forward: Forward | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.layers = [layer.eval() for layer in layers]
        self.state = state
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.max_positions = max_positions
        self.switch_length = switch_length
        self.lockstep = lockstep
        self._forward = forward or self._run_layers
        # Sequence parallelism splits the tokens over the tensor-parallel ranks: there must be a multiple of so many.
        self._split = state.tp_size if state.sequence_parallel else 1
        # What the embedding hands to all layers: made of weights alone, so it moves from stage to stage just once.
        self._has_shared = any("shared" in getattr(layer, "carried", ()) for layer in layers)
        # What the objective reads of an inner block comes beside hidden states, but for those of a cache.
        carried: tuple[str, ...] = next((layer.carried for layer in layers if hasattr(layer, "carried")), ())
        self._receives_inner = "inner" in carried and not state.is_first_stage
        self._shared: Tensor | None = None  # as received
        self._sent_shared = False

    def _run_layers(self, carry: Carry, cache: KVCache | None, then: Then | None) -> Any:
        return run_stage(self.layers, carry, Recompute(), cache, then)

    def new_cache(self, capacity: int, start: Tensor | None) -> KVCache:
        """A cache for this stage's layers. `start`: first real column of each left-padded row."""
        return KVCache(self.layers, capacity, None if start is None else self._with_more_rows(start))

    @torch.no_grad()
    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        then: Then | None = None,
        doc_ids: Tensor | None = None,
    ) -> Any | None:
        """What `then` makes of the network's output (the `LMOutput` itself without) for tokens [b, s], on ranks of the
        last stage; None elsewhere. Collective over the copy. Under sequence parallelism the output may have more rows.

        Args:
            tokens, positions: [b, s], the same on every rank of the copy.
            cache: what `new_cache` gave, or None to run without one (then `tokens` is everything so far).
            doc_ids: [b, s], the packed documents that are kept apart; None: a row is one document.
        """
        if self.lockstep is not None:
            self.lockstep.before_pass()
        return self._pass(tokens, positions, cache, then, doc_ids)

    def _pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache | None,
        then: Then | None,
        doc_ids: Tensor | None = None,
    ) -> Any | None:
        tokens, positions = self._with_more_rows(tokens), self._with_more_rows(positions)
        documents = None if doc_ids is None else Documents(self._with_more_rows(doc_ids))
        split = tokens.numel() // self._split
        first = tokens if self.state.is_first_stage else self._receive(split)
        known = None if self.state.is_first_stage else tokens  # the embedding hands them on itself
        inner = self._receive_hidden(split) if self._receives_inner and cache is None else None
        out = self._forward(Carry(first, positions, documents, None, self._shared, known, inner), cache, then)
        if self.state.is_last_stage:
            return out
        self._send(out)
        return None

    def _with_more_rows(self, rows: Tensor) -> Tensor:
        """Rows [b, ...] with copies of the last one, until sequence parallelism can split them."""
        missing = -rows.shape[0] % self._split
        return torch.cat((rows, rows[-1:].expand(missing, *rows.shape[1:]))) if missing else rows

    def last_logits(self, tokens: Tensor, positions: Tensor, cache: KVCache | None) -> Tensor | None:
        """Logits [b, v] fp32 of the last column, on ranks of the last stage; None elsewhere. As `run`."""
        logits = self.run(tokens, positions, cache, then=LMOutput.last_logits)
        return None if logits is None else logits[: tokens.shape[0]]

    def finish(self) -> None:
        """This rank's copy is done with its texts: wait until all are."""
        if self.lockstep is not None:
            self.lockstep.finish(self._join if self.lockstep.lag == 0 else lambda: None)

    @torch.no_grad()
    def _join(self) -> None:
        """Lend this rank's part of the weights to a pass that others make (ZeRO-3)."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.state.device)
        self._pass(token, token, None, lambda out: None)

    @property
    def copy(self) -> tuple[int, int]:
        """Which copy of the model this rank belongs to, and how many there are."""
        return self.state.dp_rank // self.state.ep_size, self.state.dp_size // self.state.ep_size

    @property
    def has_results(self) -> bool:
        """Whether this rank is the one of its copy that has the results: the last stage's first."""
        return self.state.is_last_stage and self.state.tp_rank == 0 and self.state.ep_rank == 0

    def share(self, tokens: Tensor | None, size: int) -> Tensor:
        """Send the tokens [b] of the rank that has the results to every rank of the copy, so that none differs."""
        state = self.state
        if not self.has_results:
            tokens = torch.empty(size, dtype=torch.int64, device=state.device)
        assert tokens is not None
        # First to the ranks that share its experts, then from each of these to all stages.
        if (group := state.group("expert")) is not None and state.is_last_stage and state.tp_rank == 0:
            dist.broadcast(tokens, src=self._rank(data=state.dp_rank - state.ep_rank), group=group)
        if (group := state.group("model_pipe")) is not None:
            dist.broadcast(tokens, src=self._rank(pipe=state.pp_size - 1, model=0), group=group)
        return tokens

    def _rank(self, **coordinates: int) -> int:
        topology = self.state.topology
        return topology.rank(**{**topology.coord(self.state.rank), **coordinates})

    def _receive(self, tokens: int) -> Tensor:
        hidden, previous = self._receive_hidden(tokens), self._rank(pipe=self.state.pp_rank - 1)
        if self._has_shared and self._shared is None:
            form: list[Any] = [None, None]
            dist.recv_object_list(form, src=previous, device=self.state.device)
            shape, dtype = form
            self._shared = torch.empty(shape, dtype=dtype, device=self.state.device)
            dist.recv(self._shared, src=previous)
        return hidden

    def _receive_hidden(self, tokens: int) -> Tensor:
        hidden = torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.state.device)
        dist.recv(hidden, src=self._rank(pipe=self.state.pp_rank - 1))
        return hidden

    def _send(self, out: Carry) -> None:
        following = self._rank(pipe=self.state.pp_rank + 1)
        dist.send(out.hidden.contiguous(), dst=following)
        if out.shared is not None and not self._sent_shared:
            form = [tuple(out.shared.shape), out.shared.dtype]
            dist.send_object_list(form, dst=following, device=self.state.device)
            dist.send(out.shared.contiguous(), dst=following)
            self._sent_shared = True
        if out.inner is not None:
            dist.send(out.inner.contiguous(), dst=following)


def batches(stage: Stage, lengths: Sequence[int], size: int, what: str = "") -> Iterable[list[int]]:
    """Numbers of the texts with these lengths, `size` at a time: the longest first, so that texts of similar
    length are padded little and a batch that does not fit into memory fails at once. Progress on rank 0 as `what`.
    """
    ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    return progress(found, what=what, unit="batch") if what and stage.state.rank == 0 else found
