"""Weights that hold several in one, query, key and value or a gate and what it gates, split over a tensor axis."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from dmp import (
    DistributedModelParallel,
    PlanError,
    ShardError,
    ShardingEnv,
    ShardingPlan,
    check_cover,
    clip_grad_norm_,
    colwise,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    rowwise,
    save_checkpoint,
    to_unsharded,
)
from planner import ShardingPlanner
from sharders import TensorParallelSharder, default_sharders
from sharders.tensor_parallel.proof.simulated import simulate
from sharders.tensor_parallel.split.split import split
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.test_transformers import MESHES, V, batch, compare, end_of, loss_of

D, H, INNER = 16, 4, 24
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


class Transposed(nn.Module):
    """A Linear with a weight of (in, out), that views its output by a number that it keeps."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.out = out
        self.weight, self.bias = nn.Parameter(torch.randn(width, out) / 4), nn.Parameter(torch.randn(out) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.out)


class Attention(nn.Module):
    """Query, key and value in one, one behind the other; or the three of each head (`by_head`), or with fewer keys."""

    def __init__(self, linear: type[nn.Module], keys: int = H, by_head: bool = False) -> None:
        super().__init__()
        self.num_heads, self.keys, self.head_dim, self.by_head = H, keys, D // H, by_head
        self.sizes = D
        self.qkv, self.proj = linear(D, D + 2 * keys * (D // H)), linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        if self.by_head:
            q, k, v = qkv.view(*x.shape[:2], self.num_heads, 3, self.head_dim).unbind(3)
        else:
            width = self.keys * self.head_dim
            parts = qkv.split(self.sizes, -1) if width == D else qkv.split([D, width, width], -1)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys < H)
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A gate and what it gates in one."""

    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.down = linear(D, 2 * INNER), linear(INNER, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, linear: type[nn.Module], keys: int, by_head: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), Attention(linear, keys, by_head)
        self.norm2, self.mlp = nn.LayerNorm(D), MLP(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, linear: type[nn.Module] = nn.Linear, keys: int = H, by_head: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([Block(linear, keys, by_head) for _ in range(2)])
        self.head = nn.Linear(D, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Queries(nn.Module):
    """An attention whose output is joined elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = H
        self.to_q, self.to_k, self.to_v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Single(nn.Module):
    """One Linear for what an attention and an MLP give, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), Queries()
        self.proj_mlp, self.proj_out = nn.Linear(D, 2 * D), nn.Linear(3 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.proj_out(torch.cat([self.attn(y), F.gelu(self.proj_mlp(y))], -1))


class WithSingles(Model):
    def __init__(self) -> None:
        super().__init__()
        self.singles = nn.ModuleList([Single(), Single()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in [*self.blocks, *self.singles]:
            x = block(x)
        return self.head(x)


LINEARS = {"linear": nn.Linear, "transposed": Transposed}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(LINEARS[kind]).double()


# ---- layouts ----


def test_a_rank_has_its_share_of_each_part() -> None:
    env = ShardingEnv.abstract((2,), ("tp",))
    shards = colwise(parts=3).shards((12, 5), env)
    assert [(s.offsets[0], s.sizes, s.rank) for s in shards] == [
        (4 * part + 2 * rank, (2, 5), rank) for rank in range(2) for part in range(3)
    ]
    check_cover(shards, (12, 5), 2)
    assert colwise(parts=1) == colwise()
    plan = ShardingPlan({"w": colwise(1, parts=2)})
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert str(plan["w"].layout) == "colwise(1, parts=2)"
    with pytest.raises(ShardError, match=r"parts.*does not divide"):
        colwise(parts=3).shards((9, 5), env)
    with pytest.raises(ShardError, match="1 or more"):
        colwise(parts=0)
    with pytest.raises(ShardError, match=r"rowwise.* 1 or more"):
        rowwise(parts=0)


def test_along_a_fully_sharded_axis_the_other_dim_is_split() -> None:
    env = ShardingEnv.abstract((2, 2), ("shard", "tp"))
    shards = colwise(parts=3).shards((12, 4), env)
    assert {s.sizes for s in shards} == {(2, 2)}
    check_cover(shards, (12, 4), 4)
    whole = colwise(parts=3).shards((12,), env)
    assert {s.sizes for s in whole} == {(2,)}
    assert len(whole) == 12
    assert {s.sizes for s in colwise(1, parts=3).shards((4, 12), env)} == {(2, 2)}
    assert {s.sizes for s in rowwise(parts=3).shards((4, 12), env)} == {(2, 2)}
    assert {s.sizes for s in rowwise(parts=3).shards((12,), env)} == {(6,)}


# ---- plans ----


def placed(model: nn.Module, size: int = 2) -> tuple[dict[str, object], str]:
    found = TensorParallelSharder().place(model, {}, ShardingEnv.abstract((size,), ("tp",)))
    styles = {path.removeprefix("blocks.0."): style for path, style in found.styles.items() if "blocks.0" in path}
    return styles, "\n".join(found.notes)


@pytest.mark.parametrize("kind", LINEARS)
def test_what_is_one_behind_the_other_is_split_part_by_part(kind: str) -> None:
    styles, notes = placed(make(kind))
    assert styles == {
        "attn.qkv": "colwise_packed_3",
        "attn.proj": "rowwise",
        "mlp.up": "colwise_packed_2",
        "mlp.down": "rowwise",
    }
    assert "; proved" in notes


class Config:
    def __init__(self) -> None:
        self.num_attention_heads = H


class AttentionOfConfig(Attention):
    """Reads a number of heads from the configuration that the whole model has."""

    def __init__(self, config: Config) -> None:
        super().__init__(nn.Linear)
        del self.num_heads
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.config.num_attention_heads * self.head_dim
        qkv = self.qkv(x)
        parts = qkv[..., :width], qkv[..., width : 2 * width], qkv[..., 2 * width :]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_number_of_heads_in_a_configuration_is_the_attention_s_own_then() -> None:
    model = Model().double()
    model.config = Config()  # type: ignore[assignment]
    for block in model.blocks:
        block.attn = AttentionOfConfig(model.config).double()  # type: ignore[arg-type]
    found = TensorParallelSharder().place(model, {}, ShardingEnv.abstract((2,), ("tp",)))
    assert found.styles["blocks.1.attn.qkv"] == "colwise_packed_3"
    assert found.divided == {(f"blocks.{i}.attn", "config.num_attention_heads"): H // 2 for i in range(2)}
    ids = batch(0, 0)[0]
    whole = model(ids)

    def job(mesh: DeviceMesh) -> torch.Tensor:
        here = copy.deepcopy(model)
        split(here, mesh, found.styles, found.divided)
        assert here.config.num_attention_heads == H  # type: ignore[union-attr]
        assert here.blocks[0].attn.config.num_attention_heads == H // 2  # type: ignore[union-attr]
        assert copy.deepcopy(here.blocks[0].attn.config).num_attention_heads == H  # type: ignore[arg-type, union-attr]
        return here(ids).detach()

    for rank in simulate(2, "tp", job):
        torch.testing.assert_close(rank, whole.detach())


def test_what_lies_head_by_head_is_split_as_one() -> None:
    styles, notes = placed(Model(by_head=True))
    assert (styles["attn.qkv"], styles["mlp.up"]) == ("colwise", "colwise_packed_2")
    assert "; proved" in notes


def test_queries_with_fewer_keys_behind_them_stay_whole() -> None:
    styles, notes = placed(Model(keys=2))
    assert set(styles) == {"mlp.up", "mlp.down"}
    assert "blocks.0.attn (and 1 like it): left whole, because" in notes


def test_heads_that_do_not_divide_stay_whole_and_a_plan_of_them_is_refused() -> None:
    model = make("linear")
    styles, notes = placed(model, 8)
    assert set(styles) == {"mlp.up", "mlp.down"}
    assert "blocks.0.attn (and 1 like it): left whole, its number of heads 4 is not divisible by 8" in notes
    plan = {"blocks.*.attn.qkv": "colwise_packed_3", "blocks.*.attn.proj": "rowwise"}
    with pytest.raises(PlanError, match="number of heads 4 is not divisible by 8"):
        TensorParallelSharder(plan).place(model, {}, ShardingEnv.abstract((8,), ("tp",)))


def test_a_plan_that_takes_it_for_one_is_wrong() -> None:
    plan = {"blocks.*.attn.qkv": "colwise", "blocks.*.attn.proj": "rowwise"}
    with pytest.raises(PlanError, match="a tensor-parallel plan that is wrong"):
        TensorParallelSharder(plan).place(make("linear"), {}, ShardingEnv.abstract((2,), ("tp",)))


def test_what_is_not_proved_is_left_whole() -> None:
    class Unknown(Model):
        def forward(self, *, page: list[str]) -> torch.Tensor:
            return super().forward(torch.tensor([[len(word) for word in page]]))

    model = Unknown()
    for block in model.blocks:
        block.forward = lambda *, page, block=block: Block.forward(block, page)  # nor do blocks run alone
        block.attn.forward = lambda *, page, a=block.attn: Attention.forward(a, page)
        block.mlp.forward = lambda *, page, a=block.mlp: MLP.forward(a, page)
    styles, notes = placed(model)
    assert styles == {}
    assert "blocks.0.attn (and 1 like it): left whole, one weight holds several" in notes


def test_the_planner_counts_a_rank_s_share() -> None:
    def bytes_of(env: ShardingEnv) -> int:
        plan = ShardingPlanner().plan(Model(Transposed), default_sharders(), env)
        (block,) = (b for b in plan.report.dense if b.name == "blocks.*")  # type: ignore[attr-defined]
        return sum(block.rank_bytes.values())

    one, two = (bytes_of(ShardingEnv.abstract((n,), ("tp",))) for n in (1, 2))
    norms_and_sums = 2 * 4 * (4 * D + 2 * D)
    assert two - norms_and_sums == (one - norms_and_sums) // 2


# ---- training ----


def trained_saved_and_loaded(mesh: str, kind: str, source: str | None, target: str | None) -> None:
    """Three steps equal one process; state goes to a folder of any mesh, and comes from it."""
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    oracle = WithSingles().double() if kind == "linear" else make(kind)
    model = DistributedModelParallel(copy.deepcopy(oracle), env)
    if kind == "linear":
        layouts = (model.plan[f"singles.1.{name}.weight"].layout for name in ("attn.to_v", "proj_mlp", "proj_out"))
        assert [str(layout) for layout in layouts] == ["colwise()", "colwise(parts=2)", "rowwise(parts=3)"]
    assert "colwise" in str(model.plan["blocks.0.attn.qkv.weight"])
    assert "parts=3" in str(model.plan["blocks.0.attn.qkv.bias"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (oracle, model)]
    if source is not None:
        load_checkpoint(source, model, optimizers[1])
        oracle.load_state_dict(full_state_dict(model))
        state = full_optimizer_state_dict(model, optimizers[1])["state"]
        for name, p in oracle.named_parameters():
            optimizers[0].state[p] = {key: value.clone() for key, value in state[name].items()}
    for step in range(3):
        batches = [batch(r, step) for r in range(env.data_size)]
        losses = [loss_of(oracle, *b) for b in batches]
        loss = loss_of(model, *batches[env.data_rank])
        torch.testing.assert_close(loss, losses[env.data_rank], atol=1e-10, rtol=1e-10)
        (sum(losses) / env.data_size).backward()  # type: ignore[union-attr]
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in oracle.parameters() if p.grad is not None])
        torch.testing.assert_close(clip_grad_norm_(model, math.inf), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(model, optimizers[1], end_of(oracle, optimizers[0]), 1e-10)
    ids = batch(0, 9)[0]
    torch.testing.assert_close(to_unsharded(model)(ids), model(ids))
    if target is not None:
        save_checkpoint(target, model, optimizers[1])
        _through_torch(model, optimizers[1], f"{target}.dcp")


def _through_torch(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """torch's own checkpoint gives back what was there."""
    before = full_state_dict(model), full_optimizer_state_dict(model, optimizer)["state"]
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
            for value in optimizer.state[p].values():
                value.zero_()
    into = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(into, checkpoint_id=path)
    model.load_state_dict(into["model"])
    optimizer.load_state_dict(into["optimizer"])
    dist.barrier()
    _are_as(before, model, optimizer)
    states: Any = copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = ({}, {}) if dist.get_rank() else states
    set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=options)
    _are_as(before, model, optimizer)


