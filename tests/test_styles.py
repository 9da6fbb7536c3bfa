"""Styles and plans: names, patterns, ties and layouts, and what is refused; no processes."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from dmp import PlanError, ShardError, ShardingEnv, colwise, replicate, row_wise, rowwise, sequence
from dmp import names as dmp_names
from sharders import TensorParallelSharder
from sharders.tensor_parallel import head_counts as local_attributes
from sharders.tensor_parallel.split import patterns as tp_plan
from sharders.tensor_parallel.split.styles import ALIASES, KNOWN, canonical, layouts_of, torch_style
from sharders.tensor_parallel.structure import feeds
from tests.transformers_zoo import GPT, Bert, Llama

TP2 = ShardingEnv.abstract((2,), ("tp",))
SHARD2_TP2 = ShardingEnv.abstract((2, 2), ("shard", "tp"))
ATTENTION = {
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
}


def place(model: nn.Module, plan: Any = None, given: Any = None, env: ShardingEnv = TP2, **options: Any) -> Any:
    return TensorParallelSharder(plan, **options).place(model, given or {}, env)


def fails(
    model: nn.Module, *words: str, env: ShardingEnv = TP2, given: Any = None, plan: Any = None, **options: Any
) -> None:
    """`place` raises a PlanError with all of `words`, and leaves the model as it was."""
    before = fingerprint(model)
    with pytest.raises(PlanError) as caught:
        place(model, plan, given, env, **options)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    assert fingerprint(model) == before


def fingerprint(model: nn.Module) -> Any:
    """Everything that applying a plan changes."""
    attributes = [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    kinds = [type(m) for m in model.modules()]
    return attributes, hooks, kinds, [(n, id(p), type(p)) for n, p in model.named_parameters()]


@pytest.mark.parametrize(
    ("style", "module", "expected"),
    [
        ("colwise", nn.Linear(4, 4), ColwiseParallel()),
        ("colwise_rep", nn.Linear(4, 4), ColwiseParallel(output_layouts=Replicate())),
        ("colwise_gather_output", nn.Linear(4, 4), ColwiseParallel(output_layouts=Replicate())),
        ("colwise_loss_parallel", nn.Linear(4, 4), ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)),
        ("rowwise", nn.Linear(4, 4), RowwiseParallel()),
        ("rowwise_rep", nn.Linear(4, 4), RowwiseParallel(input_layouts=Replicate())),
        ("rowwise_scatter", nn.Linear(4, 4), RowwiseParallel(output_layouts=Shard(1))),
        ("rowwise", nn.Embedding(4, 4), RowwiseParallel(input_layouts=Replicate())),
        ("embedding_rowwise", nn.Embedding(4, 4), RowwiseParallel(input_layouts=Replicate())),
        ("embedding_colwise", nn.Embedding(4, 4), ColwiseParallel(output_layouts=Replicate())),
    ],
)
def test_names_mean_torchs_styles(style: str, module: nn.Module, expected: Any) -> None:
    assert repr(torch_style(canonical(style, "m", module), module)) == repr(expected)


def test_names_of_activations_split_nothing() -> None:
    names = ("gather_input", "split_sequence", "gather_sequence", "sequence", "sum_gradients", "replicate")
    assert [torch_style(canonical(name, "m", nn.LayerNorm(4)), nn.LayerNorm(4)) for name in names] == [None] * 6
    assert set(names) < set(KNOWN) and set(ALIASES.values()) < set(KNOWN)


def test_layouts_follow_the_module() -> None:
    linear, table, norm = nn.Linear(4, 4), nn.Embedding(4, 4), nn.LayerNorm(4)
    assert layouts_of("colwise", linear) == {"weight": colwise(), "bias": colwise()}
    assert layouts_of("rowwise_scatter", linear) == {"weight": rowwise(), "bias": rowwise()}
    assert layouts_of("rowwise", table) == {"weight": rowwise(dim=0)}
    assert layouts_of("colwise", table) == {"weight": colwise(dim=1)}
    assert layouts_of("sequence", norm) == {"weight": sequence(), "bias": sequence()}
    assert layouts_of(SequenceParallel(), norm) == layouts_of("gather_sequence", norm) == layouts_of("sequence", norm)
    assert layouts_of(RowwiseParallel(), nn.Linear(4, 4, bias=False)) == {"weight": rowwise()}
    assert layouts_of("gather_input", norm) == layouts_of("sum_gradients", norm) == {}


@pytest.mark.parametrize(
    ("module", "style", "words"),
    [
        (nn.Linear(4, 4), "colwize", ["unknown style 'colwize'", "did you mean 'colwise'?", "rowwise_scatter", "'m'"]),
        (nn.Linear(4, 4), "packed_rowwise", ["unknown style 'packed_rowwise'", "ParallelStyle"]),
        (nn.LayerNorm(4), "colwise", ["'m'", "LayerNorm", "nn.Linear or nn.Embedding"]),
        (nn.Linear(4, 4), "embedding_rowwise", ["'m'", "Linear", "colwise_gather"]),
        (nn.Embedding(4, 4), "rowwise_scatter", ["'m'", "Embedding", "colwise, rowwise"]),
        (nn.Embedding(4, 4), "colwise_loss_parallel", ["Embedding"]),
        (nn.Linear(4, 4), ColwiseParallel, ["'m'", "ColwiseParallel", "call it"]),
        (nn.Linear(4, 4), 3, ["'m'", "got 3"]),
        (nn.LayerNorm(4), RowwiseParallel(), ["'m'", "LayerNorm", "RowwiseParallel"]),
    ],
)
def test_styles_that_a_module_cannot_take(module: nn.Module, style: Any, words: list[str]) -> None:
    fails(nn.ModuleDict({"m": module}), *words, plan={"m": style})


def test_patterns() -> None:
    model = Llama()
    placed = place(
        model, {**ATTENTION, "layers.*.feed_forward.w[13]": "colwise", "layers.*.feed_forward.w2": "rowwise"}
    )
    assert [n for n in placed.layouts if n.startswith("layers.1.")] == [
        f"layers.1.{name}.weight"
        for name in ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
        + ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    ]
    assert placed.layouts["layers.0.feed_forward.w3.weight"] == colwise()
    assert placed.divided[("layers.0.attention", "heads")] == 2
    norms = {"layers.*.ffn_norm": "sum_gradients", "layers.1.ffn_norm": "replicate", "layers.0.ffn_norm": "replicate"}
    exact = place(model, {**ATTENTION, **norms, "layers.*.attention_norm": "replicate"})
    assert exact.styles["layers.1.ffn_norm"] == exact.styles["layers.1.attention_norm"] == "replicate"
    assert place(model, {}).layouts == {} == place(model, {}, loss_parallel=True).styles


def test_patterns_that_are_wrong() -> None:
    model = Llama()
    fails(model, "'layers.*.attention.q'", "matches no module", plan={"layers.*.attention.q": "colwise"})
    fails(model, "did you mean", "'layers.0.attention.wq'", plan={"layers.0.attention.wqq": "colwise"})
    fails(model, "did you mean", "'layers.0.attention.wq'", plan={"layer.*.wq": "colwise"})
    fails(
        model,
        *("'layers.0.attention.wq'", "'layers.*.attention.wq'", "'layers.*.*.wq'", "'colwise'", "'rowwise'"),
        plan={"layers.*.attention.wq": "colwise", "layers.*.*.wq": "rowwise"},
    )
    with pytest.raises(PlanError, match="dict of module path -> style; got list"):
        TensorParallelSharder(["layers.0"])  # type: ignore[arg-type]


def test_sizes_that_do_not_divide() -> None:
    fails(nn.Sequential(nn.Linear(4, 7)), "'0'", "out_features=7", "2 ranks", "'tp'", "pad", plan={"0": "colwise"})
    fails(nn.Sequential(nn.Linear(7, 4)), "'0'", "in_features=7", "2 ranks", "'tp'", plan={"0": "rowwise"})
    fails(nn.Sequential(nn.Linear(7, 4)), "in_features=7", "RowwiseParallel", plan={"0": RowwiseParallel()})
    fails(nn.Sequential(nn.Embedding(7, 4)), "'0'", "num_embeddings=7", "'tp'", plan={"0": "embedding_rowwise"})
    fails(nn.Sequential(nn.Embedding(4, 7)), "'0'", "embedding_dim=7", "'tp'", plan={"0": "colwise"})
    renamed = ShardingEnv.abstract((3,), ("wide",), tensor="wide")
    fails(nn.Sequential(nn.Linear(4, 4)), "3 ranks", "'wide'", env=renamed, plan={"0": "colwise"})


def test_heads_that_do_not_divide() -> None:
    tp4 = ShardingEnv.abstract((4,), ("tp",))
    fails(Llama(kv_heads=2), "'layers.0.attention'", "2", "4", "'tp'", "key/value heads", env=tp4, plan=ATTENTION)
    fails(Llama(kv_heads=2), "'layers.0.attention'", "2", "4", "'tp'", "key/value heads", env=tp4)


def test_mesh_without_one_tensor_axis() -> None:
    fails(Llama(), "1-D mesh", "'tp'", "'tensor'", env=ShardingEnv.abstract((2, 2), ("tp", "tensor")), plan=ATTENTION)
    for env in (ShardingEnv.abstract((2,), ("dp",)), ShardingEnv.abstract((2, 1), ("dp", "tp")), ShardingEnv.single()):
        model = Llama()
        before = fingerprint(model)
        placed = place(model, ATTENTION, env=env)
        placed.apply(model)
        assert placed.layouts == {} and fingerprint(model) == before
    given = {"layers.0.attention.wq.weight": colwise()}
    assert place(Llama(), given=given, env=ShardingEnv.abstract((1,), ("tp",))).layouts == given


def test_a_mesh_that_is_not_here_can_be_planned_but_not_applied() -> None:
    model = Llama()
    placed = place(model, env=SHARD2_TP2)
    with pytest.raises(ShardError, match="mesh that is not here"):
        placed.apply(model)


def test_tied_weights_are_split_alike() -> None:
    for plan, styles in [
        ({"wte": "embedding_rowwise"}, {"wte": "rowwise", "lm_head": "colwise_gather"}),
        ({"lm_head": "colwise"}, {"wte": "rowwise", "lm_head": "colwise_gather"}),
        ({"wte": "embedding_colwise"}, {"wte": "colwise", "lm_head": "rowwise_gather"}),
    ]:
        placed = place(GPT(), plan)
        assert placed.styles == styles
        assert set(placed.layouts) == {"wte.weight"}
    words = ("'wte'", "'lm_head'", "share a weight", "dim 0", "colwise_gather")
    fails(GPT(), *words, plan={"wte": "rowwise", "lm_head": "rowwise"})
    fails(GPT(), *words, plan={"wte": "rowwise", "lm_head": "replicate"})


def test_a_weight_shared_with_what_cannot_be_split() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Bilinear(4, 1, 4)})
    model["b"].bias = model["a"].bias
    model["c"] = nn.Linear(4, 4)
    model["c"].weight = model["a"].weight
    fails(model, "'a'", "'c'", "share a weight", plan={"a": "colwise", "c": "rowwise"})


def test_a_shared_module_is_split_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    model["b"] = model["a"]
    assert place(model, {"b": "rowwise"}).styles == {"a": "rowwise"}
    fails(model, "'a'", "'colwise'", "'rowwise'", plan={"a": "colwise", "b": "rowwise"})


def test_the_head() -> None:
    names = {"tok_embeddings": "embedding_rowwise", "output": "colwise"}
    assert place(Llama(), names).styles["output"] == "colwise_gather"
    assert place(Llama(), names, loss_parallel=True).styles["output"] == "colwise_loss_parallel"
    assert place(Llama(), loss_parallel=True).styles["output"] == "colwise_loss_parallel"
    tower = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    assert place(tower, {"0": "colwise", "2": "rowwise"}).styles == {"0": "colwise", "2": "rowwise"}
    fails(Llama(), "loss_parallel=True", "head", plan=ATTENTION, loss_parallel=True)
    fails(Llama(vocab=63), "63", "'tp'", loss_parallel=True)


def test_own_choice() -> None:
    placed = place(Bert())
    assert placed.layouts["word_embeddings.weight"] == rowwise(dim=0)
    assert placed.layouts["encoder.1.output.dense.bias"] == rowwise()
    assert placed.notes and all(isinstance(note, str) for note in placed.notes)
    assert place(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))).layouts == {}


def test_given_layouts() -> None:
    model = Llama()
    own = place(model, sequence_parallel=True)
    again = place(model, given=dict(own.layouts), sequence_parallel=True)
    assert again.styles == own.styles
    assert place(model, given={"norm.weight": replicate()}).styles == place(model).styles

    some = {
        "layers.1.feed_forward.w1.weight": colwise(),
        "layers.1.feed_forward.w3.weight": colwise(),
        "layers.1.feed_forward.w2.weight": rowwise(),
    }
    placed = place(model, given={**some, "norm.weight": replicate()})
    assert placed.layouts == some
    assert set(placed.styles.values()) == {"colwise", "rowwise"}
    assert place(model, ATTENTION, given=some).layouts == some
    completed = place(model, given=dict(own.layouts))  # without being asked for: the layouts say so
    assert completed.layouts == own.layouts
    assert completed.styles == own.styles
    assert place(GPT(), given={"wte.weight": rowwise(dim=0)}).styles == {"wte": "rowwise", "lm_head": "colwise_gather"}


def test_given_layouts_that_a_module_cannot_take() -> None:
    w1 = "layers.1.feed_forward.w1"
    fails(Llama(), f"'{w1}.weight'", "Linear", "colwise()", given={f"{w1}.weight": colwise(dim=1)})
    fails(Llama(), "'norm'", "RMSNorm", "colwise", given={"norm.weight": colwise()})
    fails(
        Llama(),
        "'tok_embeddings.weight'",
        "Embedding",
        "expected rowwise(0)",
        given={"tok_embeddings.weight": rowwise()},
    )
    fails(GPT(), "'h.0.mlp.0'", "bias", "'h.0.mlp.0.weight'", given={"h.0.mlp.0.bias": colwise()})
    fails(
        GPT(),
        *("'h.0.mlp.0'", "different layouts"),
        given={"h.0.mlp.0.weight": colwise(), "h.0.mlp.0.bias": rowwise()},
    )
    assert not row_wise().is_tensor_parallel


def test_sequence_parallel_needs_names() -> None:
    plan = {**ATTENTION, "layers.*.feed_forward.w1": ColwiseParallel(), "layers.*.feed_forward.w2": RowwiseParallel()}
    fails(Llama(), "'layers.0.feed_forward.w1'", "ColwiseParallel", "name", plan=plan, sequence_parallel=True)
    fails(Llama(), "'norm'", "'gather_input'", "colwise nn.Linear inside", plan={"norm": "gather_input"})


def test_place_reads_meta_and_changes_nothing() -> None:
    with torch.device("meta"):
        model = GPT()
    before, copied = fingerprint(model), copy.deepcopy(model)
    assert place(model, sequence_parallel=True).layouts == place(copied, sequence_parallel=True).layouts
    assert fingerprint(model) == before


def test_lazy_modules_cannot_be_split() -> None:
    model = nn.ModuleDict({"a": nn.LazyLinear(4)})
    fails(model, "'a'", "lazy", plan={"a": "colwise"})


def test_the_own_choice_is_what_it_is_asked_for() -> None:
    model, sharder = Llama(), TensorParallelSharder(sequence_parallel=True)
    own = sharder.place(model, {}, TP2)
    for given in (dict(own.layouts), {**own.layouts, "other": replicate()}):
        assert sharder.place(model, given, TP2) == own
    some = {f"layers.0.feed_forward.{name}.weight": colwise() for name in ("w1", "w3")}
    some["layers.0.feed_forward.w2.weight"] = rowwise()
    assert sharder.place(model, some, TP2).layouts == some


def test_one_look_and_three_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsplit, split, and split with local numbers of heads; whatever the number of blocks, from parts found once."""
    calls: list[str] = []

    def count(module: ModuleType, name: str) -> None:
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: (calls.append(name), call(*args, **kwargs))[1])

    count(local_attributes, "recognise")
    count(local_attributes, "dry_run")
    count(feeds, "dry_run")
    for given in ({}, dict(place(Llama(layers=5)).layouts)):
        calls.clear()
        place(Llama(layers=5), given=given)
        assert sorted(calls) == ["dry_run"] * 3 + ["recognise"]


def test_exact_paths_are_not_matched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Llama(layers=6)
    plan = {path: "colwise" for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    matches: list[tuple[str, str]] = []
    real = dmp_names.fnmatchcase
    monkeypatch.setattr(dmp_names, "fnmatchcase", lambda *a: (matches.append(a), real(*a))[1])
    assert tp_plan.expand(model, plan) == plan
    assert matches == []
    assert len(tp_plan.expand(model, {"layers.*.attention.wq": "colwise"})) == 6
    assert len(matches) == 6 * 4, "paths of another length or with another last word are passed over"
    assert len(tp_plan.expand(model, {"layers.[12].*.w[qk]": "colwise"})) == 4
