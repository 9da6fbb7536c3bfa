"""Constraints on dense weights: what they open is chosen by cost and memory, said in the plan, and run as it says."""

from __future__ import annotations

import math

import pytest
import torch

from dmp import DistributedModelParallel, PlanError, ShardingEnv, colwise, replicate
from planner import Constraint, ShardingPlanner, Topology
from sharders import default_sharders
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.test_transformers import MESHES, make, trained_like

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
EITHER = Constraint(layouts=["fully_sharded", "replicate"])
SLOW = Topology(1e9, 1e12, 1e13, 1e8, 1e-3)


def entries(constraints: dict[str, Constraint], mesh: str, topology: Topology = SLOW) -> dict[str, str]:
    env = ShardingEnv.abstract(*MESHES[mesh])
    planner = ShardingPlanner(topology, constraints, batch_size=2, sequence_length=8)
    return {name: str(entry.layout) for name, entry in planner.plan(make("llama"), default_sharders(), env).items()}


def test_blocks_are_copied_where_that_is_allowed_saves_time_and_fits() -> None:
    assert not {name for name in entries({}, "fsdp2") if name.startswith("layers.")}
    copied = entries({"layers.*": EITHER}, "fsdp2")
    names = {name for name, _ in make("llama").named_parameters() if name.startswith("layers.")}
    assert {name for name, layout in copied.items() if layout == str(replicate())} == names
    split = 4 * sum(p.numel() for p in make("llama").parameters()) * 4 / 2
    room = Topology(2.0 * split, 1e12, 1e13, 1e8, 1e-3)  # for the split weights and what is gathered of them
    assert not names & entries({"layers.*": EITHER}, "fsdp2", room).keys()
    fast = Topology(1e9, 1e12, 1e3, 1e12, 0.0)  # compute hides all, so that splitting costs nothing
    assert not names & entries({"layers.*": EITHER}, "fsdp2", fast).keys()
    assert names <= entries({"layers.*": Constraint(layouts=["replicate"])}, "fsdp2", fast).keys()


def test_a_branch_may_be_left_whole_on_the_tensor_axis() -> None:
    plain = entries({}, "tp2")
    without = entries({"layers.*.feed_forward": Constraint(forbid=["colwise", "rowwise"])}, "tp2")
    assert {name for name in plain if name not in without} == {name for name in plain if "feed_forward" in name}
    assert plain["layers.0.attention.wq.weight"] == without["layers.0.attention.wq.weight"] == str(colwise())
    cheap = Constraint(layouts=["colwise", "rowwise", "replicate"])
    chosen = entries({"layers.*.feed_forward": cheap}, "tp2")
    assert {chosen[name] for name in plain if "feed_forward" in name} == {str(replicate())}


@pytest.mark.parametrize(
    ("constraint", "mesh", "said"),
    [
        (Constraint(layouts=["fully_sharded"]), "dp2", "has no axis"),
        (Constraint(layouts=["colwise"]), "fsdp2", "it can be fully_sharded"),
        (Constraint(forbid=["colwise", "rowwise"]), "tp2", "whole on the tensor axis"),
    ],
)
def test_what_the_mesh_cannot_do_is_an_error(constraint: Constraint, mesh: str, said: str) -> None:
    key = "*" if mesh == "tp2" else "layers.*"
    with pytest.raises(PlanError, match=said):
        entries({key: constraint}, mesh)


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint(pooling_factor=2), "says pooling_factor; 'layers.0.attention.wq.weight' is a dense weight"),
        (Constraint(layouts=["replicate"], ranks=[0]), "says ranks; .* is a dense weight"),
        (Constraint(layouts=["replicate", "fuly_sharded"]), "names 'fuly_sharded'; .* may name .*'fully_sharded'"),
        (Constraint(layouts=["row_wise"]), "names 'row_wise'; .* may name .*'rowwise'"),
        (Constraint(), "says nothing; .* is a dense weight"),
    ],
)
def test_what_dense_weights_have_not_is_not_passed_over(constraint: Constraint, said: str) -> None:
    with pytest.raises(PlanError, match=f"the constraint on 'layers.0.attention' {said}"):
        entries({"layers.0.attention": constraint}, "fsdp2")


CONSTRAINTS = {
    "all": {"*": Constraint(layouts=["replicate"])},
    "blocks": {"layers.*": Constraint(layouts=["replicate"])},
    "mlp": {"layers.*.feed_forward": Constraint(forbid=["colwise", "rowwise"])},
    "mlp_whole": {"layers.*.feed_forward": Constraint(layouts=["replicate"])},
}


def _trained(mesh: str, which: str) -> None:
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    oracle, module = make("llama"), make("llama")
    model = DistributedModelParallel(module, env, planner=ShardingPlanner(constraints=CONSTRAINTS[which]))
    # With torch's eps the rounding of a gradient that is next to nothing is a step of its own.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4, foreach=False) for m in (oracle, model)]
    trained_like(oracle, model, env, optimizers, steps=2)


@pytest.mark.parametrize(
    ("mesh", "which"),
    [
        ("fsdp2", "blocks"),
        ("tp2", "mlp"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp2xtp2", "mlp"), ("hsdp2x2", "blocks"))),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp2", "all"), ("fsdp2xtp2", "mlp_whole"))),
    ],
)
def test_what_was_chosen_trains_as_one_process(mesh: str, which: str) -> None:
    run_ranks(math.prod(MESHES[mesh].shape), _trained, mesh, which)
