"""Gradients that are asked for of some weights alone: of one process, or an error that says what to do."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dmp import DistributedModelParallel, ShardError, ShardingEnv, row_wise
from dmp.ranks import say_once
from sharders import TensorParallelSharder
from tests.ranks import mesh, run_ranks
from tests.test_unreached import Net, batch, branches, differences, made

ASKED = ("head.weight", "up.bias", "scale", "table.weight")


def some(model: nn.Module) -> list[nn.Parameter]:
    named = dict(model.named_parameters())
    return [named[name] for name in ASKED]


def of_some(axis: str, **options: Any) -> list[str]:
    """Some weights, then all, then an input alone, whose gradient leaves those of weights as they are."""
    model, plain = made(axis, **options)
    rank, found = model.env.data_rank, []
    for step, asked in enumerate((some, lambda m: list(m.parameters()))):
        for m in (model, plain):
            m.zero_grad()
        branches(model, rank, 0).backward(inputs=asked(model))
        for other in range(2):
            (branches(plain, other, 0) / 2).backward(inputs=asked(plain))
        found += [f"step {step}: {text}" for text in differences(model, plain)]
    x, y = (batch(rank, 0).requires_grad_() for _ in range(2))
    model(x, True).sum().backward(inputs=[x])
    plain(y, True).sum().backward(inputs=[y])
    torch.testing.assert_close(x.grad, y.grad)
    return found + list(differences(model, plain))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_backward_of_some_weights(axis: str) -> None:
    """Split weights got no gradient, in silence: autograd was asked for what no forward has computed with."""
    assert run_ranks(2, of_some, axis) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_backward_of_some_weights_beside_tensor_parallel_ones(axis: str) -> None:
    assert run_ranks(4, of_some, axis, tp=True) == [[]] * 4


def with_a_graph(axis: str) -> list[str]:
    model, _ = made(axis)
    with Said() as said:
        branches(model, model.env.rank, 0).backward(create_graph=True)
    return said.texts


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_averaged_gradients_have_no_graph() -> None:
    """A penalty on those of split weights was left out in silence; DDP spoke of a leaf that requires grad."""
    for error in run_ranks(2, with_a_graph, "dp", expect=ShardError):
        assert "backward(create_graph=True): a gradient in .grad is averaged" in str(error)
    for texts in run_ranks(2, with_a_graph, "shard"):
        assert [text for text in texts if "has no graph: a term of it in a loss changes no gradient" in text]


def returned(axis: str, allow_unused: bool) -> None:
    model, _ = made(axis)
    torch.autograd.grad(branches(model, model.env.rank, 0), some(model), allow_unused=allow_unused)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_of_split_weights_are_not_returned(allow_unused: bool) -> None:
    """They were None where that is allowed."""
    for error in run_ranks(2, returned, "shard", allow_unused, expect=ShardError):
        assert "grad of 'head.weight': FSDP2" in str(error)
        assert "loss.backward(inputs=[...])" in str(error)


class Said(logging.Handler):
    """What `dmp` logs within."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def __enter__(self) -> Said:
        logging.getLogger("dmp").addHandler(self)
        return self

    def __exit__(self, *of_error: object) -> None:
        logging.getLogger("dmp").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def of_copies() -> tuple[list[str], bool]:
    model, _ = made("dp")
    said = Said()
    logging.getLogger("dmp").addHandler(said)
    try:
        loss = branches(model, model.env.rank, 0)
        torch.autograd.grad(loss, some(model), create_graph=True)
        assert not said.texts  # as for a penalty on them, whose own backward averages
        torch.autograd.grad(loss, some(model), retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, [dict(model.named_parameters())["head.weight"]])
    finally:
        logging.getLogger("dmp").removeHandler(said)
    plain = Net()
    (wanted,) = torch.autograd.grad(branches(plain, model.env.rank, 0), [plain.head.weight])
    return said.texts, torch.allclose(gradient, wanted)


def test_returned_gradients_of_copies_are_each_ranks_own_which_is_said_once() -> None:
    for texts, is_own in run_ranks(2, of_copies):
        assert len(texts) == 1
        assert "gradients of its own samples" in texts[0]
        assert is_own


def with_a_term_over_all(axis: str, reads_whole: bool) -> list[str]:
    model, plain = made(axis)
    rank = model.env.data_rank

    def term(m: nn.Module) -> torch.Tensor:
        read = [p.full_tensor() if reads_whole and isinstance(p, DTensor) else p for p in m.parameters()]
        return sum((p.square().sum() for p in read), torch.zeros(()))

    (branches(model, rank, 0) + term(model)).backward()
    for other in range(2):
        ((branches(plain, other, 0) + term(plain)) / 2).backward()
    return list(differences(model, plain))


def test_a_term_over_all_weights_is_explained_and_its_way_out_is_right() -> None:
    for error in run_ranks(2, with_a_term_over_all, "shard", False, expect=ShardError):
        assert "read p.full_tensor() where p is a DTensor" in str(error)
    assert run_ranks(2, with_a_term_over_all, "shard", True) == [[], []]


