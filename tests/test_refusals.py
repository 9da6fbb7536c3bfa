"""What is refused beside a tensor axis names module, sizes and the way out, and leaves the module as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dmp import (
    DistributedModelParallel,
    DmpError,
    ShardingEnv,
    colwise,
    fully_sharded,
    replicate,
    row_wise,
)
from sharders import EmbeddingSharder, FSDPWrapper
from sharders import TensorParallelSharder as TP
from tests.ranks import mesh, run_ranks
from tests.strangers import ViT
from tests.transformers_zoo import Llama

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
WQ = "layers.0.attention.wq.weight"


class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.bias = self.a.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def llama(**sizes: Any) -> Callable[[], nn.Module]:
    return lambda: Llama(**{"kv_heads": 4, **sizes})


def tp(plan: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"sharders": [TP(plan, **options)]}


OF_DTENSORS = {
    **{f"layers.*.attention.{name}": ColwiseParallel(use_local_output=False) for name in ("wq", "wk", "wv")},
    "layers.*.attention.wo": RowwiseParallel(),
}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, ...]]] = {
    "heads": (llama(heads=3, kv_heads=3, dim=48), {}, ("'layers.0.attention'", "heads 3", "2", "'tp'", "leaves this")),
    "one key": (llama(kv_heads=1), {}, ("'layers.0.attention'", "heads 1", "a mesh without the axis 'tp'")),
    "pattern": (llama(), tp({"layers.*.attn.wq": "colwise"}), ("'layers.*.attn.wq'", "did you mean")),
    "style": (llama(), tp({"output": "columnwise"}), ("'output'", "did you mean 'colwise'")),
    "norm": (llama(), tp({"norm": "rowwise"}), ("'norm'", "RMSNorm", "sequence")),
    "norm by torch's style": (llama(), tp({"norm": ColwiseParallel()}), ("'norm'", "RMSNorm", "leave it out")),
    "dtensors": (
        llama(),
        tp(OF_DTENSORS),
        ("'layers.0.attention.wq'", "use_local_output=False", "sequence_parallel=True"),
    ),
    "class": (llama(), tp({"output": ColwiseParallel}), ("'output'", "the class; call it")),
    "odd": (lambda: nn.Sequential(nn.Linear(8, 7)), {"plan": {"0.weight": colwise()}}, ("'0.weight'", "7", "2", "pad")),
    "bias": (lambda: nn.Sequential(nn.Linear(8, 8)), {"plan": {"0.bias": colwise()}}, ("'0'", "'0.weight'")),
    "tie": (llama(tied=True), tp({"tok_embeddings": "colwise", "output": "colwise"}), ("'output'", "colwise_gather")),
    "tied bias": (SharedBias, tp({"a": "colwise", "b": "rowwise"}), ("'a' (colwise)", "'b' (rowwise)", "same style")),
    "loss": (ViT, {"sharders": [TP(loss_parallel=True)]}, ("loss_parallel=False",)),
    "table": (llama(), {"plan": {WQ: row_wise()}}, (WQ, "layout of a table", "colwise()")),
    "whole": (llama(), {"plan": {WQ: replicate()}}, (WQ, "colwise()", "sharders=[TensorParallelSharder(...)")),
    "pieces": (llama(), {"plan": {WQ: fully_sharded()}}, (WQ, "colwise()", "leave it out")),
    "twice": (llama(), {"sharders": [TP(), TP()]}, ("both split", "pass one")),
    "units": (llama(), {"data_parallel_wrapper": FSDPWrapper(units=["blocks.*"])}, ("'blocks.*'", "'layers.0'")),
}


SAMPLE = ("heads", "odd", "tied bias", "units")


def looks(module: nn.Module) -> list[object]:
    """Everything that a refusal must not change, but values."""
    modules = [
        (name, id(m), type(m), [len(getattr(m, hooks)) for hooks in HOOKS], sorted(vars(m)), m.training)
        + tuple((key, value) for key, value in vars(m).items() if type(value) is int)
        for name, m in module.named_modules()
    ]
    held = [(n, id(p), type(p), p.requires_grad, sorted(vars(p))) for n, p in module.named_parameters("", True, False)]
    return [*modules, *held]


def refused(case: str, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    make, options, words = CASES[case]
    env, module = ShardingEnv.from_mesh(mesh(shape, names)), make()
    before, values = looks(module), [p.detach().clone() for p in module.parameters()]
    with pytest.raises(DmpError) as error:
        DistributedModelParallel(module, env=env, **options)
    text = str(error.value)
    assert all(word in text for word in words), f"{case}: {text}"
    assert looks(module) == before, case
    assert all(map(torch.equal, values, module.parameters())), case
    DistributedModelParallel(module, env=env, sharders=[TP({}), EmbeddingSharder()])  # it can be wrapped all the same
    return text


def all_refused(shape: tuple[int, ...], names: tuple[str, ...], cases: list[str]) -> list[str]:
    return [refused(case, shape, names) for case in cases]


@pytest.mark.parametrize(
    ("shape", "names"),
    [((1, 2), ("shard", "tp")), pytest.param((2, 1, 2), ("replicate", "shard", "tp"), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_refusal_names_the_way_out_and_changes_nothing(
    cases: tuple[str, ...], shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    texts = run_ranks(torch.Size(shape).numel(), all_refused, shape, names, list(cases))
    assert all(of_rank == texts[0] for of_rank in texts)


def without_a_data_axis() -> None:
    for option in ({"mixed_precision": torch.bfloat16}, {"offload": True}):
        env, module = ShardingEnv.from_mesh(mesh((2,), ("tp",))), Llama(kv_heads=4)
        before = looks(module)
        with pytest.raises(DmpError, match=f"{next(iter(option))} of FSDPWrapper needs a mesh with a data axis"):
            DistributedModelParallel(module, env=env, data_parallel_wrapper=FSDPWrapper(**option))  # type: ignore[arg-type]
        assert looks(module) == before


def test_policies_without_a_data_axis_change_nothing() -> None:
    run_ranks(2, without_a_data_axis)
