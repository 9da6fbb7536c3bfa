"""With `validate=False` no id reaches memory that is not its table's: hundreds of bad batches, every kind of table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, InputError, column_wise, data_parallel, row_wise, table_wise
from sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, EmbeddingSharder
from tests.equality import attach, env_of
from tests.ranks import run_ranks

ROWS = (7, 11, 5, 9)
PLAN = (row_wise(), table_wise(1), column_wise([1, 0]), data_parallel())
ODD = (-1, -7, 2**31 - 1, 2**31 + 3, 2**32, 2**63 - 1, -(2**63))
SMALL = (-1, -7, 2**31 - 1, -(2**31))


def wrapped(kind: str, kernel: str | None) -> DistributedModelParallel:
    """Four tables, of which the t-th holds t + 1 everywhere."""
    import torchrec

    sharder: Any
    if kind == "embedding":
        module: nn.Module = nn.ModuleList([nn.Embedding(rows, 8) for rows in ROWS])
        names, sharder = [f"{t}.weight" for t in range(4)], EmbeddingSharder
    else:
        is_pooled = kind == "ebc"
        config = torchrec.EmbeddingBagConfig if is_pooled else torchrec.EmbeddingConfig
        tables = [
            config(name=f"t{t}", num_embeddings=rows, embedding_dim=8, feature_names=[f"f{t}"])
            for t, rows in enumerate(ROWS)
        ]
        module = (torchrec.EmbeddingBagCollection if is_pooled else torchrec.EmbeddingCollection)(tables=tables)
        names = [f"embedding{'_bags' if is_pooled else 's'}.t{t}.weight" for t in range(4)]
        sharder = EmbeddingBagCollectionSharder if is_pooled else EmbeddingCollectionSharder
    for t, name in enumerate(names):
        nn.init.constant_(module.get_parameter(name), t + 1)
    attach(module, "rowwise_adagrad" if kernel is None else "adam")
    plan = dict(zip(names, PLAN, strict=True))
    return DistributedModelParallel(
        module, env_of("dp2"), plan=plan, sharders=[sharder(validate=False, kernel=kernel)], init_data_parallel=False
    )


def odd_ids(count: int, rows: int, rng: torch.Generator) -> torch.Tensor:
    dtype = (torch.int32, torch.int64)[int(torch.randint(0, 2, (), generator=rng))]
    if not torch.randint(0, 4, (), generator=rng):
        return torch.randint(0, rows, (count,), generator=rng).to(dtype)
    odd = torch.tensor([*(SMALL if dtype == torch.int32 else ODD), rows, rows + 1, 0, rows - 1], dtype=dtype)
    return odd[torch.randint(0, len(odd), (count,), generator=rng)]


def odd_batch(victim: int, rng: torch.Generator) -> tuple[Any, torch.Tensor]:
    """A KJT in which one feature alone has ids, and its lengths (3,), which lie now and then."""
    from torchrec import KeyedJaggedTensor

    lengths = torch.zeros(4, 3, dtype=torch.int64)
    lengths[victim] = torch.randint(0, 4, (3,), generator=rng)
    ids = odd_ids(int(lengths.sum()), ROWS[victim], rng)
    lie = int(torch.randint(0, 12, (), generator=rng))
    if lie == 0:
        lengths[victim] += torch.tensor([-5, 5, 0])
    elif lie == 1:
        lengths[victim, 1] += 3
    elif lie == 2:
        lengths[victim, 0] = 2**62
    return KeyedJaggedTensor(keys=[f"f{t}" for t in range(4)], values=ids, lengths=lengths.flatten()), lengths[victim]


def results(kind: str, model: DistributedModelParallel, victim: int, rng: torch.Generator) -> tuple[torch.Tensor, Any]:
    """What the victim's table gives, and what it should: as many times its constant as there are ids."""
    if kind == "embedding":
        out = model.get_submodule(str(victim))(odd_ids(6, ROWS[victim], rng).view(2, 3))
        return out, float(victim + 1)
    features, lengths = odd_batch(victim, rng)
    out = model(features)
    features.values().fill_(2**30)  # the caller's to use again, before the backward pass too
    if kind == "ebc":
        return out[f"f{victim}"], lengths.view(-1, 1) * float(victim + 1)
    return out[f"f{victim}"].values(), float(victim + 1)


def survives(kind: str, kernel: str | None, batches: int) -> tuple[int, int]:
    """(batches that were refused, that were trained on)."""
    model = wrapped(kind, kernel)
    held = [p.detach() for p in model.parameters()]
    before = [p.clone() for p in held]
    refused = trained = 0
    for seed in range(batches):
        victim = seed % 4
        try:
            found, expected = results(kind, model, victim, torch.Generator().manual_seed(seed * 2 + model.env.rank))
        except InputError:
            refused += 1
            continue
        assert torch.equal(found, torch.as_tensor(expected).expand_as(found)), seed
        found.sum().backward()
        trained += 1
        for t, p in enumerate(held):
            assert t == victim or torch.equal(p, before[t]), (seed, t)
            assert p.isfinite().all()
            p.copy_(before[t])
    return refused, trained


@pytest.mark.parametrize(
    ("kind", "kernel", "batches"),
    [("ebc", None, 120), ("ebc", "torch", 80), ("ec", None, 80), ("ec", "torch", 40), ("embedding", None, 40)],
)
@pytest.mark.sampled(2)
def test_no_id_leaves_its_table(kind: str, kernel: str | None, batches: int) -> None:
    """Whatever ids and lengths come: an error on both ranks, or rows of the table itself."""
    (first, second) = run_ranks(2, survives, kind, kernel, batches, timeout=120)
    assert first == second
    assert sum(first) == batches and first[1] > batches // 3 and (kind == "embedding" or first[0] > 0)


def test_a_table_without_rows_has_no_nearest() -> None:
    module = nn.Embedding(0, 4)
    model = DistributedModelParallel(module, plan={"weight": row_wise()}, sharders=[EmbeddingSharder(validate=False)])
    with pytest.raises(InputError, match="id 3"):
        model(torch.tensor([3]))
