"""Derived tensor-parallel plans: which styles, which attributes, what is refused, and that nothing is changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import PlanError
from sharders.tensor_parallel.auto_plan import Choice, check_heads, derive
from sharders.tensor_parallel.head_counts import ModelRuns
from sharders.tensor_parallel.sequence import sequence_styles
from tests.transformers_zoo import GPT, Bert, BertSelfAttention, Llama, LlamaBlock, LlamaPositionsFirst


def of_block(styles: dict[str, str], block: str) -> dict[str, str]:
    return {p[len(block) + 1 :]: s for p, s in styles.items() if p.startswith(block + ".")}


def with_sequence(model: nn.Module, styles: Any, **options: bool) -> dict[str, str]:
    """A plan of splits, completed for sequence parallelism."""
    runs = ModelRuns(model, 2, "tp")
    return sequence_styles(runs, styles, next(runs.divisions(styles)), **options)[0]


def is_verified(found: Choice) -> bool:
    return any(n.startswith("verified by a dry run") for n in found.notes)


LLAMA = {
    "attention.wq": "colwise",
    "attention.wk": "colwise",
    "attention.wv": "colwise",
    "attention.wo": "rowwise",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}


def test_llama() -> None:
    found = derive(ModelRuns(Llama(), 2, "tp"))
    blocks = {f"layers.{i}.{n}": s for i in range(2) for n, s in LLAMA.items()}
    assert found.styles == {**blocks, "tok_embeddings": "rowwise", "output": "colwise_gather"}
    heads = {(f"layers.{i}.attention", n): v for i in range(2) for n, v in (("heads", 2), ("kv_heads", 1))}
    assert found.divided == heads
    assert is_verified(found)


def test_gpt_divides_heads_though_the_shapes_outside_do_not_ask_for_it() -> None:
    found = derive(ModelRuns(GPT(), 2, "tp"))
    assert found.divided == {("h.0.attn", "n_head"): 2, ("h.1.attn", "n_head"): 2}
    assert of_block(found.styles, "h.1") == {
        "attn.query": "colwise",
        "attn.key": "colwise",
        "attn.value": "colwise",
        "attn.proj": "rowwise",
        "mlp.0": "colwise",
        "mlp.2": "rowwise",
    }
    assert (found.styles["wte"], found.styles["lm_head"]) == ("rowwise", "colwise_gather")
    assert is_verified(found)


def test_bert_divides_the_joint_width_of_heads_too() -> None:
    found = derive(ModelRuns(Bert(layers=1), 4, "tp"))
    path = "encoder.0.attention.self"
    assert found.divided == {(path, "num_attention_heads"): 1, (path, "all_head_size"): 8}
    assert {p: s for p, s in found.styles.items() if "encoder" not in p} == {
        "word_embeddings": "rowwise",
        "decoder": "colwise_gather",
    }
    assert is_verified(found)


def test_eighty_blocks_on_meta_are_one_decision() -> None:
    with torch.device("meta"):
        model = Llama(128256, 8192, 80, 64, 8, 28672)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    forward, LlamaBlock.forward = LlamaBlock.forward, lambda *a: (count(), forward(*a))[1]
    try:
        found = derive(ModelRuns(model, 8, "tp"), sequence_parallel=True)
    finally:
        LlamaBlock.forward = forward
    assert calls < 10, "one block of the eighty runs, once in each dry run"
    assert {len(of_block(found.styles, f"layers.{i}")) for i in range(80)} == {len(LLAMA) + 4}
    assert len(found.divided) == 160
    assert is_verified(found)


def test_blocks_of_several_structures_each_get_their_own_numbers() -> None:
    model = Llama(layers=3)
    model.layers[1] = LlamaBlock(32, 8, 4, 128)
    model.layers[1].attention.head_dim = 4
    model.layers[1].forward = lambda x, positions: x  # its heads are of another size than the rotary table
    found = derive(ModelRuns(model, 2, "tp"))
    assert {v for (p, _), v in found.divided.items() if p.startswith("layers.1")} == {4, 2}
    assert {v for (p, _), v in found.divided.items() if p.startswith("layers.2")} == {2, 1}


@pytest.mark.parametrize("make", [Llama, GPT, Bert])
def test_the_model_is_as_before(make: Callable[[], nn.Module]) -> None:
    model = make().train()
    model.requires_grad_()
    calls: list[object] = []
    model.register_forward_hook(lambda *a: calls.append(a))
    before = copy.deepcopy(model.state_dict())
    attributes = {p: {k: v for k, v in vars(m).items() if k[0] != "_"} for p, m in model.named_modules()}
    parameters = {n: id(p) for n, p in model.named_parameters()}
    states = torch.get_rng_state(), random.getstate()
    derive(ModelRuns(model, 2, "tp"), sequence_parallel=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert parameters == {n: id(p) for n, p in model.named_parameters()}
    assert attributes == {p: {k: v for k, v in vars(m).items() if k[0] != "_"} for p, m in model.named_modules()}
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert not calls, "hooks of the model's own do not run"


def test_transformer_encoder() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    found = derive(ModelRuns(model, 2, "tp"))
    mlps = {f"layers.{i}.linear{n}": s for i in "01" for n, s in (("1", "colwise"), ("2", "rowwise"))}
    attentions = {f"layers.{i}.self_attn": "colwise_packed_3" for i in "01"}
    outputs = {f"layers.{i}.self_attn.out_proj": "rowwise" for i in "01"}
    assert found.styles == {**mlps, **attentions, **outputs}
    assert found.divided == {}
    assert is_verified(found)


def test_no_transformer_no_plan() -> None:
    found = derive(
        ModelRuns(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), 2, "tp"), sequence_parallel=True
    )
    assert (found.styles, found.divided) == ({}, {})
    assert "no transformer blocks" in found.notes[0]


def test_an_attention_of_one_head_is_whole() -> None:
    """As that in the middle of an autoencoder of images: no axis divides it."""
    found = derive(ModelRuns(Llama(heads=1, kv_heads=1), 2, "tp"))
    assert not any("attention" in path for path in found.styles) and "layers.1.feed_forward.w2" in found.styles
    assert any("layers.0.attention" in note and "number of heads 1 is not" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "size", "words"),
    [
        (Llama(heads=4, kv_heads=4), 8, ("'layers.0.attention'", "number of heads 4")),
        (Llama(heads=4, kv_heads=2), 4, ("'layers.0.attention'", "key/value heads 2")),
        (GPT(heads=4, hidden=66), 4, ("'h.0.mlp'", "hidden size 66")),
    ],
)
def test_what_does_not_divide_is_named(model: nn.Module, size: int, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        derive(ModelRuns(model, size, "tensor"))
    for word in (*words, f"not divisible by {size}", "axis 'tensor'", "TensorParallelSharder({"):
        assert word in str(caught.value)


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    found = derive(ModelRuns(GPT(vocab=65), 2, "tp"))
    assert "wte" not in found.styles and "lm_head" not in found.styles
    assert any("vocabulary 65" in n for n in found.notes)
    with pytest.raises(PlanError, match="vocabulary 65 is not divisible by 2"):
        derive(ModelRuns(GPT(vocab=65), 2, "tp"), loss_parallel=True)


def test_loss_parallel_needs_a_head() -> None:
    assert derive(ModelRuns(Llama(), 2, "tp"), loss_parallel=True).styles["output"] == "colwise_loss_parallel"
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    with pytest.raises(PlanError, match="loss_parallel needs a head"):
        derive(ModelRuns(encoder, 2, "tp"), loss_parallel=True)


class Asks(nn.Module):
    """Looks at values, which meta tensors have none of."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.sum().item() >= 0
        return self.body(ids)


