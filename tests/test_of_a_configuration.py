"""Attentions whose numbers of heads only their configuration has, which all modules of the model hold: litgpt's."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv
from sharders import TensorParallelSharder
from sharders.tensor_parallel.structure.find_transformer import recognise
from sharders.tensor_parallel.structure.transformer import Heads
from tests.ranks import mesh, run_ranks

HEADS, SIZE, VOCAB = 4, 4, 24
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    """Query, key and value one behind the other in one Linear; keys and values are kept where that is asked for."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(WIDTH, (config.n_head + 2 * config.n_query_groups) * SIZE)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.kept: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, length, _ = x.shape
        heads, groups = self.config.n_head, self.config.n_query_groups
        q, k, v = self.qkv(x).split([n * SIZE for n in (heads, groups, groups)], dim=-1)
        q, k, v = (t.view(b, length, n, SIZE).transpose(1, 2) for t, n in ((q, heads), (k, groups), (v, groups)))
        if self.kept is not None:
            self.kept = [torch.cat(pair, 2) for pair in zip(self.kept, (k, v), strict=True)]
            k, v = self.kept
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return self.proj(out.transpose(1, 2).reshape(b, length, heads * SIZE))


class GatedMLP(nn.Module):
    """Has the shapes of grouped queries: a gate and what it gates in one."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.fc, self.proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.norm_1, self.attn = nn.LayerNorm(WIDTH), Attention(config)
        self.norm_2, self.mlp = nn.LayerNorm(WIDTH), GatedMLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Configured(nn.Module):
    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_head=HEADS, n_query_groups=groups)
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def keep(self, batch: int) -> None:
        for block in self.blocks:
            empty = torch.empty(batch, block.attn.config.n_query_groups, 0, SIZE, dtype=self.head.weight.dtype)
            block.attn.kept = [empty, empty]


def test_they_are_found_and_an_mlp_is_none() -> None:
    for groups in (HEADS, 2):
        found = {b.path: (b.heads, b.parts) for b in recognise(Configured(groups)).blocks[0].branches}
        parts = (3, 1) if groups == HEADS else (1,)
        assert found == {"attn": (Heads(HEADS, groups, SIZE), parts), "mlp": (None, (2, 1))}


def test_grouped_ones_stay_whole_beside_mlps_that_are_split() -> None:
    placed = TensorParallelSharder().place(Configured(2), {}, ShardingEnv.abstract((2,), ("tp",)))
    assert {name.split(".")[2] for name in placed.layouts if name.startswith("blocks")} == {"mlp"}
    (said,) = [note for note in placed.notes if "blocks.0.attn" in note]
    assert "left whole" in said


def check_training_and_decoding() -> None:
    torch.manual_seed(0)
    plain, module = Configured().double(), Configured().double()
    module.load_state_dict(plain.state_dict())
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    assert all(b.attn.qkv.weight.to_local().shape[0] == 3 * WIDTH // 2 for b in module.blocks)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for _ in range(3):
        ids = torch.randint(VOCAB, (4, 7))
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        expected = plain(ids)
        torch.testing.assert_close(model(ids), expected)
        model.keep(len(ids))
        first = model(ids[:, :3])
        torch.testing.assert_close(torch.cat([first, *(model(ids[:, t : t + 1]) for t in range(3, 7))], 1), expected)


def test_training_and_decoding_equal_one_process() -> None:
    run_ranks(2, check_training_and_decoding)
