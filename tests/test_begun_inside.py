"""Backward passes that begin inside of what is gathered at once: at a tensor that the model has kept of its forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, full_state_dict
from tests.ranks import mesh, run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


class Features(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.layers = nn.Embedding(10, 4), nn.ModuleList(Block() for _ in range(2))
        self.get_submodule(path).register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.kept = output

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.rows(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def _loss(model: Features, ids: torch.Tensor, step: int) -> torch.Tensor:
    """Of what was kept alone, but for the last step's."""
    result = model(ids)
    return model.kept.square().mean() + (result.mean() if step == 2 else 0)


def _begins(shape: tuple[int, ...], names: tuple[str, ...], path: str) -> None:
    env, plain = ShardingEnv.from_mesh(mesh(shape, names)), Features(path)
    model = DistributedModelParallel(Features(path), env)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        ids = torch.randint(10, (env.data_size, 3), generator=torch.Generator().manual_seed(step))
        _loss(model.module, ids[env.data_rank], step).backward()  # type: ignore[arg-type]
        torch.stack([_loss(plain, each, step) for each in ids]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_a_loss_of_what_is_gathered_with_the_root() -> None:
    """Nobody averaged it, and no optimizer saw it, in silence."""
    run_ranks(2, _begins, (2,), ("shard",), "rows")


@pytest.mark.parametrize("path", ["rows", "layers.0.up"])
def test_a_loss_of_copies_beside_tensor_parallelism(path: str) -> None:
    run_ranks(4, _begins, (2, 2), ("dp", "tp"), path)


def _begins_where_freed() -> None:
    with pytest.raises(ShardError, match="began at a tensor from within the block"):
        _begins((2,), ("shard",), "layers.0.up")


def test_a_loss_of_a_block_that_was_freed_is_told() -> None:
    run_ranks(2, _begins_where_freed)
