"""`ShardingEnv`: meshes, roles, ranks and groups, and every error a user can cause."""

from __future__ import annotations

import atexit
import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dmp import DistributedModelParallel, ShardingEnv, ShardingPlan, row_wise, table_wise
from dmp.env import _of_group
from dmp.ranks import watchdog
from tests.ranks import mesh, run_ranks

# ---- without process groups ----


def test_single() -> None:
    env = ShardingEnv.single()
    assert (env.mesh, env.rank, env.size, env.table_rank, env.table_size, env.data_size) == (None, 0, 1, 0, 1, 1)
    assert env.device == torch.device("cpu") and env.table_group is None and env.group() is None
    assert env.submesh("shard") is None
    assert ShardingEnv.single("cuda:0").device_type == "cuda"
    assert ShardingEnv.single(torch.device("cpu")) == env


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("dp",), ("shard",)),
        (("data",), ("shard",)),
        (("shard",), ("shard",)),
        (("fsdp",), ("shard",)),
        (("replicate",), ("replicate",)),
        (("dp_replicate", "dp_shard"), ("replicate", "shard")),
        (("dp", "tp"), ("shard", "tensor")),
        (("host", "local"), ("shard", "shard")),
        (("replicate", "shard", "tensor"), ("replicate", "shard", "tensor")),
    ],
)
def test_roles_of_names(names: tuple[str, ...], roles: tuple[str, ...]) -> None:
    assert ShardingEnv.abstract((2,) * len(names), names).roles == roles


def test_roles_by_keyword_win_over_names() -> None:
    env = ShardingEnv.abstract((2, 3, 4, 5), ("x", "y", "dp", "z"), "cpu", replicate="dp", shard=["x", "y"], tensor="z")
    assert env.roles == ("shard", "shard", "replicate", "tensor")
    assert env.axes("shard") == ("x", "y") and env.axes("tensor", "replicate") == ("dp", "z")
    assert env.size == 120 and env.data_size == 24 and env.table_shape == (2, 3, 5) and env.table_size == 30


def test_abstract_has_sizes_and_no_groups() -> None:
    env = ShardingEnv.abstract((128, 8), ("host", "local"))
    assert env.size == env.table_size == 1024 and env.table_shape == (128, 8)
    assert env.group() is None and env.table_group is None and env.submesh("shard") is None
    assert len(row_wise().shards((10_000, 4), env)) == 1000  # blocks of ceil(10000 / 1024) = 10


@pytest.mark.parametrize(
    ("shape", "names", "replicas", "table_ranks"),
    [
        ((2, 2), ("replicate", "shard"), [0, 0, 1, 1], [0, 1, 0, 1]),
        ((2, 2), ("shard", "replicate"), [0, 1, 0, 1], [0, 0, 1, 1]),
        ((2, 2), ("host", "local"), [0, 0, 0, 0], [0, 1, 2, 3]),
        ((2, 2, 2), ("host", "replicate", "local"), [0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3]),
        ((2, 2), ("dp", "tp"), [0, 0, 0, 0], [0, 1, 2, 3]),
        ((3,), ("replicate",), [0, 1, 2], [0, 0, 0]),
    ],
)
def test_table_ranks_are_row_major_without_replicas(
    shape: tuple[int, ...], names: tuple[str, ...], replicas: list[int], table_ranks: list[int]
) -> None:
    env = ShardingEnv.abstract(shape, names)
    assert [env.replica_of(r) for r in range(env.size)] == replicas
    assert [env.table_rank_of(r) for r in range(env.size)] == table_ranks


