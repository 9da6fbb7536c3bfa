"""What scripts ask of the wrapper itself, and TorchRec's helpers that are given one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dmp
from dmp import DistributedModelParallel, ShardError, ShardingPlan, full_state_dict
from tests.ranks import run_ranks
from tests.torchrec_dropin.scripts import IGNORED, LR, batch, both, feed, model_of, start

pytestmark = IGNORED
CPU = torch.device("cpu")


def asked(DistributedModelParallel: Any) -> Any:
    model = start(DistributedModelParallel(module=model_of(torch.optim.SGD, lr=LR), device=CPU))
    assert model.sparse_grad_parameter_names() == [] and model.get_delta_tracker() is None
    names = [name for name, _ in model.bare_named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in model.bare_named_parameters(prefix="x")] == [f"x.{name}" for name in names]
    assert model.device == CPU and model._env.world_size == 2 and len(model.sharders) >= 1
    assert set(model._plan.plan) == {"ebc"} and type(model.module).__name__ == "Model"
    inner = model._dmp_wrapped_module
    losses = [inner(feed(model, 0)).detach(), model.module(feed(model, 0)).detach()]
    assert torch.equal(*losses)
    from torchrec.distributed.types import Awaitable  # which theirs gives, and ours has waited for

    pooled = model.module.ebc(feed(model, 0))
    losses.append((pooled.wait() if isinstance(pooled, Awaitable) else pooled).values().detach())
    losses.append(model.module.ebc(feed(model, 0)).wait().values().detach())
    return names, losses


def helped(DistributedModelParallel: Any) -> Any:
    from torchrec.distributed.model_parallel import get_module, get_unwrapped_module
    from torchrec.distributed.utils import add_prefix_to_state_dict, filter_state_dict

    model = start(DistributedModelParallel(module=model_of(torch.optim.SGD, lr=LR), device=CPU))
    over = [get_unwrapped_module(model).over, get_unwrapped_module(model.module).over]
    assert over[0] is over[1] and get_module(model) is not None
    state = model.state_dict()
    of_over = filter_state_dict(state, "over")
    assert set(of_over) == {"weight", "bias"}
    add_prefix_to_state_dict(of_over, "over.")
    assert set(of_over) == {"over.weight", "over.bias"}
    return model(feed(model, 0)).detach()


def _both() -> None:
    names, _ = both(lambda wrap: [asked(wrap)[1]]), both(lambda wrap: [helped(wrap)])
    assert names


def test_members_and_helpers() -> None:
    run_ranks(2, _both)


@pytest.mark.filterwarnings("ignore:(The TorchScript type system|TorchScript will treat):UserWarning")
def test_a_module_that_was_wrapped_is_scripted_for_serving() -> None:
    """torch compiles every function of `KeyedTensor`, and said of our `wait` that it is none."""
    model = DistributedModelParallel(model_of(torch.optim.SGD, lr=LR))
    ebc, ids = dmp.to_unsharded(model).get_submodule("ebc"), batch(0, 0)
    torch.testing.assert_close(torch.jit.script(ebc)(ids).values(), ebc(ids).wait().values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_that_was_cast_is_unsharded_in_its_dtype(dtype: torch.dtype) -> None:
    """Tables had that of their configs: float64 was rounded, in silence."""
    model = DistributedModelParallel(model_of().to(dtype))
    plain, values = dmp.to_unsharded(model), dmp.full_state_dict(model)
    assert all(p.dtype is dtype and torch.equal(p, values[name]) for name, p in plain.named_parameters())


def test_what_is_read_and_what_is_refused() -> None:
    model = DistributedModelParallel(model_of(torch.optim.SGD, lr=LR))
    assert isinstance(model._plan, ShardingPlan) and model._env is model.env
    for name, words in (
        ("write", "local_shards"),
        ("join", "as many batches"),  # of DDP
        ("join_hook", "algorithms.Join; .*as many batches"),  # of torch's Join([model])
    ):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"a wrapped model has no '{name}', which is .*{words}"):
            getattr(model, name)
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        _ = model.nothing
    for name in ("module", "_dmp_wrapped_module"):
        before = list(model.state_dict())
        with pytest.raises(ShardError, match=f"model.{name} of a wrapped model is not replaced"):
            setattr(model, name, nn.Linear(1, 1))
        assert list(model.state_dict()) == before
    sparse = DistributedModelParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)), sharders=[])
    assert sparse.sparse_grad_parameter_names(prefix="m") == ["m.0.weight"]


class Writer(nn.Module):
    """Has members of its own under such names."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.sharders = nn.Linear(2, 2), "mine"

    def write(self) -> str:
        return "mine"


def test_the_modules_own_come_first() -> None:
    model = DistributedModelParallel(Writer())
    assert model.write() == model.sharders == "mine"


def test_a_copy_is_another_model() -> None:
    from torchrec.distributed.utils import copy_to_device

    model = DistributedModelParallel(model_of(torch.optim.SGD, lr=LR))
    expected, before = model(batch(0, 0)).detach(), full_state_dict(model)
    nccl: Any = mock.patch.object(torch._C._distributed_c10d, "ProcessGroupNCCL", type("NCCL", (), {}), create=True)
    with nccl:  # which theirs asks for on a CPU too
        copies = [model.copy(CPU), copy_to_device(model, CPU, CPU)]
    for each in copies:
        assert torch.equal(each(batch(0, 0)), expected)
    loss = copies[0](batch(0, 0))
    loss.backward()
    assert dmp.full_state_dict(model).keys() == before.keys()
    torch.testing.assert_close(full_state_dict(model), before, rtol=0, atol=0)
