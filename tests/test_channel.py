"""The data path sends on channels alone: another transport is one class, and values may travel in another format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dmp
from sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.channel import Channel, GroupChannel, InFlight, Landing, Purpose, Transfer, over_connections, over_group
from sharders.embedding.exchange.codec import AS_COMPUTED, Cast, Codecs
from tests.equality import attach, check_case, env_of, layouts_for, loss_of, make_batch, make_module
from tests.ranks import run_ranks


def sharder(kind: str, codecs: Codecs = AS_COMPUTED, **options: object) -> dmp.ModuleSharder:
    """The built-in one, whose data path has these options."""
    base = EmbeddingCollectionSharder if kind == "ec" else EmbeddingBagCollectionSharder
    made = type("Sharder", (base,), {"sharded_type": staticmethod(partial(base.sharded_type, **options))})(
        codecs=codecs
    )
    assert isinstance(made, dmp.ModuleSharder)
    return made


class FolderChannel(GroupChannel):
    """Ranks that leave each other messages in a key-value store: no collective."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None, purpose: Purpose) -> None:
        super().__init__(group)
        self._store = dist.FileStore(str(folder / f"{purpose} {self.size}"), self.size)
        self._count = 0

    def all_to_all(
        self,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        out: torch.Tensor | None = None,
        landing: Landing | None = None,
    ) -> Transfer:
        """See `Channel`."""
        self._count += 1
        for i, part in enumerate(send.split(list(send_sizes))):
            self._store.set(f"{self._count} {self.rank} {i}", bytes(part.view(torch.uint8).tolist()))
        came = b"".join(self._store.get(f"{self._count} {i} {self.rank}") for i in range(self.size))
        whole = torch.tensor(list(came), dtype=torch.uint8).view(send.dtype)
        assert whole.numel() == sum(receive_sizes)
        return InFlight(whole if out is None else out.copy_(whole), receive_sizes)

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        """See `Channel`."""
        sizes = [send.numel()] * self.size
        return self.all_to_all(send.repeat(self.size), sizes, sizes).wait().view(self.size, -1)

    def sum(self, tensor: torch.Tensor) -> None:
        """See `Channel`."""
        tensor.copy_(self.all_gather(tensor.reshape(-1)).sum(0).view_as(tensor))


def _through_a_folder(kind: str, folder: Path) -> None:
    env = env_of("dp2")
    case = layouts_for(env)["mixed"]  # among them row-wise and data-parallel tables
    check_case(kind, case, "adagrad", env, sharders=[sharder(kind, transport=partial(FolderChannel, folder))])


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_another_transport_is_one_class(kind: str, tmp_path: Path) -> None:
    run_ranks(2, _through_a_folder, kind, tmp_path)


class Counting(GroupChannel):
    """Counts the bytes that it sends."""

    sent: list[int]

    def all_to_all(
        self,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        out: torch.Tensor | None = None,
        landing: Landing | None = None,
    ) -> Transfer:
        """See `Channel`."""
        self.sent.append(send.nbytes)
        return super().all_to_all(send, send_sizes, receive_sizes, out)


def _both() -> tuple[Channel, Channel]:
    """Channels between all ranks, through memory and over connections."""
    memory, connections = (of(dist.group.WORLD, "tables") for of in (over_group, over_connections))
    assert type(memory).__name__ == "MemoryChannel" and isinstance(connections, GroupChannel)
    return memory, connections


DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.float64, torch.bool]


def _same_through_memory() -> None:
    """Sizes that grow, and others that are nothing; several under way; sent from memory of the channel's, and not."""
    memory, connections = _both()
    me, size = memory.rank, memory.size
    same, own = torch.Generator(), torch.Generator().manual_seed(me)
    for step in range(48):
        counts = torch.randint(0, (3, 50, 3000)[step % 3], (size, size), generator=same)
        sizes, receive_sizes = counts[me].tolist(), counts[:, me].tolist()
        sent = torch.randint(0, 100, (sum(sizes),), generator=own).to(DTYPES[step % len(DTYPES)])
        filled = memory.empty(len(sent), sent.dtype, sent.device).copy_(sent) if step % 2 else sent.clone()
        first = memory.all_to_all(filled, sizes, receive_sizes)
        second = memory.all_to_all(sent + sent, sizes, receive_sizes, sent.new_empty(sum(receive_sizes)))
        expected = connections.all_to_all(sent, sizes, receive_sizes).wait()
        assert torch.equal(second.wait(), expected + expected)
        assert torch.equal(first.wait(), expected) and torch.equal(first.wait(), expected)
        untold = [memory.all_to_all(sent.clone(), sizes, None) for _ in range(2)]
        assert torch.equal(torch.cat([untold[0].part(i) for i in range(size)]), expected)
        untold[0].end()
        assert torch.equal(untold[1].wait(), expected)
        assert [untold[1].part(i).numel() for i in range(size)] == receive_sizes
        addend = torch.randn(1 + 400 * step, generator=own)
        total, like = addend.clone(), addend.clone()
        memory.sum(total)
        connections.sum(like)
        assert torch.equal(total, like) if size == 2 else torch.allclose(total, like, atol=1e-5)
        everyones = memory.all_gather(addend)
        assert torch.equal(everyones, connections.all_gather(addend))
        in_order = everyones[0].clone()
        for each in everyones[1:]:
            in_order += each
        assert torch.equal(total, in_order)


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_memory_gives_what_connections_give(size: int) -> None:
    run_ranks(size, _same_through_memory)


