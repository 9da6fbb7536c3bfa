"""What scripts look for in a wrapped model: sharded modules by class, and TorchRec's pipelines around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, column_wise, table_wise
from tests.ranks import run_ranks
from tests.torchrec_dropin.scripts import IGNORED, LR, batch, both, model_of

pytestmark = IGNORED


def scanned(DistributedModelParallel: Any) -> list[Any]:
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.types import ShardedModule
    from torchrec.distributed.utils import get_unsharded_module_names

    model = DistributedModelParallel(module=model_of(torch.optim.SGD, lr=LR), device=torch.device("cpu"))
    assert sorted(get_unsharded_module_names(model.module)) == ["out", "over"]
    found = {name: m for name, m in model.module.named_modules() if isinstance(m, ShardedModule)}
    assert set(found) == {"ebc"} and isinstance(found["ebc"], ShardedEmbeddingBagCollection)
    assert found["ebc"].unsharded_module_type is EmbeddingBagCollection
    names = sorted(found["ebc"].sharded_parameter_names("ebc"))
    assert names == [f"ebc.embedding_bags.t{i}.weight" for i in range(2)]
    plan = found["ebc"].module_sharding_plan
    assert {t: (p.sharding_type, p.compute_kernel) for t, p in plan.items()} == {
        "t0": ("row_wise", "fused"),
        "t1": ("table_wise", "fused"),
    }
    return [[shard.shard_sizes for shard in plan[t].sharding_spec.shards] for t in ("t0", "t1")] + [plan["t1"].ranks]


def of_one_module() -> None:
    """As code that saves module by module reads it."""
    from torchrec.optim.fused import FusedOptimizerModule
    from torchrec.optim.keyed import KeyedOptimizer

    layouts = {"ebc.embedding_bags.t0.weight": column_wise([0, 1])}
    layouts["ebc.embedding_bags.t1.weight"] = table_wise(0)
    model = DistributedModelParallel(model_of(torch.optim.Adagrad, lr=LR), plan=layouts)
    model(batch(model.env.rank, 0)).backward()
    (module,) = (m for m in model.modules() if isinstance(m, FusedOptimizerModule))
    part, whole = module.fused_optimizer, model.fused_optimizer.state_dict()
    assert isinstance(part, KeyedOptimizer)
    given = part.state_dict()
    for name, values in given["state"].items():
        torch.testing.assert_close(dict(values), dict(whole["state"][f"ebc.{name}"]), rtol=0, atol=0)
    assert len(given["state"]) == 2 == len(model.fused_optimizer.param_groups[0]["params"])
    given = copy.deepcopy(given)
    given["state"]["embedding_bags.t1.weight"]["sum"] += 1
    part.load_state_dict(given)
    part.param_groups[0]["lr"] = 0.5
    now = model.fused_optimizer
    assert now.param_groups[0]["lr"] == 0.5
    changed = now.state_dict()["state"]["ebc.embedding_bags.t1.weight"]["sum"]
    torch.testing.assert_close(changed, given["state"]["embedding_bags.t1.weight"]["sum"], rtol=0, atol=0)


def test_a_sharded_module_has_an_optimizer_of_its_tables() -> None:
    run_ranks(2, of_one_module)


def _scans() -> None:
    both(scanned)


def test_sharded_modules_are_found() -> None:
    run_ranks(2, _scans)


def test_plain_modules_are_found_too() -> None:
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBag
    from torchrec.distributed.types import ShardedModule

    model = DistributedModelParallel(nn.Sequential(nn.EmbeddingBag(4, 8), nn.Linear(8, 1)))
    assert [isinstance(m, ShardedModule) for m in model.module] == [True, False]
    assert isinstance(model.module[0], ShardedEmbeddingBag)
    assert model.module[0].unsharded_module_type is nn.EmbeddingBag  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "EvalPipelineSparseDist"]
)
def test_their_pipelines_say_which_of_ours(name: str) -> None:
    from torchrec.distributed import train_pipeline

    model = DistributedModelParallel(
        model_of(), plan={f"ebc.embedding_bags.t{i}.weight": column_wise([0]) for i in (0, 1)}
    )
    for given, words in ((model, "not traced by torch.fx"), (model.module, "do not run ShardedEmbeddingBagCollection")):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        pipeline = getattr(train_pipeline, name)(given, optimizer, torch.device("cpu"))
        with pytest.raises(ShardError, match=f"{words}.*import the pipeline of the same name from dmp"):
            pipeline.progress(iter([batch(0, 0), batch(0, 1)]))
