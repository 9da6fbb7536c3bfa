"""Managed collision as users hand it over: TorchRec's sharders, modules on meta, batch sizes of their own; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmp
from sharders import ManagedCollisionEmbeddingBagCollectionSharder
from tests.equality import env_of
from tests.ranks import run_ranks
from tests.torchrec_dropin import raw_ids

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),  # of TorchRec's hash maps
]


def _torchrecs_sharders(kind: str) -> None:
    """Their default ones, and one with an optimizer."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder as Rows
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder as Bags
    from torchrec.distributed.sharding_plan import get_default_sharders

    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": raw_ids.LR, "eps": 1e-10}
    theirs = Rows if kind == "ec" else Bags
    for sharders, optimizer in (get_default_sharders(), None), ([theirs(fused_params=fused)], "adagrad"):
        module = raw_ids.make(kind=kind)
        model = dmp.DistributedModelParallel(module, env=env_of("dp2"), sharders=sharders)
        plain = raw_ids.make(kind=kind, optimizer=optimizer)
        pair = raw_ids.Pair("dp2", "row_wise", plain, model, kind=kind, optimizer=optimizer)
        for step in range(4):
            pair.step(step)


@pytest.mark.parametrize("kind", ["ebc", pytest.param("ec", marks=pytest.mark.slow)])
def test_torchrecs_sharders_and_the_planners_plan(kind: str) -> None:
    run_ranks(2, _torchrecs_sharders, kind)


def _on_meta() -> Any:
    from torchrec import EmbeddingBagConfig
    from torchrec.modules.mc_adapter import McEmbeddingBagCollectionAdapter

    tables = [EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["f"])]
    return McEmbeddingBagCollectionAdapter(tables, 1 << 40, torch.device("meta"), 2, zch_method="sort_zch")


def _trained_from_meta(at: str) -> dict[str, torch.Tensor]:
    from torchrec import KeyedJaggedTensor

    model = dmp.DistributedModelParallel(_on_meta(), env=env_of(at), init_data_parallel=True)
    ids = torch.arange(6) * 1000
    for _ in range(3):
        model(KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.tensor([4, 2])))
    return dmp.full_state_dict(model)


def test_modules_on_meta_become_the_same_on_every_mesh() -> None:
    (expected,) = run_ranks(1, _trained_from_meta, "single")
    found = next(v for name, v in expected.items() if name.endswith("_mch_sorted_raw_ids"))
    assert found[:6].tolist() == [0, 1000, 2000, 3000, 4000, 5000]
    for got in run_ranks(2, _trained_from_meta, "dp2"):
        for name, value in expected.items():
            if not name.endswith("_mch_counts"):  # two ranks bring each id twice as often
                torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


def test_a_batch_size_for_each_feature() -> None:
    from torchrec import KeyedJaggedTensor

    plain, model = raw_ids.make(kind="ec"), dmp.DistributedModelParallel(raw_ids.make(kind="ec"))
    sizes = {"values": torch.arange(8) * 100, "lengths": torch.tensor([2, 1, 1, 1, 2, 1])}
    batch = KeyedJaggedTensor(keys=["f", "g", "h"], **sizes, stride_per_key_per_rank=[[2], [3], [1]])
    for _ in range(2):
        (expected, ids), (got, our_ids) = plain(batch), model(batch)
        assert ids.stride_per_key() == our_ids.stride_per_key() == [3, 1, 2]
        assert torch.equal(ids.values(), our_ids.values())
        for name, rows in expected.items():
            torch.testing.assert_close(got[name].values(), rows.values())
            assert torch.equal(got[name].lengths(), rows.lengths())


def _refused(what: str) -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.modules import mc_embedding_modules, mc_modules
    from torchrec.modules.mc_adapter import McEmbeddingBagCollectionAdapter

    cpu = torch.device("cpu")
    if what == "sync_interval":
        ManagedCollisionEmbeddingBagCollectionSharder(sync_interval=2)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=["f"])
        for name in ("a", "b")[: 1 + (what == "feature")]
    ]
    if what == "hash":
        options = {"zch_method": "mpzch", "mpzch_num_buckets": 2}
        module: Any = McEmbeddingBagCollectionAdapter(tables, 1000, cpu, 2, **options)
    else:
        kind = type("Own", (mc_modules.LFU_EvictionPolicy,), {}) if what == "policy" else mc_modules.LFU_EvictionPolicy
        maps = {t.name: mc_modules.MCHManagedCollisionModule(8, cpu, kind(), 1) for t in tables}
        module = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables), mc_modules.ManagedCollisionCollection(maps, tables)
        )
    dmp.DistributedModelParallel(module, env=env_of("dp2"))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hash", "HashZchManagedCollisionModule: FBGEMM's kernel of it learns on CUDA alone"),
        ("policy", "Own wants a whole map in one place"),
        ("feature", "'f' is read by several tables"),
        ("sync_interval", "sync_interval=2 averages copies"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(what: str, text: str) -> None:
    for error in run_ranks(2, _refused, what, expect=dmp.ShardError):
        assert text in str(error), error


def test_the_hash_learns_on_cuda_alone() -> None:
    """Why it is refused: the module itself does not train here."""
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    module = HashZchManagedCollisionModule(zch_size=8, device=torch.device("cpu"), total_num_buckets=2)
    ids = JaggedTensor(values=torch.tensor([5, 7, 1000]), lengths=torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="Expected readonly to be true, but got false"):
        module({"f": ids})
    assert module.eval()({"f": ids})["f"].values().numel() == 3  # where it learns nothing it runs
