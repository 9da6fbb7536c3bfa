"""Optimizer state by parameter name, in the unsharded model's shapes, whoever updates the parameter.

Three kinds of owners: the model's fused optimizer (updates in the backward pass), optimizers that
`apply_optimizer_in_backward` left on a plain parameter, and the ordinary optimizer that the caller passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dmp import live_models as live
from dmp.calls import alone
from dmp.chunked import ChunkedTensor, as_chunks, chunk_views
from dmp.errors import CheckpointError
from dmp.foreign import type_name
from dmp.places import is_dtensor
from dmp.state.chunks_of_state import give_chunks, keyed_give, keyed_take
from dmp.state.find_wrapped import common_env, env_of, fused_parameters, in_force, joint_plan
from dmp.state.local_chunks import sharded_parameters
from dmp.state.safetensors_files import refuse_parts
from dmp.state.snapshots import read_into_chunks
from dmp.state.strided_shards import create_chunk_list, create_write_items, cut_strided_shards, get_tensor_shard
from dmp.state.torch_state_dict import (
    begin_together,
    gather_chunks,
    give_whole,
    keep_empty_parts,
    load_together,
    refuse_broadcasts,
    save_alone,
    save_beside_steps,
)
from dmp.state.trainer_saves import save_model, save_state
from dmp.wrap.earlier.earlier_optimizers import follow
from dmp.wrap.optimizers.column_blocks import is_blocked, merge_blocks
from dmp.wrap.optimizers.given_optimizers import layers_of
from dmp.wrap.optimizers.keyed import parts
from dmp.wrap.optimizers.optimizer_trial import BY_BLOCK
from dmp.wrap.values.whole import gather


@dataclass
class OwnedState:
    """The live optimizer state of one parameter.

    Args:
        name: fully-qualified name of the parameter.
        shape: of the unsharded parameter.
        options: the live param group.
        values: state name -> the live tensor as pieces in the unsharded shape, or a plain object (a number).
        optimizer: whose `state` holds the values and may be given more; None where the model itself keeps them.
        parameter: the local parameter.
        chunked: its pieces when a sharded module holds it.
    """

    name: str
    shape: tuple[int, ...]
    options: dict[str, Any]
    values: dict[str, Any]
    optimizer: torch.optim.Optimizer | None
    parameter: nn.Parameter
    chunked: ChunkedTensor | None

    def new(self, key: str, size: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, ChunkedTensor]:
        """A zero state tensor for the optimizer, and the pieces through which to fill it.

        Raises:
            CheckpointError: a shape that says nothing of how a sharded parameter's state is cut.
        """
        on_cpu = not (self.options.get("capturable") or self.options.get("fused"))
        if tuple(size) == self.shape and (size or key != "step"):
            made = torch.zeros_like(self.parameter.detach(), dtype=dtype)
        elif not size:
            made = torch.zeros((), dtype=dtype, device="cpu" if on_cpu else self.parameter.device)
        elif self.chunked is None and not is_dtensor(self.parameter):
            made = torch.zeros(tuple(size), dtype=dtype, device=self.parameter.device)
        else:
            raise CheckpointError(
                f"optimizer state {key!r} of {self.name!r} has shape {tuple(size)}, not the parameter's {self.shape}: "
                "it cannot be cut as the parameter is"
            )
        return made, self.pieces(key, made)

    def pieces(self, key: str, value: torch.Tensor) -> ChunkedTensor:
        """A state tensor of the local parameter as pieces in the unsharded shape; views.

        Raises:
            CheckpointError: state of a sharded parameter that is neither a scalar nor shaped as the parameter.
        """
        if value.dim() == 0 or self.chunked is None:
            is_by_row = type(self.optimizer).__name__ in BY_BLOCK
            if is_by_row and tuple(value.shape) == (*self.shape[:1], 1) != self.shape:
                value = value.view(-1)  # TorchRec's row-wise sum is (rows,) everywhere; others' state is as made
            return as_chunks(value)
        if value.shape != self.parameter.shape:
            raise CheckpointError(
                f"optimizer state {key!r} of {self.name!r} has local shape {tuple(value.shape)}, neither a scalar nor "
                f"the local parameter's {tuple(self.parameter.shape)}; its optimizer cannot run on a sharded table"
            )
        return chunk_views(value, self.parameter, self.chunked)


@alone("full_optimizer_state_dict", at_rest=True)
def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Fused and ordinary optimizer state of the unsharded model, as plain CPU tensors.

    Collective over `model.env`. Row-wise Adagrad's `sum` is (rows,) also where the table is split by columns: the
    width-weighted mean over the column blocks.

    Args:
        model: a `DistributedModelParallel`, or any module.
        optimizer: an ordinary optimizer over the model's parameters.
        rank0_only: the other ranks return empty state.

    Returns:
        `{"state": {parameter name: {state name: tensor}}, "param_groups": [{..., "params": [names]}]}`.

    Raises:
        CheckpointError: an optimizer with a parameter that is not the model's, or state that cannot be unsharded.

    Example:
        >>> full_optimizer_state_dict(nn.Linear(2, 1))
        {'state': {}, 'param_groups': []}
    """
    env = env_of(model)
    owned = owned_states(model, optimizer)
    flat = {f"{o.name}\0{key}": value for o in owned for key, value in o.values.items()}
    whole = gather(flat, env, rank0_only=rank0_only, what=f"full_optimizer_state_dict, {told_of(optimizer)}")
    widths = column_widths(model, owned)
    state: dict[str, dict[str, Any]] = {}
    for pair, value in whole.items():
        name, key = pair.split("\0")
        if name in widths and is_blocked(value, widths[name]):
            value = merge_blocks(value, widths[name])
        state.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": param_groups(owned)}


