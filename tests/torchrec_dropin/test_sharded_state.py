"""Code that asks `isinstance(value, ShardedTensor)`: it finds our tensors, and what it makes of them is right."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import dmp
from dmp import CheckpointError, DistributedModelParallel, Layout, RanksError, ShardError, ShardingEnv, full_state_dict
from dmp.put_around import put_around
from dmp.state.snapshots import read_into_chunks
from tests.ranks import mesh, run_ranks
from tests.test_survival import mortal_ranks
from tests.torchrec_dropin.scripts import IGNORED, LR, batch, model_of

pytestmark = IGNORED

T0, T1 = (f"ebc.embedding_bags.{name}.weight" for name in ("t0", "t1"))
PLANS: dict[str, tuple[Layout, Layout]] = {
    "rows": (dmp.row_wise(), dmp.table_wise(1)),
    "columns": (dmp.column_wise([0, 1]), dmp.data_parallel()),
    "rows the other way": (dmp.row_wise([1, 0]), dmp.row_wise([1, 0])),
    "columns of one rank": (dmp.column_wise([1, 1]), dmp.column_wise([1, 0])),
}


def wrapped(plan: str, axes: tuple[str, ...] = ("dp",)) -> DistributedModelParallel:
    """After a step, by which row-wise state is no longer zeros."""
    from torchrec.optim import RowWiseAdagrad

    env = ShardingEnv.from_mesh(mesh((2,) * len(axes), axes))
    layouts = dict(zip((T0, T1), PLANS[plan], strict=True))
    model = DistributedModelParallel(model_of(RowWiseAdagrad, lr=LR), env, plan=layouts)
    model(batch(env.data_rank, 0)).backward()
    return model


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in model_of().state_dict().items()}


def gathered(*axes: str) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed._state_dict_utils import _gather_state_dict
    from torchrec.inference import state_dict_transform as transform
    from torchrec.inference.inference_legacy import state_dict_transform as legacy

    for plan in PLANS:
        model = wrapped(plan, axes)
        state, expected = model.state_dict(), full_state_dict(model)
        assert isinstance(state[T0], ShardedTensor) and isinstance(state[T0], dmp.ChunkedTensor)
        assert isinstance(state[T1], ShardedTensor) == (plan != "columns")  # which every rank has whole
        assert type(state[T0]) is dmp.ChunkedTensor and not isinstance(state["over.weight"], ShardedTensor)
        assert state[T0]._process_group is model.env.table_group
        results = []
        for gather in (transform.state_dict_gather, legacy.state_dict_gather):
            results.append(zeros())
            gather(state, results[-1])
        if "replicate" not in axes:  # of copies theirs sees several shards in one place
            moved = transform.state_dict_to_device(state, dist.group.WORLD, torch.device("cpu"))
            assert type(moved[T0]) is ShardedTensor
            results.append(zeros())
            transform.state_dict_gather(moved, results[-1])
        last = dist.get_world_size() - 1
        outs = [{name: torch.zeros_like(value) for name, value in expected.items()} for _ in range(2)]
        for name in (T0, *[T1] * (plan != "columns")):
            state[name].gather(last, out=outs[0][name] if dist.get_rank() == last else None)
            if dist.get_rank() == last:
                torch.testing.assert_close(outs[0][name], expected[name], rtol=0, atol=0)
        if dist.get_rank() == 0:
            for result in results:
                torch.testing.assert_close(result, expected, rtol=0, atol=0)
        whole = _gather_state_dict({T0: state[T0]})[T0]  # torch's own would be equal blocks of rows
        torch.testing.assert_close(whole, expected[T0], rtol=0, atol=0)
        torch.testing.assert_close(get_model_state_dict(model)[T0], state[T0], rtol=0, atol=0)


def test_theirs_gather_the_unsharded_values() -> None:
    run_ranks(2, gathered, "dp")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("host", "local"), ("replicate", "dp")])
def test_theirs_gather_them_on_four_ranks(axes: tuple[str, ...]) -> None:
    run_ranks(4, gathered, *axes)


def not_gathered() -> None:
    table = wrapped("rows").state_dict()[T0]
    out = torch.zeros(table.shape) if dist.get_rank() == 0 else None
    for dst, wrong, match in (
        (0, None, r"expected a tensor of \(18, 8\) as `out` on rank 0; got None"),
        (0, None if out is None else out[1:], r"on rank 0; got \(17, 8\)"),
        (1, out, "`out` on rank 1"),
        (2, None, "a rank of 2 to gather to; got dst=2"),
    ):
        with pytest.raises(ShardError, match=match):
            table.gather(dst, wrong)
    with pytest.raises(ShardError, match=r"no state of a model's.*full_state_dict"):
        dmp.ChunkedTensor((2, 2), [], []).gather()
    table.gather(0, out)


def test_what_is_not_gathered_is_told_on_every_rank() -> None:
    run_ranks(2, not_gathered)


# ---- files of one rank ----


def written(folder: str) -> None:
    for plan in PLANS:
        model, other = wrapped(plan), wrapped("rows" if plan != "rows" else "columns")
        dense = torch.optim.Adam(model.module.over.parameters())
        path = f"{folder}/{plan}.{dist.get_rank()}.pt"
        torch.save([model.state_dict(), model.fused_optimizer.state_dict(), dense.state_dict()], path)
        state, fused, _ = torch.load(path)
        again = wrapped(plan)
        before = full_state_dict(again)
        again(batch(dist.get_rank(), 1)).backward()
        again.load_state_dict(state)
        again.fused_optimizer.load_state_dict(fused)
        assert Path(path).stat().st_size < 20_000  # no more of a bank than is asked for
        torch.testing.assert_close(full_state_dict(again), before, rtol=0, atol=0)
        states = [m.fused_optimizer.state_dict()["state"] for m in (again, model)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
        kept = full_state_dict(other)
        with pytest.raises(CheckpointError, match=r"in pieces of another plan: use save_checkpoint"):
            other.load_state_dict(state)
        torch.testing.assert_close(full_state_dict(other), kept, rtol=0, atol=0)
        torch.save(model.state_dict(), path)
        with pytest.raises(CheckpointError, match=r"what one rank had of a wrapped model.*save_checkpoint"):
            dmp.load_checkpoint(f"{folder}/{plan}.0.pt", model)


def test_each_rank_writes_and_reads_its_own(tmp_path: Path) -> None:
    run_ranks(2, written, str(tmp_path))


def of_an_optimizer(folder: str) -> None:
    """Chunks of an ordinary optimizer's state; one without any."""
    model = DistributedModelParallel(model_of(), plan=dict(zip((T0, T1), PLANS["rows"], strict=True)))
    for make in (torch.optim.Adam, torch.optim.SGD):
        optimizer, path = make(model.parameters(), lr=LR), f"{folder}/{dist.get_rank()}"
        model(batch(dist.get_rank(), 0)).backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), path)
        before = dmp.full_optimizer_state_dict(model, optimizer)["state"]
        again = make(model.parameters(), lr=LR)
        again.load_state_dict(torch.load(path))
        after = dmp.full_optimizer_state_dict(model, again)["state"]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_an_optimizers_state_is_written_likewise(tmp_path: Path) -> None:
    run_ranks(2, of_an_optimizer, str(tmp_path))


