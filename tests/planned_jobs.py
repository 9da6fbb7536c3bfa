"""Plans that the planner makes of drawn tables, run on real ranks beside the unsharded module; runs on every rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import dmp
from dmp import DistributedModelParallel, PlanError, Shard, ShardingEnv, ShardingPlan
from planner import Constraint, ShardingPlanner, Topology
from sharders import default_sharders
from tests.bench.planner_cases import Random, Table
from tests.equality import Taken, compare_state, env_of
from tests.oracle import LR, Oracle, attach
from tests.results import is_empty, loss_of, same_result

NAMES = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid", "data_parallel")


def drawn_tables(seed: int) -> tuple[Table, ...]:
    """From one row to some hundred, dims that are no multiple of anything among them."""
    return Random(seed, 10, (4, 8, 20, 36, 64, 100, 132), rows=(1, 500), most_pooling=4).tables()


def module_of(tables: Sequence[Table], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=[f"f{i}_{k}" for k in range(len(t.pooling))],
        )
        for i, t in enumerate(tables)
    ]
    return EmbeddingBagCollection(tables=configs)


def batch_of(tables: Sequence[Table], rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    """Some bags are empty, some ranks have fewer samples."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    keys = [(f"f{i}_{k}", t.rows) for i, t in enumerate(tables) for k in range(len(t.pooling))]
    size = (5, 3, 4, 2)[(rank + step) % 4]
    lengths = torch.randint(0, 4, (len(keys), size), generator=rng)
    ids = [torch.randint(0, rows, (int(n.sum()),), generator=rng) for (_, rows), n in zip(keys, lengths, strict=True)]
    return (KeyedJaggedTensor([key for key, _ in keys], torch.cat(ids), lengths=lengths.flatten()),)


def planned(module: nn.Module, tables: Sequence[Table], env: ShardingEnv, seed: int) -> ShardingPlan:
    """A plan under constraints that are drawn: of layouts, ranks, widths, and of little memory; pins among them."""
    rng, topology = random.Random(seed), None
    if rng.random() < 0.5:
        weights = 4 * sum(t.rows * t.dim for t in tables)
        topology = Topology(rng.uniform(3, 12) * weights / env.table_size + 1e5, 1e11, 1e12, 1e9, 0.0)
    for attempt in range(40):
        constraints: dict[str, Constraint] = {}
        for i, table in enumerate(tables):
            only = rng.sample(NAMES, rng.choice((1, 1, 2, 6)))
            ranks = sorted(rng.sample(range(env.table_size), rng.randint(1, env.table_size)))
            constraints[f"t{i}"] = Constraint(
                layouts=None if rng.random() < 0.2 + attempt / 40 else only,
                ranks=ranks if rng.random() < 0.2 else None,
                min_columns=rng.choice((1, 4, 12)) if table.dim >= 8 and rng.random() < 0.8 else None,
                pooling_factor=table.pooling,
                spread="apart" if rng.random() < 0.1 else None,
            )
        planner = ShardingPlanner(
            topology if attempt < 20 else None,
            constraints,
            batch_size=rng.choice((4, 2048)),
            time_budget_s=1e6,  # as much on a slow machine
        )
        try:
            return planner.plan(module, default_sharders(), env)
        except PlanError:  # what was drawn does not go together
            continue
    raise AssertionError(f"seed {seed}: nothing that was drawn can be planned")


