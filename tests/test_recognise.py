"""What is found in a model by structure alone: no names of classes, no values."""

from __future__ import annotations

import torch
from torch import nn

from dmp import ShardingEnv
from sharders import TensorParallelSharder
from sharders.tensor_parallel.structure.find_transformer import recognise
from sharders.tensor_parallel.structure.transformer import Heads
from tests.transformers_zoo import GPT, Bert, Llama


def branches(model: nn.Module, block: int = 0) -> dict[str, tuple[tuple[str, ...], str, int, Heads | None]]:
    return {u.path: (u.up, u.down, u.hidden, u.heads) for u in recognise(model).blocks[block].branches}


def test_llama() -> None:
    found = recognise(Llama())
    assert [b.path for b in found.blocks] == ["layers.0", "layers.1"]
    assert (found.width, found.embedding, found.head) == (32, "tok_embeddings", "output")
    assert branches(Llama()) == {
        "attention": (("attention.wq", "attention.wk", "attention.wv"), "attention.wo", 32, Heads(4, 2, 8)),
        "feed_forward": (("feed_forward.w1", "feed_forward.w3"), "feed_forward.w2", 64, None),
    }


def test_square_matrices_are_told_apart_by_name_and_order() -> None:
    found = branches(Llama(kv_heads=4, hidden=32))
    assert found["attention"][:2] == (("attention.wq", "attention.wk", "attention.wv"), "attention.wo")
    assert found["feed_forward"][:2] == (("feed_forward.w1", "feed_forward.w3"), "feed_forward.w2")


def test_gpt_has_its_mlp_in_a_sequential_and_a_tied_head() -> None:
    found = recognise(GPT())
    assert (found.embedding, found.head) == ("wte", "lm_head")
    assert branches(GPT()) == {
        "attn": (("attn.query", "attn.key", "attn.value"), "attn.proj", 32, Heads(4, 4, 8)),
        "mlp": (("mlp.0",), "mlp.2", 64, None),
    }


def test_bert_is_nested_and_its_classifier_head_is_not_a_block() -> None:
    found = recognise(Bert())
    assert [b.path for b in found.blocks] == ["encoder.0", "encoder.1"]
    assert (found.embedding, found.head) == ("word_embeddings", "decoder")
    queries = ("attention.self.query", "attention.self.key", "attention.self.value")
    assert branches(Bert()) == {
        "attention": (queries, "attention.output.dense", 32, Heads(4, 4, 8)),
        "": (("intermediate.0",), "output.dense", 64, None),
    }


def test_more_positions_than_words_do_not_make_positions_the_vocabulary() -> None:
    assert recognise(GPT(max_len=512, tied=False)).embedding == "wte"


def test_equal_blocks_are_one_structure_and_others_are_not() -> None:
    model = Llama(layers=5)
    model.layers[2].feed_forward.w1 = nn.Linear(32, 64, bias=True)
    model.layers[3].attention.kv_heads = 2  # as it was
    found = recognise(model)
    assert [b.path for b in found.representatives()] == ["layers.0", "layers.2"]
    assert len(found.blocks) == 5


def test_torch_s_attention_and_its_neighbours_are_found() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    found = recognise(model)
    assert branches(model) == {
        "self_attn": (("self_attn",), "self_attn.out_proj", 32, Heads(4, 4, 8)),
        "": (("linear1",), "linear2", 64, None),
    }
    assert found.blocks[0].whole == ()


def test_fused_attention_with_its_number_of_heads_elsewhere_is_seen() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_key_value_heads = 2
            self.qkv_proj, self.o_proj = nn.Linear(32, 64), nn.Linear(32, 32)

    found = recognise(nn.ModuleList([Fused(), Fused()]))
    assert [b.path for b in found.blocks] == ["0", "1"]
    assert found.blocks[0].branches == ()


