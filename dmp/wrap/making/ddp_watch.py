"""Whether a data-parallel wrapper still has hold of the dense parameters: DistributedDataParallel has hooks on them.

A cast (`model.double()`), a move, a parameter or module put in the place of another, one that is frozen or trained from
now on, a new one: each leaves hooks that never run, or none at all, and gradients stay each rank's own. Whoever did it,
to the wrapper, to its module, to a part of it or to a parent, the next forward sees it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from dmp.errors import ShardError
from dmp.names import join_name
from dmp.places import is_dtensor, local_of
from dmp.wrap.values.gathered import wholes

_Held = Mapping[str, nn.Parameter | None]
_KIND = {True: "trained", False: "frozen"}


class _Seen(NamedTuple):
    """A dense parameter in its place."""

    held: _Held
    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    is_trained: bool
    path: str
    shape: torch.Size


def _parameters_of(owner: nn.Module) -> _Held:
    """Its own; of a scripted module, which cannot be given others, those that it has."""
    held = owner._parameters
    return dict(held.items()) if isinstance(owner, torch.jit.ScriptModule) else held


class _Structure:
    """Which modules there are, and how many parameters each has. Every forward asks: lists are compared whole."""

    def __init__(self, module: nn.Module) -> None:
        modules = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]  # those keep theirs
        self._held, self._were = [m._modules for m in modules], [dict(m._modules) for m in modules]
        self._own, self._numbers = [m._parameters for m in modules], [len(m._parameters) for m in modules]

    def has_changed(self) -> bool:
        return self._held != self._were or [*map(len, self._own)] != self._numbers


class SplitWatch:
    """Weights that are split in place: torch's FSDP2 takes no new ones, and keeps whole tensors of their first dtype.

    Args:
        module: the model, as it was split.
        is_shared: several ranks have it, which gradients are averaged or copies kept the same over.
    """

    def __init__(self, module: nn.Module, is_shared: bool) -> None:
        self._module, self._is_shared, self._structure = module, is_shared, _Structure(module)
        self._known = {(owner, name) for owner in module.modules() for name in owner._parameters}
        self._dtypes: list[tuple[_Held, str, str, torch.dtype]] | None = None  # from the first forward on
        self.know_data()
        self._trained = {path: p.requires_grad for _, _, path, p in self._split()}
        self._is_gathered = hasattr(type(module), "set_requires_gradient_sync")  # by FSDP2, which looks by itself

    def _split(self) -> Iterator[tuple[_Held, str, str, torch.Tensor]]:
        for path, owner in self._module.named_modules():
            for name, p in owner._parameters.items():
                if p is not None and is_dtensor(p):
                    yield owner._parameters, name, join_name(path, name), p

    def check(self, owned: Callable[[], Collection[str]]) -> str:
        """Before a forward; what is whole at the moment is passed over.

        Args:
            owned: names, under every alias, of what sharders own.

        Returns:
            What was frozen or unfrozen since the last one, which all ranks must have done; "" where nothing was.

        Raises:
            ShardError: a weight of another dtype, a trained one that is new, or is whole where it was split.
        """
        if self._is_shared and self._structure.has_changed():
            self._check_new(owned())
        if self._dtypes is None:
            self._dtypes = [(held, name, path, p.dtype) for held, name, path, p in self._split()]
        changed, gathered = "", None
        for held, name, path, dtype in self._dtypes:
            p = held.get(name)
            if p is None or not is_dtensor(p):
                if p is not None and self._is_shared and not self._is_gathered:
                    raise ShardError(
                        f"{path!r} was replaced after wrapping, where it is split or kept the same on all ranks: write "
                        "into it under torch.no_grad() (copy_, load_state_dict), or replace it before wrapping"
                    )
                continue
            if (known := self._data.get(path)) is None or known[0] is not p:
                gathered = wholes(self._module) if gathered is None else gathered
                if id(p) in gathered:
                    continue
                self._data[path] = p, _data_of(p)
            if p.dtype is not dtype:
                raise ShardError(
                    f"{path!r} was cast from {dtype} to {p.dtype} after the model had run: FSDP2 cannot follow. Cast "
                    "before wrapping, or back; sharders.FSDPWrapper(mixed_precision=...) computes in another dtype"
                )
            if p.requires_grad is not self._trained.get(path, p.requires_grad):
                self._trained[path] = p.requires_grad
                changed = changed or f"{path!r} was {'unfrozen' if p.requires_grad else 'frozen'}"
        self.check_data()
        return changed

    def cast(self) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
        """What has another dtype than before the first forward: name, the dtype then, and now. What is whole at the
        moment, in the dtype that FSDP2 computes in, is passed over: its unit looks by itself."""
        gathered = None
        for held, name, path, dtype in self._dtypes or ():
            if (p := held.get(name)) is not None and p.dtype is not dtype and is_dtensor(p):
                gathered = wholes(self._module) if gathered is None else gathered
                if id(p) not in gathered:
                    yield path, dtype, p.dtype

    def know_data(self) -> None:
        """Take what there is for the weights' own: when it begins, and when values have come for those on meta."""
        self._data = {path: (p, _data_of(p)) for _, _, path, p in self._split()}

    def check_data(self) -> None:
        """That nobody has given a weight other values by `p.data = ...`, of which torch makes nothing, in silence.

        Raises:
            ShardError: somebody has. It is told once.
        """
        for path, (p, was) in self._data.items():
            if p.untyped_storage()._cdata == was[0]:
                continue
            self._data[path] = p, (now := _data_of(p))
            if was[1] and now[1] == was[1]:  # else it was moved or cast
                raise ShardError(
                    f"p.data = ... of {path!r}, a DTensor whose ranks hold parts of it, changes nothing: torch keeps "
                    "what was there. Write into it, under torch.no_grad() by p.copy_(...) or p.data.copy_(...), "
                    "or by model.load_state_dict({...}, strict=False)"
                )

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks, for `check_agreement`."""
        return {f"parameter {path!r}": _KIND[is_trained] for path, is_trained in self._trained.items()}

    def unknown(self, owned: Callable[[], Collection[str]]) -> list[tuple[str, torch.Tensor]]:
        """Those that were added since, by name."""
        return self._new(owned()) if self._is_shared and self._structure.has_changed() else []

    def _new(self, owned: Collection[str]) -> list[tuple[str, torch.Tensor]]:
        return [
            (join_name(path, name), p)
            for path, owner in self._module.named_modules()
            for name, p in owner._parameters.items()
            if p is not None and (owner, name) not in self._known and join_name(path, name) not in owned
        ]

    def _check_new(self, owned: Collection[str]) -> None:
        found = self._new(owned)
        trained = next((name for name, p in found if p.requires_grad), None)
        if trained is not None:
            raise ShardError(
                f"{trained!r} was added after wrapping, where weights are split in place over the ranks: nobody would "
                "average its gradients, or keep it the same on all. Add it before wrapping, or freeze it"
            )
        if not found:  # one that is frozen may be trained later
            self._structure = _Structure(self._module)


def _data_of(p: torch.Tensor) -> tuple[int, int]:
    """The memory that stands for a DTensor, of which `p.data = ...` gives it another, and where this rank's part is."""
    with torch.inference_mode(False):  # an evaluation may be the first to see that something was frozen
        local = local_of(p.detach())
    return p.untyped_storage()._cdata, 0 if local.is_meta else local.data_ptr()


