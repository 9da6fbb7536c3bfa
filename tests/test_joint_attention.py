"""An attention to two sequences at once, as diffusion transformers have: its other Linears have its heads, so it is
split with them where a proof reaches these, and is whole elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv
from sharders import TensorParallelSharder
from sharders.tensor_parallel.structure.find_transformer import recognise
from tests.ranks import mesh, run_ranks
from tests.transformers_zoo import LlamaBlock


class JointAttention(nn.Module):
    """Of (B, T, dim), and of a context (B, S, dim) where there is one."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.add_q, self.add_k, self.add_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out, self.to_add_out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        length = x.shape[1]
        if context is not None:
            pairs = ((q, self.add_q), (k, self.add_k), (v, self.add_v))
            q, k, v = (torch.cat([t, add(context)], 1) for t, add in pairs)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.to_out(out[:, :length]), None if context is None else self.to_add_out(out[:, length:])


class JointBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = JointAttention(dim, heads)
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended, of_context = self.attn(x, context)
        x = x + attended
        return x + self.fc2(F.relu(self.fc1(self.norm(x)))), context + of_context


class Joint(nn.Module):
    """Two arguments that nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(JointBlock(16, 4) for _ in range(2))

    def forward(self, picture: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            picture, context = block(picture, context)
        return picture + context.mean()


def check_training() -> None:
    torch.manual_seed(0)
    plain = Joint()
    expected = plain(x := torch.randn(2, 6, 16), context := torch.randn(2, 3, 16))
    expected.square().mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    plain.zero_grad()
    model = DistributedModelParallel(plain, ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    out = model(x, context)
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), gradients[name], msg=lambda m, name=name: f"{name}: {m}")


def test_training_equals_one_process() -> None:
    run_ranks(2, check_training)


def test_it_is_split_with_its_other_linears() -> None:
    placed = TensorParallelSharder().place(Joint(), {}, ShardingEnv.abstract((2,), ("tp",)))
    every = {name for name, _ in Joint().named_parameters() if ".norm." not in name}
    assert placed.layouts.keys() == every


class UnseenAttention(JointAttention):
    """Nobody guesses the name of its second input: run alone, it attends to one sequence."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(x, other)


class UnseenBlock(JointBlock):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.attn = UnseenAttention(dim, heads)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, other)


class UnseenModel(Joint):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UnseenBlock(16, 4) for _ in range(2))

    def forward(self, picture: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(picture, other)


def test_it_stays_whole_where_nothing_is_seen_of_them_and_that_is_said() -> None:
    placed = TensorParallelSharder().place(UnseenModel(), {}, ShardingEnv.abstract((2,), ("tp",)))
    assert sorted({name.split(".")[2] for name in placed.layouts}) == ["fc1", "fc2"]
    assert any("attn" in note and "beside query, key and value" in note for note in placed.notes)


def test_a_block_that_is_its_own_attention_may_hold_its_mlp() -> None:
    """Its other Linears are no part of the attention."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = LlamaBlock(16, 4, 4, 32)
            self.heads = 4
            self.q_proj, self.k_proj, self.v_proj = inner.attention.wq, inner.attention.wk, inner.attention.wv
            self.o_proj, self.fc1, self.fc2 = inner.attention.wo, nn.Linear(16, 32), nn.Linear(32, 16)

    (block, _) = recognise(nn.ModuleList([nn.ModuleList([Flat(), Flat()])])).blocks
    assert [(u.up, u.down) for u in block.branches] == [
        (("q_proj", "k_proj", "v_proj"), "o_proj"),
        (("fc1",), "fc2"),
    ]