def with_samples_and_a_weight() -> list[str]:
    """A loss that reads weights which the program holds: as such, and what is made of one."""
    model, plain = made("shard")
    rank = model.env.data_rank

    def loss(m: nn.Module, of: int) -> torch.Tensor:
        held = dict(m.named_parameters())
        first, second = held["head.weight"], held["up.bias"].exp()
        read = [p.full_tensor() if isinstance(p, DTensor) else p for p in (first, second)]
        values = branches(m, of, 0)
        return values * read[0].mean() + values * read[1].mean()

    loss(model, rank).backward()
    for other in range(2):
        (loss(plain, other) / 2).backward()
    return list(differences(model, plain))


def test_a_split_weight_that_is_multiplied_by_samples_past_the_forward() -> None:
    """Each rank's piece had the gradient of its own samples alone, in silence."""
    assert run_ranks(2, with_samples_and_a_weight) == [[], []]


def with_a_penalty_on_a_gradient() -> list[str]:
    """On that of a whole weight, whose average is a part of the graph."""
    model, plain = made("shard")
    x = torch.arange(1, 9, dtype=plain.head.weight.dtype) / 8

    def penalty(m: nn.Module, of: int) -> torch.Tensor:
        held = dict(m.named_parameters())["head.weight"]
        whole = held.full_tensor() if isinstance(held, DTensor) else held
        value = (whole * x[: whole.shape[-1]] * (of + 1)).pow(3).sum()
        (gradient,) = torch.autograd.grad(value, held, create_graph=True)
        read = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return read.square().sum()

    penalty(model, 0).backward()
    penalty(plain, 0).backward()
    return list(differences(model, plain))


def test_a_penalty_on_the_gradient_of_a_whole_weight() -> None:
    assert run_ranks(2, with_a_penalty_on_a_gradient) == [[], []]


def of_gathered() -> None:
    """The model's attributes have these between the passes; their memory is free when one has gone by."""
    model, _ = made("shard")
    loss = branches(model, model.env.rank, 0)
    with pytest.raises(ShardError, match=r"grad of 'head\.weight': FSDP2 computes with a gathered copy of it"):
        torch.autograd.grad(loss, [model.module.head.weight])


def test_what_a_model_s_attributes_have_between_the_passes_is_refused_likewise() -> None:
    run_ranks(2, of_gathered)


def by_torch_func(axis: str, told: str) -> None:
    model, _ = made(axis)

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, torch.arange(4))  # type: ignore[no-any-return]

    with pytest.raises(ShardError, match=rf"'head\.weight' {told}"):
        torch.func.grad(loss)({"head.weight": torch.zeros_like(model.module.head.weight)})


@pytest.mark.parametrize(
    ("axis", "told"), [("dp", r"is a tensor of torch\.func"), ("shard", "was replaced after wrapping")]
)
def test_gradients_by_torch_func_are_refused_in_words(axis: str, told: str) -> None:
    run_ranks(2, by_torch_func, axis, told)


def functional(axes: tuple[str, ...]) -> None:
    """Averages of weights are tried in the middle of training."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    env = ShardingEnv.from_mesh(mesh((2,) * len(axes), axes))
    split = [TensorParallelSharder({"0": "colwise", "2": "rowwise"})] if "tp" in axes else []
    model = DistributedModelParallel(copy.deepcopy(plain), env, sharders=split)
    told = r"functional_call with another '0\.weight': FSDP2 would keep it"
    for _ in range(2):
        results: list[torch.Tensor] = []
        for each in (model, plain):
            each(torch.ones(3, 4)).square().mean().backward()
            with torch.no_grad():
                twice = {name: 2 * p for name, p in each.named_parameters()}
                results += [torch.func.functional_call(each, twice, torch.ones(3, 4)), each(torch.ones(3, 4))]
        torch.testing.assert_close(results[:2], results[2:])
        others = {name: 2 * p for name, p in model.named_parameters()}
        for each_kind in (others, {name: nn.Parameter(p.detach() * 2) for name, p in model.named_parameters()}):
            with pytest.raises(ShardError, match=told):
                torch.func.functional_call(model, each_kind, torch.ones(3, 4))
        result = model(torch.ones(3, 4))
        torch.testing.assert_close(result, plain(torch.ones(3, 4)))
        with torch.no_grad(), pytest.raises(ShardError, match=told):
            torch.func.functional_call(model, others, torch.ones(3, 4))
        torch.testing.assert_close(result, model(torch.ones(3, 4)))


@pytest.mark.parametrize("axes", [("shard",), ("dp", "tp")])
def test_calls_with_other_weights_leave_the_model_its_own(axes: tuple[str, ...]) -> None:
    """FSDP2 took what it was called with for the model's weights, in silence, and for ever."""
    run_ranks(2 ** len(axes), functional, axes)


