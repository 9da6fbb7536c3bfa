"""Tables are found by torch's classes after wrapping too, by scripts that draw modules anew for each fold of the data,
or give embeddings a weight decay or a term of the loss of their own: these found none, in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, data_parallel, full_state_dict, row_wise
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

KINDS = (nn.Embedding, nn.EmbeddingBag)


class Named(nn.Embedding):
    """With values of its own."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)


class Net(nn.Module):
    """Tables of three kinds before a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.bags = nn.Embedding(9, 4, padding_idx=6), nn.EmbeddingBag(7, 4)
        self.own, self.out = Named(5, 4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.words(ids % 9).sum(1) + self.bags(ids % 7) + self.own(ids % 5).sum(1))
        return out


def wrapped(shape: tuple[int, ...], axes: tuple[str, ...]) -> DistributedModelParallel:
    plan: dict[str, Any] = {"words.weight": row_wise(), "bags.weight": row_wise(), "own.weight": data_parallel()}
    return DistributedModelParallel(Net(), ShardingEnv.from_mesh(mesh(shape, axes)), plan=plan)


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    tables = {id(p) for m in model.modules() if isinstance(m, KINDS) for p in m.parameters()}
    both = [[p for p in model.parameters() if (id(p) in tables) is is_table] for is_table in (True, False)]
    assert all(both)
    return [{"params": group, "weight_decay": decay} for group, decay in zip(both, (0.0, 0.5), strict=True)]


def decayed(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    model, whole = wrapped(shape, axes), Net()
    models = iter((model, whole))
    ids = lambda g: torch.randint(0, 60, (2, 2, 3), generator=g)  # noqa: E731
    trains(model, whole, model.env, ids, lambda _, **options: torch.optim.SGD(in_groups(next(models)), **options))


def drawn(shape: tuple[int, ...], axes: tuple[str, ...]) -> dict[str, Any]:
    model = wrapped(shape, axes)
    before = full_state_dict(model)
    torch.manual_seed(5)
    with pytest.raises(ShardError, match="reset_parameters of Named draws a whole table"):
        model.module.own.reset_parameters()  # type: ignore[union-attr, operator]
    for module in model.modules():
        if isinstance(module, KINDS) and module is not model.module.own:  # type: ignore[union-attr]
            module.reset_parameters()
    after = full_state_dict(model)
    for name in ("words.weight", "bags.weight"):
        assert not (before[name] == after[name])[:6].any() and after[name].std() > 0.5
    assert not after["words.weight"][6].any() and after["words.weight"].unique().numel() == 8 * 4 + 1
    return after


@pytest.mark.parametrize(("shape", "axes"), [((2,), ("dp",)), ((2,), ("shard",)), ((2,), ("replicate",))])
def test_tables_have_their_own_weight_decay(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    run_ranks(2, decayed, shape, axes)


@pytest.mark.parametrize(("shape", "axes"), [((2,), ("dp",)), ((2,), ("shard",)), ((2,), ("replicate",))])
def test_tables_are_drawn_anew(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    first, second = run_ranks(2, drawn, shape, axes)
    assert all(torch.equal(first[name], second[name]) for name in first)


def changed() -> None:
    model = wrapped((2,), ("dp",))
    assert repr(model.module.words).startswith("ShardedEmbedding(9, 4, padding_idx=6, kernel=")
    words, bags = model.module.words, model.module.bags  # type: ignore[union-attr]
    for module, name, value in ((words, "max_norm", 1.0), (words, "scale_grad_by_freq", True), (bags, "mode", "sum")):
        was = getattr(module, name)
        with pytest.raises(ShardError, match=f"{name} of sharded table '(words|bags)' was set to .* after wrapping"):
            setattr(module, name, value)
        setattr(module, name, was)
    for kind, make in ((nn.Embedding, words), (nn.EmbeddingBag, bags)):
        with pytest.raises(ShardError, match=f"no {kind.__name__} by its class"):
            make.__class__ = kind
        for again in (lambda m: type(m)(5, 4), lambda m: type(m)(num_embeddings=5, embedding_dim=4)):
            with pytest.raises(ShardError, match=rf"nn\.{kind.__name__}\(\.\.\.\) makes a plain one"):
                again(make)
        with pytest.raises(ShardError, match="or its from_pretrained would"):
            type(make).from_pretrained(torch.ones(2, 2))
    with pytest.raises(ShardError, match=r"this rank has a part of shape \([54], 4\) of table 'words.weight'"):
        words.weight.data[words.padding_idx].zero_()  # type: ignore[union-attr, index]


def test_what_a_lookup_goes_by_is_not_set_later() -> None:
    """It was on the module, and looked up as before in silence; and a row by its number was out of bounds."""
    run_ranks(2, changed)
