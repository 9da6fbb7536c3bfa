"""A model on meta whose `init_weights` puts a new buffer, complex, in the old one's place: torchtitan's Llama."""

from __future__ import annotations

import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict
from sharders import TensorParallelSharder
from tests.equality import env_of
from tests.ranks import run_ranks

WIDTH, VOCAB = 32, 16


class Rotated(nn.Module):
    """Positions are turned by `turns`, (16, width / 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("turns", self._turns())
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True) for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        with torch.device(self.turns.device):
            self.turns = self._turns()
        nn.init.normal_(self.tok_embeddings.weight)
        nn.init.trunc_normal_(self.output.weight, std=WIDTH**-0.5)

    def _turns(self) -> torch.Tensor:
        angles = torch.outer(torch.arange(16.0), 100.0 ** -(torch.arange(WIDTH // 2) / WIDTH))
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.tok_embeddings(ids).unflatten(-1, (-1, 2)))
        x = torch.view_as_real(pairs * self.turns[: ids.shape[1]]).flatten(-2)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def filled(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    with torch.device("meta"):
        module = Rotated()
    return full_state_dict(DistributedModelParallel(module, env_of(name)))


def test_its_values_are_the_same_on_every_mesh() -> None:
    expected = filled("single")
    assert torch.equal(expected["turns"], Rotated().turns)
    for name in ("dp2", "tp2"):
        for got in run_ranks(2, filled, name):
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[key], value) for key, value in expected.items())


def test_its_plan_is_proved() -> None:
    with torch.device("meta"):
        module = Rotated()
    placed = TensorParallelSharder().place(module, {}, ShardingEnv.abstract((2,), ("tp",)))
    assert any(note.startswith("verified by a dry run") for note in placed.notes)
    assert not any("not proved" in note for note in placed.notes)