def of_replaced(axis: str) -> list[str]:
    """Weights that were listed before wrapping, in the first backward and after."""
    plain, module = Net(), Net()
    earlier = some(module)
    model = DistributedModelParallel(
        module, ShardingEnv.from_mesh(mesh((2,), (axis,))), plan={"table.weight": row_wise()}
    )
    for step in range(2):
        branches(model, model.env.rank, step).backward(inputs=earlier)
        for rank in range(2):
            (branches(plain, rank, step) / 2).backward(inputs=some(plain))
    loss = branches(model, model.env.rank, 0)
    with pytest.raises(ShardError, match=r"grad of 'table.weight' as it was before the model was wrapped"):
        torch.autograd.grad(loss, earlier[3:], allow_unused=True)
    table, rank = model.get_parameter("table.weight").grad, model.env.rank
    assert table is not None and torch.allclose(table, plain.table.weight.grad[4 * rank :][:4])  # type: ignore[index]
    return list(differences(model, plain))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_weights_listed_before_wrapping(axis: str) -> None:
    """They got no gradient, and None came of `torch.autograd.grad`, in silence."""
    assert run_ranks(2, of_replaced, axis) == [[], []]


class Shared(nn.Module):
    """One block twice, computed again each time."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.block, self.last = times, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=True)
        x = self.last(x)
        return x


def shared_and_computed_again() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    x = torch.ones(2, 4, requires_grad=True)
    for times in (2, 1):
        model = DistributedModelParallel(Shared(times), env=env)
        beside = model.module.block(x).sum() if times == 1 else 0.0  # which comes when all are averaged already
        with pytest.raises(ShardError, match=r"share a weight, .* are computed again .* use_reentrant=False"):
            (beside + model(x).sum()).backward()


def test_blocks_that_share_a_weight_and_are_computed_again_are_explained() -> None:
    run_ranks(2, shared_and_computed_again)


def looked_through_for_nan() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        with_a_term_over_all("shard", True)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_torchs_search_for_nan_in_dtensors_is_explained() -> None:
    """Of an operator without a sharding strategy; a recommender library begins the search when it is imported."""
    for error in run_ranks(2, looked_through_for_nan, expect=ShardError):
        assert "torch.autograd.set_detect_anomaly(True)" in str(error)


class Again(torch.autograd.Function):
    """Runs a module without a graph, and once more in its backward, as adjoints of differential equations do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.module(x := x.detach().requires_grad_())
            return None, *torch.autograd.grad(y, [x, *weights], grads)


class Adjoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.field = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Again.apply(self.field, self.first(x), *self.field.parameters())  # type: ignore[no-any-return, no-untyped-call]


def in_a_function(axis: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    torch.manual_seed(0)
    plain = Adjoint()
    model = DistributedModelParallel(copy.deepcopy(plain), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    x = torch.randn(4, 4)
    say_once.cache_clear()
    logging.getLogger("dmp").addHandler(handler)
    try:
        model(x[2 * model.env.rank :][:2]).square().mean().backward()
    finally:
        logging.getLogger("dmp").removeHandler(handler)
    plain(x).square().mean().backward()
    return said + list(differences(model, plain))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_what_a_function_asks_for_in_its_own_backward_is_averaged(axis: str) -> None:
    """It was refused where weights are split, and of copies said to be averaged by nobody."""
    assert run_ranks(2, in_a_function, axis) == [[], []]


def by_hand() -> tuple[int, int, int]:
    """How often it was said: of gradients that are 0, as for making state, of such by torch.func, after a pass."""
    model = DistributedModelParallel(nn.Linear(4, 2), ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    weights = {name: p.detach() for name, p in model.module.named_parameters()}
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.full((3, 4), float(model.env.rank + 1))

    def steps(gradients: Mapping[str, torch.Tensor]) -> int:
        for name, p in model.module.named_parameters():
            p.grad = gradients[name].clone()
        say_once.cache_clear()
        with Said() as said:
            optimizer.step()
        optimizer.zero_grad()
        return sum("no backward pass through the model has made" in text for text in said.texts)

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model.module, given, x).square().mean()  # type: ignore[no-any-return]

    zeros = steps({name: torch.zeros_like(p) for name, p in weights.items()})
    own = steps(torch.func.grad(loss)(weights))
    model(x).square().mean().backward()
    return zeros, own, steps({name: p.grad for name, p in model.module.named_parameters() if p.grad is not None})


def test_a_step_by_gradients_of_a_rank_s_own_by_hand_is_said() -> None:
    """Copies parted in silence, as where gradients of single samples are clipped."""
    assert run_ranks(2, by_hand) == [(0, 1, 0)] * 2


class Within(nn.Module):
    """Runs all of its backward passes itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        loss: torch.Tensor = self.last(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()


def passes_within(axis: str) -> str:
    model = DistributedModelParallel(Within(), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    try:
        for _ in range(3):
            model(torch.ones(2, 4))
    except ShardError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_backward_pass_inside_of_the_forward_is_told(axis: str) -> None:
    """Where weights are split it ended the process, for memory was let go of, or trained nothing, in silence."""
    for said in run_ranks(2, passes_within, axis):
        assert "inside of" in said and "return the loss from it" in said
