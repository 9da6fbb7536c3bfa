"""TorchRec's modules around a collection: those that are right on several ranks, and those that are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import ShardError
from tests.equality import env_of
from tests.ranks import run_ranks

# TorchRec's modules of tensors' pools script themselves when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

PRIVATE = {
    "ManagedCollisionEmbeddingBagCollection": "raw ids",
    "ManagedCollisionEmbeddingCollection": "raw ids",
    "ManagedCollisionCollection": "raw ids",
    "McEmbeddingBagCollectionAdapter": "raw ids",
    "ITEPEmbeddingBagCollection": "prunes",
    "ITEPEmbeddingCollection": "prunes",
    "TensorPool": "another reads",
    "KeyedJaggedTensorPool": "another reads",
    "FusedEmbeddingBagCollection": "own backward",
}
SHARDED = ("ManagedCollisionEmbeddingBagCollection", "ManagedCollisionEmbeddingCollection")
SHARDED += ("McEmbeddingBagCollectionAdapter", "FusedEmbeddingBagCollection")
"""Those that a sharder of ours takes."""


def _private(kind: str) -> nn.Module:
    """A module that keeps something of its own on each rank, inside a model with a dense part."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.modules import fused_embedding_modules, itep_embedding_modules, mc_adapter, mc_embedding_modules
    from torchrec.modules.itep_modules import GenericITEPModule
    from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )
    from torchrec.modules.tensor_pool import TensorPool

    cpu = torch.device("cpu")
    bags = [EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
    rows = [EmbeddingConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
    ebc, ec = EmbeddingBagCollection(tables=bags), EmbeddingCollection(tables=rows)

    def id_map(configs: Any) -> nn.Module:
        policy = DistanceLFU_EvictionPolicy()
        one = MCHManagedCollisionModule(8, cpu, policy, eviction_interval=1, input_hash_size=1000)
        return ManagedCollisionCollection({"t": one}, configs)

    made: dict[str, Any] = {
        "ManagedCollisionEmbeddingBagCollection": lambda: mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
            ebc, id_map(bags)
        ),
        "ManagedCollisionEmbeddingCollection": lambda: mc_embedding_modules.ManagedCollisionEmbeddingCollection(
            ec, id_map(rows)
        ),
        "ManagedCollisionCollection": lambda: id_map(bags),
        "McEmbeddingBagCollectionAdapter": lambda: mc_adapter.McEmbeddingBagCollectionAdapter(
            bags, 1000, cpu, 1, zch_method="sort_zch"
        ),
        "ITEPEmbeddingBagCollection": lambda: itep_embedding_modules.ITEPEmbeddingBagCollection(
            ebc, GenericITEPModule({"t": 16}, enable_pruning=False)
        ),
        "ITEPEmbeddingCollection": lambda: itep_embedding_modules.ITEPEmbeddingCollection(
            ec, GenericITEPModule({"t": 16}, enable_pruning=False)
        ),
        "TensorPool": lambda: TensorPool(8, 4, torch.float),
        "KeyedJaggedTensorPool": lambda: KeyedJaggedTensorPool(8, {"f": 4}, values_dtype=torch.int64, device=cpu),
        "FusedEmbeddingBagCollection": lambda: fused_embedding_modules.FusedEmbeddingBagCollection(
            tables=bags, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}
        ),
    }
    return nn.ModuleDict({"inner": made[kind](), "ebc": ebc, "top": nn.Linear(4, 1)})


def _refusals(at: str, options: dict[str, Any]) -> dict[str, str]:
    texts = {}
    for kind in PRIVATE.keys() - (set() if options else SHARDED):
        model = _private(kind)
        before = [(name, type(m)) for name, m in model.named_modules()]
        with pytest.raises(ShardError) as error:
            dmp.DistributedModelParallel(model, env=env_of(at), **options)
        assert before == [(name, type(m)) for name, m in model.named_modules()], kind
        texts[kind] = str(error.value)
    return texts


@pytest.mark.parametrize(("at", "options"), [("dp2", {}), ("replicate2", {"sharders": []})])
def test_what_learns_from_each_ranks_own_ids_is_refused(at: str, options: dict[str, Any]) -> None:
    """With sharders or without, whether tables are cut or only copied."""
    for texts in run_ranks(2, _refusals, at, options, timeout=60):
        wrong = {k: t for k, t in texts.items() if PRIVATE[k] not in t or "'inner" not in t or "2 data ranks" not in t}
        assert not wrong, wrong


def test_one_process_runs_it_as_it_is() -> None:
    model = _private("ManagedCollisionEmbeddingBagCollection")
    assert dmp.DistributedModelParallel(model, env=dmp.ShardingEnv.single()).plan


class Processed(nn.Module):
    """Per-position weights that are trained, before a weighted collection; and one with weights from the batch."""

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
        from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f", "g"])
        self.collection = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[config], is_weighted=True),
            PositionWeightedModuleCollection(max_feature_lengths={"f": 4, "g": 4}),
        )
        for p in self.collection._feature_processors.parameters():
            nn.init.uniform_(p, 0.5, 1.5)

    def forward(self, features: Any) -> torch.Tensor:
        out: torch.Tensor = self.collection(features).values()
        return out


def _features(rank: int) -> Any:
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([[2, 0, 1, 3], [4, 1, 0, 2]])[rank]
    ids = torch.arange(int(lengths.sum())) * (rank + 2) % 9
    return KeyedJaggedTensor(keys=["f", "g"], values=ids, lengths=lengths)


def _processed() -> None:
    env = env_of("dp2")
    plain = Processed()
    model = dmp.DistributedModelParallel(
        copy.deepcopy(plain), env=env, plan={n: dmp.row_wise() for n in dict(plain.named_parameters()) if "bags" in n}
    )
    results: list[torch.Tensor] = []  # of the plain module, by rank
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    for _ in range(2):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            ranks = (0, 1) if m is plain else (env.rank,)
            outs = [m(_features(r)) for r in ranks]
            sum(o.square().mean() / len(outs) for o in outs).backward()  # type: ignore[union-attr]
            if m is model:
                torch.testing.assert_close(outs[0], results[env.rank])
            results = outs
            optimizer.step()
            optimizer.zero_grad()
    for name, value in dmp.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)


def test_trained_position_weights_around_a_collection() -> None:
    run_ranks(2, _processed, timeout=60)
