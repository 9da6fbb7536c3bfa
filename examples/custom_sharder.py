"""A module that the framework does not know, sharded: experts split over the ranks, tokens sent to their experts.

`Experts` multiplies every token by the matrix of its expert. What follows it is all that running it on a mesh takes:
`ExpertsSharder` says what may be cut and how, `ShardedExperts` stands in its place. `register_sharder` makes it known
(see `main`), or an entry point does (see the folder `plugin/`).

    python examples/custom_sharder.py                              # two processes
    python examples/custom_sharder.py 1                            # one
    torchrun --nproc_per_node=4 examples/custom_sharder.py

Letters in names: N tokens of this rank, I and O features in and out, E experts in all.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    ChunkedTensor,
    DistributedModelParallel,
    ParameterInfo,
    full_state_dict,
    load_checkpoint,
    register_sharder,
    row_wise,
    save_checkpoint,
    table_wise,
)


class Experts(nn.Module):
    """One matrix for each expert: tokens (N, I) and their experts (N,) give (N, O). Knows nothing of processes."""

    def __init__(self, num_experts, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, tokens_NI, expert_N):
        return torch.bmm(tokens_NI.unsqueeze(1), self.weight[expert_N]).squeeze(1)


# ---- the sharder ----


class ExpertsSharder:
    """Shards `Experts`: whole experts, in blocks over the ranks (`row_wise`) or all on one (`table_wise`)."""

    module_type = Experts

    def parameters(self, module):
        return {"weight": ParameterInfo(tuple(module.weight.shape), module.weight.dtype, kind="experts")}

    def layouts(self, info, env):
        return [row_wise(), table_wise(0)]

    def shard(self, module, plan, env, device):
        return ShardedExperts(module, plan["weight"].layout.shards(module.weight.shape, env), env, device)


class ShardedExperts(nn.Module):
    """`Experts` whose `weight` has this rank's experts only. Experts are counted in the order of the ranks they are on.

    Forward is four exchanges: how many tokens go where, their experts, the tokens, the results; backward is two.
    """

    def __init__(self, original, shards, env, device):
        super().__init__()
        self._env, self._shape = env, tuple(original.weight.shape)
        shards = sorted(shards, key=lambda s: s.rank)
        counts = [sum(s.sizes[0] for s in shards if s.rank == rank) for rank in range(env.table_size)]
        experts = torch.cat([torch.arange(s.offsets[0], s.offsets[0] + s.sizes[0]) for s in shards])
        self._place_E = experts.argsort()
        self._rank_E = torch.arange(env.table_size).repeat_interleave(torch.tensor(counts))  # by place, not by expert
        self._first = sum(counts[: env.table_rank])
        self._mine = [s for s in shards if s.rank == env.table_rank]
        values = original.weight.detach()[experts[self._first : self._first + counts[env.table_rank]]]
        values = torch.empty_like(values, device=device) if values.is_meta else values.to(device)
        self.weight = nn.Parameter(values, requires_grad=original.weight.requires_grad)
        self._groups()

    def _groups(self):
        """Who has the other experts, and who has copies of these; the first call is collective."""
        return self._env.table_group, self._env.group("replicate")

    def forward(self, tokens_NI, expert_N):
        group, _ = self._groups()
        place_N = self._place_E.to(expert_N.device)[expert_N]
        by_place = place_N.argsort()
        sends = torch.bincount(self._rank_E.to(expert_N.device)[place_N], minlength=self._env.table_size)
        receives = Exchange.apply(sends, None, None, group).tolist()
        sends = sends.tolist()
        slots = Exchange.apply(place_N[by_place], sends, receives, group) - self._first
        tokens = Exchange.apply(tokens_NI[by_place], sends, receives, group)
        weight = MeanGradient.apply(self.weight, self)
        results = torch.bmm(tokens.unsqueeze(1), weight[slots]).squeeze(1)
        return Exchange.apply(results, receives, sends, group)[by_place.argsort()]

    def chunked_state(self):
        """For state dicts and checkpoints: this rank's pieces as views, and where they lie in the whole."""
        pieces = self.weight.detach().split([s.sizes[0] for s in self._mine]) if self._mine else []
        return {"weight": ChunkedTensor(self._shape, pieces, [s.offsets for s in self._mine], self.weight.dtype)}

    def unsharded(self):
        with torch.device("meta"):
            return Experts(*self._shape).to(self.weight.dtype)


