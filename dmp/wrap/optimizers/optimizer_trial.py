"""Whether an optimizer that nobody here knows computes the same on chunks as on whole parameters: it is tried.

Each rank steps by itself, on what it holds. One that takes the norm of a parameter (LAMB, LARS), of all of them, or a
mean over rows takes another number then, and nothing tells. So another instance of its class, with the same options,
makes a few steps on a small parameter, and one more on a part of it, cut as the tables are; where the steps differ, the
optimizer is wrong on chunks. Some look at such numbers only now and then (a projection where two directions are
alike, a norm that has outgrown another), which a few steps need not meet: one that makes a single number of a whole
parameter's is wrong on parts of it, too, whatever it has done with it here. So is one that takes a parameter's matrix
apart (GaLore by its singular vectors): a small matrix has no more directions than are kept of a large one's.

A DTensor knows that it is split, and most optimizers are right on it, or torch says that they are not, in the middle of
a step. Some take what a rank has of a sum for the sum (`.item()` after it), and say nothing: steps are tried on small
DTensors, too, which are split as those of the model.

Terms. A *cut* is what ranks may have of a table: some rows, some columns, both, or nothing of it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import isnan
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmp.layouts.shard import Shard
from dmp.places import local_of
from dmp.ranks import gather_objects

BY_ELEMENT = (
    *("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam"),
    *("Adadelta", "Adagrad", "RMSprop"),
)
"""Of torch.optim: each works on every element by itself."""

BY_BLOCK = ("RowWiseAdagrad",)
"""Of TorchRec: one sum for each row and block of columns, as it is documented."""

_CUTS: Mapping[str, tuple[slice, slice]] = {
    "by rows": (slice(0, 2), slice(None)),
    "by columns": (slice(None), slice(0, 2)),
    "by rows and columns": (slice(0, 2), slice(0, 2)),
    "of which a rank has nothing": (slice(0, 0), slice(None)),
}
_PARTS = [*_CUTS][:3]  # of one table, beside whole tables that a rank has or not
_SHAPE, _OTHERS = (6, 4), ((5, 3), (3, 4))  # of what is cut, at least, and of parameters beside it
_MOST = 160  # rows and columns of what is cut: some treat what has fewer than 128 otherwise
_LENGTH = 4  # of what a rank has of a DTensor
_SCALES = (1.0, 2.0, 0.5, 2.0, 1.0, 2.0, 1e3, 1e-3)
"""Of gradients: those of one size tell apart what is clipped by their spread, the last two what is by their norm; some
optimizers (RAdam) make no step before the sixth."""
_LEAST = 3  # steps that change something
_TOLERANCE, _EXACT = 1e-3, 1e-6  # of a step: state may be kept in fewer bits, but not of a parameter that is whole
_OF_VECTORS = ("aten::linalg_vector_norm", "aten::linalg_cross")  # each row's, it may be
_PLAIN = (bool, int, float, str, tuple, torch.Tensor)  # of options
Params = list[torch.nn.Parameter]
Steps = list[list[torch.Tensor]]
Form = Callable[[torch.Tensor], torch.Tensor]


class Untried(Exception):
    """Why there is nothing to compare."""


def is_known(optimizer: Optimizer) -> bool:
    """Whether nothing has to be tried."""
    kind = type(optimizer)
    of_torch = kind.__name__ in BY_ELEMENT and getattr(torch.optim, kind.__name__) is kind
    return of_torch or (kind.__name__ in BY_BLOCK and kind.__module__.startswith("torchrec."))


def cut_of(shards: Iterable[Shard], size: tuple[int, ...], num_ranks: int) -> set[str]:
    """Names of `_CUTS` that a table's shards have."""
    found, ranks = set(), set()
    for shard in shards:
        ranks.add(shard.rank)
        rows, columns = (own < whole for own, whole in zip(shard.sizes, size, strict=True))
        if rows or columns:
            found.add("by rows and columns" if rows and columns else "by rows" if rows else "by columns")
    return found if len(ranks) == num_ranks else found | {"of which a rank has nothing"}


def wrong_cut(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    cuts: Iterable[str],
    device: torch.device,
    size: tuple[int, ...] = _SHAPE,
) -> tuple[str, str] | None:
    """The first of these cuts that it is wrong on, and how that was seen, in words; None where it is right on all.

    Args:
        size: of the largest table: some keep means over rows and columns of what has enough of both.

    Raises:
        Untried: no other instance can be made, it does not step, or draws random numbers.
    """
    cuts = sorted(cuts)
    shape = tuple(max(least, min(own, _MOST)) for least, own in zip(_SHAPE, size, strict=True))
    with _trying():
        trial = _Trial(optimizer, group, (shape, *_OTHERS), device)
        seen = trial.looked([_whole, _whole, _whole])
        taken, parts = ", ".join(seen.found), [cut for cut in cuts if cut in _PARTS]
        if taken and parts:
            return parts[0], f"it takes one number of a whole parameter's ({taken})"
        if seen.taken_apart and parts:
            return parts[0], f"it takes a parameter's matrix apart ({', '.join(seen.taken_apart)})"
        trial.check_repeats()
        if taken and cuts and not set(trial.looked([None, _whole, _whole]).values) <= set(seen.values):
            return cuts[0], f"it takes one number of several parameters ({taken})"
        for cut in cuts:
            tolerance = _TOLERANCE if cut in _PARTS else _EXACT
            if wrong := trial.differs([partial(_part, _CUTS[cut]), _whole, _whole], tolerance):
                return cut, wrong
    return None