def combined() -> None:
    """Theirs copies shard by shard, wherever these lie, once a tensor says that it is a `ShardedTensor`."""
    from torchrec.optim.keyed import CombinedOptimizer

    model, other = wrapped("rows"), wrapped("rows the other way")
    with torch.no_grad():
        for values in model.fused_optimizer.state_dict()["state"].values():
            values["sum"].chunks and values["sum"].chunks[0].add_(dist.get_rank() + 1)
    theirs = CombinedOptimizer([("", other.fused_optimizer)])
    before, state = dmp.full_optimizer_state_dict(other)["state"], model.fused_optimizer.state_dict()
    with pytest.raises(ShardError, match="come from another plan"):
        theirs.load_state_dict(state)
    torch.testing.assert_close(dmp.full_optimizer_state_dict(other)["state"], before, rtol=0, atol=0)
    whole = dmp.full_optimizer_state_dict(model)
    theirs.load_state_dict(whole)
    torch.testing.assert_close(dmp.full_optimizer_state_dict(other)["state"], whole["state"], rtol=0, atol=0)


def test_state_of_another_plan_is_refused_by_theirs_too() -> None:
    run_ranks(2, combined)


def in_a_thread() -> None:
    """Its own exchanges would have met those of the steps, and ended both."""
    model, errors = wrapped("rows"), list[Exception]()
    state = {name: value.cpu() for name, value in model.state_dict().items()}

    def write() -> None:
        try:
            torch.save(state, io.BytesIO())
        except ShardError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    for step in range(3):
        model(batch(dist.get_rank(), step)).backward()
    thread.join()
    assert "in another thread" in str(errors[0]) and "asynchronous=True" in str(errors[0])


def test_another_thread_does_not_write() -> None:
    run_ranks(2, in_a_thread)


def alone(folder: str) -> str:
    model = wrapped("rows")
    try:
        if dist.get_rank() == 0:  # as programs do where every rank has everything
            torch.save(model.state_dict(), f"{folder}/alone")
        model(batch(dist.get_rank(), 1))
    except RanksError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_one_rank_does_not_write_alone(tmp_path: Path) -> None:
    """Its file would have lost the other's rows."""
    first, second = mortal_ranks(2, alone, str(tmp_path))
    assert "rank 0 is in torch.save (or pickle) of a table" in second and "the forward" in second
    assert "all write their own" in first and "save_checkpoint(path, model, optimizer)" in first


# ---- torchsnapshot, whose reader asks by type ----


def read() -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    class Preparer:
        @classmethod
        def prepare_read(cls, entry: torch.Tensor, obj_out: Any = None) -> Any:
            if type(obj_out) is not ShardedTensor:
                return [], SimpleNamespace(obj=entry)
            for shard in obj_out.local_shards():
                box = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                shard.tensor.copy_(entry[tuple(slice(at, at + size) for at, size in box)])
            return [], SimpleNamespace(obj=obj_out)

    theirs = SimpleNamespace(ShardedTensorIOPreparer=Preparer)
    put_around(Preparer, "prepare_read", read_into_chunks)
    for plan in PLANS:
        model, saved = wrapped(plan), {name: torch.rand_like(value) for name, value in zeros().items()}
        state = model.state_dict()
        for name in (T0, T1):
            _, future = theirs.ShardedTensorIOPreparer.prepare_read(saved[name], state[name])
            assert future.obj is (saved[name] if (name, plan) == (T1, "columns") else state[name])
        assert torch.equal(full_state_dict(model)[T0], saved[T0])
        for of_table in model.fused_optimizer.state_dict()["state"].values():
            for value in of_table.values():  # row-wise state of column blocks too
                if isinstance(value, dmp.ChunkedTensor):
                    assert sum(s.shard_sizes[0] for s in value.metadata().shards_metadata) >= value.shape[0]
                    assert type(value.sharding_spec()).__name__ == "EnumerableShardingSpec"


def test_a_reader_that_asks_by_type() -> None:
    run_ranks(2, read)
