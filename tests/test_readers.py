"""Weights that other code reads: they are no tables, and where a plan makes them tables a read is an error.

`READS` and `LOOKS_UP` are models of one table `emb`, three bags and a linear layer. Each says how its code gets at the
weight; the class of those that only look up must stay sharded, however their code is written.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dmp
from dmp import PlanError, ShardError, row_wise
from dmp.registry import default_sharders
from tests.equality import env_of
from tests.ranks import run_ranks


class Base(nn.Module):
    """Looks up only, in all the ways that recommendation models do."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.bags = nn.ModuleList([nn.EmbeddingBag(7, 4, mode="sum") for _ in range(2)])
        self.top = nn.Linear(4, 1)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.emb(ids).sum(1)
        for bag in self.bags:
            h = h + bag(ids)
        return h

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.look_up(ids)) + self.top.weight.sum()
        return out


def scores(x: torch.Tensor, module: Any) -> torch.Tensor:
    return F.linear(x, module.weight)


class Direct(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids) @ self.emb.weight.t()


class LocalName(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.emb
        return self.look_up(ids) @ table.weight.t()


class Functional(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.emb.weight)


class Passed(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return scores(self.look_up(ids), self.emb)


class ByString(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids) @ getattr(self.emb, "weight").t()  # noqa: B009


class Property(Base):
    @property
    def codebook(self) -> torch.Tensor:
        return self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids) @ self.codebook.t()


class Cached(Base):
    @functools.cached_property
    def codebook(self) -> torch.Tensor:
        return self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids) @ self.codebook.t()


class Method(Base):
    def decode(self, h: torch.Tensor) -> torch.Tensor:
        return h @ self.emb.weight.t()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decode(self.look_up(ids))


class Inherited(Direct):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


