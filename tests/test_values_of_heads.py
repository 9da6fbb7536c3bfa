"""What attentions have for each head, as sinks, scales, gates and positions, or beside, and MLPs for all features."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardingEnv, ShardingPlan
from sharders import TensorParallelSharder
from sharders.tensor_parallel.structure import caches
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

MESHES = {"tp": ((2,), ("tp",)), "shard x tp": ((2, 2), ("shard", "tp"))}
WIDTH, HEADS, LENGTH, MOST, BUCKETS = 16, 4, 3, 32, 3
TP = ShardingEnv.abstract((2,), ("tp",))


class Positions(nn.Module):
    """(H, T, T) of a table of distances, by an embedding or a parameter of its own."""

    def __init__(self, is_table: bool) -> None:
        super().__init__()
        if is_table:
            self.table = nn.Embedding(2 * MOST, HEADS)
        else:
            self.bias = nn.Parameter(torch.randn(2 * MOST, HEADS))

    def forward(self, length: int) -> torch.Tensor:
        places = torch.arange(length)
        apart = places[:, None] - places + MOST
        found: torch.Tensor = self.table(apart) if hasattr(self, "table") else self.bias[apart]
        return found.permute(2, 0, 1)  # heads first


class Attention(nn.Module):
    """With what `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_heads, self.kind = 2 if "shared" in kind else HEADS, kind
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if kind == "sinks":
            self.sinks = nn.Parameter(torch.randn(HEADS))
        if kind == "scale":
            self.scale = nn.Parameter(torch.rand(HEADS, 1, 1))
        if kind == "gate":
            self.gate = nn.Linear(WIDTH, HEADS)
        if kind == "wide gate":
            self.gate = nn.Linear(WIDTH, WIDTH)
        if kind == "shared":
            self.apart = nn.Parameter(torch.randn(2 * MOST, WIDTH // 2))
        if kind == "distances":  # a step on the way to a value for each head
            self.bias_of = nn.Sequential(nn.Linear(1, 24), nn.ReLU(), nn.Linear(24, HEADS, bias=False))
        if kind == "buckets":
            self.bias_of = nn.Linear(WIDTH, BUCKETS * HEADS)
        if kind == "each head":
            self.turn = nn.Linear(WIDTH // HEADS, WIDTH // HEADS)
        if kind in ("table", "bias"):
            self.positions = Positions(kind == "table")

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind == "each head":
            q = self.turn(q)
        scores = q @ k.transpose(-1, -2)
        places = torch.arange(x.shape[1], dtype=x.dtype)
        if self.kind == "distances":
            bias = self.bias_of((places[:, None] - places)[..., None]).view(*scores.shape[2:], self.num_heads)
            bias = bias.permute(2, 0, 1)
        if self.kind == "buckets":
            values = self.bias_of(x).view(*x.shape[:2], BUCKETS, self.num_heads)
            scores = scores + values[:, :, (places[:, None] - places).abs().long()[0] % BUCKETS].permute(0, 3, 1, 2)
        if self.kind == "scale":
            scores = scores * self.scale
        if self.kind == "shared":
            places = torch.arange(x.shape[1])
            scores = scores + torch.einsum("bhtd,tsd->bhts", q, self.apart[places[:, None] - places + MOST])
        if self.kind == "shared outside" and bias is not None:
            scores, bias = scores + torch.einsum("bhtd,dts->bhts", q, bias), None
        if hasattr(self, "positions"):
            bias = self.positions(x.shape[1])
        scores = scores if bias is None else scores + bias
        if self.kind == "sinks":
            sinks = self.sinks.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
            scores = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        heads = scores.softmax(-1) @ v
        if self.kind == "gate":
            heads = heads * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        joined = heads.transpose(1, 2).flatten(2)
        return self.out(joined * self.gate(x).sigmoid() if self.kind == "wide gate" else joined)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(kind)
        activation = nn.PReLU() if kind == "slope" else nn.SiLU()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), activation, nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), bias)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    """`outside`: one bias for the attentions of all blocks, or what is as wide as each of their heads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = Positions(True) if "outside" in kind else None
        if self.positions is not None and kind == "shared outside":
            self.positions.table = nn.Embedding(2 * MOST, WIDTH // 2)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.positions is None else self.positions(x.shape[1])
        for block in self.blocks:
            x = block(x, bias)
        return x


HOLDERS = {
    "sinks": ("blocks.1.attention", "heads_0"),
    "scale": ("blocks.1.attention", "heads_0"),
    "gate": ("blocks.1.attention.gate", "colwise"),
    "wide gate": ("blocks.1.attention.gate", "colwise"),
    "slope": ("blocks.1.mlp.1", "sum_gradients"),
    "shared": ("blocks.1.attention", "sum_gradients"),
    "table": ("blocks.1.attention.positions.table", "heads_1"),
    "bias": ("blocks.1.attention.positions", "heads_1"),
    "outside": ("positions.table", "heads_1"),
    "shared outside": ("positions.table", "sum_gradients"),
    "distances": ("blocks.1.attention.bias_of.2", "colwise"),
    "buckets": ("blocks.1.attention.bias_of", "colwise_packed_3"),
    "each head": ("blocks.1.attention.turn", "sum_gradients"),
}


def trains_split(on: str, kind: str) -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES[on]))
    model = DistributedModelParallel(Model(kind).double(), env)
    split = {name for name, p in model.named_parameters() if not on_tensor_axis(p).is_replicate()}
    assert {"blocks.1.attention.q.weight", "blocks.1.attention.out.weight", "blocks.1.mlp.0.weight"} <= split
    assert HOLDERS[kind][1] == "sum_gradients" or any(
        name.startswith(HOLDERS[kind][0]) and "." not in name[len(HOLDERS[kind][0]) + 1 :] for name in split
    )
    trains(
        model, Model(kind).double(), env, lambda g: torch.randn(env.data_size, 2, LENGTH, WIDTH, generator=g).double()
    )


def on_tensor_axis(parameter: Any) -> Any:
    return parameter.placements[-1]


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("on", [pytest.param(on, marks=[pytest.mark.slow] * (on != "tp")) for on in MESHES])
@pytest.mark.sampled(7)
def test_attentions_with_values_for_each_head_train_as_in_one_process(on: str, kind: str) -> None:
    """All of these attentions lay whole on every rank of the axis."""
    run_ranks(2 if on == "tp" else 4, trains_split, on, kind)


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.sampled(8)
def test_styles_and_layouts_of_values(kind: str) -> None:
    path, style = HOLDERS[kind]
    model = Model(kind)
    found = TensorParallelSharder().place(model, {}, TP)
    assert found.styles[path] == style
    by_names = TensorParallelSharder({p: s for p, s in found.styles.items() if isinstance(s, str)})
    assert by_names.place(model, {}, TP).layouts == found.layouts
    read = ShardingPlan.from_json(ShardingPlan(dict(found.layouts)).to_json())
    wanted = {name: entry.layout for name, entry in read.items()}
    assert TensorParallelSharder().place(model, wanted, TP).styles == found.styles


def test_a_plan_that_leaves_sinks_whole_is_wrong() -> None:
    plan = {"blocks.*.attention.q": "colwise", "blocks.*.attention.k": "colwise", "blocks.*.attention.v": "colwise"}
    plan |= {"blocks.*.attention.out": "rowwise"}
    with pytest.raises(PlanError, match="wrong for this model"):
        TensorParallelSharder(plan).place(Model("sinks"), {}, TP)
    found = TensorParallelSharder(plan | {"blocks.*.attention": "heads_0"}).place(Model("sinks"), {}, TP)
    assert found.layouts["blocks.0.attention.sinks"] == found.layouts["blocks.0.attention.q.bias"]


class SometimesMore(Model):
    """With a table that is as wide as there are heads, and read only where it is asked for."""

    def __init__(self) -> None:
        super().__init__("outside")
        self.kinds = nn.Embedding(10, HEADS)

    def forward(self, x: torch.Tensor, kinds: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x)
        if kinds is None:
            return x
        more: torch.Tensor = self.kinds(kinds).mean(-1, keepdim=True)
        return x + more


def test_a_table_that_nothing_was_seen_of_has_no_values_of_heads() -> None:
    """It was split beside those that are: each rank took the mean of its own columns."""
    found = TensorParallelSharder().place(SometimesMore(), {}, TP)
    assert found.styles["positions.table"] == "heads_1"
    assert "kinds" not in found.styles
    assert not found.warnings


class AskedFor(Attention):
    """With a Linear beside that is used where a bias is given."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.beside = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if bias is None else x * self.beside(x).sum(-1, keepdim=True))


def test_an_attention_with_a_linear_that_nothing_was_seen_of_stays_whole() -> None:
    model = Model("plain")
    for block in model.blocks:
        block.attention = AskedFor()
    found = TensorParallelSharder().place(model, {}, TP)
    assert set(found.styles) == {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)} and not found.warnings
    assert any("how its Linears beside query, key, value and output are used is not proved" in n for n in found.notes)


class OfPages(Model):
    """Takes what nobody can guess; its blocks run alone."""

    def forward(self, pages: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        assert isinstance(pages, list)
        return super().forward(torch.stack(pages))


def test_what_is_outside_and_may_be_of_heads_is_not_split_without_them() -> None:
    """As UDOP's relative positions, which all layers add: blocks were proved without, and the model did not run."""
    found = TensorParallelSharder().place(OfPages("outside"), {}, TP)
    assert set(found.styles) == {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)} and not found.divided
    assert any("may be what it adds for each head, 'positions.table'" in text for text in found.warnings)
    assert "blocks.1.attention.q" in TensorParallelSharder().place(OfPages("sinks"), {}, TP).styles
    by_matrix = OfPages("outside")
    by_matrix.positions = nn.Linear(2 * MOST, HEADS, bias=False)  # type: ignore[assignment]
    found = TensorParallelSharder().place(by_matrix, {}, TP)
    assert "blocks.1.attention.q" not in found.styles and any("head, 'positions'" in text for text in found.warnings)
    pages = [torch.randn(LENGTH, WIDTH) for _ in range(2)]
    known = TensorParallelSharder(example_inputs=(pages,)).place(OfPages("outside"), {}, TP)
    assert known.styles["positions.table"] == "heads_1" and known.styles["blocks.1.attention.q"] == "colwise"


class Within(nn.Module):
    """Cannot be run by a guess; what it holds can, alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Model(kind)

    def forward(self, pages: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(pages, list)
        return self.inner(torch.stack(pages))  # type: ignore[no-any-return]


def test_what_blocks_share_is_seen_of_what_is_around_them() -> None:
    """As SpeechT5's relative positions: blocks were proved without, and the plan was then found wrong, an error."""
    found = TensorParallelSharder().place(Within("shared outside"), {}, TP)
    assert found.styles["inner.positions.table"] == "sum_gradients"
    assert {f"inner.blocks.{i}.{name}" for i in (0, 1) for name in ("attention.q", "mlp.0")} <= set(found.styles)


def test_what_values_for_each_head_are_not() -> None:
    for module in ("blocks.0.mlp.0", "blocks.0"):
        with pytest.raises(PlanError, match="all values for each head; its own are"):
            TensorParallelSharder({module: "heads_0"}).place(Model("sinks"), {}, TP)
    with pytest.raises(PlanError, match="splits the values of 4 heads over the 3 ranks"):
        TensorParallelSharder({"blocks.0.attention": "heads_0"}).place(
            Model("sinks"), {}, ShardingEnv.abstract((3,), ("tp",))
        )


@pytest.mark.parametrize("name", ["T5", "GptOss", "Swin", "Beit"])
@pytest.mark.sampled(4)
def test_published_models(name: str) -> None:
    import transformers

    small: dict[str, dict[str, Any]] = {
        "T5": {"d_model": 64, "d_kv": 8, "num_heads": 8, "d_ff": 96, "num_layers": 2, "vocab_size": 96},
        "GptOss": {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
        | {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 128, "num_local_experts": 4},
        "Swin": {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
        "Beit": {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"intermediate_size": 64, "use_relative_position_bias": True},
    }
    config = getattr(transformers, f"{name}Config")(**small[name])
    kind = "T5EncoderModel" if name == "T5" else f"{name}Model"
    model = getattr(transformers, kind)(config)
    found = TensorParallelSharder().place(model, {}, TP)
    assert not found.warnings
    values = [path for path, style in found.styles.items() if style in ("heads_0", "heads_1")]
    assert values
    split = [path for path, style in found.styles.items() if style == "rowwise"]
    assert any("attention" in path.lower() or "attn" in path for path in split)


def test_what_a_function_keeps_of_a_run_on_meta_is_let_go_of() -> None:
    """BEiT keeps the places of a window for its size: from meta, torch read memory that was nobody's."""
    from transformers import BeitConfig, BeitModel

    torch.manual_seed(0)
    model = BeitModel(
        BeitConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            use_relative_position_bias=True,
        )
    ).eval()
    image = torch.randn(2, 3, 32, 32)
    TensorParallelSharder().place(model, {}, TP)
    index = model.layers[0].relative_position_bias.generate_relative_position_index((4, 4))
    assert index.device.type == "cpu"
    assert index.max() == 7 * 7 + 2
    torch.testing.assert_close(model(image)[0], model(image)[0])


def test_a_models_own_plan_may_name_sinks() -> None:
    """As Granite's does, by the name of a parameter; the whole plan was not used for that."""
    own = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise", "sinks": "colwise"}
    model = Model("sinks")
    model.tp_plan = {f"blocks.*.attention.{name}": style for name, style in own.items()}  # type: ignore[assignment]
    model.tp_plan |= {"blocks.*.attention": "local_params", "blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}  # type: ignore[operator]
    found = TensorParallelSharder().place(model, {}, TP)
    assert found.styles["blocks.1.attention"] == "heads_0"
    assert not any("tp_plan is not used" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["sinks", "gate"])
def test_sequence_parallel_says_what_it_does_not_run(kind: str) -> None:
    with pytest.raises(PlanError, match=r"blocks.0.attention.* values for each head: .*sequence_parallel=False"):
        TensorParallelSharder(sequence_parallel=True).place(Model(kind), {}, TP)


class Sloped(nn.Module):
    """Its attention has one number, its MLP lies in the block, and nobody can guess what it takes."""

    def __init__(self, slope: bool) -> None:
        super().__init__()
        self.attention = Attention("")
        self.attention.temperature = nn.Parameter(torch.ones(()))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        if slope:
            self.act = nn.PReLU()

    def forward(self, page: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("slope", [False, True])
def test_single_numbers_are_of_what_is_split_only_where_that_is_proved(slope: bool) -> None:
    """Gradients of a number that is used on whole activations would be summed."""
    found = TensorParallelSharder().place(nn.ModuleList(Sloped(slope) for _ in range(2)), {}, TP)
    assert ("1.fc1" in found.styles) != slope
    assert "sum_gradients" not in found.styles.values()
    assert any("its single numbers" in note and ".attention" in note for note in found.notes)


def test_caches_are_not_kept_alive_by_a_look_at_a_model() -> None:
    """That of a bound method holds its model."""

    class Holder:
        def __init__(self) -> None:
            self.cached = functools.lru_cache(self.positions)

        def positions(self, length: int) -> torch.Tensor:
            return torch.arange(length)

    holder = Holder()
    holder.cached(3)
    caches._known.cache_clear()
    TensorParallelSharder().place(Model("sinks"), {}, TP)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