class _Together(torch.autograd.Function):
    """A node that has all parameters before it: one call tells what adds up the gradient of each.

    `setup_context` is for torch.func, which takes no function without it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*parameters: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise NotImplementedError("nobody reads the result")


# Torch asks for it in every call; to work it out takes longer than the rest of that.
_Together.forward.__signature__ = inspect.signature(_Together.forward)  # type: ignore[attr-defined]


def _accumulators(parameters: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """What adds up the gradient of each, and has DDP's hook: a cast makes another, and a cast back one more.

    Inside of `torch.func.jvp`, as in one of the levels of torch.func, none would be seen, and all be taken for lost.
    """
    if not parameters:
        return ()
    with temporarily_clear_interpreter_stack():
        together = _Together.apply(*parameters)  # type: ignore[no-untyped-call]
    return () if together.grad_fn is None else together.grad_fn.next_functions  # which is known while the result is


class Watch:
    """The dense parameters as they were when the data-parallel part was made.

    Args:
        module: the model.
        others: names, under every alias, of what the data-parallel part leaves alone; DTensors are left out too. Asked
            again where the model's structure is another.
    """

    def __init__(self, module: nn.Module, others: Callable[[], Collection[str]]) -> None:
        self._module, self._others = module, others
        self._structure, self._seen = _Structure(module), self._found()
        self._device = self._seen[0].parameter.device if self._seen else None
        self._trained = [each.parameter for each in self._seen if each.is_trained]
        with torch.enable_grad():
            self._hooked = _accumulators(self._trained)

    def _found(self) -> list[_Seen]:
        others = self._others()
        found = [
            _Seen(held, name, p, p.dtype, p.requires_grad, join_name(path, name), p.shape)
            for path, owner in self._module.named_modules()
            for held in [_parameters_of(owner)]
            for name, p in held.items()
            if p is not None and join_name(path, name) not in others and not is_dtensor(p)
        ]
        tied = next((each.path for each in found if hasattr(each.parameter, "_dmp_sharded")), None)
        if tied is not None:
            raise ShardError(
                f"{tied!r} was tied to the weight of a sharded table after wrapping: each rank has a part of it, and "
                "would compute with that. Tie them before the model is wrapped, or wrap to_unsharded(model), tied, anew"
            )
        return found

    def is_lost(self) -> bool:
        """Whether a parameter is another one, of another kind, or new.

        Raises:
            ShardError: a sharder's module is gone, or its weight is another module's, too.
        """
        is_lost = self._is_lost()
        if is_lost:
            self._found()
        return is_lost

    def _is_lost(self) -> bool:
        if self._structure.has_changed():
            if [id(each.parameter) for each in self._found()] != [id(each.parameter) for each in self._seen]:
                return True
            self._structure = _Structure(self._module)
        for held, name, p, dtype, is_trained, *_ in self._seen:
            if held.get(name) is not p or p.dtype is not dtype or p.requires_grad is not is_trained:
                return True
        if self._seen and self._seen[0].parameter.device != self._device:  # of all, for a model moves as one
            return True
        return torch.is_grad_enabled() and _accumulators(self._trained) != self._hooked

    def cast(self) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
        """What is trained and has another dtype than it had: name, the dtype then, and now."""
        for held, name, p, dtype, is_trained, path, _ in self._seen:
            if p.dtype is not dtype and is_trained and held.get(name) is p:
                yield path, dtype, p.dtype

    def reshaped(self) -> list[str]:
        """What was given data of another shape, in words: what adds up its gradient is of the old one."""
        seen = (each for each in self._seen if each.parameter.shape != each.shape)
        return [f"{each.path!r} from {tuple(each.shape)} to {tuple(each.parameter.shape)}" for each in seen]

    def unknown(self) -> list[tuple[str, torch.Tensor]]:
        """Those that were added since, by name."""
        known = {id(each.parameter) for each in self._seen} if self._structure.has_changed() else None
        return [] if known is None else [(e.path, e.parameter) for e in self._found() if id(e.parameter) not in known]

    def what_is_lost(self) -> str:
        """For messages, once it is: the first name, and what has become of it."""
        seen, now = ({each.path: each for each in all_} for all_ in (self._seen, self._found()))
        for path in dict.fromkeys((*seen, *now)):
            was, is_ = seen.get(path), now.get(path)
            if was is None or is_ is None:
                return f"{path!r} {'was added' if was is None else 'was taken out'}"
            if was.parameter is not is_.parameter:
                return f"{path!r} was replaced"
            if was.dtype is not is_.dtype:
                return f"{path!r} was cast to {is_.dtype}"
            if was.is_trained is not is_.is_trained:
                return f"{path!r} was {'unfrozen' if is_.is_trained else 'frozen'}"
        return "the model was moved, or cast and cast back"

    def facts(self) -> dict[str, str]:
        """What of the dense parameters must be the same on all ranks, for `check_agreement`."""
        found = self._found()
        return {f"parameter {s.path!r}": f"{tuple(s.parameter.shape)} {s.dtype}, {_KIND[s.is_trained]}" for s in found}
