"""torch's data parallelism around wrapped models: it leaves them alone.

DistributedDataParallel would broadcast rank 0's chunks over the other ranks', and average gradients of different rows;
`fully_shard` would cut chunks of different sizes, for which gloo ends the process. Trainers (Accelerate, Lightning,
Composer) put them around whatever they are given, and go by the class of what comes out: where a wrapped model's
parameters are all that is trained there, that is `PassingDDP`.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmp import live_models as live
from dmp.chunked import ChunkedTensor
from dmp.errors import ShardError
from dmp.layouts.shard import is_replicated
from dmp.names import join_name
from dmp.places import is_dtensor
from dmp.put_around import put_around
from dmp.wrap.torchrec_members import REFUSED
from dmp.wrap.values.skeleton import all_tensors

_OPTIONS = "DistributedModelParallel(..., data_parallel_wrapper=DDPWrapper(...)) and FSDPWrapper(...) take such options"
_CHANGING = (
    "mixed_precision",
    "param_to_hook_all_reduce",
)  # numbers; the others say when and in which pieces they travel


class _NoReducer:
    """What Lightning readies for a backward pass by hand."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's own, which copies and pickles by them
            raise AttributeError(name)
        return lambda *_: None


class PassingDDP(DistributedDataParallel):
    """DDP with nothing to average, for the wrapped models in its module do: what is asked of it is asked of them.

    What is beside them there, frozen weights and buffers, is rank 0's, as under DDP.
    """

    reducer = _NoReducer()  # type: ignore[assignment]
    require_forward_param_sync = True

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The module's."""
        if self.broadcast_buffers:
            self._send(buffer for m in _outside(self.module) for buffer in m.buffers(recurse=False))
        return self.module(*inputs, **options)

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """All ranks of the wrapped models."""
        return self._wrapped[0].env.everyone

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether dense gradients are averaged, see `DistributedModelParallel.no_sync`."""
        return all(m.require_backward_grad_sync for m in self._wrapped)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for m in self._wrapped:
            m.require_backward_grad_sync = value

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is nothing to send.

        Raises:
            ShardError: always.
        """
        raise ShardError(f"this DistributedDataParallel leaves averages to the wrapped model inside; {_OPTIONS}")

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, as a wrapped model's.

        Raises:
            ShardError: always.
        """
        raise ShardError(f"a wrapped model has no 'join', which is {REFUSED['join']}")

    join_hook = join

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)

    @property
    def _wrapped(self) -> list[Any]:
        return [m for outer in _outside(self) for m in outer.children() if m in live.models]

    def _send(self, tensors: Iterable[torch.Tensor]) -> None:
        for each in tensors:
            if self.process_group is not None:
                dist.broadcast(each.detach(), group=self.process_group, group_src=0)


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """Modules down to the wrapped ones, which may be large."""
    if module not in live.models:
        yield module
        for child in module.children():
            yield from _outside(child)


def keep_from_fully_shard(model: nn.Module) -> None:
    """Have `fully_shard` of a parent pass over a wrapped model, as over what `replicate` has taken."""
    # Private: what torch's composable functions know each other by.
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    setattr(model, REGISTRY_KEY, OrderedDict(replicate=RegistryItem()))


def name_of(model: Any) -> str:
    """A wrapped model's `_get_name`, by which Transformers' `Trainer` knows whether it is to shift labels that it
    smooths: of the model itself, of one in adapters (PEFT's `get_base_model`), of its class before torch split it."""
    if "_made" not in model.__dict__:  # its making has failed
        return type(model).__name__
    base = getattr(model.module, "get_base_model", None)
    kinds = type(base() if callable(base) else model.module).__mro__
    return next(kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed."))


def repr_of(model: Any) -> str:
    """A wrapped model's text, which begins with the wrapper's name all the same."""
    return type(model).__name__ + nn.Module.__repr__(model).removeprefix(name_of(model))


@functools.cache
def guard_ddp() -> None:
    """From now on DistributedDataParallel looks for wrapped models in what it is given; once per process."""
    put_around(DistributedDataParallel, "__init__", _init)


def _init(own: Any, self: Any, module: Any, *args: Any, **options: Any) -> None:
    live.look()  # a trainer may have been imported since
    is_asked = live.models and isinstance(module, nn.Module)
    inside = [(path, m) for path, m in module.named_modules() if m in live.models] if is_asked else []
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    if is_asked and any(m.module is module and _is_split(m, ignored) for m in live.models):
        raise ShardError(
            "a DistributedDataParallel around model.module, whose weights are split over the ranks: it takes the "
            "wrapped model itself, as do Accelerate's prepare(model) and transformers' Trainer(model=model)"
        )
    names = ignored if inside else set()
    names.update(join_name(path, name) for path, m in inside for name, _ in all_tensors(m))
    if inside and not any(p.requires_grad for name, p in module.named_parameters() if name not in names):
        _pass(self, module, inspect.signature(own).bind(self, module, *args, **options))
        return
    if inside:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    own(self, module, *args, **options)


def _is_split(model: Any, ignored: Collection[str]) -> bool:
    """Whether ranks have parts of it, but for some; the same on all of them."""
    state = {name: t for name, t in model.state_dict().items() if name not in ignored}
    sizes = {name: torch.Size(t.size()) for name, t in state.items() if isinstance(t, ChunkedTensor)}
    tables = [
        (model.plan[name].layout.shards(size, model.env), size) for name, size in sizes.items() if name in model.plan
    ]
    return any(map(is_dtensor, model.parameters())) or not all(is_replicated(*table) for table in tables)


def _pass(outer: Any, module: nn.Module, asked: inspect.BoundArguments) -> None:
    if changing := [name for name in _CHANGING if asked.arguments.get(name) is not None]:
        raise ShardError(
            f"{', '.join(changing)} of a DistributedDataParallel around a wrapped model, which averages its own "
            "gradients, would change nothing: " + _OPTIONS
        )
    kind = type(outer)
    outer.__class__ = (
        PassingDDP
        if kind is DistributedDataParallel
        else type(kind.__name__, (PassingDDP, kind), {"__module__": kind.__module__})
    )
    nn.Module.__init__(outer)
    outer.module = module
    asked.apply_defaults()
    syncs = [
        asked.arguments.pop(name, None) for name in ("forward_sync_buffers", "broadcast_buffers")
    ]  # the new, the old
    outer.broadcast_buffers = next((each for each in syncs if each is not None), True)
    for name in asked.arguments.keys() - {"self", "module", "process_group"}:
        setattr(outer, name, asked.arguments[name])
    if outer.init_sync:
        own = {id(t) for m in outer._wrapped for _, t in all_tensors(m)}
        beside = [t for m in _outside(module) for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        outer._send(t for t in beside if id(t) not in own)