class Square(nn.Module):
    """Four square Linears in a chain, as an MLP tower has them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))


def test_mlp_towers_are_no_transformer() -> None:
    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(100, 16)
            self.bottom = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
            self.crosses = nn.ModuleList(Square() for _ in range(3))
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in "123")

    assert recognise(Recommender()).blocks == ()


class Attention(nn.Module):
    def __init__(self, **attributes: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0))
        vars(self).update(attributes)


def test_head_size_alone_gives_the_number_of_heads() -> None:
    model = nn.Sequential(Attention(dim_head=4))
    assert branches(model)[""][1:] == ("to_out.0", 16, Heads(4, 4, 4))


def test_an_attention_without_a_number_of_heads_is_whole() -> None:
    found = recognise(nn.ModuleList([Attention()]))
    assert found.blocks[0].branches == ()
    assert "number of heads" in found.blocks[0].whole[0].why


def test_the_number_of_heads_may_be_in_a_configuration() -> None:
    class Config:
        num_attention_heads = 2

    attention = Attention()
    attention.config = Config()
    assert branches(nn.ModuleList([attention]))[""][3] == Heads(2, 2, 8)


def test_parameters_for_each_head_are_split_with_the_attention_or_leave_it_whole() -> None:
    attention = Attention(heads=4)
    attention.bias = nn.Embedding(32, 4)
    (branch,) = recognise(nn.ModuleList([attention])).blocks[0].branches
    assert dict(branch.adapters) == {"bias": "heads_1"}
    attention.mix = nn.Parameter(torch.zeros(3, 5, 4))
    found = recognise(nn.ModuleList([attention])).blocks[0]
    assert found.branches == ()
    assert "'mix'" in found.whole[0].why


def test_blocks_beside_tables_are_found() -> None:
    class Generative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(50, 32), nn.Embedding(90, 32)
            self.tower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
            self.body = Llama().layers

    found = recognise(Generative())
    assert [b.path for b in found.blocks] == ["body.0", "body.1"]
    assert found.embedding is None, "two tables and no head: neither is the vocabulary"


def test_a_block_without_a_list_is_found() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
            self.block = Llama().layers[0]

    assert [b.path for b in recognise(One()).blocks] == ["block"]


def test_blocks_of_a_list_without_attention_are_found_by_their_mlp() -> None:
    model = Llama(layers=2)
    model.layers.append(model.layers[0].feed_forward.__class__(32, 128))
    found = recognise(model)
    assert [b.path for b in found.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert [(u.up, u.down) for u in found.blocks[2].branches] == [(("w1", "w3"), "w2")]


def test_blocks_may_be_in_a_list_for_each_layer() -> None:
    """As x-transformers', of a norm and what it is before; MLPs stayed whole."""
    blocks = [part for layer in Llama(layers=2).layers for part in (layer.attention, layer.feed_forward)]
    layers = nn.ModuleList(nn.ModuleList((nn.LayerNorm(32), block)) for block in blocks)
    found = recognise(nn.ModuleDict({"layers": layers}))
    assert [b.path for b in found.blocks] == ["layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1"]
    assert [(u.up, u.down) for u in found.blocks[1].branches] == [(("w1", "w3"), "w2")]


def test_recognition_reads_no_values() -> None:
    with torch.device("meta"):
        assert recognise(Llama()) == recognise(Llama())


def test_a_configuration_may_refuse_to_answer() -> None:
    """Of a model whose layers differ, Hugging Face's raise where they are asked for the heads of all."""

    class Refuses:
        @property
        def num_heads(self) -> int:
            raise RuntimeError("ask each layer")

    attention = Attention(heads=4)
    attention.config = Refuses()
    (branch,) = recognise(nn.ModuleList([attention])).blocks[0].branches
    assert branch.heads == Heads(4, 4, 4)
    del attention.heads
    (found,) = recognise(nn.ModuleList([attention])).blocks
    assert found.branches == () and "no number of heads" in found.whole[0].why


class LucidAttention(nn.Module):
    """As vit-pytorch's: query, key and value in one, and the output in a Sequential with its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.to_qkv, self.to_out = nn.Linear(32, 96), nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
        return self.to_out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_an_output_may_be_in_a_sequential() -> None:
    mlp = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
    model = nn.Sequential(*(nn.Sequential(LucidAttention(), each) for each in mlp))
    (attention, _) = recognise(model).blocks[0].branches
    assert (attention.up, attention.down, attention.heads) == (("0.to_qkv",), "0.to_out.0", Heads(4, 4, 8))
    placed = TensorParallelSharder().place(model, {}, ShardingEnv.abstract((2,), ("tp",)))
    assert {"0.0.to_qkv.weight", "0.0.to_out.0.weight", "1.1.0.weight", "1.1.2.weight"} <= placed.layouts.keys()
