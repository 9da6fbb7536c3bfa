"""The battery: our sharders and the example's pass it; a sharder with one thing wrong fails the check of that name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dmp import ChunkedTensor, ParameterInfo, ShardingEnv, column_wise
from examples.custom_sharder import Experts, ExpertsSharder, ShardedExperts
from sharders.testing import SharderCheckError, check_sharder
from tests import equality
from tests.ranks import run_ranks

SIZES = (4, 2, 3, 5)
KINDS = ("ebc", "ebc_weighted", "ec", "bag", "bag_mean", "embedding", "experts")


class Mixed(nn.Module):
    """Experts inside a model, beside what no sharder takes; gives a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.experts = Experts(5, 4, 3)

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> dict[str, Any]:
        out = self.experts(torch.tanh(self.dense(tokens)), expert)
        return {"out": (out, out.detach() * 2), "count": torch.bincount(expert, minlength=5)}


def make_module(kind: str) -> nn.Module:
    if kind != "experts":
        return equality.make_module(kind)
    torch.manual_seed(3)
    return Mixed()


def make_batch(kind: str, rank: int, step: int) -> tuple[Any, ...]:
    """A batch of each rank's own size, no size 0: TorchRec's plain modules cannot take that."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    size = SIZES[(rank + step) % len(SIZES)]
    if kind == "experts":
        return torch.randn(size, 4, generator=rng), torch.randint(0, 5, (size,), generator=rng)
    step += next(s for s in range(8) if (4, 0, 3, 5, 2, 1, 0, 6)[(rank + step + s) % 8])
    return equality.make_batch(kind, rank, step)


def sharder_of(kind: str) -> Any:
    import sharders

    if kind == "experts":
        return ExpertsSharder()
    if kind.startswith("ebc"):
        return sharders.EmbeddingBagCollectionSharder()
    if kind.startswith("bag"):
        return sharders.EmbeddingBagSharder()
    return sharders.EmbeddingCollectionSharder() if kind == "ec" else sharders.EmbeddingSharder()


def check(kind: str, mesh: str, optimizer: str | None = None) -> None:
    def make() -> nn.Module:
        module = make_module(kind)
        equality.attach(module, optimizer)
        return module

    check_sharder(sharder_of(kind), make, lambda rank, step: make_batch(kind, rank, step), equality.env_of(mesh))


QUICK = {1: KINDS, 2: ("ebc_weighted", "ec", "bag_mean", "embedding", "experts"), 4: ("experts",)}
"""By ranks; `tests/test_equality.py` has all kinds on each."""
CASES = [
    pytest.param(world, mesh, kind, marks=[] if kind in QUICK[world] else [pytest.mark.slow])
    for world, mesh in ((1, "single"), (2, "dp2"), (4, "dp4"))
    for kind in KINDS
]


@pytest.mark.parametrize(("world", "mesh", "kind"), CASES)
@pytest.mark.sampled(16)
def test_ours_pass(world: int, mesh: str, kind: str) -> None:
    run_ranks(world, check, kind, mesh, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ebc", "experts"])
@pytest.mark.parametrize("mesh", ["replicate2xshard2", "host2xlocal2"])
def test_ours_pass_on_two_axes(mesh: str, kind: str) -> None:
    run_ranks(4, check, kind, mesh, timeout=200)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adagrad"])
def test_ours_pass_with_an_optimizer_in_the_backward_pass(optimizer: str) -> None:
    run_ranks(2, check, "ebc", "dp2", optimizer, timeout=200)


def check_by_default() -> None:
    check_sharder(ExpertsSharder(), lambda: make_module("experts"), lambda r, s: make_batch("experts", r, s))


def test_env_is_the_default_group() -> None:
    run_ranks(2, check_by_default)
    check_by_default()


# ---- mutants: each is the example's sharder with one thing wrong ----


class Mutant(ExpertsSharder):
    """Changes the module that the good sharder makes."""

    def __init__(self, change: Callable[[ShardedExperts], Any]) -> None:
        self._change = change

    def shard(self, module: Any, plan: Any, env: Any, device: Any) -> nn.Module:
        new = super().shard(module, plan, env, device)
        return self._change(new) or new


def forgets_the_mean(new: ShardedExperts) -> None:
    new.weight.register_hook(lambda gradient: gradient * new._env.size)


def discards_values(new: ShardedExperts) -> None:
    nn.init.normal_(new.weight)


def loses_the_last_row(new: ShardedExperts) -> None:
    if new._mine:
        new.weight.data[-1:].zero_()


def renames(new: ShardedExperts) -> None:
    new.matrix = new.weight
    del new.weight


def freezes(new: ShardedExperts) -> None:
    new.weight.requires_grad_(False)


def adds_a_buffer(new: ShardedExperts) -> None:
    new.register_buffer("place", new._place_E, persistent=False)


class WrongOffsets(ShardedExperts):
    def chunked_state(self) -> dict[str, ChunkedTensor]:
        good = super().chunked_state()["weight"]
        offsets = [(good.size(0) - c.shape[0] - o[0], 0, 0) for c, o in zip(good.chunks, good.offsets, strict=True)]
        return {"weight": ChunkedTensor(self._shape, good.chunks, offsets, good.dtype)}


class HalfState(ShardedExperts):
    def chunked_state(self) -> dict[str, ChunkedTensor]:
        good = super().chunked_state()["weight"]
        return {"weight": ChunkedTensor(self._shape, [c[:-1] for c in good.chunks], good.offsets, good.dtype)}


class CopiedState(ShardedExperts):
    def chunked_state(self) -> dict[str, ChunkedTensor]:
        return {"weight": super().chunked_state()["weight"].clone()}


class NoState(ShardedExperts):
    chunked_state = None


class SharedCopy(ShardedExperts):
    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCopy:
        new = copy.copy(self)
        new._parameters = {"weight": nn.Parameter(self.weight.detach())}
        return new


class Unsorted(ShardedExperts):
    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, expert)[expert.argsort()]


class Doubles(ShardedExperts):
    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, expert).double()


class Keep(torch.autograd.Function):
    """Leaves on the module what backward needs."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module, module.kept = module, len(rows)
        ctx.rows = len(rows)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.module.kept / ctx.rows, None


