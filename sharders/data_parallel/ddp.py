"""`DDPWrapper`: what no sharder owns, replicated, gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmp import ShardError, ShardingEnv, is_dtensor
from sharders.data_parallel.options import check_ddp
from sharders.data_parallel.static_graph import StaticGraphDDP
from sharders.data_parallel.thawed import can_thaw, forget_earlier
from sharders.data_parallel.unreached import AnyReachDDP
from sharders.data_parallel.updated import BY_OPTIONS, refuse_updated
from sharders.data_parallel.whole import average_thawed, average_whole


class DDPWrapper:
    """Wraps in `DistributedDataParallel` over the data ranks; does nothing for one process or without dense parameters.

    Args:
        options: passed to `DistributedDataParallel` (`bucket_cap_mb`, ...). Parameters that the loss does not reach
            need nothing: `find_unused_parameters` is taken, and makes no difference, see `AnyReachDDP`. With
            `static_graph` torch's own treatment of them is had, see `StaticGraphDDP`.
    """

    def __init__(self, **options: Any) -> None:
        check_ddp(options)
        self.options = options

    def wrap(self, module: nn.Module, env: ShardingEnv, device: torch.device, ignored: frozenset[str]) -> nn.Module:
        """DDP of `module` that leaves `ignored` parameters and buffers alone.

        Raises:
            ShardError: parameters that tensor parallelism has split.
        """
        group = env.group("replicate", "shard")
        owned = {name: p for name, p in module.named_parameters() if name not in ignored}
        trained = {name: p for name, p in owned.items() if p.requires_grad}
        forget_earlier(owned.values())
        if group is None or env.data_size == 1:
            return module
        if not trained:
            average_thawed([p for p in owned.values() if can_thaw(p)], group, env.everyone)
            return module
        first = next((name for name, p in trained.items() if is_dtensor(p)), None)
        if first is not None:
            raise ShardError(
                f"DistributedDataParallel takes no DTensors, and {first!r} is one (split over {env.axes('tensor')}); "
                "pass data_parallel_wrapper=FSDPWrapper(), which copies or splits them over the data axes"
            )
        # The only way to keep DDP off a parameter; see also dmp/private_names.py.
        # It asks for those of the module itself by "name" in one place, by ".name" in another.
        # Sparse buffers, which it cannot send, are rank 0's since wrapping began.
        left = {*ignored, *(name for name, buffer in module.named_buffers() if buffer.layout != torch.strided)}
        names = {*left, *(f".{name}" for name in left if "." not in name)}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        ids = [device] if device.type != "cpu" else None
        # It costs torch a walk through each graph, and is wrong where two forwards come before their backward passes.
        options = {name: value for name, value in self.options.items() if name != "find_unused_parameters"}
        options.setdefault("init_sync", False)  # values are alike, and so a rank may copy its model alone
        if options.get("static_graph"):
            if device.type == "cpu":  # where torch's own way to update them asks for a stream of an accelerator
                refuse_updated(trained, BY_OPTIONS)
            return StaticGraphDDP(module, device_ids=ids, process_group=group, **options)
        made = AnyReachDDP(module, device_ids=ids, process_group=group, **options)
        if env.everyone is not None:
            made.take_turns(env.everyone)
        return made


class WholeWrapper:
    """Averages the few weights that a plan replicates on a mesh that splits the others: by DDP, or beside weights that
    tensor parallelism has split, of which DDP takes none, in one exchange at the end of the backward pass."""

    def wrap(self, module: nn.Module, env: ShardingEnv, device: torch.device, ignored: frozenset[str]) -> nn.Module:
        """`module`, in DDP or in place; `ignored` parameters and buffers are left alone."""
        group = env.group("replicate", "shard")
        whole = {name: p for name, p in module.named_parameters() if name not in ignored}
        if not any(map(is_dtensor, whole.values())):
            return DDPWrapper().wrap(module, env, device, ignored)
        if group is not None and env.data_size > 1:
            average_whole(module, list(whole), group, env.everyone)
        return module
