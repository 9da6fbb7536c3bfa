"""torch's jagged nested tensors as ids of an `nn.Embedding`: as the unsharded module, ragged alike on the way out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict, row_wise
from tests.ranks import mesh, run_ranks


class Attention(nn.Module):
    """Attention over each sample's own positions; what is added must be ragged by the same offsets."""

    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.over = nn.Embedding(20, 8, padding_idx=padding_idx), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.rows(ids)
        heads = self.over(x).unflatten(-1, (2, 4)).transpose(1, 2)
        out: torch.Tensor = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2) + x
        return out


def batch(rank: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(rank)
    samples = [torch.randint(0, 20, (n,), generator=rng) for n in (3, 1 + rank, 5)]
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


def jagged(axis: str, padding_idx: int | None) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    model = DistributedModelParallel(Attention(padding_idx), env, plan={"rows.weight": row_wise()})
    whole = Attention(padding_idx)
    got, wanted = model(batch(env.data_rank)), [whole(batch(rank)) for rank in range(env.data_size)]
    torch.testing.assert_close(got.values(), wanted[env.data_rank].values())
    assert torch.equal(got.offsets(), wanted[env.data_rank].offsets())
    got.values().square().sum().backward()
    (sum(w.values().square().sum() for w in wanted) / env.data_size).backward()
    for each in (model, whole):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(full_state_dict(model)[name], value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_equals_unsharded(axis: str, padding_idx: int | None) -> None:
    run_ranks(2, jagged, axis, padding_idx)
