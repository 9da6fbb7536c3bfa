"""What TorchRec's users hand to the wrapper beside sharders and plans: env, device, data-parallel wrapper."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from dmp import ShardError, ShardingEnv
from tests.equality import attach, env_of, loss_of, make_batch, make_module
from tests.ranks import mesh, run_apart, run_ranks


class Net(nn.Module):
    """A collection, a layer over it, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = make_module("ebc")
        self.over = nn.Linear(48, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, features: Any) -> torch.Tensor:
        out: torch.Tensor = self.over(self.ebc(features).values())
        return out


def _trained(**options: Any) -> dict[str, torch.Tensor]:
    """Weights after two steps on this rank's batches."""
    torch.manual_seed(3)
    net = Net()
    attach(net.ebc, "sgd")
    model = dmp.DistributedModelParallel(net, **options)
    dense = torch.optim.SGD([*net.over.parameters(), *net.unused.parameters()], lr=0.1)
    for step in range(2):
        loss_of(model(*make_batch("ebc", model.env.rank, step + 2))).backward()
        dense.step()
        dense.zero_grad()
    return dmp.full_state_dict(model)


@functools.cache
def _by_default() -> dict[str, torch.Tensor]:
    return _trained(env=env_of("dp2"))


def _same(**options: Any) -> None:
    for name, value in _trained(**options).items():
        torch.testing.assert_close(value, _by_default()[name], msg=name)


def _torchrecs_env() -> None:
    from torchrec.distributed.types import ShardingEnv as Theirs

    group = dist.group.WORLD
    assert group is not None
    env = Theirs.from_process_group(group)
    _same(env=env)
    _same(env=env, device=torch.device("cpu"))
    ours = dmp.DistributedModelParallel(Net(), env=env).env
    assert (ours.world_size, ours.rank, ours.process_group) == (env.world_size, env.rank, env.process_group)
    assert ours.device_mesh is ours.mesh is not None


def test_torchrecs_env_is_taken() -> None:
    run_ranks(2, _torchrecs_env)


def _subgroup() -> tuple[int, int]:
    """TorchRec's env of one rank's own group."""
    from torchrec.distributed.types import ShardingEnv as Theirs

    group = mesh((2, 1), ("host", "dp"))["dp"].get_group()
    model = dmp.DistributedModelParallel(Net(), env=Theirs.from_process_group(group))
    return model.env.world_size, len(model(*make_batch("ebc", 0, 2)))


def test_torchrecs_env_of_some_ranks() -> None:
    """On ranks of its own: TorchRec's env makes its mesh of rank 0 on both, after which torch's next group hangs."""
    assert run_apart(2, _subgroup) == [(1, 3)] * 2


def test_an_env_without_a_group() -> None:
    from torchrec.distributed.types import ShardingEnv as Theirs

    model = dmp.DistributedModelParallel(Net(), env=Theirs.from_local(1, 0))
    assert model.env == ShardingEnv.from_local(1, 0) == ShardingEnv.single()
    assert model.env.world_size == 1 and model.env.process_group is None and model.env.device_mesh is None
    with pytest.raises(ShardError, match=r"env of 2 ranks without a process group.*from_process_group.*abstract"):
        dmp.DistributedModelParallel(Net(), env=Theirs.from_local(2, 1))
    with pytest.raises(ValueError, match="without a process group"):
        ShardingEnv.from_local(2, 0)
    two_d = object.__new__(__import__("torchrec.distributed.types", fromlist=["x"]).ShardingEnv2D)
    with pytest.raises(ShardError, match=r"torchrec.distributed.types.ShardingEnv2D is made for.*from_mesh"):
        dmp.DistributedModelParallel(Net(), env=two_d)
    with pytest.raises(ShardError, match=r"expected env to be a dmp.env.ShardingEnv .*; got torch.device"):
        dmp.DistributedModelParallel(Net(), env=torch.device("cpu"))  # type: ignore[arg-type]


def test_a_collection_of_replicas() -> None:
    with pytest.raises(ImportError, match=r"mesh with a replicate axis.*from_mesh.*sync_interval=k"):
        from dmp import DMPCollection  # type: ignore[attr-defined]  # noqa: F401


def _wrappers() -> float:
    """TorchRec's wrapper with its options, and what 16 bits change."""
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper as Theirs

    for options in (
        {},
        {"bucket_cap_mb": 1, "static_graph": False},
        {"find_unused_parameters": True, "ddp_kwargs": {"broadcast_buffers": True}},
    ):
        _same(data_parallel_wrapper=Theirs(**options))
    exact, halved = _trained(), _trained(data_parallel_wrapper=Theirs(allreduce_comm_precision="fp16"))
    torch.testing.assert_close(halved["over.weight"], exact["over.weight"], rtol=1e-2, atol=1e-3)
    alone = _trained(data_parallel_wrapper=Theirs(params_to_ignore=["over.bias"]))["over.bias"]
    values: list[Any] = [None, None]
    dist.all_gather_object(values, alone)
    torch.testing.assert_close((values[0] + values[1]) / 2, exact["over.bias"], rtol=1e-2, atol=1e-2)
    assert not torch.equal(*values)
    return float((halved["over.weight"] - exact["over.weight"]).abs().max())


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_torchrecs_data_parallel_wrapper() -> None:
    assert min(run_ranks(2, _wrappers)) > 0


def test_a_users_own_wrapper_of_torchrecs_form_is_refused() -> None:
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

    class Own(DefaultDataParallelWrapper):
        def wrap(self, dmp: Any, env: Any, device: Any) -> None:
            """In place."""

    with pytest.raises(ShardError, match=r"got .*Own, which has wrap\(dmp.*in place does nothing here"):
        dmp.DistributedModelParallel(Net(), env=ShardingEnv.single(), data_parallel_wrapper=Own())  # type: ignore[arg-type]
    wrapper = DefaultDataParallelWrapper(allreduce_comm_precision="int8")
    with pytest.raises(ShardError, match=r"allreduce_comm_precision is one of \['bf16', 'fp16'\]; got 'int8'"):
        dmp.DistributedModelParallel(Net(), env=ShardingEnv.single(), data_parallel_wrapper=wrapper)


def test_a_module_on_meta_with_a_device() -> None:
    net = Net()
    for name in ("ebc", "over"):
        setattr(net, name, getattr(net, name).to("meta"))
    model = dmp.DistributedModelParallel(net, env=ShardingEnv.single(), device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    with pytest.raises(ShardError, match="device='meta' holds no values"):
        dmp.DistributedModelParallel(Net(), device=torch.device("meta"))


def test_shards_without_values() -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    config = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])
    ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    asked = {"device": torch.device("meta"), "init_parameters": False, "init_data_parallel": False}
    model = dmp.DistributedModelParallel(torch.nn.ModuleDict({"ebc": ebc}), **asked)
    held = {name: (tuple(t.shape), t.device.type) for name, t in model.state_dict().items()}
    assert held == {"ebc.embedding_bags.t.weight": ((10, 8), "meta")}
    with pytest.raises(dmp.CheckpointError, match="device='meta'"):
        model.load_state_dict({"ebc.embedding_bags.t.weight": torch.ones(10, 8)})
    with pytest.raises(ShardError, match="device='meta'"):
        model(None)