def _are_as(before: tuple[object, object], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    after = full_state_dict(model), full_optimizer_state_dict(model, optimizer)["state"]
    torch.testing.assert_close(after, before, atol=0, rtol=0)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.sampled(2)
def test_trains_as_one_process_and_its_state_goes_to_any_mesh(kind: str, tmp_path: Path) -> None:
    meshes = ["tp4", "fsdp2xtp2", "replicate2xtp2", "tp2"] if kind == "linear" else ["fsdp2xtp2", "tp2"]
    folders = [None, *(str(tmp_path / mesh) for mesh in meshes[:-1]), None]
    for mesh, source, target in zip(meshes, folders[:-1], folders[1:], strict=True):
        run_ranks(math.prod(MESHES[mesh].shape), trained_saved_and_loaded, mesh, kind, source, target)


class Unknown(WithSingles):
    """Nobody can guess its input, and it has blocks of one kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def forward(self, *, page: torch.Tensor) -> torch.Tensor:
        return super().forward(page)


def test_sequence_parallel_does_not_run_what_shares_its_output() -> None:
    """Each rank attended to its slice alone, and where nothing is proved nobody was told."""
    with pytest.raises(PlanError, match=r"'singles.0.proj_mlp', 'singles.0.proj_out'\] are beside .*=False"):
        TensorParallelSharder(sequence_parallel=True).place(Unknown(), {}, ShardingEnv.abstract((2,), ("tp",)))


@pytest.mark.parametrize("kind", LINEARS)
def test_sequence_parallel_is_proved_too(kind: str) -> None:
    sharder = TensorParallelSharder(sequence_parallel=True)
    found = sharder.place(make(kind), {}, ShardingEnv.abstract((2,), ("tp",)))
    wanted = {"attn": "gather_input", "attn.qkv": "colwise_packed_3", "attn.proj": "rowwise_scatter"}
    assert {path: found.styles[f"blocks.0.{path}"] for path in wanted} == wanted
    assert any("; proved" in note for note in found.notes)