def test_a_model_that_looks_at_values_is_proved_without_a_dry_run() -> None:
    found, known = derive(ModelRuns(Asks(Llama()), 2, "tp")), derive(ModelRuns(Llama(), 2, "tp"))
    assert found.styles == {f"body.{p}": s for p, s in known.styles.items()}
    assert found.divided == {(f"body.{p}", a): v for (p, a), v in known.divided.items()}
    assert found.notes[-1].startswith("proved"), "it runs with values"
    bert = derive(ModelRuns(Asks(Bert()), 2, "tp"), sequence_parallel=True)
    path = "body.encoder.0.attention.self"
    assert bert.divided[path, "num_attention_heads"] == 2
    assert bert.divided[path, "all_head_size"] == 16


def test_without_a_dry_run_sequence_parallel_goes_by_structure() -> None:
    for make in (Llama, GPT, Bert):
        found = derive(ModelRuns(Asks(make()), 2, "tp"), sequence_parallel=True)
        known = derive(ModelRuns(make(), 2, "tp"), sequence_parallel=True)
        assert found.styles == {f"body.{p}": s for p, s in known.styles.items()}


class Batched(nn.Module):
    """Takes what nobody can guess."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.body(batch["ids"])


def test_blocks_are_run_alone_where_the_model_cannot() -> None:
    found = derive(ModelRuns(Batched(GPT()), 2, "tp"))
    assert found.divided == {("body.h.0.attn", "n_head"): 2, ("body.h.1.attn", "n_head"): 2}
    assert any(n.startswith("body.h.0: verified by a dry run with hidden states") for n in found.notes)
    assert any(n.startswith("not proved outside the blocks") for n in found.notes)


def test_what_does_not_run_goes_by_its_source_and_is_said_not_to_be_proved() -> None:
    found, known = derive(ModelRuns(Batched(Llama()), 2, "tp")), derive(ModelRuns(Llama(), 2, "tp"))
    assert found.styles == {f"body.{p}": s for p, s in known.styles.items()}
    assert found.divided == {(f"body.{p}", a): v for (p, a), v in known.divided.items()}
    assert any(n.startswith("not proved: ") for n in found.notes)


class JoinsByShape(BertSelfAttention):
    """As the first BERT of PyTorch, and what was made of it since."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._split(self.value(x)).transpose(1, 2).contiguous()
        shape = out.size()[:-2] + (self.all_head_size,)
        return out.view(*shape)


