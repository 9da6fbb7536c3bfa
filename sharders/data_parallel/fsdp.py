"""`FSDPWrapper`: what no sharder owns, split or copied over the data ranks; the default for every mesh.

Which of torch's own runs it depends on the mesh and on what tensor parallelism has split already:

| dense parameters along the data axes | none split by tensor parallelism | some are DTensors |
| --- | --- | --- |
| split along some (`shard`, `dp_shard`, `fsdp`) | `fully_shard` | `fully_shard` |
| copies along all (`dp`, `replicate`, ...) | `DistributedDataParallel` | `replicate`, in groups as `fully_shard` |

Copies along some and split along others is torch's HSDP: a 2-D mesh (copies, shards), whichever is outer here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from dmp import Layout, ShardError, ShardingEnv, fully_sharded_dim, is_dtensor, ranks, strided
from sharders.data_parallel.agreed_order import keep_order
from sharders.data_parallel.asked import hear_of_split
from sharders.data_parallel.blocks import (
    Units,
    cast_inputs,
    checkpoint_blocks,
    find_units,
    repeated_blocks,
    say_of_unsure,
)
from sharders.data_parallel.cast_inside import refuse_casts
from sharders.data_parallel.classes import begin_alike
from sharders.data_parallel.computed_again import average_each_time
from sharders.data_parallel.ddp import DDPWrapper
from sharders.data_parallel.fsdp_units import units_of
from sharders.data_parallel.options import check_fsdp, check_parts, check_torch
from sharders.data_parallel.past_hooks import explain_pieces, gather_by_forward, gather_outside
from sharders.data_parallel.read_outside import read_outside
from sharders.data_parallel.replaced import take_replaced
from sharders.data_parallel.twice import forget_graphs
from sharders.data_parallel.unfinished import (
    clear_by_zero_grad,
    forget_unfinished,
    has_raised,
    refuse_steps,
    split_weights,
)
from sharders.data_parallel.unreached import hook_hidden, reduce_unreached_chunks
from sharders.data_parallel.updated import SPLITS, refuse_updated
from sharders.data_parallel.whole import average_whole
from sharders.data_parallel.whole_read import average_whole_read
from sharders.data_parallel.written_inside import keep_writes
from sharders.tensor_parallel.split.plain import Own

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


class FSDPWrapper:
    """Shards dense parameters over the `shard` axes by torch's `fully_shard`, unit by unit, then the root for the rest.

    Parameters become DTensors under their names, in place; the module stays the same object, with torch's
    `FSDPModule` methods (`set_requires_gradient_sync(False)` while gradients accumulate). Where no axis splits dense
    parameters they are copies, by `DDPWrapper` or, beside tensor parallelism, by torch's replicating form of FSDP2.
    Parameters without dimensions, which `fully_shard` does not take, stay whole, their gradients averaged; and so do
    those that the model keeps in a list, dict or object beside their places, where no chunks would be seen, and biases
    of query, key and value in one that tensor parallelism has split (see [Note: parts] of dense layouts). Buffers are
    not synchronised after the start, as under `fully_shard` itself; DDP does synchronise them. Where weights are split,
    a trained one that is added or replaced later is an error at the next forward.

    Args:
        reshard_after_forward: of `fully_shard`: None frees units after their forward and keeps the root's parameters.
        mixed_precision: a dtype to compute in (gradients are reduced in float32), or a `MixedPrecisionPolicy`, whose
            `output_dtype` is the whole model's.
        offload: True keeps parameters, gradients and optimizer state on the CPU; or an `OffloadPolicy`.
        units: what is gathered at once: path patterns (`"layers.*"`) or classes of modules. By default the plan of a
            Hugging Face model, else the repeated blocks that all ranks run, as far as the code of the model shows.
        activation_checkpointing: recompute the repeated blocks in the backward pass; or a choice
            `(path, module) -> bool` among them.
        compile: compile each repeated block; or a dict of `torch.compile`'s options. Beside tensor parallelism
            sequences of several lengths need `{"dynamic": False}`: torch 2.13 raises for split weights otherwise.

    Example:
        >>> wrapper = FSDPWrapper(mixed_precision=torch.bfloat16, activation_checkpointing=True)
        >>> model = DistributedModelParallel(module, env, data_parallel_wrapper=wrapper)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        reshard_after_forward: bool | int | None = None,
        mixed_precision: MixedPrecisionPolicy | torch.dtype | None = None,
        offload: OffloadPolicy | bool = False,
        units: Units | None = None,
        activation_checkpointing: bool | Callable[[str, nn.Module], bool] = False,
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        self.reshard_after_forward = reshard_after_forward
        self.mixed_precision = mixed_precision
        self.offload = offload
        self.units = units if units is None or isinstance(units, (str, type)) else tuple(units)
        self.activation_checkpointing = activation_checkpointing
        self.compile = compile
        check_fsdp(vars(self))

    def shards_in_place(self, env: ShardingEnv, has_dtensors: bool) -> bool:
        """Whether `wrap` returns the module that it is given, and takes parameters on meta.

        Args:
            env: the mesh.
            has_dtensors: whether tensor parallelism has split dense parameters.
        """
        return bool(env.fully_sharded_axes) or has_dtensors or bool(self._policies())

    def wrap(self, module: nn.Module, env: ShardingEnv, device: torch.device, ignored: frozenset[str]) -> nn.Module:
        """`module` so, in place but for DDP; parameters and buffers named in `ignored` are left alone.

        Raises:
            ShardError: a unit that is not there or cannot be one, or a policy on a mesh with nothing to run it on.
        """
        dense = {name: p for name, p in module.named_parameters() if name not in ignored}
        if not dense:
            return module
        self._prepare_blocks(module, ignored)
        if not self.shards_in_place(env, any(map(is_dtensor, dense.values()))):
            return DDPWrapper().wrap(module, env, device, ignored)
        self._check_policies(env)
        if not self._policies() and env.data_size == 1 and not env.fully_sharded_axes:
            return module
        del dense  # whole parameters go as they are split, unit by unit: nobody may hold them
        self._shard(module, env, ignored)
        return module

    def check(self, module: nn.Module, env: ShardingEnv, placed: Mapping[str, Layout], ignored: frozenset[str]) -> None:
        """Raise what `wrap` would raise, while nothing of the module has been changed.

        Args:
            placed: what tensor parallelism will split, by the parameters' first names.
            ignored: names of what the tables' sharders take.
        """
        dense = {name: p for name, p in module.named_parameters() if name not in ignored and not is_lazy(p)}
        if not dense:
            return
        if not self.shards_in_place(env, bool(placed)):
            return
        refuse_updated(dense, SPLITS)
        check_parts(self.reshard_after_forward, env)
        self._check_policies(env)
        if env.mesh is not None and (env.data_size > 1 or env.fully_sharded_axes):
            check_torch()
            split_by_dtype(
                find_units(module, self.units, ignored),
                module,
                {n: p for n, p in dense.items() if p.dim() and p.numel()},
            )

    def _check_policies(self, env: ShardingEnv) -> None:
        policies = self._policies()
        if policies and (env.mesh is None or not env.axes("replicate", "shard")):
            asked = " and ".join("mixed_precision" if name == "mp_policy" else "offload" for name in policies)
            raise ShardError(
                f"{asked} of FSDPWrapper needs a mesh with a data axis (dp, shard, replicate, ...); "
                f"this is {env}. For mixed precision without one use torch.autocast"
            )

    def _prepare_blocks(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Checkpointing, then compilation of what it runs; sharding comes after both, so that it stays outside."""
        if self.activation_checkpointing is False and self.compile is False:
            return
        blocks = repeated_blocks(module, ignored)
        checkpoint_blocks(blocks, self.activation_checkpointing)
        if self.compile is not False:
            for block in blocks.values():  # in place: names stay, and equal blocks share one compilation
                block.compile(**(self.compile if isinstance(self.compile, Mapping) else {}))

    def _shard(self, module: nn.Module, env: ShardingEnv, ignored: Collection[str]) -> None:
        whole, units, apply, options = self._prepare(module, env, ignored)
        group = env.group("replicate", "shard")
        policy = options.get("mp_policy")
        for m in [*units.values(), module]:
            m.register_forward_hook(_own_outputs)  # before torch's hook on outputs, so it runs before it
            if policy is not None:
                options["mp_policy"] = replace(policy, output_dtype=policy.output_dtype if m is module else None)
            begin_alike(m, is_split=bool(env.fully_sharded_axes))
            apply(m, **options)
            if self.reshard_after_forward is None and (m is module or not env.fully_sharded_axes):
                m.register_forward_hook(_put_back)
            gather_by_forward(m)
            average_each_time(m)
        explain_pieces(module, list(units.values()))
        free = _free_outdated([*units.values(), module], env, stays=self.reshard_after_forward is not None)
        module.register_forward_pre_hook(lambda *_: free(), prepend=True)
        gather_outside(module, list(units.values()), free, _own_outputs)
        read_outside(module, free)
        reduce_unreached_chunks(module)
        keep_writes(module, group)
        keep_order({**units, "": module}, env.everyone)
        hear_of_split(module)
        refuse_steps(module, has_raised, split_weights)
        clear_by_zero_grad(module)
        if whole and group is not None:
            average_whole(module, whole, group, env.everyone)
        average_whole_read(module, group, env.everyone)

    def _prepare(
        self, module: nn.Module, env: ShardingEnv, ignored: Collection[str]
    ) -> tuple[list[str], dict[str, nn.Module], Callable[..., Any], dict[str, Any]]:
        """Names of parameters that stay whole, units, torch's function and its options."""
        dense = {name: p for name, p in module.named_parameters() if name not in ignored}
        dims = {name: _split_dim(p, env) for name, p in dense.items()}
        whole = [name for name, dim in dims.items() if dim is None]
        managed = {name: p for name, p in dense.items() if dims[name] is not None}
        units = find_units(module, self.units, ignored)
        if self.units is None and env.rank == 0:
            say_of_unsure(module, ignored, units)
        if len({p.dtype for p in managed.values() if p.requires_grad}) > 1:
            units = split_by_dtype(units, module, managed)
        apply, options = self._apply(env)
        if ignored or whole:
            named = module.named_parameters(remove_duplicate=False)
            options["ignored_params"] = {p for name, p in named if name in ignored or _split_dim(p, env) is None}
        if any(dims.values()):
            from torch.distributed.tensor import Shard

            options["shard_placement_fn"] = lambda p: Shard(_split_dim(p, env) or 0)
        for p in managed.values():  # fully_shard takes contiguous ones alone
            if not p.is_contiguous():
                p.data = p.data.contiguous()
        policy = options.get("mp_policy")
        if ignored and policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
            ids = {id(p) for p in managed.values()}
            for m in module.modules():
                if any(id(p) in ids for p in m._parameters.values()):
                    cast_inputs(m, policy.param_dtype)
        return whole, units, apply, options

    def _apply(self, env: ShardingEnv) -> tuple[Callable[..., Any], dict[str, Any]]:
        """torch's function for this mesh, and its options."""
        options = {"mesh": data_mesh(env), **self._policies()}
        if env.fully_sharded_axes:
            from torch.distributed.fsdp import fully_shard

            return fully_shard, {**options, "reshard_after_forward": self.reshard_after_forward}
        # Private: DDP takes no DTensors, and nothing public averages their gradients without splitting them.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return replicate, options

    def _policies(self) -> dict[str, Any]:
        """Those asked for, as `fully_shard` names them."""
        policies: dict[str, Any] = {}
        if self.mixed_precision is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            policy = self.mixed_precision
            if isinstance(policy, torch.dtype):
                policy = MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=torch.float32)
            policies["mp_policy"] = policy
        if self.offload is not False:
            from torch.distributed.fsdp import CPUOffloadPolicy

            pin = torch.accelerator.is_available()
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=pin) if self.offload is True else self.offload
        return policies


