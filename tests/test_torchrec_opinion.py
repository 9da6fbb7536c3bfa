"""A second opinion: TorchRec's own wrapper computes what ours does, where it can do the same.

That is: pooled sums of an `EmbeddingBagCollection`, tables whole, cut by rows or by columns, on two ranks, with batches
of one size and keys in one order (`DistributedModelParallel` of TorchRec 1.8.0 gives wrong numbers in other cases). It
discards the values that a module has before wrapping, so both get theirs by loading. Row-wise Adagrad on column blocks
has one accumulator for each block on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from tests import equality
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings(  # calls of TorchRec 1.8.0 that torch 2.13 deprecates
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
    "ignore:`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated:FutureWarning",
)
ROWS = {"t0": 17, "t1": 40}
DIM = 8
OPTIMIZERS = ("sgd", "rowwise_adagrad")
LAYOUTS = ("table_wise", "row_wise", "column_wise", "mixed")


class Model(nn.Module):
    """Two tables, three features, a dense layer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        torch.manual_seed(5)
        features = {"t0": ["a", "b"], "t1": ["c"]}
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(num_embeddings=ROWS[t], embedding_dim=DIM, name=t, feature_names=f)
                for t, f in features.items()
            ],
            device=torch.device(device),
        )
        self.over = nn.Linear(3 * DIM, 1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.over(self.ebc(features).values())


def batch(rank: int, step: int, size: int = 6) -> Any:
    from torchrec import KeyedJaggedTensor

    rng = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (3, size), generator=rng)
    ids = [
        torch.randint(0, ROWS[t], (int(n.sum()),), generator=rng)
        for t, n in zip(("t0", "t0", "t1"), lengths, strict=True)
    ]
    return KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.cat(ids), lengths=lengths.view(-1))


def layout_of(case: str, table: str) -> dmp.Layout:
    if case == "mixed":
        case = {"t0": "column_wise", "t1": "row_wise"}[table]
    return {
        "table_wise": dmp.table_wise(int(table[1])),
        "row_wise": dmp.row_wise(),
        "column_wise": dmp.column_wise([0, 1]),
    }[case]


def theirs(case: str, optimizer: str, params: Mapping[str, Any] = MappingProxyType({})) -> Any:
    from torchrec.distributed import DistributedModelParallel, ShardingEnv
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan

    def sharding(table: str) -> Any:
        layout = layout_of(case, table)
        return {
            "table_wise": lambda: table_wise(rank=int(table[1])),
            "row_wise": row_wise,
            "column_wise": lambda: column_wise(ranks=[0, 1]),
        }[layout.name]()

    model = Model("meta")
    equality.attach(model.ebc, optimizer)
    sharder = EmbeddingBagCollectionSharder(fused_params=dict(params))
    plan = construct_module_sharding_plan(
        model.ebc, {t: sharding(t) for t in ROWS}, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    world = torch.distributed.group.WORLD
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )


def ours(case: str, optimizer: str, params: Mapping[str, Any] = MappingProxyType({})) -> dmp.DistributedModelParallel:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    model = Model("cpu")
    equality.attach(model.ebc, optimizer)
    plan = {f"ebc.embedding_bags.{t}.weight": layout_of(case, t) for t in ROWS}
    return dmp.DistributedModelParallel(
        model, plan=plan, sharders=[EmbeddingBagCollectionSharder(fused_params=dict(params))]
    )


def compare(case: str, optimizer: str, params: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    models = [ours(case, optimizer, params), theirs(case, optimizer, params)]
    initial = {name: value.detach().clone() for name, value in Model("cpu").state_dict().items()}
    models[1].load_state_dict(copy.deepcopy(initial))  # it changes the dict that it is given
    optimizers = [torch.optim.SGD(m.module.over.parameters(), lr=equality.LR) for m in models]
    for step in range(3):
        outputs = [m(batch(rank, step)) for m in models]
        torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
        for output, dense in zip(outputs, optimizers, strict=True):
            dense.zero_grad()
            equality.loss_of(output).backward()
            dense.step()
    whole = dmp.full_state_dict(models[0])
    other = models[1].state_dict()
    assert set(whole) == set(other)
    moved = 0.0
    for name, value in whole.items():
        if not hasattr(other[name], "local_shards"):
            torch.testing.assert_close(value, other[name].detach(), atol=1e-5, rtol=1e-5)
            continue
        for shard in other[name].local_shards():
            part = tuple(
                slice(o, o + n) for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            )
            torch.testing.assert_close(value[part], shard.tensor.detach(), atol=1e-5, rtol=1e-5)
            moved += float((value[part] - initial[name][part]).abs().sum())
    assert moved > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.sampled(4)
def test_torchrec_agrees(case: str, optimizer: str) -> None:
    run_ranks(2, compare, case, optimizer, {})


CLIPPED = {"gradient_clipping": True, "max_gradient": 1e-2}


@pytest.mark.parametrize(
    ("case", "optimizer", "params"),
    [
        ("mixed", "sgd", CLIPPED),
        ("row_wise", "sgd", {"weight_decay": 0.5, "max_norm": 0.1}),  # which FBGEMM's SGD has not
        ("column_wise", "adagrad", {**CLIPPED, "learning_rate": 9.0, "eps": 1e-2}),  # the table's own goes above
    ],
)
def test_torchrec_agrees_on_fused_params(case: str, optimizer: str, params: dict[str, Any]) -> None:
    run_ranks(2, compare, case, optimizer, params)
