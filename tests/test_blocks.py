"""Which blocks and units are found in a model, and how a wrong choice is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from dmp import ShardError
from sharders.data_parallel.blocks import cast_inputs, checkpoint_blocks, find_units, repeated_blocks
from tests.transformers_zoo import Llama


class Block(nn.Module):
    """Two linears; counts its forwards."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """An embedding, blocks, a head; `plan` is what a Hugging Face model says of itself."""

    def __init__(self, blocks: nn.Module | None = None, plan: dict[str, str] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = blocks if blocks is not None else nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 9, bias=False)
        self.plan = plan or {}

    @property
    def fsdp_plan(self) -> dict[str, str]:
        return self.plan


class Outer(nn.Module):
    """A planned model inside another module."""

    def __init__(self, inner: Net) -> None:
        super().__init__()
        self.model = inner
        self.tail = nn.ModuleList([Block(), Block()])


HF = {"embed": "free_full_weight", "layers.*": "free_full_weight", "norm": "keep_full_weight"}


# ---- blocks ----


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Llama(layers=3), ["layers.0", "layers.1", "layers.2"]),
        (nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4)), ["1", "2"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
        (nn.Sequential(Block(), nn.Sequential(Block(), Block())), ["1.0", "1.1"]),
        (Net(nn.ModuleList([Block()])), ["layers.0"]),
        (Net(nn.Sequential(Block())), []),
        (Net(nn.ModuleList([Block(), nn.Sequential(nn.Linear(4, 4)), Block()])), ["layers.0", "layers.1", "layers.2"]),
        (nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([Block(), Block()])])}), ["a.0.0", "a.0.1"]),
        (
            nn.Transformer(8, 2, 2, 1, 16, batch_first=True),
            ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
        ),
    ],
    ids=range(9),
)
def test_blocks(module: nn.Module, found: list[str]) -> None:
    assert list(repeated_blocks(module)) == found


def test_large_leaves_are_blocks() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4))
    assert list(repeated_blocks(module)) == ["0", "1"]


def test_outermost_blocks_alone() -> None:
    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Block(), Block()])

    assert list(repeated_blocks(Net(nn.ModuleList([Layer(), Layer()])))) == ["layers.0", "layers.1"]


def test_a_block_at_two_places_is_found_once() -> None:
    block = Block()
    assert list(repeated_blocks(Net(nn.ModuleList([block, block, Block()])))) == ["layers.0", "layers.2"]


def test_blocks_that_others_own_are_no_blocks() -> None:
    module = Net()
    ignored = {name for name, _ in module.named_parameters() if name.startswith("layers.0.")}
    assert list(repeated_blocks(module, ignored)) == ["layers.1"]
    assert list(repeated_blocks(module, {name for name, _ in module.named_parameters()})) == []


# ---- units ----


def test_units_are_the_blocks_by_default() -> None:
    assert list(find_units(Net(), None)) == ["layers.0", "layers.1"]


def test_units_follow_the_models_own_plan() -> None:
    """What the plan keeps whole goes with the root, which is kept; the plan may lack the base model's prefix."""
    assert set(find_units(Net(plan=HF), None)) == {"embed", "layers.0", "layers.1"}
    assert set(find_units(Outer(Net(plan=HF)), None)) == {"model.embed", "model.layers.0", "model.layers.1"}
    prefixed = Outer(Net())
    prefixed.base_model_prefix = "model"  # type: ignore[assignment]
    type(prefixed).fsdp_plan = HF  # type: ignore[attr-defined]
    try:
        assert set(find_units(prefixed, None)) == {"model.embed", "model.layers.0", "model.layers.1"}
    finally:
        del type(prefixed).fsdp_plan  # type: ignore[attr-defined]


def test_a_plan_that_names_no_blocks_is_not_followed() -> None:
    """Hugging Face's default plan names `layers.*` whatever the model calls them."""
    plan = {"embed": "free_full_weight", "h.*": "free_full_weight"}
    assert list(find_units(Net(plan=plan), None)) == ["layers.0", "layers.1"]


def test_tied_units_go_with_the_root() -> None:
    module = Net(plan={**HF, "head": "free_full_weight"})
    assert set(find_units(module, None)) == {"embed", "head", "layers.0", "layers.1"}
    module.head.weight = module.embed.weight
    assert set(find_units(module, None)) == {"layers.0", "layers.1"}
    module.layers[0].up.weight = module.layers[1].up.weight  # type: ignore[index, union-attr]
    assert set(find_units(module, None)) == set()


def test_ignored_units_are_none() -> None:
    assert set(find_units(Net(plan=HF), None, {"embed.weight"})) == {"layers.0", "layers.1"}


@pytest.mark.parametrize(
    ("units", "found"),
    [
        (["layers.*"], ["layers.0", "layers.1"]),
        (["layers.*.up", "layers.1"], ["layers.0.up", "layers.1.up", "layers.1"]),
        ({Block}, ["layers.0", "layers.1"]),
        (Block, ["layers.0", "layers.1"]),
        ("head", ["head"]),
        ([nn.Embedding, "head"], ["embed", "head"]),
        ([], []),
    ],
    ids=str,
)
def test_chosen_units(units: object, found: list[str]) -> None:
    """Inner ones first, as torch shards them."""
    assert list(find_units(Net(), units)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["layer.*"], r"no module with dense parameters fits 'layer\.\*'.*did you mean 'layers"),
        ([nn.Conv2d], r"fits <class 'torch.nn.*Conv2d'>.*'Block', 'Embedding'"),
        (["layers"], r"'layers' is a ModuleList, which is never called itself; name its children: 'layers\.\*'"),
        (["embed"], r"unit 'embed' shares parameter 'embed.weight' with 'head.weight', which is outside it"),
    ],
    ids=["no such path", "no such class", "never called", "shared"],
)
def test_wrong_units_are_refused(units: list[object], message: str) -> None:
    module = Net()
    module.head.weight = module.embed.weight
    with pytest.raises(ShardError, match=re.compile(message)):
        find_units(module, units)  # type: ignore[arg-type]


def test_a_shared_parameter_inside_one_unit_is_no_fault() -> None:
    module = Net()
    block = module.layers[0]  # type: ignore[index]
    block.again = block.up  # type: ignore[union-attr]
    assert list(find_units(module, ["layers.*"])) == ["layers.0", "layers.1"]


# ---- what is done to blocks ----


def test_checkpointed_blocks_run_twice_and_give_the_same() -> None:
    torch.manual_seed(0)
    plain, module = Net(), Net()
    module.load_state_dict(plain.state_dict())
    blocks = repeated_blocks(module)
    checkpoint_blocks(blocks, lambda path, block: path == "layers.1" and isinstance(block, Block))
    x = torch.randn(3, 4)
    for m in (plain, module):
        m.layers[1](m.layers[0](x)).square().sum().backward()  # type: ignore[index]
    assert [block.calls for block in blocks.values()] == [1, 2]
    assert set(plain.state_dict()) == set(module.state_dict())
    for (name, p), q in zip(plain.named_parameters(), module.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]


def test_cast_inputs_leaves_ids_and_other_objects() -> None:
    class Echo(nn.Module):
        def forward(self, *args: object, **kwargs: object) -> object:
            return args, kwargs

    module = Echo()
    cast_inputs(module, torch.bfloat16)
    (ids, x, word), kwargs = module(torch.ones(1, dtype=torch.int64), torch.ones(1), "word", y=torch.ones(1))
    assert (ids.dtype, x.dtype, word, kwargs["y"].dtype) == (torch.int64, torch.bfloat16, "word", torch.bfloat16)
