"""`FusedEmbeddingBagCollection` and `FusedEmbeddingCollection`: the oracle is the module itself on the global batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import dmp
from dmp import DistributedModelParallel, ShardError, column_wise, data_parallel, row_wise, table_wise
from sharders import EmbeddingCollectionSharder, FusedEmbeddingBagCollectionSharder
from sharders.testing import check_sharder
from tests.equality import env_of
from tests.ranks import run_ranks
from tests.torchrec_dropin.their_modules import ROWS, make_batch

PLANS: dict[str, Any] = {
    "mixed": lambda i: [row_wise(), column_wise([0, 1]), table_wise(1)][i],
    "rows": lambda i: row_wise(),
    "copies": lambda i: data_parallel(),
    "tables": lambda i: table_wise(i % 2),
}


def _optimizer(name: str) -> Any:
    import torchrec

    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise": torchrec.optim.RowWiseAdagrad}
    return kinds[name]


def _tables(pooled: bool = True) -> list[Any]:
    from torchrec import EmbeddingBagConfig, EmbeddingConfig

    kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    return [
        kind(name=name, num_embeddings=ROWS[names[0]], embedding_dim=8, feature_names=names)
        for name, names in (("t0", ["a", "b"]), ("t1", ["c"]), ("t2", ["d"]))
    ]


def make_fused(optimizer: str = "sgd", device: str = "cpu") -> Any:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    kwargs = {"lr": 0.1, **({} if optimizer == "sgd" else {"eps": 1e-6})}
    made = FusedEmbeddingBagCollection(_tables(), _optimizer(optimizer), kwargs, device=torch.device(device))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in made.parameters():
            if not p.is_meta:
                p.copy_(torch.randn(p.shape, generator=generator))
    return made


def _battery() -> None:
    check_sharder(FusedEmbeddingBagCollectionSharder(), make_fused, lambda rank, step: make_batch("ebc", rank, step))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_battery(size: int) -> None:
    run_ranks(size, _battery, timeout=300)


def _global(step: int, size: int) -> Any:
    """The batches of all ranks as one."""
    from torchrec import KeyedJaggedTensor

    batches = [make_batch("ebc", rank, step)[0].to_dict() for rank in range(size)]
    keys = list(ROWS)
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([b[k].values() for k in keys for b in batches]),
        lengths=torch.cat([b[k].lengths() for k in keys for b in batches]),
    )


def _steps(model: Any, env: dmp.ShardingEnv, steps: range, oracle: Any = None) -> None:
    """Of each the loss is the mean over the ranks."""
    for step in steps:
        out = model(*make_batch("ebc", env.rank, step))
        if oracle is not None:
            whole = oracle(_global(step, env.size))
            assert out.keys() == whole.keys()
            torch.testing.assert_close(out.values(), whole.values().split(3)[env.rank])
            ((whole.values() ** 2).sum() / env.size).backward()
        (out.values() ** 2).sum().backward()


def _equal(optimizer: str, plan: str, path: str) -> list[int]:
    env, oracle = env_of("dp2"), make_fused(optimizer)
    layouts = {f"embedding_bags.t{i}.weight": PLANS[plan](i) for i in range(3)}
    earlier = make_fused(optimizer)  # has been trained before it is wrapped
    for module in (oracle, earlier):
        (module(_global(9, 2)).values() ** 2).sum().backward()
    model = DistributedModelParallel(earlier, env=env, plan=layouts)
    _steps(model, env, range(2), oracle)
    dmp.save_checkpoint(path, model)
    _steps(model, env, range(2, 4), oracle)
    again = DistributedModelParallel(make_fused(optimizer), env=env, plan=dict.fromkeys(layouts, row_wise()))
    dmp.load_checkpoint(path, again)
    _steps(again, env, range(2, 4))
    for wrapped in (model, again, copy.deepcopy(model)):
        for name, value in oracle.state_dict().items():
            torch.testing.assert_close(dmp.full_state_dict(wrapped)[name], value, msg=name)
        state = dmp.full_optimizer_state_dict(wrapped)["state"]
        for (lookup,) in [oracle._emb_modules] if optimizer != "sgd" else []:
            for i, kept in enumerate(lookup._emb_module.get_optimizer_state()):
                torch.testing.assert_close(state[f"embedding_bags.t{i}.weight"]["sum"], kept["sum"])
    assert model.module.optimizer_type() is _optimizer(optimizer)
    return [sum(p.nbytes for p in model.parameters()), sum(p.nbytes for p in make_fused().parameters())]


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        ("adagrad", "mixed"),
        ("rowwise", "rows"),
        pytest.param("sgd", "copies", marks=pytest.mark.slow),
        pytest.param("rowwise", "tables", marks=pytest.mark.slow),
    ],
)
def test_steps_state_and_checkpoints_equal_the_module_itself(tmp_path: Path, optimizer: str, plan: str) -> None:
    held, whole = run_ranks(2, _equal, optimizer, plan, str(tmp_path / "saved"))[0]
    assert held == whole if plan == "copies" else held < whole


def _planned() -> None:
    """Without a plan, on meta, beside a dense layer: by the defaults, by TorchRec's sharder, and no optimizer asked."""
    from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder as Theirs

    for sharders in (None, [Theirs()]):
        model = DistributedModelParallel(make_fused(device="meta"), env=env_of("dp2"), sharders=sharders)
        assert set(model.fused_optimizer.fused) == {f"embedding_bags.t{i}.weight" for i in range(3)}
        before = dmp.full_state_dict(model)
        (model(*make_batch("ebc", model.env.rank, 0)).values() ** 2).sum().backward()
        assert any(not torch.equal(before[name], value) for name, value in dmp.full_state_dict(model).items())


def test_the_planner_and_torchrecs_sharder() -> None:
    run_ranks(2, _planned)


def _unpooled() -> None:
    """On a CPU it can only be made on meta: against the plain collection with the optimizer that FBGEMM runs."""
    from torchrec import EmbeddingCollection
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingCollection

    fused = FusedEmbeddingCollection(
        _tables(pooled=False), torch.optim.SGD, {"lr": 0.1}, device=torch.device("meta"), need_indices=True
    )
    plain = EmbeddingCollection(tables=_tables(pooled=False), need_indices=True)
    env = env_of("dp2")
    plan = {f"embeddings.t{i}.weight": PLANS["mixed"](i) for i in range(3)}
    ours = DistributedModelParallel(fused, env=env, plan=plan)
    ours.load_state_dict(plain.state_dict())
    twin = DistributedModelParallel(plain, env=env, plan=plan, sharders=[EmbeddingCollectionSharder()])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        got, want = (model(*make_batch("ec", env.rank, step)) for model in (ours, twin))
        for name, rows in want.items():
            torch.testing.assert_close(got[name].values(), rows.values())
            torch.testing.assert_close(got[name].weights(), rows.weights())
        for out in (got, want):
            sum((rows.values() ** 2).sum() for rows in out.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in dmp.full_state_dict(twin).items():
        torch.testing.assert_close(dmp.full_state_dict(ours)[name], value, msg=name)


def test_an_unpooled_one() -> None:
    run_ranks(2, _unpooled)


def test_names_that_are_anothers_are_refused() -> None:
    from torchrec import PoolingType
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    tables = _tables()
    tables[1].pooling = PoolingType.MEAN
    module = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(ShardError, match="gives one table's results under another's name"):
        DistributedModelParallel(module, env=dmp.ShardingEnv.single())
