"""The ranks that hold a model's tables, as the tensors of its state dicts know them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from dmp.calls import Calls
from dmp.chunked import is_chunked
from dmp.env import ShardingEnv
from dmp.errors import RanksError, ShardError
from dmp.ranks import fail_together, gather_words
from dmp.wrap.values.half_steps import say_of_half_by
from dmp.wrap.values.whole import gather

T = TypeVar("T", bound=Mapping[str, object])
_WRITES = "torch.save (or pickle) of a table, of which each rank has a part"
_ALL_OR_NONE = (
    "what one rank alone writes has lost the others': all write their own, to a file each, or "
    "save_checkpoint(path, model, optimizer) keeps everything, for any mesh; full_state_dict(model) and "
    "full_optimizer_state_dict(model, optimizer), called on all ranks, give plain tensors for torch.save on one"
)


class Holders:
    """See `dmp.sharded_form.Holders`.

    Args:
        env: the model's.
        calls: likewise, where they are known.
    """

    def __init__(self, env: ShardingEnv, calls: Calls | None = None) -> None:
        self._env, self._calls, self._thread = env, calls, threading.get_ident()

    def __deepcopy__(self, memo: object) -> Holders:
        return self

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._env.table_group

    def gather(self, tensor: torch.Tensor, dst: int, out: torch.Tensor | None) -> None:
        env, what = self._env, f"gather of a tensor of {tuple(tensor.shape)} to rank {dst}"
        fail_together(lambda: _check_out(tensor, out, env.rank, dst, env.size), env.everyone, what, kind=ShardError)
        gather({"": tensor}, env, rank0_only=dst == 0, out={} if out is None else {"": out}, what=what)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = gather({"": tensor}, self._env, cpu=False)[""]
        return found

    def meet(self) -> None:
        """As in `dmp.sharded_form.Holders`.

        Raises:
            RanksError: on every rank: some do something else.
            ShardError: it is another thread that writes, in the midst of whatever the first one does with other ranks.
        """
        if self._env.table_size > 1 and threading.get_ident() != self._thread:
            raise ShardError(
                f"{_WRITES}, in another thread than the one that asked for the state: ranks wait for each other there, "
                "in the midst of their steps. save_checkpoint(path, model, optimizer, asynchronous=True) writes in the "
                "background; or torch.save(state, buffer) to an io.BytesIO first, whose bytes any thread may write"
            )
        self.say_when()
        try:
            gather_words(_WRITES, [0, 0], self._env.table_group if self._env.table_size > 1 else None)
        except RanksError as error:
            raise type(error)(f"{error}. {_ALL_OR_NONE}") from error

    def say_when(self) -> None:
        """As in `dmp.sharded_form.Holders`; in the background it is a copy that is written, of another time."""
        if threading.get_ident() == self._thread:
            say_of_half_by(self._calls)


def _check_out(tensor: torch.Tensor, out: torch.Tensor | None, rank: int, dst: int, size: int) -> None:
    if not 0 <= dst < size:
        raise ShardError(f"expected a rank of {size} to gather to; got {dst=}")
    if rank == dst and (out is None or out.shape != tensor.shape):
        came = None if out is None else tuple(out.shape)
        raise ShardError(f"gather: expected a tensor of {tuple(tensor.shape)} as `out` on rank {dst}; got {came}")
    if rank != dst and out is not None:
        raise ShardError(f"gather: expected `out` on rank {dst} alone; it is given on rank {rank} too")


def held(tensors: T, env: ShardingEnv, calls: Calls | None = None) -> T:
    """The same, whose chunks know from now on who has the others."""
    for tensor in tensors.values():
        if is_chunked(tensor):
            tensor.holders = Holders(env, calls)
    return tensors
