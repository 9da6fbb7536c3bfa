"""Blocks compiled under every kind of data parallelism train as the plain model.

Each case in processes of its own: what one compilation leaves in torch's caches, the next would meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sharders.data_parallel.fsdp import FSDPWrapper
from tests.ranks import close_pools, run_ranks
from tests.test_fully_shard import env_of, ids_of, make, same, split_by_tensor, train


@pytest.fixture(autouse=True)
def own_processes() -> Iterator[None]:
    close_pools()
    yield
    close_pools()


def compiles(shape: tuple[int, ...] | None, names: tuple[str, ...], backend: str, checkpointing: bool) -> int:
    """Number of graphs compiled."""
    env, plain, module, graphs = env_of(shape, names), make(), make(), []
    inner = torch._dynamo.lookup_backend(backend)

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return inner(graph, inputs, **options)

    split_by_tensor(module, env)
    wrapper = FSDPWrapper(compile={"backend": counting}, activation_checkpointing=checkpointing)
    model: nn.Module = wrapper.wrap(module, env, env.device, frozenset())
    train(model, lambda step: ids_of(step, env))
    train(plain, lambda step: ids_of(step, env, everyone=True))
    same(module, plain)
    return len(graphs)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler: what it says differs by version and is not about us
@pytest.mark.parametrize(
    ("shape", "names", "backend", "checkpointing"),
    [
        (None, (), "aot_eager", True),
        ((2,), ("shard",), "aot_eager", True),
        pytest.param((2,), ("dp",), "aot_eager", False, marks=pytest.mark.slow),
        pytest.param((2, 2), ("shard", "tp"), "aot_eager", False, marks=pytest.mark.slow),
        pytest.param((2, 2), ("replicate", "tp"), "aot_eager", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_compiled_blocks(
    shape: tuple[int, ...] | None, names: tuple[str, ...], backend: str, checkpointing: bool
) -> None:
    world = 1 if shape is None else torch.Size(shape).numel()
    graphs = run_ranks(world, compiles, shape, names, backend, checkpointing)
    assert min(graphs) >= 1