def test_is_frozen_and_prints() -> None:
    env = ShardingEnv.abstract((2, 4), ("replicate", "shard"), "cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        env.shape = (1,)  # type: ignore[misc]
    assert str(env) == "ShardingEnv(replicate=2 (replicate), shard=4 (shard); cpu, rank 0 of 8)"
    assert copy.deepcopy(env) is env
    assert env == ShardingEnv.abstract((2, 4), ("replicate", "shard"), "cpu") and hash(env) == hash(copy.copy(env))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShardingEnv("mesh"), ["from_mesh(mesh)", "from_process_group(group)"]),
        (lambda: ShardingEnv(world_size=2, rank=0, pg=None), ["from_mesh(mesh)", "from_process_group(group)"]),
        (lambda: ShardingEnv.from_mesh("dp"), ["DeviceMesh", "str", "'dp'"]),
        (lambda: ShardingEnv.from_mesh(None), ["DeviceMesh", "NoneType"]),
        (lambda: ShardingEnv.from_process_group(3), ["ProcessGroup", "int", "3"]),
        (lambda: ShardingEnv.from_process_group(dist.GroupMember.NON_GROUP_MEMBER), ["not in the group"]),
        (lambda: ShardingEnv.abstract((2,), ("x",)), ["'x'", "no role", "'shard'", "shard='x'"]),
        (lambda: ShardingEnv.abstract((2, 2), ("dp", "dp")), ["differ", "('dp', 'dp')"]),
        (lambda: ShardingEnv.abstract((2,), ("dp",), shard="x"), ["shard='x'", "('dp',)"]),
        (lambda: ShardingEnv.abstract((2,), ("dp",), shard="dp", tensor="dp"), ["'dp'", "'shard'", "'tensor'"]),
        (lambda: ShardingEnv.abstract((2,), ("dp",), shard=0), ["shard=0", "('dp',)"]),
        (lambda: ShardingEnv.abstract((2,), ("dp",), shard=[1]), ["shard=1", "('dp',)"]),
        (lambda: ShardingEnv.abstract((2, 2), ("dp",)), ["(2, 2)", "('dp',)"]),
        (lambda: ShardingEnv.abstract((0,), ("dp",)), ["positive", "(0,)"]),
        (lambda: ShardingEnv.abstract((), ()), ["positive", "()"]),
        (lambda: ShardingEnv.abstract((2,), ("dp",)).axes("shards"), ["'shards'", "'shard'", "'tensor'"]),
        (lambda: ShardingEnv.abstract((2,), ("dp",)).axis_group("tp"), ["'tp'", "('dp',)"]),
    ],
)
def test_errors_say_what_came_and_what_is_allowed(make, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r".") as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


# ---- on real processes ----