def test_heads_that_are_joined_by_a_shape_are_seen_in_the_source() -> None:
    """The view of a part was to have the width of the whole."""
    model = Bert(layers=1)
    model.encoder[0].attention.self = JoinsByShape(32, 4)  # type: ignore[union-attr]
    runs = ModelRuns(Batched(model), 2, "tp")
    path = "body.encoder.0.attention.self"
    assert runs.divide_by_source(derive(runs).styles) == {(path, "num_attention_heads"): 2, (path, "all_head_size"): 16}


def test_blocks_alone_get_hidden_states_of_their_dtype() -> None:
    found = derive(ModelRuns(Batched(GPT().bfloat16()), 2, "tp"))
    assert any(n.startswith("body.h.0: verified") for n in found.notes)


class TiedByFunction(nn.Module):
    """Its logits are products with the embedding's weight, without a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()
        self.gpt.lm_head = nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.gpt(ids), self.gpt.wte.weight)


@pytest.mark.parametrize("make", [TiedByFunction, lambda: Batched(TiedByFunction())])
def test_an_embedding_that_is_used_as_a_head_stays_whole(make: Callable[[], nn.Module]) -> None:
    found = derive(ModelRuns(make(), 2, "tp"))
    assert not [p for p in found.styles if p.endswith("wte")]
    assert len(found.styles) == 12
    assert any("wte: left whole" in n for n in found.notes)


def test_an_mlp_that_normalises_its_hidden_units_stays_whole() -> None:
    model = GPT(layers=1)
    model.h[0].mlp[1] = nn.Softmax(-1)
    found = derive(ModelRuns(model, 2, "tp"))
    assert "h.0.mlp.0" not in found.styles and found.styles["h.0.attn.proj"] == "rowwise"
    assert any("h.0.mlp: left whole" in n for n in found.notes)


def test_the_default_device_is_not_the_proofs() -> None:
    """Under `torch.device("meta")` a mesh of simulated ranks had no numbers; its axis is not met elsewhere."""
    with torch.device("meta"):
        found = derive(ModelRuns(Llama().to_empty(device="cpu"), 2, "of_default_device"))
    assert any("proved: outputs" in n for n in found.notes), found.notes


SEQUENCE = {
    Llama: {
        "layers.0": "split_sequence",
        "layers.0.attention_norm": "sequence",
        "layers.0.attention": "gather_input",
        "layers.0.attention.wo": "rowwise_scatter",
        "layers.0.ffn_norm": "sequence",
        "layers.0.feed_forward": "gather_input",
        "layers.0.feed_forward.w2": "rowwise_scatter",
        "norm": "gather_sequence",
    },
    GPT: {
        "h.0": "split_sequence",
        "h.0.ln_1": "sequence",
        "h.0.attn": "gather_input",
        "h.0.attn.proj": "rowwise_scatter",
        "h.0.ln_2": "sequence",
        "h.0.mlp": "gather_input",
        "h.0.mlp.2": "rowwise_scatter",
        "ln_f": "gather_sequence",
    },
    Bert: {
        "encoder.0": "split_sequence",
        "encoder.0.attention.self": "gather_input",
        "encoder.0.attention.output.dense": "rowwise_scatter",
        "encoder.0.attention.output.norm": "sequence",
        "encoder.0.intermediate": "gather_input",
        "encoder.0.output.dense": "rowwise_scatter",
        "encoder.0.output.norm": "sequence",
        "encoder.1": "gather_sequence",
    },
}


@pytest.mark.parametrize("make", SEQUENCE)
def test_sequence_parallel(make: Callable[[], nn.Module]) -> None:
    plain, found = derive(ModelRuns(make(), 2, "tp")), derive(ModelRuns(make(), 2, "tp"), sequence_parallel=True)
    changed = {p: s for p, s in found.styles.items() if plain.styles.get(p) != s}
    first = SEQUENCE[make]
    assert {p: s for p, s in changed.items() if p in first} == first
    stack = next(iter(first)).removesuffix(".0")
    later = {p.replace(".0.", ".1.", 1): s for p, s in first.items() if p.startswith(f"{stack}.0.")}
    assert {p: s for p, s in changed.items() if p not in first} == later
    assert any(n.startswith("sequence parallel: verified") for n in found.notes)
    assert found.divided == plain.divided
    assert with_sequence(make(), plain.styles) == found.styles


def test_the_hidden_state_may_be_any_argument() -> None:
    found = derive(ModelRuns(LlamaPositionsFirst(), 2, "tp"), sequence_parallel=True)
    assert found.styles["layers.0"] == "split_sequence"
    assert any(n.startswith("sequence parallel: verified") for n in found.notes)


def test_sequence_parallel_with_loss_parallel_changes_the_head_alone() -> None:
    model, styles = Llama(), derive(ModelRuns(Llama(), 2, "tp")).styles
    whole, split = (with_sequence(model, styles, loss_parallel=b) for b in (False, True))
    assert {p for p in whole if whole[p] != split[p]} == {"output"}
    assert split["output"] == "colwise_loss_parallel"


def test_sequence_parallel_refuses_what_it_cannot_slice() -> None:
    fused = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    with pytest.raises(PlanError, match=r"layers\.0.*sequence_parallel=False"):
        derive(ModelRuns(fused, 2, "tp"), sequence_parallel=True)
    model = Llama()
    model.layers[1].ffn_norm = nn.Sequential(nn.Conv1d(32, 32, 1))
    with pytest.raises(PlanError, match=r"'layers\.1\.ffn_norm\.0' \(Conv1d\)"):
        derive(ModelRuns(Asks(model).body, 2, "tp"), sequence_parallel=True)
    mlps = {p: s for p, s in derive(ModelRuns(GPT(), 2, "tp")).styles.items() if "mlp" in p}
    with pytest.raises(PlanError, match=r"'h\.0\.attn\.query' \(Linear\)"):
        with_sequence(GPT(), mlps)
    with pytest.raises(PlanError, match="one stack"):
        with_sequence(nn.Linear(2, 2), {})
    with pytest.raises(PlanError, match="second block or a final norm"):
        derive(ModelRuns(Bert(layers=1), 2, "tp"), sequence_parallel=True)


def test_sequence_parallel_refuses_linears_directly_in_a_block() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = GPT().h[0].attn, nn.LayerNorm(32)
            self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.fc2(self.fc1(self.norm(x + self.attn(x))).relu())

    model = nn.Sequential(Direct(), Direct())
    assert derive(ModelRuns(model, 2, "tp")).styles["1.fc2"] == "rowwise"
    with pytest.raises(PlanError, match=r"\['0\.fc1'\] lie directly in block '0'"):
        derive(ModelRuns(model, 2, "tp"), sequence_parallel=True)


def test_check_heads_is_for_any_plan() -> None:
    model = Llama()
    styles = derive(ModelRuns(model, 2, "tp")).styles
    check_heads(ModelRuns(model, 2, "tp"), styles)
    check_heads(ModelRuns(model, 4, "tp"), {p: s for p, s in styles.items() if "attention" not in p})
    with pytest.raises(PlanError, match=r"'layers\.0\.attention': number of key/value heads 2 .* axis 'tp'"):
        check_heads(ModelRuns(model, 4, "tp"), styles)


@pytest.mark.parametrize("make", [Llama, GPT, Bert])
def test_divided_attributes_of_a_given_plan(make: Callable[[], nn.Module]) -> None:
    found = derive(ModelRuns(make(), 2, "tp"))
    assert next(ModelRuns(make(), 2, "tp").divisions(found.styles)) == found.divided
    mlps = {p: s for p, s in found.styles.items() if not any(n in p for n in ("attn", "attention"))}
    assert next(ModelRuns(make(), 2, "tp").divisions(mlps)) == {}


def test_tables_of_torchrec_are_not_run() -> None:
    from torchrec import EmbeddingCollection, EmbeddingConfig

    class Generative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingConfig(name="t", embedding_dim=32, num_embeddings=100, feature_names=["f"])
            self.tables = EmbeddingCollection(device=torch.device("meta"), tables=[config])
            self.h = GPT().h

    found = derive(ModelRuns(Generative(), 2, "tp"))
    assert len(found.styles) == 12
    assert found.divided == {("h.0.attn", "n_head"): 2, ("h.1.attn", "n_head"): 2}
    assert any("jagged" in n for n in found.notes)
