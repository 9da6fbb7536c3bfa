"""Blocks compiled under every kind of data parallelism train as the plain model, and so does what a user compiles.

Each case in processes of its own: what one compilation leaves in torch's caches, the next would meet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict, rowwise
from sharders import TensorParallelSharder
from sharders.data_parallel.fsdp import FSDPWrapper
from tests.beside_plain import trains
from tests.ranks import close_pools, mesh, run_ranks
from tests.test_claimed_width import LENGTH, WIDTH, Model
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


def compiled_vocabulary(shape: tuple[int, ...], names: tuple[str, ...], what: str, chunked: bool) -> None:
    """A wrapped Llama with a split vocabulary, compiled by torch's own call or by the wrapper: two steps as the plain
    model's.

    With a split sequence the vocabulary got no gradient, without a word, so that the wrapper refused to compile.
    """
    import transformers

    env = ShardingEnv.from_mesh(mesh(shape, names))
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    oracle = transformers.LlamaForCausalLM(config)
    sharders = [TensorParallelSharder(sequence_parallel=chunked)]
    wrapper = FSDPWrapper(compile={"backend": "aot_eager"} if what == "blocks" else False)
    model = DistributedModelParallel(copy.deepcopy(oracle), env, sharders=sharders, data_parallel_wrapper=wrapper)
    assert model.plan["model.embed_tokens.weight"].layout == rowwise(dim=0)
    called: Any = torch.compile(model, backend="aot_eager") if what == "model" else model
    if what == "layers":
        model.module.model.layers[0].compile(backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle)]
    for step in range(2):
        rng = torch.Generator().manual_seed(step)
        batches = torch.randint(64, (env.data_size, 2, 8), generator=rng)
        losses = [oracle(input_ids=ids, labels=ids).loss for ids in batches]
        (sum(losses) / len(losses)).backward()
        mine = batches[env.data_rank]
        loss = called(input_ids=mine, labels=mine).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), losses[env.data_rank].detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, oracle.state_dict()[name], msg=f"{name} differs")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shape", "names", "what", "chunked"),
    [
        pytest.param((2,), ("tp",), "layers", False, marks=pytest.mark.slow),
        ((2,), ("tp",), "layers", True),
        pytest.param((2,), ("tp",), "blocks", True, marks=pytest.mark.slow),
        pytest.param((2,), ("tp",), "blocks", False, marks=pytest.mark.slow),
        pytest.param((2, 2), ("shard", "tp"), "blocks", False, marks=pytest.mark.slow),
        pytest.param((2, 2), ("shard", "tp"), "blocks", True, marks=pytest.mark.slow),
        pytest.param((2, 2), ("shard", "tp"), "model", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_split_vocabulary(shape: tuple[int, ...], names: tuple[str, ...], what: str, chunked: bool) -> None:
    run_ranks(torch.Size(shape).numel(), compiled_vocabulary, shape, names, what, chunked)


def called_between_graphs() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model = DistributedModelParallel(Model("joint").double(), env)
    model.module.compile(backend="aot_eager")
    trains(model, Model("joint").double(), env, lambda g: torch.randn(1, 2, LENGTH, WIDTH, generator=g).double())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_a_split_module_gives_between_compiled_graphs_has_a_gradient() -> None:
    """All behind it had none, without a word: its sum over the ranks had not arrived when the next graph took it."""
    run_ranks(2, called_between_graphs)