class KeepsOnModule(ShardedExperts):
    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return Keep.apply(super().forward(tokens, expert), self)


class FirstValues(ShardedExperts):
    """Uses the values that it had at its first forward in evaluation, as one with a cache does."""

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return super().forward(tokens, expert)
        if not hasattr(self, "cache"):
            self.cache = self.made.detach().clone()
        own, self.weight.data = self.weight.data, self.cache
        out = super().forward(tokens, expert)
        self.weight.data = own
        return out


def remembers(new: Any) -> None:
    new.__class__ = FirstValues
    new.made = new.weight.detach().clone()


class OtherNames(ShardedExperts):
    def unsharded(self) -> nn.Module:
        return nn.Linear(2, 2)


class StaysOnMeta(ExpertsSharder):
    def shard(self, module: Any, plan: Any, env: Any, device: Any) -> nn.Module:
        new = super().shard(module, plan, env, device)
        if module.weight.is_meta:
            new.weight = nn.Parameter(new.weight.to("meta"))
        return new


class OwnInit(ExpertsSharder):
    """Its initial values depend on the number of ranks."""

    def shard(self, module: Any, plan: Any, env: Any, device: Any) -> nn.Module:
        self.size = env.size
        return super().shard(module, plan, env, device)

    def parameters(self, module: Any) -> Any:
        def init_fn(block: torch.Tensor) -> None:
            block.fill_(float(self.size))

        return {"weight": ParameterInfo(tuple(module.weight.shape), module.weight.dtype, "experts", init_fn=init_fn)}


class CannotRunAll(ExpertsSharder):
    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Any:
        return [*super().layouts(info, env), column_wise([0, 0], widths=[2, info.shape[1] - 2])]


class RunsInPlaceOnly(ExpertsSharder):
    """Offers `table_wise(0)`, and means it."""

    def shard(self, module: Any, plan: Any, env: Any, device: Any) -> nn.Module:
        layout = plan["weight"].layout
        if layout.name == "table_wise" and dict(layout.args)["rank"]:
            raise ValueError("only rank 0 can hold it")
        return super().shard(module, plan, env, device)


class NeedsProcesses(ExpertsSharder):
    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Any:
        return super().layouts(info, env) if env.mesh is not None else []


class OffersOutside(ExpertsSharder):
    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Any:
        return [column_wise([0, env.table_size], widths=[1, info.shape[1] - 1])]


