"""Whole weights, which tensor parallelism does not split: DTensors that a model's code reads as plain tensors.

[Note: whole weights] Beside split weights, which are DTensors, a plain one is trouble: optimizers' foreach kernels and
gradient clipping take no mixture. So a whole weight becomes a DTensor, whole on every rank of the tensor axis, but no
forward should have to know. The module that owns it gets a subclass of its class, with a property of the weight's name.
While the model's own code runs that reads the local tensor, and the gradient arrives at the DTensor as a DTensor; for
everybody else (who makes an optimizer, freezes, compares) it is the parameter. The model's own code is: `forward` of
the owner and of every module around it, their methods that are given something to compute with (`encode(x)`, not
`freeze()`, nor `merge("adapter")`, which names a part of the module), and what is computed again in the backward pass.
Under FSDP2 the same holds of the weight that is gathered for the forward; its sharded form, on a larger mesh, reads as
what it is.

Where a weight is used on a part of the activations only (a chunk of the sequence, some of the heads), its gradients on
the ranks are parts of a sum: reading it through `redistribute` has torch sum them in the backward pass, one all-reduce
per weight. torch's SequenceParallel leaves them as parts, for each operation of the optimizer to sum again. The same
way a vocabulary's gradient is brought to the rows that are here: torch's embedding makes it whole on every rank. Which
ids are here torch 2.13 keeps in a buffer beside the graph: the tensors of one compilation met those of the next there
("Mixing fake modes"), so that a split vocabulary is looked up between compiled graphs, hooks and all.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from dmp import Place, ShardedModule
from sharders.tensor_parallel.split.own_parts import follow
from sharders.tensor_parallel.split.plain import replicated
from sharders.unheard import made_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_Read = Callable[[Any, nn.Module], Any]
"""What the model's code gets of a parameter, a DTensor, and of the module that owns it."""