def _split_dim(parameter: torch.Tensor, env: ShardingEnv) -> int | None:
    """The dim along which fully sharded axes split it; None for what neither `fully_shard` nor `replicate` takes."""
    size = prod(env.shape[env.names.index(axis)] for axis in env.fully_sharded_axes)
    if size == 1 or not parameter.numel():  # of no elements: a norm of no features
        return 0 if parameter.dim() and parameter.numel() else None
    tensor_dim, parts = None, 1
    for placement in parameter.placements if is_dtensor(parameter) else ():
        if not placement.is_replicate():
            tensor_dim, parts = strided(placement) or (placement.dim, 1)  # type: ignore[attr-defined]
    return fully_sharded_dim(parameter.shape, tensor_dim, parts, size)


def data_mesh(env: ShardingEnv) -> DeviceMesh:
    """Mesh of the data axes for `fully_shard`: (shards,), (copies, shards), or (copies,); collective when new.

    Axes of one kind are flattened into one; axes of size 1 along which dense parameters are copies are left out.
    """
    assert env.mesh is not None
    data = env.axes("replicate", "shard")
    shards = env.fully_sharded_axes
    copies = tuple(axis for axis in data if axis not in shards)
    if shards and prod(env.shape[env.names.index(axis)] for axis in copies) == 1:
        copies = ()
    parts = [_flat(env.mesh, axes) for axes in (copies, shards) if axes]
    # Private: slicing takes axes in the mesh's order alone, and copies must be outer here whatever the mesh's order.
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def _flat(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    return mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten("dmp_" + "_".join(axes))


def split_by_dtype(
    units: Mapping[str, nn.Module], module: nn.Module, managed: Mapping[str, nn.Parameter]
) -> dict[str, nn.Module]:
    """Units so that each, and the root, trains parameters of one dtype: `fully_shard` reduces a unit's in one buffer.

    The modules that hold a unit's rarer dtypes become units of their own.

    Raises:
        ShardError: one module that holds two dtypes, or a rarer one held by a unit itself.
    """
    held: dict[str, list[tuple[str, torch.dtype]]] = {}
    paths = sorted(units, key=len, reverse=True)
    for name, p in managed.items():
        if p.requires_grad:
            unit = next((u for u in paths if name.startswith(f"{u}.")), "")
            held.setdefault(unit, []).append((name, p.dtype))
    inner: dict[str, nn.Module] = {}
    for unit, entries in held.items():
        common = Counter(dtype for _, dtype in entries).most_common(1)[0][0]
        for name, dtype in entries:
            path = name.rpartition(".")[0]
            if dtype == common:
                continue
            if path == unit or any(d != dtype for n, d in entries if n.startswith(f"{path}.")):
                raise ShardError(
                    f"parameter {name!r} is {dtype} beside trainable parameters of {common} in {path or 'the root'!r}; "
                    "fully_shard reduces the gradients of a unit in one dtype: cast one of them, or keep it in a "
                    "module of its own"
                )
            inner[path] = module.get_submodule(path)
    return {**inner, **units}


def _own_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Outputs that are views, as tensors of their own.

    torch hangs the gather and reduction of the backward pass on the outputs. An in-place operation on a view takes its
    hooks away (such as on what `nn.Linear` with a bias gives for 3-D inputs), and gradients would not be averaged.
    Nothing is copied. What torch does not find in an output, an object's attributes, gets its hook here.
    """
    if torch.is_grad_enabled():
        refuse_casts(module)
        hook_hidden(module, output)
    if not torch.is_grad_enabled() or not any(map(_is_view, tree_leaves(output))):
        return None  # as it is
    return tree_map(lambda leaf: Own.apply(leaf) if _is_view(leaf) else leaf, output)  # type: ignore[no-untyped-call]


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view()


def _put_back(module: nn.Module, args: Any, output: Any) -> None:
    """Chunks in place of whole weights after a forward that no backward pass will follow."""
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]


def _free_outdated(modules: Sequence[Any], env: ShardingEnv, stays: bool) -> Callable[[], None]:
    """What comes before torch's hooks: whole weights of an earlier forward are freed, where chunks may be newer.

    On all ranks alike: none may gather alone. Chunks are written by optimizers, or by whoever goes through parameters.

    Args:
        modules: those that are gathered at once each.
        stays: the user has asked for them to stay: only what has been written in place, as torch counts it, is newer.
    """
    units = units_of(modules)
    written: list[int] = []

    def before() -> None:
        forget_unfinished(modules[-1])
        try:
            if take_replaced(modules[-1], units):
                written.clear()
        except ShardError as error:
            ranks.raise_on_all(error, env.everyone, "the forward pass")
        if torch.is_inference_mode_enabled():
            _gather_first(modules)
        now = [held.sharded_param._version for unit in units for held in unit.fsdp_params]
        if now != written:
            forget_graphs(modules[-1])
        for unit in units:
            if unit.is_sharded or unit._training_state.name != "IDLE":  # the latter: a backward pass computes it again
                continue
            if now != written or not (stays or not unit.reshard_after_backward):
                unit.reshard()
            elif unit.is_unsharded:
                for held in unit.fsdp_params:
                    held.to_unsharded()  # in the middle of a look its modules hold the chunks
        written[:] = now

    return before


def _gather_first(modules: Sequence[Any]) -> None:
    """Gather what never was, as outside of inference mode: torch keeps that memory, and what inference mode has made
    cannot be written, nor trained, when it has ended.

    Args:
        modules: those that are gathered at once each, the root last.
    """
    with torch.inference_mode(False), torch.no_grad():
        modules[-1]._get_fsdp_state()._lazy_init()
        for m in modules:
            if not all(each.all_gather_outputs for unit in units_of([m]) for each in unit.fsdp_params):
                m.unshard()
                m.reshard()