def told_of(optimizer: Any) -> str:
    """What ranks compare of an optimizer that they pass: where one passes none, its state would be missing, unnoticed.

    Example:
        >>> told_of(None)
        'optimizer=None'
    """
    return f"optimizer={None if optimizer is None else type(optimizer).__name__}"


def owned_states(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[OwnedState]:
    """Every parameter that an optimizer updates, with its state; the values are live.

    Raises:
        CheckpointError: no optimizer, one with a parameter that is not the model's, or several of one parameter.
    """
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise CheckpointError(
            f"expected a torch.optim.Optimizer over the model's parameters; got {type_name(optimizer)}. Of several, "
            "give one with their param groups, or TorchRec's CombinedOptimizer of them"
        )
    sharded = sharded_parameters(model)
    named = dict(model.named_parameters())
    owned: dict[str, OwnedState] = {}

    def add(name: str, options: dict[str, Any], own: torch.optim.Optimizer | None, values: Mapping[str, Any]) -> None:
        if name in owned:
            raise CheckpointError(f"parameter {name!r} is updated by more than one optimizer; only one can be saved")
        chunked = sharded[name][1] if name in sharded else None
        shape = tuple(chunked.size() if chunked is not None else named[name].shape)
        entry = OwnedState(name, shape, options, {}, own, named[name], chunked)
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                value = entry.pieces(key, value) if own is not None else as_chunks(value)
            entry.values[key] = value
        owned[name] = entry

    for name, fused in fused_parameters(model).items():
        add(name, fused.options, None, fused.state())
    for name, parameter in named.items():
        for inner in () if name in owned else getattr(parameter, "_in_backward_optimizers", ()):
            add(name, inner.param_groups[0], inner, inner.state.get(parameter, {}))
    for name, group, part in _groups(model, named, optimizer):
        add(name, group, part, part.state.get(named[name], {}))
    return [*owned.values(), *_warm_ups(optimizer)]


def param_groups(owned: Iterable[OwnedState]) -> list[dict[str, Any]]:
    """The param groups with names in place of parameters, copied."""
    groups: dict[int, dict[str, Any]] = {}
    for o in owned:
        if id(o.options) not in groups:
            options = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in o.options.items()}
            groups[id(o.options)] = {**options, "params": []}
        groups[id(o.options)]["params"].append(o.name)
    return list(groups.values())


def column_widths(model: nn.Module, owned: Iterable[OwnedState]) -> dict[str, tuple[int, ...]]:
    """Widths of the column blocks of every parameter that the plan splits by columns; see column_blocks.py."""
    plan, env = joint_plan(model), common_env(model)
    if env is None:
        return {}
    widths: dict[str, tuple[int, ...]] = {}
    for o in owned:
        if o.name in plan and len(o.shape) == 2 and not plan[o.name].layout.is_dense:
            shards = plan[o.name].layout.shards(o.shape, env)
            starts = sorted({s.offsets[1] for s in shards})
            if len(starts) > 1:
                widths[o.name] = tuple(b - a for a, b in pairwise([*starts, o.shape[1]]))
    return widths