def keep_whole_weights(
    model: nn.Module,
    mesh: DeviceMesh,
    on_parts: Collection[int],
    adding: Collection[int] = (),
    kept: Collection[int] = (),
) -> None:
    """Make every whole weight of the model a DTensor on the tensor axis, see [Note: whole weights]; no communication.

    Args:
        model: its split weights are DTensors already; modules that hold chunks of tables are left alone.
        mesh: the tensor axis.
        on_parts: ids of modules whose own weights are used on parts of the activations.
        adding: ids of modules that add theirs, biases, on every rank to what is summed over the ranks.
        kept: ids of weights that the model goes on reading beside their places; they stay what they are where every
            rank has their whole gradient.
    """
    from torch.distributed.tensor import DTensor

    made: dict[int, nn.Parameter] = {}
    for owner in list(outside_tables(model)):
        left = () if id(owner) in on_parts or id(owner) in adding else kept
        plain = {n: p for n, p in owner._parameters.items() if p is not None and not is_lazy(p) and id(p) not in left}
        plain = {n: p for n, p in plain.items() if not isinstance(p, DTensor) or id(p) in made}
        if not plain or isinstance(owner, nn.RNNBase):  # its kernel takes a list of the weights themselves
            continue
        for name, old in plain.items():
            if id(old) not in made:
                new = nn.Parameter(replicated(old.detach(), mesh), requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                made[id(old)] = made[id(new)] = new
            owner._parameters[name] = made[id(old)]
        _read_as(owner, tuple(plain), _summed if id(owner) in on_parts else _shared if id(owner) in adding else _local)
    _read_inside(model)


def read_local(owner: nn.Module, names: tuple[str, ...], *, is_followed: bool = False) -> None:
    """Have the model's code read split weights as what of them is here, a bias in the dtype of its weight: mixed
    precision casts what is gathered, and FSDP2 may have left a bias whole.

    Args:
        is_followed: what is computed of them is of a part, whatever it is computed with.
    """
    for name in names:
        _read_as(owner, (name,), _own if is_followed else _local if name == "weight" else _like_weight)


def align_gradient(owner: nn.Module, name: str) -> None:
    """Have the gradient of a split weight arrive split as it is, and the owner called outside of compiled code."""
    _read_as(owner, (name,), _aligned)


def keep_tie(places: Sequence[Place]) -> None:
    """Put a split weight back into all the places that had it; one that is not split itself reads it whole.

    Such as the bias of a masked language model's head, which BERT holds beside its decoder too.

    Args:
        places: of one parameter before modules were split.
    """
    from torch.distributed.tensor import DTensor

    held = [place.store[place.name] for place in places]
    split = next((p for p in held if isinstance(p, DTensor)), held[0])
    for place, was in zip(places, held, strict=True):
        place.store[place.name] = split
        if isinstance(split, DTensor) and not isinstance(was, DTensor):
            _read_as(place.owner, (place.name,), _gathered)


def _read_as(owner: nn.Module, names: tuple[str, ...], read: _Read | None) -> None:
    kind: Any = owner.__class__
    owner.__class__ = _reader(kind, names, read)


def _read_inside(module: nn.Module) -> None:
    """Have the code of every module around one that reads so count as the model's."""
    for each in outside_tables(module):
        has_code = type(each).forward is not nn.Module.forward and not isinstance(each, nn.Sequential)
        if has_code and not _is_reader(each) and any(map(_is_reader, each.modules())):
            _read_as(each, (), None)


def _is_reader(module: nn.Module) -> bool:
    return hasattr(type(module), "_dmp_reads")


@cache
def _reader(kind: Any, names: tuple[str, ...], read: _Read | None) -> type[nn.Module]:
    """The subclass of `kind` that reads these parameters through `read`; named as `kind`, for code that asks."""
    body: dict[str, Any] = {name: property(_getter(name, read)) for name in names if read is not None}
    if not hasattr(kind, "_dmp_reads"):
        body.update({name: _model_code(method) for name, method in _methods(kind)})
    if read is _aligned:
        body["__call__"] = _disable_dynamo(kind.__call__)  # see [Note: whole weights]
    made: type[nn.Module] = made_of(kind, {**body, "_dmp_reads": True})
    return made


def _methods(kind: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """`forward`, and what else of the class's own takes at least one argument."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    found = {name: value for each in reversed(own) for name, value in vars(each).items()}
    for name, value in found.items():
        if inspect.isfunction(value) and not name.startswith("__") and (name == "forward" or _takes_something(value)):
            yield name, value


def _takes_something(method: Callable[..., Any]) -> bool:
    _, *rest = inspect.signature(method).parameters.values()
    return any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in rest)


class _Running(threading.local):
    """Whether the code of a model with such weights runs in this thread."""

    code = False


_running = _Running()


def _model_code(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _running.code:
            return method(*args, **kwargs)
        if method.__name__ != "forward" and _is_told_names(*args, **kwargs):
            return method(*args, **kwargs)
        _running.code = True
        try:
            return method(*args, **kwargs)
        finally:
            _running.code = False

    return run


def _is_told_names(module: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether a method is given names or paths of the module's own parts alone: what it computes is of weights."""
    given = (*args, *kwargs.values())
    return bool(given) and all(isinstance(each, str) and _has_part(module, each) for each in given)


def _has_part(module: nn.Module, name: str) -> bool:
    first, _, below = name.partition(".")
    for each in (module, *module.children()):
        inner = each._modules.get(first)
        if (inner is not None and (not below or _has_part(inner, below))) or name in each._parameters:
            return True
    return False


def _is_read_by_model() -> bool:
    # The last is private in torch: whether a backward pass runs, in which checkpointed functions run again.
    return torch.compiler.is_compiling() or _running.code or torch._C._current_graph_task_id() >= 0


def _getter(name: str, read: _Read) -> Callable[[nn.Module], Any]:
    from torch.distributed.tensor import DTensor

    def get(module: nn.Module) -> Any:
        parameter = module._parameters.get(name)
        if isinstance(parameter, DTensor):
            if not _is_read_by_model():
                return parameter
            if parameter.device_mesh.ndim == 1:
                return read(parameter, module)
            # On several axes it is FSDP2's sharded form, which is nothing to compute with unless each rank has all; a
            # gradient of it would be averaged by nobody.
            is_whole = not torch.is_grad_enabled() and all(p.is_replicate() for p in parameter.placements)
            return _local(parameter, module) if is_whole else parameter
        return module.__getattr__(name) if parameter is None and name not in module._parameters else parameter

    return get


def _local(parameter: Any, _: nn.Module) -> Any:
    return parameter.to_local()


def _own(parameter: Any, owner: nn.Module) -> Any:
    local = _like_weight(parameter, owner)
    return local if torch.compiler.is_compiling() else follow(local)


def _like_weight(parameter: Any, owner: nn.Module) -> Any:
    weight = owner._parameters.get("weight")
    return parameter.to_local() if weight is None else parameter.to_local().to(weight.dtype)


def _gathered(parameter: Any, _: nn.Module) -> Any:
    from torch.distributed.tensor import Replicate

    return parameter.redistribute(placements=[Replicate()]).to_local()


def _summed(parameter: Any, owner: nn.Module) -> Any:
    from torch.distributed.tensor import Partial

    return _aligned(parameter, owner).to_local(grad_placements=(Partial(),))


def _shared(parameter: Any, owner: nn.Module) -> Any:
    return _summed(parameter, owner) / parameter.device_mesh.size()


def _aligned(parameter: Any, _: nn.Module) -> Any:
    # To where it is already: nothing forward; backward, the gradient from where it is (partial, whole) to the same.
    return parameter.redistribute(placements=parameter.placements)


def outside_tables(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that do not hold chunks of tables, each once."""
    tables: set[nn.Module] = {m for m in module.modules() if isinstance(m, ShardedModule)}
    return (m for _, m in module.named_modules(memo=tables))
