"""Modules that are run past the hooks by which FSDP2 gathers their weights.

A unit is gathered when it is called: `layer(x)`. Models also write `layer.forward(x)`, which goes by its hooks, so each
unit's `forward` calls the unit unless that is where it comes from. What else runs a unit's weights (a method beside
`forward`, a part of it called from outside) finds pieces, which torch calls a mixture of tensors: the error says where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dmp import ShardError, is_dtensor, join_name
from sharders.data_parallel.fsdp_units import is_idle

_TORCH = str(Path(torch.__file__).parent)
MIXED = "got mixed torch.Tensor and DTensor"


def gather_by_forward(unit: Any) -> None:
    """Have `unit.forward(x)` be `unit(x)`, outside of that itself.

    Args:
        unit: after `fully_shard`.
    """
    own = unit.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_idle(unit):
            return own(*args, **kwargs)
        return unit(*args, **kwargs)

    unit.forward = forward


def explain_pieces(root: Any, units: Sequence[Any]) -> None:
    """Have what torch says of pieces of weights, where the model's forward meets them, be an error that says whose.

    So has what it says of modules that were added since, which may have been made for the shape of a piece. What was
    made of a piece outside and is handed in, as a first hidden state by `next(model.parameters()).new_zeros(...)`, is
    made whole.

    Args:
        root: whose forward it is; after `gather_by_forward`.
        units: the others that are gathered at once each.
    """
    own, were = root.forward, set(root.modules())
    meshes = {p.device_mesh for p in root.parameters() if is_dtensor(p)}

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*_made_whole(args, meshes), **{name: _made_whole(x, meshes) for name, x in kwargs.items()})
        except RuntimeError as error:
            added = next((n for path, m in root.named_modules() if m not in were for n in _trained(path, m)), None)
            if added is not None:
                raise ShardError(
                    f"{added!r} was added after wrapping, where weights are split in place over the ranks, and may "
                    f"have been made for the shape of a piece: the forward pass stopped with {str(error)!r}. Add it "
                    "before wrapping (get_peft_model, then DistributedModelParallel), and call the wrapped model"
                ) from error
            if MIXED in str(error) and units:  # else all is whole while this runs, but for a tensor axis
                raise ShardError(_explained(root, units, error)) from error
            raise

    root.forward = forward


def _made_whole(value: Any, meshes: Container[Any]) -> Any:
    """Of a DTensor on one of the meshes the whole; of tuples of such, which lie in each other, too."""
    if type(value) is tuple:
        whole = tuple(_made_whole(each, meshes) for each in value)
        return value if all(a is b for a, b in zip(value, whole, strict=True)) else whole
    return value.full_tensor() if is_dtensor(value) and value.device_mesh in meshes else value


def _trained(path: str, module: nn.Module) -> list[str]:
    """Names of a module's own parameters that are trained and are no pieces."""
    own = module._parameters.items()
    return [join_name(path, name) for name, p in own if p is not None and p.requires_grad and not is_dtensor(p)]


def gather_outside(
    root: Any, units: Sequence[Any], before_forward: Callable[[], None], after_forward: Callable[..., Any]
) -> None:
    """Have modules with weights that are gathered with the root run past the root's forward; collective, as a forward.

    A Hugging Face model's `generate` calls its encoder so; a loss of hidden states, as of its `get_text_features`, its
    backbone. With gradients the root's weights stay whole until the backward pass has ended, as behind its forward.
    torch takes what is called first for the root: here it never is a unit.

    Args:
        root: after `fully_shard`.
        units: the others that are gathered at once each.
        before_forward: what is done before each forward of the root.
        after_forward: the hook behind each, before torch's own.
    """
    state, inside = root._get_fsdp_state(), {id(part) for unit in units for part in unit.modules()}

    def is_outside() -> bool:
        return not torch.compiler.is_compiling() and is_idle(root)

    def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_outside():
            return None
        before_forward()

        def end(_: nn.Module, args: Any, output: Any) -> Any:
            handle.remove()
            own = after_forward(root, args, output)
            output = state._post_forward(root, args, output if own is None else own)
            if not torch.is_grad_enabled():
                root.reshard()
            return output

        handle = module.register_forward_hook(end, always_call=True)
        # Without the inputs, at whose gradients torch would free what other calls, and reads between them, need.
        state._pre_forward(root, (), {})
        return state._cast_forward_inputs(args, kwargs)

    def begin_unit(*_: Any) -> None:
        if is_outside():
            state._lazy_init()
            if not torch.is_grad_enabled():
                before_forward()

    for module in root.modules():
        outer = (part for part in module.modules() if id(part) not in inside)
        if module is not root and id(module) not in inside and any(any(_pieces(part)) for part in outer):
            module.register_forward_pre_hook(begin, with_kwargs=True)
    for unit in units:
        unit.register_forward_pre_hook(begin_unit, prepend=True)


def _pieces(module: nn.Module) -> list[bool]:
    return [is_dtensor(p) for p in module._parameters.values()]


def _explained(root: nn.Module, units: Sequence[Any], error: RuntimeError) -> str:
    paths = {id(m): path for path, m in root.named_modules()}
    outer_first = sorted(units, key=lambda unit: paths[id(unit)].count("."))
    unit_of = {id(part): unit for unit in outer_first for part in unit.modules()}
    frames = list(_frames(error.__traceback__))
    passed = [unit_of.get(id(module)) for module, *_ in frames]
    idle = [i for i, unit in enumerate(passed) if unit is not None and is_idle(unit)]
    advice = "or have all weights gathered at once, data_parallel_wrapper=FSDPWrapper(units=[])"
    if not idle:
        some = ", ".join(paths[id(unit)] for unit in units[:3])
        where = next((where for *_, where in reversed(frames) if where), "")
        return (
            f"the model's forward computes with a piece of a weight that is split over the ranks ({where}): a weight "
            f"is whole while the module that it is gathered with runs ({some}, ...): "
            f"read it there, {advice}"
        )
    first = next(i for i in idle if passed[i] is passed[idle[-1]])
    module, method, _ = frames[first]
    where = next((where for *_, where in reversed(frames[:first]) if where), "")
    unit, called = paths[id(passed[first])], repr(paths[id(module)])
    called = called if method == "_wrapped_call_impl" else f"{method}() of {called}"
    return (
        f"{called} is run ({where}) while the weights of {unit!r} are in pieces: they are "
        f"gathered when {unit!r} itself is called. Call that, as layer(x), {advice}"
    )


def _frames(trace: TracebackType | None) -> Iterator[tuple[Any, str, str]]:
    """Of each call of a method, outermost first: its object, its name, and where it is in code that is not torch's."""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = "" if code.co_filename.startswith(_TORCH) else f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        yield trace.tb_frame.f_locals.get("self"), code.co_name, where
        trace = trace.tb_next