class Beside:
    """A planned model and the unsharded module, step by step."""

    def __init__(self, mesh: str, seed: int, optimizer: str | None) -> None:
        self.env, self.tables, self.seed, self.kind = env_of(mesh), drawn_tables(seed), seed, optimizer
        self.oracle_module = module_of(self.tables, seed)
        self.model, self.shards = self.wrapped(seed)
        self.oracle = Oracle(optimizer, self.shards, {})
        self.steps = 0

    def wrapped(self, seed: int) -> tuple[DistributedModelParallel, dict[str, tuple[Shard, ...]]]:
        """Under another plan for another seed."""
        module = module_of(self.tables, self.seed)
        attach(module, self.kind)
        plan = self.one_plan(module, seed)
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        shards = {name: tuple(plan[name].layout.shards(shape, self.env)) for name, shape in shapes.items()}
        return DistributedModelParallel(module, self.env, plan=plan), shards

    def one_plan(self, module: nn.Module, seed: int) -> ShardingPlan:
        """Rank 0's, sent as text: each rank would take as long to come to the same."""
        text = [planned(module, self.tables, self.env, seed).to_json() if self.env.rank == 0 else None]
        dist.broadcast_object_list(text, 0)
        assert text[0] is not None
        return ShardingPlan.from_json(text[0])

    def step(self) -> list[str]:
        """One step of both; what differs."""
        batches = [batch_of(self.tables, rank, self.steps) for rank in range(self.env.data_size)]
        outs = [self.oracle_module(*batch) for batch in batches if not is_empty(batch)]
        (sum(map(loss_of, outs)) / self.env.data_size).backward()  # type: ignore[union-attr]
        mine = self.model(*batches[self.env.data_rank])
        loss_of(mine).backward()
        faults = self._fault(lambda: same_result(mine, outs[self.env.data_rank]), "result")
        if self.kind is None:
            grads = {name: p.grad for name, p in self.oracle_module.named_parameters()}
            faults += self._fault(lambda: self._same_gradients(grads), "gradients")
            torch.optim.SGD(self.model.parameters(), lr=LR).step()
            for p in self.model.parameters():
                p.grad = None
        self.oracle.step(self.oracle_module)
        self.steps += 1
        return faults + self.compare(self.model, self.shards)

    def _same_gradients(self, expected: Mapping[str, torch.Tensor | None]) -> None:
        for name, p in self.model.named_parameters():
            whole = expected[name]
            assert whole is not None and p.grad is not None, name
            held = [s for s in self.shards[name] if s.rank == self.env.table_rank]
            if len({s.rank for s in self.shards[name]}) == len(self.shards[name]) and held:
                (rows, columns), (height, width) = held[0].offsets, held[0].sizes
                part = whole[rows : rows + height, columns : columns + width]
                torch.testing.assert_close(p.grad.reshape(part.shape), part, atol=1e-5, rtol=1e-5)

    def compare(self, model: DistributedModelParallel, shards: Mapping[str, Sequence[Shard]]) -> list[str]:
        """Weights and the optimizer's state."""
        values = {name: p.detach() for name, p in self.oracle_module.named_parameters()}
        taken = Taken([], [], values, copy.deepcopy(self.oracle.state), self.steps)
        return self._fault(lambda: compare_state(model, taken, shards), "state")

    def _fault(self, check: object, what: str) -> list[str]:
        try:
            check()  # type: ignore[operator]
        except AssertionError as error:
            return [f"step {self.steps}, {what}: {str(error)[:300]}"]
        return []


def equals_unsharded(mesh: str, seeds: Sequence[int], optimizers: Sequence[str | None], folder: str) -> list[str]:
    """Two steps, a checkpoint, the same under another plan, another step; what differed, and each layout's name."""
    failed: list[str] = []
    for seed in seeds:
        optimizer = optimizers[seed % len(optimizers)]
        both = Beside(mesh, seed, optimizer)
        faults = [*both.step(), *both.step()]
        path = Path(folder) / f"{mesh}_{seed}"
        dmp.save_checkpoint(path, both.model)
        both.model, shards = both.wrapped(seed + 1000)
        dmp.load_checkpoint(path, both.model)
        if optimizer != "rowwise_adagrad":  # whose state is by column block
            both.shards = shards
            faults += [*both.compare(both.model, shards), *both.step()]
        else:
            whole = {name: p.detach() for name, p in both.oracle_module.named_parameters()}
            state = dmp.full_state_dict(both.model)
            faults += [name for name, value in whole.items() if not torch.allclose(state[name], value, atol=1e-5)]
        failed += [f"seed {seed} {optimizer} {mesh}: {fault}" for fault in faults]
    return failed
