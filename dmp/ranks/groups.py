"""Process groups of our own, beside the program's.

[Note: control] Saves, gathers and the like exchange small things on a group of their own, on the CPU, so that they
never meet a step's collectives or the program's: gloo ends the process where two collectives of different sizes meet.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dmp.errors import RanksError
from dmp.ranks import call_log, watchdog
from dmp.ranks.connections import backend_of, backends_of
from dmp.ranks.entry import entry


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks, on the CPU where the backend allows, for [Note: control]; collective for a new set of ranks."""
    is_ours = any(of in _ON_THE_CPU and group is own for (_, of), own in call_log.own_groups.items())
    return group if is_ours else own_group(group, "control")


_ON_THE_CPU = ("control", "background")


def own_group(group: dist.ProcessGroup, purpose: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The same ranks with gloo connections of their own, for one purpose; collective for a new set of ranks.

    `group` itself where that would bring nothing: the data path of a backend that is not gloo, a group that is no real
    one. Groups of the same ranks share it, so that a program may make and destroy as many as it likes; it ends with
    the default group.
    """
    try:
        backend, dog = backend_of(group), watchdog.start()
    except ValueError:
        raise RanksError(call_log.DESTROYED) from None
    is_control = purpose in _ON_THE_CPU
    if dog is None or dist.get_world_size(group) == 1:
        return group
    if backend != "gloo" and not (is_control and _needs_gloo(group)):
        return group
    ranks = dist.get_process_group_ranks(group)
    made = call_log.own_groups.get((tuple(ranks), purpose))
    if made is not None:
        return made
    name = f"dmp/{purpose}/{call_log.shown(tuple(ranks))}"
    with entry(f"making a group for {purpose}", group):  # in torch nothing could tell it that nobody will come
        count = dog.wait_in_store(name, len(ranks))
        made = _new_group(ranks, dist.get_rank(group), f"{name}/{count}", timeout)
    call_log.own_groups[tuple(ranks), purpose] = made
    if purpose == "background":
        call_log.parts[made] = ", in the background"
    return made


def wait_for_first(group: dist.ProcessGroup, where: str) -> None:
    """Return when rank 0 of the group has come here as often as this one, however long it takes: under no timeout.

    Args:
        where: a word for the place in the code.

    Raises:
        RanksError: it will not come.
    """
    dog = watchdog.start()
    if dog is not None and dist.get_world_size(group) > 1:
        name = f"dmp/{where}/{call_log.shown(tuple(dist.get_process_group_ranks(group)))}"
        dog.wait_for_one(name, is_awaited=dist.get_rank(group) == 0)


def _new_group(ranks: list[int], rank: int, name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """As torch's `new_group`, whose names differ where ranks have made different numbers of groups before."""
    c10d: Any = dist.distributed_c10d
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(  # private
        len(ranks),
        rank,
        ranks,
        dist.Backend("gloo"),
        c10d._get_default_store(),
        name,
        timeout=timeout or c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[made] = {of_all: i for i, of_all in enumerate(ranks)}
    return made


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the program has not destroyed a group."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must be that the group exchanges: on the CPU where it takes these, else on its accelerator."""
    kinds = backends_of(group)
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(next(iter(kinds)), torch.accelerator.current_device_index())


def _needs_gloo(group: dist.ProcessGroup) -> bool:
    """Whether no backend but gloo could exchange what lies on the CPU for a group of an accelerator's backend."""
    return backends_of(group).get("cpu", "gloo") == "gloo" and dist.is_gloo_available()