def wrong_on_dtensors(optimizer: Optimizer, group: Mapping[str, Any], like: Sequence[Any], beside: bool) -> str:
    """What it does wrong with parameters that are split as these DTensors, in words; "" where it is right.

    Collective over their meshes: one that takes the largest number of a parameter is right on the rank that has it.

    Args:
        like: DTensors of the group.
        beside: whether plain tensors are in the group, too.

    Raises:
        Untried: see `wrong_cut`; on all ranks, for it comes of whole parameters.
    """
    with _trying():
        shapes, forms = zip(*(_small(p) for p in like), strict=True)
        trial = _Trial(optimizer, group, shapes, like[0].device)
        trial.check_repeats()
        trial_beside = _Trial(optimizer, group, (*shapes, _OTHERS[0]), like[0].device) if beside else None
    with _trying():
        wrong = f"split as this one, {how}" if (how := trial.differs(forms, _TOLERANCE)) else ""
        if not wrong and trial_beside and (how := trial_beside.differs([*forms, _whole], _TOLERANCE)):
            wrong = f"split as this one and beside plain tables, {how} (one for each kind, or foreach=False, may do)"
    return _of_any_rank(wrong, [p.device_mesh for p in like])


def _of_any_rank(wrong: str, meshes: Iterable[Any]) -> str:
    """What the first rank of those along these meshes says that says anything."""
    for mesh in dict.fromkeys(meshes):
        for dim in range(mesh.ndim):
            said = gather_objects("trying an optimizer on DTensors", wrong, mesh.get_group(dim))
            wrong = next(filter(None, said), "")
    return wrong


def _small(p: Any) -> tuple[tuple[int, ...], Form]:
    """A shape that is split evenly as this DTensor is, and what splits it so, without communication."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if each.is_replicate() else Shard(each.dim) for each in p.placements]
    shape = [_LENGTH] * p.dim()
    for size, each in zip(p.device_mesh.shape, placements, strict=True):
        if isinstance(each, Shard):
            shape[each.dim] *= size
    return tuple(shape), lambda t: distribute_tensor(t, p.device_mesh, placements, src_data_rank=None)


@contextmanager
def _trying() -> Iterator[None]:
    """With random numbers of its own, and nothing compiled for it; what else goes wrong is `Untried`."""
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad(), eager:
        try:
            yield
        except Untried:
            raise
        except Exception as error:  # of a class that nobody knows
            raise Untried(f"{type(error).__name__}: {error}") from error


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value


def _part(cut: tuple[slice, slice], value: torch.Tensor) -> torch.Tensor:
    return value[cut]


class _Trial:
    """Steps of an optimizer like this one on small parameters, whole ones first.

    Raises:
        Untried: it has none that could be compared.
    """

    def __init__(self, optimizer: Optimizer, group: Mapping[str, Any], shapes: Any, device: torch.device) -> None:
        self._make, self._shapes, self._device = _maker(optimizer, group), shapes, device
        self._whole = self._first()
        if min(sum(bool(step.any()) for step in steps) for steps in self._whole) < _LEAST:
            raise Untried("its first steps change nothing")

    def check_repeats(self) -> None:
        """Raise `Untried` where other random numbers would give other steps."""
        if not _same(self._whole, self._steps([_whole] * len(self._shapes), seed=2)):
            raise Untried("it draws random numbers")

    def _first(self) -> Steps:
        ways = [(torch.float64, False), (torch.float32, False), (torch.float64, True), (torch.float32, True)]
        failed: Exception | None = None
        for self._dtype, self._by_closure in ways:  # some mix in tensors of torch's default dtype
            try:
                return self._steps([_whole] * len(self._shapes))
            except Exception as error:
                failed = failed or error
        raise failed  # type: ignore[misc]

    def differs(self, forms: Sequence[Form | None], tolerance: float) -> str:
        """How steps on parameters in these forms (None: which is not there) are others than on the whole; else ""."""
        kept = [(steps, form) for steps, form in zip(self._whole, forms, strict=True) if form is not None]
        try:
            found = self._steps(forms)
        except Exception as error:
            return f"it raised {type(error).__name__}: {error}"
        wanted = [[local_of(form(step)) for step in steps] for steps, form in kept]
        is_same = _same(wanted, found, [steps for steps, _ in kept], tolerance)
        return "" if is_same else "it made other steps than on the whole"

    def looked(self, forms: Sequence[Form | None]) -> _Seen:
        """What it looks at in its steps; nothing of one that shows nothing of itself."""
        seen = _Seen()
        try:
            with seen:
                self._steps(forms)
        except Exception:
            return _Seen()
        return seen

    def _steps(self, forms: Sequence[Form | None], seed: int = 1) -> Steps:
        """What each step adds to this rank's part of each."""
        drawn = torch.Generator().manual_seed(0)

        def values(scale: float) -> Params:
            whole = [torch.randn(shape, generator=drawn, dtype=torch.float64) * scale for shape in self._shapes]
            own = [t.to(self._device, self._dtype, copy=True) for t in whole]
            return [torch.nn.Parameter(form(t)) for t, form in zip(own, forms, strict=True) if form is not None]

        parameters = values(1.0)
        optimizer, steady = self._make(parameters), [p.detach().clone() for p in parameters]
        added: Steps = [[] for _ in parameters]
        torch.default_generator.manual_seed(seed)
        for scale in _SCALES:
            before, drawn_now = [p.detach().clone() for p in parameters], values(scale)

            def closure(scale: float = scale, drawn_now: Params = drawn_now) -> torch.Tensor:
                for p, grad, common in zip(parameters, drawn_now, steady, strict=True):
                    # One direction stays, or what estimates how far to go stays small; where it looks tells, too.
                    p.grad = grad.detach() + scale * (common + p.detach() if self._by_closure else common)
                return torch.ones(())

            closure()
            optimizer.step(*[closure][: int(self._by_closure)])  # type: ignore[arg-type]
            for steps, p, old in zip(added, parameters, before, strict=True):
                steps.append(local_of(p.detach() - old))
        return added