def _groups(
    model: nn.Module, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> list[tuple[str, dict[str, Any], torch.optim.Optimizer]]:
    """(name, group, whose) of each parameter of an ordinary optimizer, or of those that a wrapper of TorchRec's stands
    for; the model's own fused one is not ordinary."""
    own = [m.fused_optimizer for m in in_force(model).values()]
    fused = fused_parameters(model)
    names = {id(p): name for name, p in named.items()}
    found = []
    for part in () if optimizer is None else parts(optimizer):
        if any(part is each for each in own):
            continue
        follow(part)
        for i, group in enumerate(part.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise CheckpointError(
                        f"param group {i} of {type(part).__name__} has a parameter of shape {tuple(p.shape)} that is "
                        "not the model's; pass the optimizer that was made from model.parameters(), without those "
                        "in whose place the forward puts others"
                    )
                name = names[id(p)]
                updated_in_backward = name in fused or bool(getattr(p, "_in_backward_optimizers", ()))
                if not updated_in_backward:  # such a parameter never gets a .grad: the optimizer does nothing to it
                    found.append((name, group, part))
    return found


def _warm_ups(optimizer: torch.optim.Optimizer | None) -> list[OwnedState]:
    """Where a schedule stands that a wrapper of TorchRec's keeps as state of a parameter of its own."""
    found: list[OwnedState] = []
    for layer in layers_of(optimizer):
        held: nn.Parameter | None = getattr(layer, "_warmup_param", None)
        if held is not None:
            values = {key: as_chunks(value) for key, value in layer.state.get(held, {}).items()}
            name = f"__warmup.{len(found)}" if found else "__warmup"
            found.append(OwnedState(name, tuple(held.shape), {}, values, layer, held, None))
    return found


live.at_first_wrap(give_chunks)
for _module in ("safetensors.torch", "peft.utils.other", "accelerate.utils.other"):
    live.when_imported(_module, refuse_parts)
for _module, _owner, _name, _around in (
    ("torchrec.optim.keyed", "KeyedOptimizer", "state_dict", keyed_give),
    ("torchrec.optim.keyed", "KeyedOptimizer", "load_state_dict", keyed_take),
    ("torchsnapshot.io_preparers.sharded_tensor", "ShardedTensorIOPreparer", "prepare_read", read_into_chunks),
    ("torch.distributed.checkpoint.state_dict", "", "_maybe_full_or_cpu_state_dict", give_whole),
    ("torch.distributed.checkpoint.state_dict", "", "_verify_options", begin_together),
    ("torch.distributed.checkpoint.state_dict", "", "_load_model_state_dict", load_together),
    ("torch.distributed.checkpoint.state_dict", "", "_load_optim_state_dict", load_together),
    ("torch.distributed.checkpoint.default_planner", "", "_flatten_sharded_tensors", keep_empty_parts),
    ("torch.distributed.checkpoint.format_utils", "BroadcastingTorchSaveReader", "read_data", refuse_broadcasts),
    ("torch.distributed.checkpoint.state_dict_saver", "", "_save_state_dict", save_alone),
    (
        "torch.distributed.checkpoint._async_thread_executor",
        "_ThreadBasedAsyncCheckpointExecutor",
        "execute_save",
        save_beside_steps,
    ),
    ("torch.distributed.tensor", "DTensor", "__create_write_items__", create_write_items),
    ("torch.distributed.tensor", "DTensor", "__create_chunk_list__", create_chunk_list),
    ("torch.distributed.tensor", "DTensor", "__get_tensor_shard__", get_tensor_shard),
    ("torch.distributed._state_dict_utils", "", "_distribute_tensors", cut_strided_shards),
    ("torch.distributed._state_dict_utils", "", "_all_gather_sharded_tensor", gather_chunks),
    ("transformers.trainer", "Trainer", "save_model", save_model),
    ("transformers.trainer", "Trainer", "_save_optimizer_and_scheduler", save_state),
):
    live.stand_in(_module, _owner, _name, _around)
