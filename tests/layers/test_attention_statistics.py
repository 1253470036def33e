"""The largest logit and the mean entropy of attention, against one query after the other in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.layers import attention_statistics as statistics
from megatron.layers.attention_contract import Call
from megatron.layers.documents import Documents
from megatron.layers.positions.alibi import alibi_slopes

pytestmark = pytest.mark.cpu

B, S, N, D = 2, 9, 4, 8
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2, 2, 2]])
RULES: list[dict[str, Any]] = [
    {},
    {"window": 2},
    {"documents": Documents(IDS), "window": 3},
    {"softcap": 1.5, "documents": Documents(IDS)},
    {"slopes": torch.tensor(alibi_slopes(N))},
    {"bias": torch.randn(1, N, S, S, generator=torch.Generator().manual_seed(2)) * 2},
]


@pytest.mark.parametrize("scores", [2**24, 3 * B * N * S, 1], ids=["at once", "in parts", "one by one"])
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(rules))
def test_they_are_those_of_every_query(monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any], scores: int) -> None:
    monkeypatch.setattr(statistics, "SCORES", scores)
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(B, S, n, D, generator=draw) * 2 for n in (N, 2))
    counted = torch.arange(S).expand(B, S) < torch.tensor([[7], [9]])
    largest, entropies = -float("inf"), []
    for row, head, i in ((row, head, i) for row in range(B) for head in range(N) for i in range(S)):
        if not counted[row, i]:
            continue
        keys = [j for j in range(i + 1) if i - j <= rules.get("window", S)]
        if "documents" in rules:
            keys = [j for j in keys if IDS[row, j] == IDS[row, i]]
        score = k[row, keys, head // 2].double() @ q[row, i, head].double() * 0.4
        if "softcap" in rules:
            score = 1.5 * torch.tanh(score / 1.5)
        largest = max(largest, float(score.max()))
        if "slopes" in rules:
            score = score - rules["slopes"][head].double() * torch.tensor([i - j for j in keys])
        if "bias" in rules:
            score = score + rules["bias"][0, head, i, keys].double()
        entropies.append(float(torch.distributions.Categorical(logits=score).entropy()))
    found = statistics.attention_statistics(q, k, Call(0.4, **rules), counted)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([largest, sum(entropies) / len(entropies)], rel=1e-5)
