"""Buffers that are sparse: the alignment heads of OpenAI's Whisper, a graph's adjacency."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, full_state_dict, load_checkpoint, save_checkpoint, to_unsharded
from tests.equality import env_of
from tests.ranks import run_ranks

NODES = 6


class Graph(nn.Module):
    """Features (nodes, 4), summed over neighbours."""

    def __init__(self, seed: int, *, rows: bool = False, persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        edges = torch.rand(NODES, NODES).round()
        self.register_buffer("adjacency", edges.to_sparse_csr() if rows else edges.to_sparse(), persistent=persistent)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(torch.mm(self.adjacency, self.up(x))))


def check(name: str, rows: bool, persistent: bool, path: str) -> None:
    env = env_of(name)
    plain = Graph(0, rows=rows, persistent=persistent)
    own = 0 if rows else env.rank  # rank 0's values win, however many others there are
    model = DistributedModelParallel(Graph(own, rows=rows, persistent=persistent), env)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        x = torch.randn(NODES, 4, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model(x), plain(x))
    assert torch.equal(dict(model.named_buffers())["adjacency"].to_dense(), plain.adjacency.to_dense())
    got, expected = full_state_dict(model), plain.state_dict()
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key].to_dense(), value.to_dense())
    if not rows:  # torch copies no module that has one
        torch.testing.assert_close(to_unsharded(model)(x), plain(x))
    save_checkpoint(path, model)
    again = DistributedModelParallel(Graph(0 if rows else 7, rows=rows, persistent=persistent), env)
    load_checkpoint(path, again)
    for key, value in full_state_dict(again).items():
        torch.testing.assert_close(value.to_dense(), expected[key].to_dense())


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.sampled(4)
def test_training_equals_one_process(rows: bool, persistent: bool, tmp_path: Path) -> None:
    for name in ("dp2", "tp2"):
        run_ranks(2, check, name, rows, persistent, str(tmp_path / name))
