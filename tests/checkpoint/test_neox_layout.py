"""Row order on disk against the format's description, written out element by element."""

import pytest
import torch

from megatron.checkpoint.neox_layout import Heads, from_disk, to_disk
from megatron.mpu.sharding import ParamSpec, shard, unshard, zeros

pytestmark = pytest.mark.cpu

D, H = 3, 5


def qkv_spec(n, n_kv, bias=False):
    blocks = (n * D, n_kv * D, n_kv * D)
    shape = (sum(blocks),) if bias else (sum(blocks), H)
    name = "2.attention.query_key_value." + ("bias" if bias else "weight")
    return ParamSpec(name=name, shape=shape, init=zeros, split_dim=0, blocks=blocks)


def row(kind, head, i):
    """A number that says which row it is: q, k or v, of which head, which of its dimensions."""
    return {"q": 0, "k": 1, "v": 2}[kind] * 10000 + head * 100 + i


def full_qkv(n, n_kv, bias):
    rows = [
        row(kind, head, i)
        for kind, heads in (("q", n), ("k", n_kv), ("v", n_kv))
        for head in range(heads)
        for i in range(D)
    ]
    full = torch.tensor(rows, dtype=torch.float32)
    return full if bias else full[:, None].expand(-1, H).clone()


def on_disk(n, n_kv, tp_rank, tp_size):
    """The rows of one rank's file: MHA per head q, k, v; GQA all Q heads, then K, then V (as GPT-NeoX writes it)."""
    q_heads = range(tp_rank * n // tp_size, (tp_rank + 1) * n // tp_size)
    kv_heads = range(tp_rank * n_kv // tp_size, (tp_rank + 1) * n_kv // tp_size)
    if n == n_kv:
        return [row(kind, head, i) for head in q_heads for kind in "qkv" for i in range(D)]
    return [
        row(kind, h, i) for kind, hs in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)) for h in hs for i in range(D)
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "n_kv", "tp"), [(4, 4, 1), (4, 4, 2), (4, 4, 4), (4, 2, 1), (4, 2, 2), (4, 1, 1)])
def test_fused_qkv_rows(n, n_kv, tp, bias):
    spec, heads = qkv_spec(n, n_kv, bias), Heads(n, n_kv)
    full = full_qkv(n, n_kv, bias)
    stored = []
    for rank in range(tp):
        disk = to_disk(shard(full, spec, rank, tp), spec, heads, rank, tp)
        assert (disk if bias else disk[:, 0]).tolist() == on_disk(n, n_kv, rank, tp)
        stored.append(from_disk(disk, spec, heads, tp))
    assert torch.equal(unshard(stored, spec), full)


def test_other_parameters_keep_their_order():
    gated = ParamSpec(name="2.mlp.linear1.weight", shape=(8, H), init=zeros, split_dim=0, blocks=(4, 4))
    full = torch.arange(8.0)[:, None].expand(8, H).clone()
    disk = to_disk(shard(full, gated, 1, 2), gated, Heads(2, 2), 1, 2)
    assert disk[:, 0].tolist() == [2, 3, 6, 7]  # up of rank 1, then gate of rank 1


def test_padded_vocabulary_rows_are_zero_on_disk():
    spec = ParamSpec(name="0.word_embeddings.weight", shape=(5, H), init=zeros, split_dim=0, padded=8)
    memory = torch.full((4, H), 7.0)
    disk = to_disk(memory, spec, Heads(2, 2), 1, 2)
    assert disk[0].tolist() == [7.0] * H and not disk[1:].any()
    assert memory.eq(7.0).all()