class WrongShape(ExpertsSharder):
    def parameters(self, module: Any) -> Any:
        return {"weight": ParameterInfo((1, *module.weight.shape[1:]), module.weight.dtype, kind="experts")}


class WrongName(ExpertsSharder):
    def parameters(self, module: Any) -> Any:
        return {"weights": ParameterInfo(tuple(module.weight.shape), module.weight.dtype, kind="experts")}


class ReadsValues(ExpertsSharder):
    def parameters(self, module: Any) -> Any:
        return {} if module.weight.is_meta else super().parameters(module)


class NoLayouts(ExpertsSharder):
    layouts = None


class WrongType(ExpertsSharder):
    module_type = "Experts"


def becomes(kind: type[ShardedExperts]) -> Any:
    def change(new: Any) -> None:
        new.__class__ = kind

    return Mutant(change)


MUTANTS: dict[str, tuple[Callable[[], Any], str]] = {
    "is a class": (lambda: ExpertsSharder, "protocol"),
    "has no layouts": (NoLayouts, "protocol"),
    "module_type is a string": (WrongType, "protocol"),
    "names a parameter that is not there": (WrongName, "parameters"),
    "gives a wrong shape": (WrongShape, "parameters"),
    "reads values, which meta has not": (ReadsValues, "parameters"),
    "offers ranks outside the mesh": (OffersOutside, "layouts"),
    "offers nothing without processes": (NeedsProcesses, "layouts"),
    "offers a layout that it cannot run": (CannotRunAll, "pieces"),
    "runs one placement of those it offers": (RunsInPlaceOnly, "shard"),
    "renames a parameter": (lambda: Mutant(renames), "names"),
    "freezes a parameter": (lambda: Mutant(freezes), "names"),
    "adds a buffer": (lambda: Mutant(adds_a_buffer), "names"),
    "gives wrong offsets": (lambda: becomes(WrongOffsets), "pieces"),
    "leaves rows out of the state": (lambda: becomes(HalfState), "pieces"),
    "gives no state": (lambda: becomes(NoState), "pieces"),
    "gives copies as state": (lambda: becomes(CopiedState), "pieces"),
    "discards values": (lambda: Mutant(discards_values), "values"),
    "loses a row": (lambda: Mutant(loses_the_last_row), "values"),
    "gives results in another order": (lambda: becomes(Unsorted), "forward"),
    "gives another dtype": (lambda: becomes(Doubles), "forward"),
    "forgets the mean": (lambda: Mutant(forgets_the_mean), "gradients"),
    "keeps on the module what backward needs": (lambda: becomes(KeepsOnModule), "two_forwards"),
    "computes with cached weights": (lambda: Mutant(remembers), "load"),
    "shares storage with its copy": (lambda: becomes(SharedCopy), "deepcopy"),
    "leaves a parameter on meta": (StaysOnMeta, "meta_init"),
    "fills by mesh": (OwnInit, "meta_init"),
    "gives another module back": (lambda: becomes(OtherNames), "unsharded"),
}


def check_mutant(name: str) -> None:
    check_sharder(MUTANTS[name][0](), lambda: make_module("experts"), lambda r, s: make_batch("experts", r, s))


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.sampled(3)
def test_a_mutant_is_caught(name: str) -> None:
    errors = run_ranks(2, check_mutant, name, expect=SharderCheckError)
    assert {e.check for e in errors} == {MUTANTS[name][1]}, errors[0]
    assert len({str(e) for e in errors}) == 1, "every rank says the same"
    assert f"check {MUTANTS[name][1]!r}" in str(errors[0])


def test_the_error_says_what_to_do() -> None:
    (error, _) = run_ranks(2, check_mutant, "forgets the mean", expect=SharderCheckError)
    text = str(error)
    assert "Mutant fails check 'gradients' with experts.weight row_wise() on rank 0 of 2" in text
    assert "gradient of 'experts.weight', piece at (0, 0, 0): expected" in text
    assert "(all of it is 2 times what is expected)" in text
    assert "Gradients are means over the data ranks" in text


def check_random_module() -> None:
    check_sharder(ExpertsSharder(), lambda: Experts(3, 2, 2), lambda r, s: ())


def test_a_module_that_is_not_the_same_twice_is_said() -> None:
    errors = run_ranks(2, check_random_module, expect=SharderCheckError)
    assert {e.check for e in errors} == {"module"}
