"""What the short scripts share: a model of TorchRec's modules, its batches, and a run under either import.

A script is a function of the class `DistributedModelParallel`, TorchRec's or ours: nothing else in it differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp

IGNORED = pytest.mark.filterwarnings(  # calls of TorchRec 1.8.0 that torch 2.13 deprecates
    "ignore:`torch.jit.[a-z]+` is deprecated:DeprecationWarning",
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
    "ignore:Please use DTensor instead and we are deprecating ShardedTensor:FutureWarning",
    "ignore:`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated:FutureWarning",
)
ROWS, DIM, BATCH_SIZE = {"t0": 18, "t1": 40}, 8, 6
FEATURES = {"t0": ["a", "b"], "t1": ["c"]}
LR = 0.1


class Model(nn.Module):
    """Two tables, three features, two dense layers; the output is a loss."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(num_embeddings=ROWS[t], embedding_dim=DIM, name=t, feature_names=f)
                for t, f in FEATURES.items()
            ],
            device=torch.device("cpu"),
        )
        self.over, self.out = nn.Linear(3 * DIM, 4), nn.Linear(4, 1)

    def forward(self, features: Any) -> torch.Tensor:
        return (self.out(self.over(self.ebc(features).values()).relu()) - 1).pow(2).mean()


def model_of(in_backward: Any = None, **options: Any) -> Model:
    """The same on every call; tables with an in-backward optimizer where one is given."""
    torch.manual_seed(5)
    model = Model()
    if in_backward is not None:
        with warnings.catch_warnings():  # this import of torch's uses what torch has deprecated
            warnings.simplefilter("ignore")
            from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
        apply_optimizer_in_backward(in_backward, model.ebc.parameters(), options)
    return model


def batch(rank: int, step: int) -> Any:
    """A `KeyedJaggedTensor` of a rank."""
    from torchrec import KeyedJaggedTensor

    rng = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (3, BATCH_SIZE), generator=rng)
    tables = [t for t, features in FEATURES.items() for _ in features]
    ids = [torch.randint(0, ROWS[t], (int(n.sum()),), generator=rng) for t, n in zip(tables, lengths, strict=True)]
    return KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.cat(ids), lengths=lengths.view(-1))


def wrapper(which: str) -> Callable[..., Any]:
    """`DistributedModelParallel` of "torchrec" or "dmp", on two ranks with t0 cut by rows and t1 on the second rank.

    Its own planner would make these tables data-parallel, where TorchRec's copies drift on CPUs.
    """
    if which == "dmp":
        layouts = {"t0": dmp.row_wise(), "t1": dmp.table_wise(1)}
        plan = {f"ebc.embedding_bags.{t}.weight": layout for t, layout in layouts.items()}
        return partial(dmp.DistributedModelParallel, plan=plan)
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan

    sharder = EmbeddingBagCollectionSharder()
    of_ebc = construct_module_sharding_plan(
        model_of(torch.optim.SGD, lr=LR).ebc,  # updated in the backward: the kernel is a fused one
        {"t0": row_wise(), "t1": table_wise(rank=1)},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    return partial(DistributedModelParallel, plan=ShardingPlan({"ebc": of_ebc}), sharders=[sharder])


class Unsharded(nn.Module):
    """The oracle in the form of a wrapper: the plain model, in one process, on the batches of all ranks."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        from torchrec.optim.fused import EmptyFusedOptimizer

        super().__init__()
        self.module, self.fused_optimizer = module, EmptyFusedOptimizer()

    def forward(self, step: int) -> torch.Tensor:
        return torch.stack([self.module(batch(rank, step)) for rank in range(2)]).mean()

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return self.module.named_parameters(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*args, **options)


def feed(model: Any, step: int, rank: int | None = None) -> Any:
    """What a model's forward takes at a step: its rank's batch."""
    return step if isinstance(model, Unsharded) else batch(dist.get_rank() if rank is None else rank, step)


def start(model: Any) -> Any:
    """The model with the values of `model_of`, which TorchRec's class discards."""
    model.load_state_dict({name: value.detach().clone() for name, value in model_of().state_dict().items()})
    return model


def both(script: Callable[..., Any], *args: Any) -> Any:
    """A script gives the same under either import; called on every rank, and by tests for what ours gives."""
    theirs, ours = script(wrapper("torchrec"), *args), script(wrapper("dmp"), *args)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return ours


def same_as_unsharded(script: Callable[..., Any], results: list[Any], *args: Any) -> None:
    """What a script gave on the ranks, losses, is in the mean what it gives of the plain model."""
    plain = script(Unsharded, None, *args)
    means = torch.stack([torch.stack(each) for each in results]).mean(0)
    torch.testing.assert_close(means, torch.stack(plain), rtol=1e-5, atol=1e-6)