class Exchange(torch.autograd.Function):
    """Rows to their ranks: the first `sends[0]` to rank 0, and so on. Backward sends the gradients back."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.back = receives, sends, group
        if group is None:
            return rows.clone()
        received = rows.new_empty((len(rows) if receives is None else sum(receives), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.back), None, None, None


class MeanGradient(torch.autograd.Function):
    """Does nothing forward. Backward makes a sum over this copy's ranks the mean over all ranks."""

    @staticmethod
    def forward(ctx, weight, module):
        ctx.module = module
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        _, copies = ctx.module._groups()
        gradient = gradient / ctx.module._env.size
        if copies is not None:
            dist.all_reduce(gradient, group=copies)
        return gradient, None


# ---- the proof ----


class Mixture(nn.Module):
    """A layer of experts between two dense ones; a gate picks each token's expert."""

    def __init__(self, num_experts=6, features=8):
        super().__init__()
        self.gate = nn.Linear(features, num_experts)
        self.experts = Experts(num_experts, features, 2 * features)
        self.head = nn.Linear(2 * features, 1)

    def forward(self, tokens):
        share, expert = self.gate(tokens).softmax(-1).max(-1)
        return self.head(torch.relu(self.experts(tokens, expert) * share.unsqueeze(-1)))


def main(steps=20, batch=64):
    """Train on every rank, beside one process on the whole batch, and show that they are the same."""
    torch.set_default_dtype(torch.float64)  # so that no rounding sends a token to another expert
    torch.manual_seed(0)
    register_sharder(ExpertsSharder())
    plain = Mixture()
    model = DistributedModelParallel(copy.deepcopy(plain))  # no plan, no sharders: planned, and found
    rank, size = model.env.rank, model.env.size
    own = slice(rank * batch, (rank + 1) * batch)
    say = print if rank == 0 else lambda *_: None
    say(f"{size} processes; the planner's plan:\n{model.plan}")

    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(steps):
        tokens = torch.randn(size * batch, 8)  # of all ranks; each takes its own
        target = tokens.prod(-1, keepdim=True).sign()
        got, wanted = model(tokens[own]), plain(tokens)
        check("outputs", got, wanted[own])
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(got, target[own]).backward()
        nn.functional.mse_loss(wanted, target).backward()
        check("gradients of the gate", model.module.gate.weight.grad, plain.gate.weight.grad)
        held = [e for s in model.module.experts._mine for e in range(s.offsets[0], s.offsets[0] + s.sizes[0])]
        check("gradients of the experts", model.module.experts.weight.grad, plain.experts.weight.grad[held])
        for optimizer in optimizers:
            optimizer.step()
    for name, values in full_state_dict(model).items():
        check(name, values, plain.state_dict()[name])
    say(f"{steps} steps equal one process on the whole batch: outputs, gradients, weights")

    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        if size > 1:
            dist.broadcast_object_list(paths, src=0)
        save_checkpoint(f"{paths[0]}/checkpoint", model)
        other = DistributedModelParallel(Mixture(), plan={"experts.weight": table_wise(size - 1)})
        load_checkpoint(f"{paths[0]}/checkpoint", other)
        check("outputs after loading", other(tokens[own]), plain(tokens)[own])
        if size > 1:
            dist.barrier()
    say(f"a checkpoint of it, loaded with every expert on rank {size - 1}, gives the same outputs")


def check(what, got, expected):
    """Raise unless the two are the same but for rounding."""
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what} differ: {text}")


def run(rank, size, store):
    """`main` as one of `size` processes that meet in the file `store`; alone, without a process group."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    main()
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        main()
        dist.destroy_process_group()
    else:
        size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, (size, f"{folder}/store"), nprocs=size)
