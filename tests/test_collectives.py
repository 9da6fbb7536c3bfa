"""Exchanges are counted: at most 3 forward and 1 backward for each module on one axis, whatever the layouts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from dmp import ShardingEnv
from sharders.channel import Purpose
from sharders.embedding.ids import input_dist
from tests.equality import attach, env_of, layouts_for, loss_of, make_batch, make_module
from tests.exchanges import Exchanges
from tests.ranks import run_ranks
from tests.test_channel import Counting, sharder

pytestmark = [  # the counter puts backward hooks on every module
    pytest.mark.filterwarnings("ignore:For backward hooks to be called"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def counts(model: nn.Module, batch: tuple[object, ...]) -> tuple[int, int]:
    """Exchanges of one forward, and of one backward."""
    with Exchanges() as forward:
        loss = loss_of(model(*batch))
    with Exchanges() as backward:
        loss.backward()
    return forward.get_total_counts(), backward.get_total_counts()


def _module_counts(mesh_name: str, kind: str, optimizer: str | None) -> dict[str, tuple[int, int]]:
    env = env_of(mesh_name)
    result = {}
    for name, layouts in layouts_for(env).items():
        module = make_module(kind)
        attach(module, optimizer)
        plan = {n: layouts(i, tuple(p.shape), env) for i, (n, p) in enumerate(module.named_parameters())}
        model = dmp.DistributedModelParallel(module, env=env, plan=plan)
        both = [counts(model, make_batch(kind, env.rank, step)) for step in range(2)]
        assert both[0] == both[1], (name, both)  # the first step sets up nothing that later ones do not
        result[name] = both[0]
    return result


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
@pytest.mark.parametrize("kind", ["ebc", "ebc_weighted", "ec", "bag", "embedding"])
@pytest.mark.sampled(12)
def test_one_axis(kind: str, optimizer: str | None) -> None:
    for of_rank in run_ranks(2, _module_counts, "dp2", kind, optimizer):
        assert {"row_wise", "column_wise", "table_wise", "data_parallel", "mixed", "grid", "random"} <= set(of_rank)
        too_many = {name: n for name, n in of_rank.items() if n[0] > 2 or n[1] > 1}  # ids go along with the headers
        assert not too_many and of_rank["row_wise"] >= (1, 1), of_rank
        assert of_rank["data_parallel"] == (1, 1)  # the header, which tells of faults, and the sum of the gradients


def test_four_ranks() -> None:
    for of_rank in run_ranks(4, _module_counts, "dp4", "ebc", "sgd"):
        assert all(forward <= 2 and backward <= 1 for forward, backward in of_rank.values()), of_rank


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_one_process_needs_none(kind: str) -> None:
    assert set(_module_counts("single", kind, "sgd").values()) == {(0, 0)}


def test_one_process_in_a_group_needs_none() -> None:
    assert set(run_ranks(1, _module_counts, "dp1", "ebc", "sgd")[0].values()) == {(0, 0)}


class Two(nn.Module):
    """Two sharded modules, and dense parameters that no gradient reaches over the wire but by DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.over = make_module("ebc"), make_module("ebc", 8), nn.Linear(48, 1)

    def forward(self, x: object) -> torch.Tensor:
        return self.over(self.a(x).values() + self.b(x).values()).sum()


def _whole(wrap: bool) -> tuple[int, int, int]:
    env = ShardingEnv.from_mesh(env_of("dp2").mesh)
    module = Two()
    plan = {
        n: layout(i, tuple(p.shape), env)
        for i, (n, p) in enumerate(module.named_parameters())
        if not n.startswith("over")
        for layout in [layouts_for(env)["mixed"]]
    }
    model = dmp.DistributedModelParallel(module, env=env, plan=plan, init_data_parallel=wrap)
    batch = make_batch("ebc", 0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):  # DDP sets up its buckets in the first steps
        forward, backward = counts(model, batch)
        with Exchanges() as look:
            optimizer.step()
        assert look.get_total_counts() == 2 * (number == 0)  # at copies and at samples, before the first
    with Exchanges() as rest:
        optimizer.step()
        optimizer.zero_grad()
        model.state_dict()
        model.fused_optimizer.state_dict()
    return forward, backward, rest.get_total_counts()


def test_whole_model_needs_no_more_than_its_modules() -> None:
    for forward, backward, rest in run_ranks(2, _whole, False):
        assert forward <= 4 and backward <= 2 and rest == 0
    for forward, backward, rest in run_ranks(2, _whole, True):
        assert forward <= 4 and backward <= 2 + 1 and rest == 0  # and DDP's one bucket


def _bytes_between_hosts() -> tuple[list[int], int]:
    """What a rank sends along the outer axis in a step of row-wise tables; bytes of its results."""
    env = env_of("host2xlocal2")
    module = make_module("ebc")
    attach(module, "sgd")
    sent: dict[tuple[int, ...], list[int]] = {}

    def transport(group: dist.ProcessGroup | None, purpose: Purpose) -> Counting:
        channel = Counting(group)
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        channel.sent = [] if purpose == "headers" else sent.setdefault(ranks, [])
        return channel

    plan = {name: dmp.row_wise() for name, _ in module.named_parameters()}
    made = sharder("ebc", transport=transport)
    model = dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=[made])
    with mock.patch.object(input_dist, "MOST_FILLED", 0.0):  # as of long bags
        out = model(*make_batch("ebc", env.rank, 1)).values()
    out.sum().backward()
    return sent[env.rank % 2, env.rank % 2 + 2], out.numel() * out.element_size()


def test_between_hosts_travel_sums_of_a_host() -> None:
    """Forward and backward at most the bytes of one batch's results each: less by tables that one host has alone. Ranks
    that sent each other theirs would send as many to each rank of the other host."""
    found = run_ranks(4, _bytes_between_hosts)
    for rank, (sent, results) in enumerate(found):
        of_peer = found[(rank + 2) % 4][1]
        assert len(sent) == 2 and sent[0] <= of_peer and sent[1] <= results, (rank, sent, results)
    assert sum(sum(sent) for sent, _ in found) > sum(results for _, results in found)


def _no_grad() -> tuple[int, int, int]:
    env = env_of("dp2")
    module = make_module("ebc")
    plan = {n: dmp.row_wise() for n, _ in module.named_parameters()}
    model = dmp.DistributedModelParallel(module, env=env, plan=plan)
    with Exchanges() as forward, torch.no_grad():
        model(*make_batch("ebc", env.rank, 0))
    with Exchanges() as loading:
        model.load_state_dict(dict(make_module("ebc", 9).state_dict()))
    with Exchanges() as giving:
        model.state_dict()
    return forward.get_total_counts(), loading.get_total_counts(), giving.get_total_counts()


def test_evaluation_and_state() -> None:
    for forward, loading, giving in run_ranks(2, _no_grad):
        assert forward <= 2 and loading <= 2 and giving == 0, (forward, loading, giving)  # the ranks agree to load
