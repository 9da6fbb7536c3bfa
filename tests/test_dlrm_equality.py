"""A whole DLRM (TorchRec's): sharded tables and DDP dense layers, 5 steps, equal one process on the global batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, full_optimizer_state_dict, full_state_dict
from tests.equality import LR, MESHES, attach, env_of, layouts_for
from tests.ranks import run_ranks

TABLES, DIM, DENSE, BATCH = 6, 8, 5, 4


def make_model(optimizer: str) -> nn.Module:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models.dlrm import DLRM

    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=7 + 11 * i, embedding_dim=DIM, feature_names=[f"f{i}"])
        for i in range(TABLES)
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), DENSE, [16, DIM], [16, 1])
    attach(model.sparse_arch, optimizer)
    return model


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, object, torch.Tensor]:
    from torchrec import KeyedJaggedTensor

    rng = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (TABLES, BATCH), generator=rng)
    ids = [torch.randint(0, 7 + 11 * i, (int(n.sum()),), generator=rng) for i, n in enumerate(lengths)]
    keys = [f"f{i}" for i in range(TABLES)]
    features = KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths.view(-1))
    return torch.randn(BATCH, DENSE, generator=rng), features, torch.rand(BATCH, 1, generator=rng).round()


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, object, torch.Tensor]) -> torch.Tensor:
    dense, features, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(dense, features), labels)


def five_steps(mesh: str, optimizer: str) -> None:
    env = env_of(mesh)
    oracle, module = make_model(optimizer), make_model(optimizer)
    mixed = layouts_for(env)["mixed" if optimizer != "rowwise_adagrad" else "row_wise"]
    tables = {n: tuple(p.shape) for n, p in module.named_parameters() if ".embedding_bags." in n}
    plan = {n: mixed(i, (shape[0], shape[1]), env) for i, (n, shape) in enumerate(tables.items())}
    model = DistributedModelParallel(module, env, plan=plan)
    ordinary = [
        torch.optim.Adagrad([p for n, p in m.named_parameters() if n not in tables], lr=LR) for m in (oracle, model)
    ]
    for step in range(5):
        batches = [make_batch(r, step) for r in range(env.data_size)]
        plain = [loss_of(oracle, b) for b in batches]
        mine = loss_of(model, batches[env.rank])
        torch.testing.assert_close(mine, plain[env.rank], atol=1e-5, rtol=1e-5)
        for optimizer_, loss in zip(ordinary, (sum(plain) / len(plain), mine), strict=True):
            optimizer_.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            optimizer_.step()
    values = full_state_dict(model)
    assert list(values) == list(oracle.state_dict())
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(values[name], value, atol=1e-5, rtol=1e-5, msg=f"{name} differs")
    state = full_optimizer_state_dict(model, ordinary[1])["state"]
    for name, p in oracle.named_parameters():
        held = p._in_backward_optimizers[0] if name in tables else ordinary[0]  # type: ignore[attr-defined]
        if "sum" in held.state[p]:
            want = held.state[p]["sum"].view(state[name]["sum"].shape)
            torch.testing.assert_close(state[name]["sum"], want, atol=1e-5, rtol=1e-5, msg=f"{name}: sum differs")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("mesh", ["single", "dp2", "dp4", "replicate2xshard2", "host2xlocal2"])
@pytest.mark.sampled(12)
def test_five_steps_equal_one_process(mesh: str, optimizer: str) -> None:
    run_ranks(max(1, math.prod(MESHES[mesh][0])), five_steps, mesh, optimizer)
