"""RWKV-6's recurrence (WKV): linear attention whose memory fades, per channel, by each token's own decay.

Legend: b batch, s sequence, n heads, d head size, L tokens of a chunk. Peng et al. 2024 (arXiv 2404.05892), section 4;
per head, S [d, d] keys by values, 0 at the start of a text:

    y_t = r_t (S_{t-1} + diag(u) k_tᵀ v_t)          S_t = diag(exp(w_t)) S_{t-1} + k_tᵀ v_t        w_t < 0, per channel

Inside a chunk every pair of tokens meets with the exponent of the decays between them, which is never above 0, so
nothing overflows however fast channels fade; between chunks travels S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.layers.chunks import over_chunks, wide_type

CHUNK = 16  # a pair of tokens costs d numbers
GONE = -1100.0  # logarithm of a decay that is 0 in every type


def wkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """r, k, v, w [b, s, n, d] (w: logarithms of decays, negative), u [n, d] -> (y like v, last state [b, n, d, d]).

    Args:
        starts: bool [b, s], True at the first token of each packed document: what is before it counts exactly 0.
        state: S before the first token (None: zeros). No gradient flows into it or out of the last one.
        chunk: tokens per chunk; bounds memory and time, not the result.

    Computes in fp32 (fp64 for fp64); y has v's type, the state is fp32.
    """
    if state is None:
        state = torch.zeros(r.shape[0], *r.shape[2:], r.shape[3], device=r.device)
    first = state.to(wide_type(r))
    return over_chunks(_chunk, (v, r, k, w), (u,), first=first, starts=starts, chunk=chunk)


def _chunk(
    v: Tensor, r: Tensor, k: Tensor, w: Tensor, u: Tensor, document: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk (`chunks.Step`): (y [b, L, n, d], S behind it)."""
    wide = before.dtype
    length = r.shape[1]
    r, k, v, w = (x.to(wide).transpose(1, 2) for x in (r, k, v, w))  # [b, n, L, d]
    earlier, until = _sums(w, document)
    seen = torch.ones(length, length, dtype=torch.bool, device=r.device).tril_(-1)[None]
    entering, leaving, through = earlier, until[:, :, -1:] - until, until[:, :, -1]
    if document is not None:
        seen = seen & (document.unsqueeze(2) == document.unsqueeze(1))
        first, last = document == 0, document == document[:, -1:]
        entering = entering.masked_fill(~first[:, None, :, None], -torch.inf)
        leaving = leaving.masked_fill(~last[:, None, :, None], -torch.inf)
        through = through.masked_fill(~first[:, None, -1:], -torch.inf)
    between = (earlier.unsqueeze(3) - until.unsqueeze(2)).to(wide)  # [b, n, L, L, d]
    fading = between.masked_fill(~seen[:, None, :, :, None], -torch.inf).exp()
    scores = torch.einsum("bnld,bnmd,bnlmd->bnlm", r, k, fading)
    own = (r * u.to(wide).unsqueeze(1) * k).sum(3, keepdim=True)
    y = torch.matmul(scores, v) + own * v + torch.matmul(r * entering.to(wide).exp(), before)
    added = torch.matmul((k * leaving.to(wide).exp()).transpose(2, 3), v)
    return y.transpose(1, 2), before * through.to(wide).exp().unsqueeze(3) + added


def _sums(w: Tensor, document: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of w [b, n, L, d] over the tokens before each one, and up to it, of its document.

    In fp64: of two large sums the difference is what counts.
    """
    w = w.double().clamp(min=GONE)
    if document is None:
        until = w.cumsum(2)
        return torch.cat((torch.zeros_like(until[:, :, :1]), until[:, :, :-1]), dim=2), until
    # Not a difference of sums over several documents, whose gradients would cancel but for their rounding.
    same = (document.unsqueeze(2) == document.unsqueeze(1)).unsqueeze(1).to(w.dtype)
    return torch.matmul(same.tril(-1), w), torch.matmul(same.tril(), w)