class _Seen(TorchDispatchMode):
    """Which operations make a number of many, all numbers, and which operations take a matrix apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, None] = {}
        self.values: list[float] = []
        self.taken_apart: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(of) if isinstance(t, torch.Tensor)] for of in ((args, kwargs), out))
        one = [t for t in made if t.numel() == 1 and t.is_floating_point()]
        self.values += [value for t in one if not isnan(value := t.item())]
        name = func._schema.name
        if "linalg_" in name and name not in _OF_VECTORS:
            self.taken_apart.setdefault(name)
        is_look = any(returned.alias_info for returned in func._schema.returns)  # at one element
        if one and not is_look and any(t.numel() > 1 for t in given):
            self.found.setdefault(name)
        return out


def _maker(optimizer: Optimizer, group: Mapping[str, Any]) -> Callable[[Params], Optimizer]:
    """Makes another instance of its class, with its options and those of the group, around others as it is."""
    kind: Any = type(optimizer)
    first, *named = inspect.signature(kind).parameters
    held = {**vars(optimizer), **getattr(optimizer, "defaults", {})}
    given = {name: _own(held[name]) for name in named if isinstance(held.get(name), _PLAIN)}
    given |= {name: type(held[name]) for name in named if isinstance(held.get(name), Optimizer)}  # as SAM takes one
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    inner = _maker(held[first], group) if isinstance(held.get(first), Optimizer) else None

    def make(parameters: Params) -> Optimizer:
        own = {name: _own(value) for name, value in options.items()}
        if "lr" in own and float(own["lr"]) == 0:  # while it warms up
            own["lr"] = torch.full_like(own["lr"], 0.1) if isinstance(own["lr"], torch.Tensor) else 0.1
        groups = [{**own, "params": parameters}]
        try:
            made: Optimizer = kind(inner(parameters) if inner else groups, **given)
        except Exception as error:  # it wants what it does not keep
            made = _copied(optimizer, groups)
            if made is None:
                raise error
        if hasattr(made, "train"):  # as schedule-free ones ask for
            made.train()
        return made

    return make


def _copied(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Any:
    """A copy with other parameters and no state; None where it holds more parameters, models, or what has no copy."""
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "step") or name.startswith("_dmp"):  # schedulers set `step`
            continue
        try:
            if any(isinstance(part, (torch.Tensor, torch.nn.Module)) for part in tree_leaves(value)):
                return None
            own = _copied(value, groups) if isinstance(value, Optimizer) else deepcopy(value)
        except Exception:
            return None
        if own is None and value is not None:
            return None
        made.__dict__[name] = own
    made.param_groups, made.state = groups, defaultdict(dict)
    return made


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(a: Any, b: Any, scale: Any = None, tolerance: float = _TOLERANCE) -> bool:
    """Whether steps are the same, up to what is nothing beside the whole steps."""
    for of_a, of_b, of_whole in zip(a, b, scale or a, strict=True):
        for x, y, whole in zip(of_a, of_b, of_whole, strict=True):
            if x.numel() and not bool((x - y).abs().max() <= tolerance * whole.abs().max()):
                return False
    return True
