"""Leftovers: weights that tensor parallelism does not split, kept as DTensors that read as plain tensors.

[Note: leftovers] Beside split weights, which are DTensors, a plain one is trouble: optimizers' foreach kernels and
gradient clipping take no mixture. So a leftover becomes a DTensor, whole on every rank of the tensor axis, but no
forward should have to know. The module that owns it gets a subclass of its class, with a property of the weight's name
that reads the local tensor; the gradient arrives at the DTensor as a DTensor. Under FSDP2 the same holds of the weight
that is gathered for the forward; its sharded form, on a larger mesh, reads as what it is.

Where a weight is used on a part of the activations only (a chunk of the sequence, some of the heads), its gradients on
the ranks are parts of a sum: reading it through `redistribute` has torch sum them in the backward pass, one all-reduce
per weight. torch's SequenceParallel leaves them as parts, for each operation of the optimizer to sum again. The same
way a vocabulary's gradient is brought to the rows that are here: torch's embedding makes it whole on every rank.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from dmp import ShardedModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def keep_leftovers(model: nn.Module, mesh: DeviceMesh, on_parts: Collection[int]) -> None:
    """Make every whole weight of the model a DTensor on the tensor axis, see [Note: leftovers]; no communication.

    Args:
        model: its split weights are DTensors already; modules that hold pieces of tables are left alone.
        mesh: the tensor axis.
        on_parts: ids of modules whose own weights are used on parts of the activations.
    """
    from torch.distributed.tensor import DTensor, Replicate

    made: dict[int, nn.Parameter] = {}
    for owner in list(_outside_tables(model)):
        plain = {n: p for n, p in owner._parameters.items() if p is not None and not is_lazy(p)}
        plain = {n: p for n, p in plain.items() if not isinstance(p, DTensor) or id(p) in made}
        if not plain or isinstance(owner, nn.RNNBase):  # its kernel takes a list of the weights themselves
            continue
        for name, old in plain.items():
            if id(old) not in made:
                whole = DTensor.from_local(old.detach(), mesh, [Replicate()], run_check=False)
                new = nn.Parameter(whole, requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                made[id(old)] = made[id(new)] = new
            owner._parameters[name] = made[id(old)]
        _read_as(owner, tuple(plain), _summed if id(owner) in on_parts else _local)


def align_gradient(owner: nn.Module, name: str) -> None:
    """Have the gradient of a split weight arrive split as it is."""
    _read_as(owner, (name,), _aligned)


def _read_as(owner: nn.Module, names: tuple[str, ...], read: Callable[[Any], Any]) -> None:
    kind: Any = owner.__class__
    owner.__class__ = _reader(kind, names, read)


@cache
def _reader(kind: Any, names: tuple[str, ...], read: Callable[[Any], Any]) -> type[nn.Module]:
    """The subclass of `kind` that reads these parameters through `read`; named as `kind`, for code that asks."""
    body: dict[str, Any] = {name: property(_getter(name, read)) for name in names}
    body.update(__module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__)
    made: type[nn.Module] = types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(body))
    return made


def _getter(name: str, read: Callable[[Any], Any]) -> Callable[[nn.Module], Any]:
    from torch.distributed.tensor import DTensor

    def get(module: nn.Module) -> Any:
        parameter = module._parameters.get(name)
        if isinstance(parameter, DTensor):
            # On several axes it is FSDP2's sharded form, which is nothing to compute with.
            return read(parameter) if parameter.device_mesh.ndim == 1 else parameter
        return module.__getattr__(name) if parameter is None and name not in module._parameters else parameter

    return get


def _local(parameter: Any) -> Any:
    return parameter.to_local()


def _summed(parameter: Any) -> Any:
    from torch.distributed.tensor import Partial

    return _aligned(parameter).to_local(grad_placements=(Partial(),))


def _aligned(parameter: Any) -> Any:
    # To where it is already: nothing forward; backward, the gradient from where it is (partial, whole) to the same.
    return parameter.redistribute(placements=parameter.placements)


def _outside_tables(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that do not hold pieces of tables, each once."""
    seen: set[int] = set()

    def walk(m: nn.Module) -> Iterator[nn.Module]:
        if id(m) in seen or isinstance(m, ShardedModule):
            return
        seen.add(id(m))
        yield m
        for child in m.children():
            yield from walk(child)

    return walk(module)
