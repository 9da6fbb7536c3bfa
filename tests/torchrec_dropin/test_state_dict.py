"""What scripts read and write in `model.state_dict()`: local shards, their metadata, values set through them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmp import CheckpointError, DistributedModelParallel, column_wise, full_state_dict
from tests.ranks import run_ranks
from tests.torchrec_dropin.scripts import IGNORED, LR, both, model_of, wrapper

pytestmark = IGNORED


def read(DistributedModelParallel: Any) -> Any:
    model = DistributedModelParallel(module=model_of(torch.optim.SGD, lr=LR), device=torch.device("cpu"))
    seen: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            continue
        for shard in value.local_shards():  # as scripts that give first values of their own
            row, column = shard.metadata.shard_offsets
            with torch.no_grad():
                shard.tensor.copy_(torch.arange(shard.tensor.numel()).view(shard.tensor.shape) + 100 * row + column)
        meta = value.metadata()
        seen[name] = [
            [s.metadata.shard_sizes for s in value.local_shards()],
            [s.metadata.placement.rank() for s in value.local_shards()],
            sum(s.tensor.numel() * s.tensor.element_size() for s in value.local_shards()),
            [(m.shard_offsets, m.shard_sizes, m.placement.rank()) for m in meta.shards_metadata],
            [*value.size(), *meta.size],
            meta.tensor_properties.dtype.itemsize,
        ]
        if len(value.local_shards()) == 1:
            seen[name].append(float(value.local_tensor().norm()))
    return seen, [
        float(s.tensor.sum()) for v in model.state_dict().values() for s in getattr(v, "local_shards", list)()
    ]


def _read() -> None:
    (seen, sums) = both(read)
    assert len(seen) == 2 and sums  # written to where the model reads


def test_local_shards_and_metadata() -> None:
    run_ranks(2, _read)


def _copied() -> None:
    from tests.torchrec_dropin.rank_tests import theirs

    copy_state_dict = theirs("test_sharding").copy_state_dict
    whole = model_of().state_dict()
    plan = {
        "ebc.embedding_bags.t0.weight": column_wise([0, 0]),
        "ebc.embedding_bags.t1.weight": column_wise([1, 0]),
    }
    for model in (
        wrapper("dmp")(module=model_of(torch.optim.SGD, lr=LR)),
        DistributedModelParallel(model_of(torch.optim.SGD, lr=LR), plan=plan),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        copy_state_dict(model.state_dict(), whole)
        torch.testing.assert_close(full_state_dict(model), dict(whole), rtol=0, atol=0)


def test_their_copy_of_a_whole_state_dict() -> None:
    run_ranks(2, _copied)


def _from_theirs() -> str:
    made = {
        name: wrapper(name)(module=model_of(torch.optim.SGD, lr=LR), device=torch.device("cpu"))
        for name in ("torchrec", "dmp")
    }
    with pytest.raises(CheckpointError) as error:
        made["dmp"].load_state_dict(made["torchrec"].state_dict())
    return str(error.value)


def test_a_state_dict_of_their_wrapper_is_refused_with_the_way() -> None:
    """On one rank torch said "Only single local shard is supported", on another that it has no `__getitem__`."""
    for text in run_ranks(2, _from_theirs):
        assert "ShardedTensor, of which each rank has a part" in text and "load_checkpoint(folder) reads it" in text
