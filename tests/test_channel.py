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
from sharders.channel import GroupChannel, Purpose, Transfer
from sharders.embedding.codec import AS_COMPUTED, Cast, Codecs
from tests.equality import attach, check_case, env_of, layouts_for, loss_of, make_batch, make_module
from tests.ranks import run_ranks


def sharder(kind: str, codecs: Codecs = AS_COMPUTED, **options: object) -> dmp.ModuleSharder:
    """The built-in one, whose data path has these options."""
    base = EmbeddingCollectionSharder if kind == "ec" else EmbeddingBagCollectionSharder
    made = type("Sharder", (base,), {"sharded_type": partial(base.sharded_type, **options)})(codecs=codecs)
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
    ) -> Transfer:
        """See `Channel`."""
        self._count += 1
        for i, part in enumerate(send.split(list(send_sizes))):
            self._store.set(f"{self._count} {self.rank} {i}", bytes(part.view(torch.uint8).tolist()))
        came = b"".join(self._store.get(f"{self._count} {i} {self.rank}") for i in range(self.size))
        whole = torch.tensor(list(came), dtype=torch.uint8).view(send.dtype)
        assert whole.numel() == sum(receive_sizes)
        return Arrived(whole if out is None else out.copy_(whole))

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        """See `Channel`."""
        sizes = [send.numel()] * self.size
        return self.all_to_all(send.repeat(self.size), sizes, sizes).wait().view(self.size, -1)

    def sum(self, tensor: torch.Tensor) -> None:
        """See `Channel`."""
        tensor.copy_(self.all_gather(tensor.reshape(-1)).sum(0).view_as(tensor))


class Arrived:
    """An exchange that has ended."""

    def __init__(self, came: torch.Tensor) -> None:
        self._came = came

    def wait(self) -> torch.Tensor:
        """See `Transfer`."""
        return self._came


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
    ) -> Transfer:
        """See `Channel`."""
        self.sent.append(send.nbytes)
        return super().all_to_all(send, send_sizes, receive_sizes, out)


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
