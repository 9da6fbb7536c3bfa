"""A batch size for each feature: equal to the unsharded modules, whatever the layouts, and refused in words."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import dmp
import sharders
from dmp import InputError, column_wise, data_parallel, row_wise, table_wise
from tests.equality import (
    MESHES,
    attach,
    env_of,
    layouts_for,
    make_batch,
    make_module,
    run_matrix,
    run_random,
    same_result,
)
from tests.ranks import run_ranks

KINDS = ("ebc_vbe", "ebc_weighted_vbe", "ec_vbe")


@pytest.mark.parametrize(
    ("mesh", "every"),
    [("dp2", 5)] + [pytest.param(m, 1, marks=pytest.mark.slow) for m in MESHES],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_equals_unsharded(mesh: str, kind: str, every: int) -> None:
    world = max(1, math.prod(MESHES[mesh][0]))
    failed = run_ranks(world, run_matrix, mesh, kind, every, timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


# ---- forms ----


def kjt(change: str = "", kind: str = "ebc") -> Any:
    """Three samples; feature a has two rows, b and c three, d and e one; or one with a fault."""
    from torchrec import KeyedJaggedTensor

    keys, rows = ["a", "b", "c", "d", "e"], [2, 3, 3, 1, 1]
    inverse = torch.tensor([[0, 1, 1], [0, 1, 2], [2, 1, 0], [0, 0, 0], [0, 0, 0]])
    lengths = torch.tensor([2, 1, 1, 0, 2, 1, 1, 0, 3, 1])
    ids = torch.arange(int(lengths.sum())) % 3
    ids[8:] = 0  # the table of e has one row
    named: Any = (keys, inverse)
    told: Any = [[n] for n in rows]
    if change == "equal sizes" or change == "equal sizes, an unread key":
        rows = [2] * 5
        told, named = [[n] for n in rows], None
        if change == "equal sizes, an unread key":
            keys, told = [*keys, "x"], [*told, [3]]
            lengths, ids = torch.cat([lengths, torch.tensor([1, 2, 0])]), torch.cat([ids, torch.tensor([99, -7, 5])])
    elif change == "of two ranks":
        told = [[n - 1, 1] for n in rows]
    elif change == "inverse indices alone":
        told = None
        inverse = inverse.clamp(max=1)
        named = (keys, inverse)
    elif change == "no inverse":
        named = None
    elif change == "inverse without a key":
        named = (keys[1:], inverse[1:])
    elif change == "inverse too large":
        inverse[0, 2] = 2
    elif change == "inverse negative":
        inverse[1, 0] = -1
    elif change == "inverse of one dim":
        named = (keys, inverse[0])
    elif change == "inverse of too few rows":
        named = (keys, inverse[1:])
    elif change == "float inverse":
        named = (keys, inverse.float())
    elif change == "too few sizes":
        told = told[1:]
    elif change == "sizes do not add up":
        told[1] = [4]
    elif change == "negative size":
        told[0], told[1] = [-1], [6]
    elif change == "flat sizes":
        told = torch.tensor(rows, dtype=torch.int32)
    elif change == "id == rows":
        ids[0] = 13
    return KeyedJaggedTensor(
        keys=keys, values=ids, lengths=lengths, stride_per_key_per_rank=told, inverse_indices=named
    )


FAULTS = {
    "no inverse": ["'b'", "batch size 3", "inverse_indices"],
    "inverse without a key": ["'a'", "inverse indices"],
    "inverse too large": ["'a'", "inverse index 2", "0..1"],
    "inverse negative": ["'b'", "inverse index -1", "0..2"],
    "inverse of one dim": ["inverse indices", "2 dims"],
    "inverse of too few rows": ["inverse indices", "5 keys", "4 rows"],
    "float inverse": ["inverse indices", "float32"],
    "too few sizes": ["stride_per_key_per_rank", "4 rows", "5 keys"],
    "sizes do not add up": ["stride_per_key_per_rank", "sum to 11", "10 lengths"],
    "negative size": ["'a'", "negative batch size -1"],
    "flat sizes": ["stride_per_key_per_rank"],
    "id == rows": ["'a'", "id 13", "13 rows"],
}


def _sharded(kind: str, layout: str, optimizer: str | None) -> dmp.DistributedModelParallel:
    env, module = env_of("dp2"), make_module(kind)
    attach(module, optimizer)
    place = layouts_for(env)[layout]
    plan = {name: place(i, tuple(p.shape), env) for i, (name, p) in enumerate(module.named_parameters())}
    return dmp.DistributedModelParallel(module, env=env, plan=plan)


def _faults() -> dict[str, str]:
    model, told = _sharded("ebc", "mixed", "sgd"), {}
    for i, change in enumerate(FAULTS):
        try:
            model(kjt(change if model.env.rank == i % 2 else ""))
        except InputError as error:
            told[change] = str(error)
    same_result(model(kjt()), make_module("ebc")(kjt()))
    return told


def test_what_does_not_fit_is_told_on_all_ranks() -> None:
    for told in run_ranks(2, _faults):
        wrong = {c: told.get(c) for c, words in FAULTS.items() if not all(w in told.get(c, "") for w in words)}
        assert not wrong, wrong


FORMS = ("", "equal sizes", "equal sizes, an unread key", "of two ranks", "inverse indices alone")


def _forms() -> None:
    model, plain = _sharded("ebc", "mixed", None), make_module("ebc")
    for rank, change in enumerate(FORMS):
        same_result(model(kjt(change)), plain(kjt(change)))
        # and one rank alone hands over batches in that form
        batch = kjt(change) if model.env.rank == rank % 2 else make_batch("ebc", 0, 0)[0]
        same_result(model(batch), plain(batch))
    for change in FORMS:
        of_copy = kjt(change).to(torch.device("cpu"))
        same_result(model(of_copy), plain(of_copy))


def test_forms_of_a_batch_size_for_each_key() -> None:
    run_ranks(2, _forms)


def _without_samples() -> list[tuple[int, ...]]:
    """Rank 1 has rows and no sample; then no rows but of a key that nobody reads."""
    from torchrec import KeyedJaggedTensor

    model, good = _sharded("ebc", "mixed", "sgd"), kjt()
    no_sample = kjt()
    no_sample._inverse_indices = (good.keys(), torch.zeros(5, 0, dtype=torch.int64))
    unread = {"keys": [*good.keys(), "x"], "values": torch.tensor([1, -2]), "lengths": torch.tensor([1, 1])}
    no_rows = KeyedJaggedTensor(**unread, stride_per_key_per_rank=[[0]] * 5 + [[2]])
    shapes = []
    for batch in (no_sample, no_rows):
        out = model(batch if model.env.rank else good).values()
        out.sum().backward()
        shapes.append(tuple(out.shape))
    return shapes


def test_batches_without_samples() -> None:
    assert run_ranks(2, _without_samples) == [[(3, 48), (3, 48)], [(0, 48), (0, 48)]]


def _rows_are_not_repeated() -> list[str]:
    """An EmbeddingCollection's results are those of the unsharded one; what TorchRec's sharded one does is said."""
    model, plain = _sharded("ec", "row_wise", None), make_module("ec")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("dmp"), "warning", lambda text, *args: said.append(text % args))
        for _ in range(2):
            same_result(model(kjt()), plain(kjt()))
    return said


def test_an_embedding_collection_leaves_inverse_indices_alone() -> None:
    (on_first,), on_second = run_ranks(2, _rows_are_not_repeated)
    assert "inverse indices" in on_first and "TorchRec's sharded one" in on_first and not on_second


def _in_tensor_layout() -> list[str]:
    env = env_of("tp2")
    part = sharders.slice_batch(kjt("equal sizes"), env)
    assert torch.equal(sharders.gather_batch(part, env).values(), kjt("equal sizes").values())
    told = []
    for move in (sharders.slice_batch, sharders.gather_batch):
        with pytest.raises(InputError) as error:
            move(kjt(), env)
        told.append(str(error.value))
    return told


def test_a_batch_to_be_cut_has_one_size() -> None:
    for told in run_ranks(2, _in_tensor_layout):
        assert all("batch size of its own" in text and "hand it to the sharded model uncut" in text for text in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kind"), [("dp2", "ebc_vbe"), ("dp4", "ebc_weighted_vbe"), ("host2xlocal2", "ebc_vbe")]
)
def test_random_rectangles(mesh: str, kind: str) -> None:
    failed = run_ranks(math.prod(MESHES[mesh][0]), run_random, mesh, kind, range(30), timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


# ---- a model of TorchRec's ----


def _model_and_inputs(world: int, is_mean: bool) -> tuple[nn.Module, list[Any]]:
    from torchrec import EmbeddingBagConfig, PoolingType
    from torchrec.distributed.test_utils.test_model import ModelInput, TestSparseNN

    pooling = PoolingType.MEAN if is_mean else PoolingType.SUM
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=11 * (i // 2 + 1),
            embedding_dim=8 * (i % 2 + 1),
            feature_names=[f"f{i}", *(["shared"] if i < 2 else [])],
            pooling=pooling,
        )
        for i in range(4)
    ]
    weighted = [
        EmbeddingBagConfig(name=f"w{i}", num_embeddings=9, embedding_dim=4, feature_names=[f"wf{i}"]) for i in range(2)
    ]
    for config in weighted:
        config.is_weighted = True  # what the generator asks for
    _, inputs = ModelInput.generate_variable_batch_input(
        average_batch_size=3, world_size=world, num_float_features=10, tables=tables, weighted_tables=weighted
    )
    cpu = torch.device("cpu")
    groups = {"group_0": ["f0", "shared@t0", "f1", "shared@t1", "f2", "f3"]}
    torch.manual_seed(3)
    model = TestSparseNN(
        tables=tables, weighted_tables=weighted, embedding_groups=groups, dense_device=cpu, sparse_device=cpu
    )
    return model, inputs


def _trains_like_one(at: str, is_mean: bool, in_pipeline: bool) -> None:
    env = env_of(at)
    plain, inputs = _model_and_inputs(env.data_size, is_mean)
    module = copy.deepcopy(plain)
    layouts = [row_wise(), table_wise(env.table_size - 1), column_wise([0, env.table_size - 1]), data_parallel()]
    names = [name for name, _ in module.named_parameters() if "embedding_bags" in name]
    model = dmp.DistributedModelParallel(module, env=env, plan={n: layouts[i % 4] for i, n in enumerate(names)})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    pipeline = dmp.TrainPipelineSparseDist(model, optimizers[1], env.device) if in_pipeline else None
    told = iter([inputs[env.data_rank]] * 3)
    for _ in range(3):
        losses = [plain(batch)[0] for batch in inputs]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        optimizers[0].step()
        optimizers[0].zero_grad()
        if pipeline is not None:
            pipeline.progress(told)
            continue
        ours, _ = model(next(told))
        torch.testing.assert_close(ours, losses[env.data_rank])
        ours.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    trained = plain.state_dict()
    for name, value in dmp.full_state_dict(model).items():
        torch.testing.assert_close(value, trained[name], msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in TorchRec's modules
@pytest.mark.parametrize("how", ["sum", "mean", "pipeline"])
@pytest.mark.parametrize("at", ["dp1", "dp2", "dp4", "tp2", "replicate2xshard2"])
def test_a_model_of_torchrec_trains_like_one_process(at: str, how: str) -> None:
    run_ranks(math.prod(MESHES[at][0]), _trains_like_one, at, how == "mean", how == "pipeline")