def _answered() -> None:
    """Answers are what connections bring, whether both have said where they want them, one, or neither; what is read
    where it lies too."""
    memory, connections = _both()
    me, size, cpu = memory.rank, memory.size, torch.device("cpu")
    same, own = torch.Generator(), torch.Generator().manual_seed(me)
    for step in range(24):
        counts = torch.randint(0, (3, 50, 3000)[step % 3], (size, size), generator=same).fill_diagonal_(0)
        to, came_from = counts[me].tolist(), counts[:, me].tolist()
        wants = step % 4 == 0 or step % size == me
        landing = memory.landing(to, 5, torch.float32, cpu) if wants else None
        there, back = torch.randn(sum(to), generator=own), torch.randn(sum(came_from), generator=own)
        first = memory.all_to_all(there, to, came_from, landing=landing)
        expected = connections.all_to_all(there, to, came_from).wait()
        assert torch.equal(torch.cat([first.part(i) for i in range(size)]), expected)
        first.end()
        answer = connections.all_to_all(back, came_from, to).wait()
        if landing is None:
            assert torch.equal(memory.all_to_all(back, came_from, to).wait(), answer)
            continue
        for part, values in zip(memory.answer(landing, came_from), back.split(came_from), strict=True):
            part.copy_(values)
        tail = landing.flat[sum(to) :].fill_(step)
        assert torch.equal(landing.send().wait(), answer)
        assert torch.equal(landing.flat[: sum(to)], answer) and tail.tolist() == [step] * 5


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_land_where_they_are_wanted(size: int) -> None:
    run_ranks(size, _answered)


def _kept_and_dropped() -> None:
    """What came stays as it is; what nobody waits for, and what is kept of memory to send from, holds nobody up."""
    memory, _ = _both()
    me, count = memory.rank, 300  # more than may be under way at once
    kept, dropped = [], []
    for step in range(count):
        send = memory.empty(2, torch.int64, torch.device("cpu"))
        send[:] = 2 * step + me
        kept.append((send, memory.all_to_all(send, [1, 1], [1, 1])))
        memory.all_to_all(send, [1, 1], [1, 1])
        dropped.append(memory.all_to_all(send, [2, 0] if me == 0 else [0, 2], [2, 0] if me == 0 else [0, 2]))
        memory.sum(torch.ones(1))
    for step, (send, transfer) in enumerate(kept):
        assert send.tolist() == [2 * step + me] * 2 and transfer.wait().tolist() == [2 * step, 2 * step + 1]


def test_memory_that_is_kept_stays_as_it_is() -> None:
    run_ranks(2, _kept_and_dropped)


def _step_over(kind: str, layout: str) -> None:
    """Steps over memory and over connections: the same to the bit, and what is kept of them stays as it is, among it a
    graph that is gone back through twice, and one that never is."""
    ends = []
    for transport in (over_group, over_connections):
        env = env_of("dp2")
        module = make_module(kind)
        attach(module, "adagrad")
        plan = {
            n: layouts_for(env)[layout](i, tuple(p.shape), env) for i, (n, p) in enumerate(module.named_parameters())
        }
        model = dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=[sharder(kind, transport=transport)])
        outs = []
        for step in range(2):
            out = model(*make_batch(kind, env.rank, step))
            loss_of(out).backward(retain_graph=step == 1)
            if step:
                loss_of(model(*make_batch(kind, env.rank, 2)))
                loss_of(out).backward()
            outs += [t.values().detach() for t in out.values()] if isinstance(out, dict) else [out.values().detach()]
        ends.append([*outs, *dmp.full_state_dict(model).values()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(("kind", "layout"), [("ebc_weighted", "mixed"), ("ebc", "table_wise"), ("ec", "row_wise")])
def test_a_step_is_the_same_through_memory(kind: str, layout: str) -> None:
    run_ranks(2, _step_over, kind, layout)


def _step(kind: str, codecs: Codecs) -> tuple[list[int], list[torch.Tensor]]:
    """What one step of row-wise tables sends of results and of gradients; its outputs and the weights after it."""
    env = env_of("dp2")
    module = make_module(kind)
    attach(module, "sgd")
    plan = {name: dmp.row_wise() for name, _ in module.named_parameters()}
    sent: list[int] = []

    def transport(group: dist.ProcessGroup | None, purpose: Purpose) -> Counting:
        channel = Counting(group)
        channel.sent = [] if purpose == "headers" else sent
        return channel

    made = sharder(kind, codecs, transport=transport)
    model = dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=[made])
    out = model(*make_batch(kind, env.rank, 1))
    loss_of(out).backward()
    outs = [t.values() for t in out.values()] if isinstance(out, dict) else [out.values()]
    weights = dmp.full_state_dict(model)
    return sent[1:], [t.detach() for t in (*outs, *weights.values())]


def _exact_and_halved(kind: str) -> None:
    exact_bytes, exact = _step(kind, Codecs())
    half_bytes, half = _step(kind, Codecs(Cast(torch.bfloat16), Cast(torch.bfloat16)))
    assert [2 * n for n in half_bytes] == exact_bytes and len(exact_bytes) == 2
    for a, b in zip(half, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)  # row partials are sums of rounded values
    assert not dist.get_rank() or any(not torch.equal(a, b) for a, b in zip(half, exact, strict=True))


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_a_codec_halves_what_travels(kind: str) -> None:
    run_ranks(2, _exact_and_halved, kind)