def _meshes() -> None:
    rank = dist.get_rank()
    plain = ShardingEnv.from_mesh(mesh((4,)))
    assert (plain.names, plain.roles, plain.rank, plain.table_rank) == (("dp",), ("shard",), rank, rank)
    assert plain.group() is dist.group.WORLD is plain.table_group  # no second communicator over all ranks

    for names in (("replicate", "shard"), ("shard", "replicate")):
        env = ShardingEnv.from_mesh(mesh((2, 2), names))
        assert env.rank == rank and env.size == 4 and env.table_size == 2 and env.data_size == 4
        same_copy = [r for r in range(4) if env.replica_of(r) == env.replica_of(rank)]
        assert dist.get_process_group_ranks(env.table_group) == same_copy
        assert same_copy[env.table_rank] == rank
        assert [env.table_rank_of(r) for r in same_copy] == [0, 1]
        holders = [r for r in range(4) if env.table_rank_of(r) == env.table_rank]
        assert dist.get_process_group_ranks(env.group("replicate")) == holders
        assert dist.get_process_group_ranks(env.group()) == [0, 1, 2, 3]
        assert copy.deepcopy(env).table_group is env.table_group
        assert env.submesh("shard").mesh_dim_names == ("shard",) and env.submesh("tensor") is None

    two = ShardingEnv.from_mesh(mesh((2, 2), ("host", "local")))
    assert two.table_shape == (2, 2) and two.table_rank == rank
    assert dist.get_process_group_ranks(two.table_group) == [0, 1, 2, 3]
    assert dist.get_process_group_ranks(two.axis_group("local")) == [rank // 2 * 2, rank // 2 * 2 + 1]

    three = ShardingEnv.from_mesh(mesh((1, 2, 2), ("replicate", "host", "local")))
    assert three.table_rank == rank and dist.get_process_group_ranks(three.table_group) == [0, 1, 2, 3]
    assert dist.get_process_group_ranks(three.group("replicate")) == [rank]
    split = ShardingEnv.from_mesh(mesh((2, 1, 2), ("replicate", "host", "local")))
    assert dist.get_process_group_ranks(split.table_group) == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_meshes() -> None:
    run_ranks(4, _meshes)


def _groups_of_one_rank() -> list[list[int]]:
    """Rank 0 alone asks for every group; a getter that made one would wait for the other rank."""
    env = ShardingEnv.from_mesh(mesh((1, 2, 1, 1), ("dp_replicate", "host", "fsdp", "tensor")))
    if env.rank:
        return []
    roles = [
        ("replicate",),
        ("shard",),
        ("tensor",),
        ("shard", "tensor"),
        ("replicate", "shard"),
        ("replicate", "tensor"),
    ]
    groups = [env.group(), env.table_group, *(env.group(*of) for of in roles), env.axis_group("host", "fsdp")]
    with pytest.raises(ValueError, match=r"no group along .*'fsdp', 'tensor'.* groups go along"):
        env.axis_group("fsdp", "tensor")
    return [dist.get_process_group_ranks(group) for group in groups if group is not None]


def test_a_getter_of_groups_only_looks() -> None:
    asked = run_ranks(2, _groups_of_one_rank)[0]
    assert asked == [[0, 1], [0, 1], [0], [0, 1], [0], [0, 1], [0, 1], [0], [0, 1]]


def test_what_the_program_began_is_not_ended_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Callable[[], None]] = [watchdog.leave]
    monkeypatch.setattr(atexit, "register", hooks.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ShardingEnv.from_mesh(init_device_mesh("cpu", (1,)))
        for hook in hooks:
            hook()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def _sub_meshes() -> None:
    rank = dist.get_rank()
    whole = mesh((2, 2), ("replicate", "shard"))
    env = ShardingEnv.from_mesh(whole["shard"])
    assert (env.rank, env.size, env.roles) == (rank % 2, 2, ("shard",))
    assert dist.get_process_group_ranks(env.table_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    deep = mesh((2, 2, 1), ("pp", "host", "local"))
    part = ShardingEnv.from_mesh(deep["host", "local"])  # an axis that is not ours stays outside
    assert part.size == 2 and part.rank == rank % 2
    assert dist.get_process_group_ranks(part.table_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(part.group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    _train(env)
    _train(part)


def test_sub_meshes() -> None:
    run_ranks(4, _sub_meshes)


def _group_errors() -> list[str]:
    errors = []
    for make in (
        lambda: ShardingEnv.from_mesh(mesh((2, 1))),
        lambda: ShardingEnv.from_mesh(mesh((2,), ("pp",))),
        lambda: ShardingEnv.from_mesh(mesh((2, 1), ("a", "b")), shard="a", tensor=("a", "b")),
    ):
        try:
            make()
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_mesh_errors() -> None:
    for unnamed, unknown, twice in run_ranks(2, _group_errors):
        assert "2 dims" in unnamed and "mesh_dim_names" in unnamed
        assert "'pp'" in unknown and "not supported yet" in unknown and "shard=" not in unknown
        assert "'a'" in twice and "'shard'" in twice and "'tensor'" in twice


class Net(nn.Module):
    """A table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(10, 4)
        self.over = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(ids)).sum()


def _train(env: ShardingEnv) -> None:
    """Three steps of SGD equal one process on the batches of the env's ranks."""
    oracle = Net()
    model = DistributedModelParallel(Net(), env=env, plan={"table.weight": row_wise()})
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (oracle, model)]
    batches = [torch.tensor([r, 2 * r + 1, 9 - r]) for r in range(env.size)]
    for _ in range(3):
        for m, optimizer in zip((oracle, model), steps, strict=True):
            optimizer.zero_grad()
            (sum(m(b) for b in batches) / env.size if m is oracle else m(batches[env.rank])).backward()
            optimizer.step()
    mine = model.state_dict()["table.weight"]
    pieces = zip(mine.chunks, mine.offsets, strict=True) if env.table_size > 1 else [(mine, (0, 0))]
    for chunk, (row, _) in pieces:
        torch.testing.assert_close(chunk, oracle.table.weight.detach()[row : row + len(chunk)])
    over = model.state_dict()["over.weight"]
    whole = over.full_tensor() if hasattr(over, "full_tensor") else over
    torch.testing.assert_close(whole, oracle.over.weight.detach())


def _from_group(ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        with pytest.raises(ValueError, match="ProcessGroup"):
            ShardingEnv.from_process_group(group)
        return
    env = ShardingEnv.from_process_group(group)
    assert env.size == len(ranks) and env.rank == ranks.index(dist.get_rank())
    assert dist.get_process_group_ranks(env.table_group) == ranks
    _train(env)


@pytest.mark.parametrize("ranks", [[1], [1, 3], [2, 3]])
def test_from_a_group_that_does_not_begin_at_rank_0(ranks: list[int]) -> None:
    run_ranks(4, _from_group, ranks)


def _not_in_mesh() -> str:
    part = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    try:
        ShardingEnv.from_mesh(part)
    except ValueError as error:
        return str(error)
    return ""


def test_mesh_without_this_process() -> None:
    texts = run_ranks(4, _not_in_mesh)
    assert texts[:2] == ["", ""]
    assert all(f"rank {r}" in texts[r] and "not part" in texts[r] for r in (2, 3)), texts


def _in_another_order(ranks: list[int] | list[list[int]], names: tuple[str, ...]) -> str:
    with pytest.raises(ValueError, match="ascending order") as error:
        ShardingEnv.from_mesh(torch.distributed.device_mesh.DeviceMesh("cpu", ranks, mesh_dim_names=names))
    return str(error.value)


def test_a_mesh_of_another_order_of_ranks() -> None:
    assert all("[1, 0]" in text for text in run_ranks(2, _in_another_order, [1, 0], ("dp",)))
    assert all("[0, 2, 1, 3]" in t for t in run_ranks(4, _in_another_order, [[0, 2], [1, 3]], ("shard", "tp")))


def _default_env() -> tuple[int, int]:
    model = DistributedModelParallel(nn.Linear(2, 1), plan={})
    return model.env.size, model.env.rank


def test_default_is_the_default_group_or_one_process() -> None:
    assert run_ranks(2, _default_env) == [(2, 0), (2, 1)]
    assert DistributedModelParallel(nn.Linear(2, 1), plan={}).env == ShardingEnv.single()


def test_groups_are_those_of_the_living_process_group() -> None:
    """A process that ends its process group and starts another must not be handed groups of the first."""
    for _ in range(2):
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            env = ShardingEnv.from_mesh(init_device_mesh("cpu", (1, 1), mesh_dim_names=("host", "local")))
            assert env.group() is dist.group.WORLD
            model = DistributedModelParallel(Net(), env=env, plan=ShardingPlan({"table.weight": table_wise(0)}))
            model(torch.tensor([1, 2])).backward()
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "asked", "wanted"),
    [
        ("cuda:nccl", None, "cuda"),
        ("cpu:gloo,cuda:nccl", None, "cuda"),  # of a group whose backend nobody has named, too
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda", "cpu"),
        ("cpu:gloo", None, "cpu"),
    ],
)
def test_the_device_of_a_group_is_that_of_its_backends(
    config: str, asked: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def from_group(group: object, kind: str, **_: object) -> object:
        found.append(kind)
        raise StopIteration

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(DeviceMesh, "from_group", from_group)
    with pytest.raises(StopIteration):
        _of_group(None, asked)  # type: ignore[arg-type]
    assert found == [wanted]