class Inner(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def decode(h: torch.Tensor) -> torch.Tensor:
            return h @ self.emb.weight.t()

        return decode(self.look_up(ids))


class Chosen(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids) @ (self.emb if self.training else self.top).weight.t()


class OwnMethod(Base):
    """A subclass of `nn.Embedding` that reads its weight in another method than its forward."""

    class Tied(nn.Embedding):
        def decode(self, h: torch.Tensor) -> torch.Tensor:
            return F.linear(h, self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.emb = OwnMethod.Tied(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.emb.decode(self.look_up(ids))


class KeptModule(Base):
    """A head that holds the module in a list, so that it is no child of it."""

    class Head(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.tables = [table]

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h @ self.tables[0].weight.t()

    def __init__(self) -> None:
        super().__init__()
        self.head = KeptModule.Head(self.emb)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.look_up(ids))
        return out


class KeptObject(Base):
    """A loss that is no module."""

    class Loss:
        def __init__(self, table: nn.Embedding) -> None:
            self.table = table

        def __call__(self, h: torch.Tensor) -> torch.Tensor:
            return h @ self.table.weight.t()

    def __init__(self) -> None:
        super().__init__()
        self.loss = KeptObject.Loss(self.emb)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.look_up(ids))


class KeptParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.decode = functools.partial(F.linear, weight=self.emb.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decode(self.look_up(ids))


class KeptAndCalled(Base):
    """It is called where it is kept, and the sharded one is put there too."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {"items": self.emb}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tables["items"](ids)
        return out


class Hook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.emb.register_forward_hook(lambda module, _, out: out + module.weight.sum())


class HookElsewhere(Base):
    def __init__(self) -> None:
        super().__init__()
        self.top.register_forward_hook(lambda module, _, out: out + self.emb.weight.sum())


class All(Base):
    """A norm of all parameters, inside the forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        norm = sum(p.square().sum() for p in self.parameters())
        out: torch.Tensor = self.top(self.look_up(ids)) + norm
        return out


class Computed(Base):
    """A weight that is made of others at each call: no lookup of rows."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.emb)


READS = (
    Direct, LocalName, Functional, Passed, ByString, Property, Cached, Method, Inherited, Inner, Chosen, OwnMethod,
    KeptModule, KeptObject, KeptParameter, Hook, HookElsewhere, All, Computed,
)  # fmt: skip


class AsksOnly(Base):
    """Dtype, device and shape are no values."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.look_up(ids).to(self.emb.weight.dtype).to(next(self.parameters()).device)
        return h * self.emb.weight.shape[0] * self.emb.weight.size(1) * self.emb.num_embeddings


class OtherReader(Base):
    """Code reads some weight that it is given; the table is not handed out."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return scores(self.emb(ids).sum(1), self.top) + self.bags[0](ids).sum()


class Unused(Base):
    """Reads it in what the forward never comes to."""

    def export(self) -> torch.Tensor:
        return self.emb.weight.clone()


LOOKS_UP = (Base, AsksOnly, OtherReader, Unused, KeptAndCalled)


def tables_of(model: nn.Module) -> set[str]:
    found = dmp.Found.of(model, default_sharders(), dmp.ShardingEnv.single())
    return {site.path for site in found.sites.taken()}


@pytest.mark.parametrize("kind", READS)
def test_what_other_code_reads_is_no_table(kind: Callable[[], nn.Module]) -> None:
    assert "emb" not in tables_of(kind())


@pytest.mark.parametrize("kind", LOOKS_UP)
def test_what_is_only_looked_up_stays_a_table(kind: Callable[[], nn.Module]) -> None:
    assert "emb" in tables_of(kind())


def test_the_others_of_a_model_that_reads_one_stay_tables() -> None:
    assert tables_of(Direct()) == {"bags.0", "bags.1"}


def test_all_of_a_list_that_a_loop_reads() -> None:
    class Loop(Base):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            total = self.look_up(ids).sum()
            for bag in self.bags:
                total = total + bag.weight.sum()
            return total

    assert tables_of(Loop()) == {"emb"}


def batch(rank: int) -> torch.Tensor:
    return torch.tensor([[[1, 2], [3, 1]], [[3, 4], [6, 6]]])[rank]


def _gradients() -> dict[str, str]:
    """Outputs and every gradient against the unsharded module, for each of `READS`; what is wrong, by class."""
    env = env_of("dp2")
    wrong = {}
    for kind in (*READS, *LOOKS_UP):
        torch.manual_seed(0)
        plain = kind()
        torch.manual_seed(0)
        names = [name for name, _ in plain.named_parameters() if name == "emb.weight" or name.startswith("bags")]
        plan = {name: dmp.data_parallel() for name in names}
        model = dmp.DistributedModelParallel(kind(), env=env, plan=plan)
        out = model(batch(env.rank))
        out.square().sum().backward()
        outs = [plain(batch(r)) for r in range(2)]
        sum(o.square().sum() / 2 for o in outs).backward()  # type: ignore[union-attr]
        expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        good = torch.allclose(out, outs[env.rank])
        good &= found.keys() == expected.keys()
        if not (good and all(torch.allclose(found[n], expected[n], atol=1e-5) for n in expected)):
            wrong[kind.__name__] = f"{out} {outs[env.rank]} {found}"
    return wrong


def test_gradients_are_the_unsharded_modules() -> None:
    for wrong in run_ranks(2, _gradients, timeout=60):
        assert not wrong, wrong


def _forced() -> dict[str, str]:
    """What a plan that makes tables of them all the same ends in, by class."""
    env = env_of("dp2")
    texts = {}
    for kind in (*READS, *LOOKS_UP):
        if kind in (Computed, OwnMethod):  # no table at all; a method that what stands in its place does not have
            continue
        module = kind()
        plan = {n: row_wise() for n, _ in module.named_parameters() if "top" not in n}
        try:
            model = dmp.DistributedModelParallel(module, env=env, plan=plan)
            model.eval().train()
            model(batch(env.rank))
            texts[kind.__name__] = "right"
        except (ShardError, PlanError) as error:
            texts[kind.__name__] = f"{type(error).__name__}: {error}"
        else:
            assert model.emb.weight.shape[0] == 5, "outside the forward it is this rank's part"
            for parameter in model.parameters():
                parameter.sum().item()
    return texts


def test_a_read_of_a_table_inside_the_forward_is_an_error() -> None:
    for texts in run_ranks(2, _forced, timeout=60):
        for kind in LOOKS_UP:
            assert texts[kind.__name__] == "right", texts
        for kind in set(READS) - {Computed, OwnMethod}:
            text = texts[kind.__name__]
            kept = kind is KeptParameter  # the sharded module stands where the module was kept, and says who reads it
            assert text.startswith("PlanError: " if kept else "ShardError: "), (kind, text)
            assert "'emb.weight'" in text and "replicate()" in text, text
            if not kept:
                assert re.search(rf"{kind.__name__}|ShardedEmbedding at 'emb'|Head at 'head'", text), text


def _ways_out() -> None:
    env = env_of("dp2")
    for layout in (dmp.replicate(), dmp.data_parallel()):
        torch.manual_seed(0)
        model = Direct()
        plain = copy.deepcopy(model)
        plan = {"emb.weight": layout, "bags.0.weight": dmp.row_wise(), "bags.1.weight": dmp.replicate()}
        wrapped = dmp.DistributedModelParallel(model, env=env, plan=plan)
        wrapped(batch(env.rank)).sum().backward()
        (sum(plain(batch(r)).sum() for r in range(2)) / 2).backward()
        for name in ("emb.weight", "bags.1.weight"):
            torch.testing.assert_close(wrapped.get_parameter(name).grad, plain.get_parameter(name).grad)


def test_the_ways_out_that_the_error_names() -> None:
    run_ranks(2, _ways_out, timeout=60)


class Collection(nn.Module):
    """A loss over a table of TorchRec's collection, inside the forward."""

    def __init__(self, reads: bool) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[config])
        self.reads = reads

    def forward(self, features: Any) -> torch.Tensor:
        out: torch.Tensor = self.ebc(features).values()
        return out + self.ebc.embedding_bags["t"].weight.square().sum() if self.reads else out


def _collection() -> str:
    from torchrec import KeyedJaggedTensor

    env = env_of("dp2")
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    assert tables_of(Collection(False)) == set(), "code that may read it keeps it whole"
    model = dmp.DistributedModelParallel(
        Collection(True), env=env, plan={"ebc.embedding_bags.t.weight": dmp.row_wise()}
    )
    assert model.ebc.embedding_bags["t"].weight.shape == (5, 4)
    with pytest.raises(ShardError) as error:
        model(features)
    model.module.reads = False
    assert model(features).shape == (2, 4)  # and all is well again
    return str(error.value)


def test_tables_of_a_collection() -> None:
    for text in run_ranks(2, _collection, timeout=60):
        assert "'ebc.embedding_bags.t.weight'" in text and "Collection at ''" in text, text


def test_it_is_said_with_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    from dmp.plans.check import check_plan
    from dmp.plans.plan import as_plan
    from dmp.plans.remarks import say_what_is_read

    model = Direct()
    plan = as_plan({"bags.0.weight": row_wise(), "bags.1.weight": row_wise()})
    resolved = check_plan(plan, model, default_sharders(), dmp.ShardingEnv.single())
    with caplog.at_level(logging.INFO, "dmp"):
        say_what_is_read(resolved)
    assert [r.getMessage() for r in caplog.records if "'emb.weight' (160 bytes)" in r.getMessage()]
    whose = "Direct.forward" if sys.version_info >= (3, 11) else "forward"  # code knows no class before
    assert whose in caplog.text and "bags" not in caplog.text
