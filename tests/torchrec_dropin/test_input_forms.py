"""Batches, tables and results in the other forms that TorchRec's collections know: equal to the unsharded modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import column_wise, data_parallel, row_wise
from tests.equality import env_of
from tests.ranks import run_ranks
from tests.results import loss_of, same_result

Make = Callable[[int], Any]


def _ebc(**options: Any) -> nn.Module:
    from torchrec import EmbeddingBagCollection

    is_weighted = options.pop("is_weighted", False)
    return EmbeddingBagCollection(tables=_tables("EmbeddingBagConfig", **options), is_weighted=is_weighted)


def _ec(**options: Any) -> nn.Module:
    from torchrec import EmbeddingCollection

    need_indices = options.pop("need_indices", False)
    return EmbeddingCollection(tables=_tables("EmbeddingConfig", **options), need_indices=need_indices)


def _tables(kind: str, **options: Any) -> list[Any]:
    import torchrec

    shapes = [(f"t{i}", 10 * (i + 1), [f"f{i}"]) for i in range(3)]
    make = getattr(torchrec, kind)
    return [make(name=n, num_embeddings=rows, embedding_dim=8, feature_names=f, **options) for n, rows, f in shapes]


def _kjt(rank: int, form: str = "", words: torch.dtype = torch.int64) -> Any:
    from torchrec import KeyedJaggedTensor

    rng = torch.Generator().manual_seed(rank + 5)
    lengths = torch.randint(0, 4, (12,), generator=rng).to(words)
    ids = torch.randint(0, 10, (int(lengths.sum()),), generator=rng).to(words)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(words)])
    told: dict[str, Any] = {"lengths": lengths}
    if form == "offsets":
        told = {"offsets": offsets}
    elif form == "offsets of a part":  # of a longer tensor's ids, which were cut out
        told = {"offsets": offsets + 2}
    elif form == "lengths of two dims":
        told = {"lengths": lengths.view(3, 4)}
    weights = torch.rand(ids.numel(), generator=rng) if form == "weights" else None
    kjt = KeyedJaggedTensor(keys=["f0", "f1", "f2"], values=ids, weights=weights, **told)
    if form == "tensor dict":
        from tensordict import TensorDict

        jagged = {k: torch.nested.nested_tensor_from_jagged(j.values(), j.offsets()) for k, j in kjt.to_dict().items()}
        return TensorDict({key: jagged[key] for key in ("f2", "f0", "f1")})
    if form == "permuted":
        return kjt.permute([2, 0, 1])
    if form == "joined":
        return KeyedJaggedTensor.concat(kjt.split([1, 2]))
    return KeyedJaggedTensor.from_jt_dict(kjt.to_dict()) if form == "from a dict" else kjt


class _Over(nn.Module):
    """What a model does with pooled results."""

    def __init__(self, what: str) -> None:
        from torchrec.modules.regroup import KTRegroupAsDict

        super().__init__()
        self.ebc, self.what = _ebc(), what
        self.regroup = KTRegroupAsDict([["f1"], ["f2", "f0"]], ["a", "b"])

    def forward(self, features: Any) -> torch.Tensor:
        from torchrec import KeyedTensor

        pooled = self.ebc(features)
        parts = {
            "regroup": lambda: KeyedTensor.regroup([pooled], [["f1"], ["f2", "f0"]]),
            "regroup module": lambda: list(self.regroup([pooled]).values()),
            "to_dict": lambda: list(pooled.to_dict().values()),
            "key": lambda: [pooled["f1"]],
        }[self.what]()
        return torch.cat(parts, 1)


def _cases() -> dict[str, tuple[nn.Module, Make]]:
    from torchrec.modules.embedding_configs import DataType

    forms = ("offsets", "offsets of a part", "lengths of two dims", "tensor dict", "permuted", "joined", "from a dict")
    cases: dict[str, tuple[nn.Module, Make]] = {
        **{f"{form} {of.__name__}": (of(), lambda r, form=form: _kjt(r, form)) for form in forms for of in (_ebc, _ec)},
        **{f"over {what}": (_Over(what), _kjt) for what in ("regroup", "regroup module", "to_dict", "key")},
        "int32": (_ebc(), lambda r: _kjt(r, words=torch.int32)),
        "int32 offsets": (_ec(), lambda r: _kjt(r, "offsets", torch.int32)),
        "indices": (_ec(need_indices=True), _kjt),
        "weights that nobody uses": (_ebc(), lambda r: _kjt(r, "weights")),
        "weights that are not handed out": (_ec(), lambda r: _kjt(r, "weights")),
        "half": (_ebc(data_type=DataType.FP16), _kjt),
        "half rows": (_ec(data_type=DataType.FP16), _kjt),
        "double": (_ebc().double(), _kjt),
        "bounds of values": (_ebc(weight_init_min=-0.5, weight_init_max=0.5), _kjt),
        "virtual table": (_ebc(use_virtual_table=True), _kjt),
        "rows after pruning": (_ebc(num_embeddings_post_pruning=10), _kjt),
    }
    mixed = _ebc()
    mixed.embedding_bags["t1"].half()  # type: ignore[index]
    return {**cases, "tables of two dtypes": (mixed, _kjt)}


def _compare(plain: nn.Module, make: Make) -> None:
    env, module = env_of("dp2"), copy.deepcopy(plain)
    layouts = [row_wise(), column_wise([0, 1]), data_parallel()]
    names = [name for name, _ in module.named_parameters()]
    model = dmp.DistributedModelParallel(module, env=env, plan=dict(zip(names, layouts, strict=True)))
    outs = [plain(make(rank)) for rank in range(2)]
    ours = model(make(env.rank))
    near = 1e-3 if any(p.dtype == torch.float16 for p in plain.parameters()) else 1e-5
    same_result(ours, outs[env.rank], near)
    if isinstance(ours, dict):
        for key, value in ours.items():
            torch.testing.assert_close(value.weights_or_none(), outs[env.rank][key].weights_or_none())
            assert vars(value).keys() == vars(outs[env.rank][key]).keys()
    (sum(loss_of(out) for out in outs) / 2).backward()  # type: ignore[union-attr]
    loss_of(ours).backward()
    for m in (model, plain):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    trained = plain.state_dict()
    for name, value in dmp.full_state_dict(model).items():
        torch.testing.assert_close(value, trained[name], atol=near, rtol=near)


def _all_cases() -> list[str]:
    wrong = []
    for name, (plain, make) in _cases().items():
        try:
            _compare(plain, make)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    return wrong


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_each_equals_the_unsharded() -> None:
    assert run_ranks(2, _all_cases) == [[], []]
