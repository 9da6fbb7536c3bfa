"""`check_sharder`: the battery that every sharder must pass, ours and a stranger's. For tests; nothing here imports it.

Terms. The *plain* module is the unsharded one, the oracle. A *case* is one plan of the module. A *check* is a generator
of problems in words; `check_x` is named `x` in the error. A *piece* is (offset, values) of a tensor on this rank.

Every rank runs every check, and after each one the ranks tell each other what they found, so that all raise the same
error. They do so in a group of their own: a sharder that raises on one rank alone, before an exchange, leaves the
others in it until the process group's timeout, and then what that one rank raised is the error. Checks that need no
exchange come first, for all plans.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    ChunkedTensor,
    DistributedModelParallel,
    Layout,
    ModuleSharder,
    ParameterInfo,
    ParameterSharding,
    Shard,
    ShardedModule,
    ShardError,
    ShardingEnv,
    plan_parameters,
    rectangles,
)

_STEPS = 3
_LR = 0.1
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SHOWN = 3
_PATIENCE = timedelta(hours=2)
_TOGETHER_S = 5.0
_Pieces = list[tuple[tuple[int, ...], torch.Tensor]]
_Plan = dict[str, Layout]


class SharderCheckError(AssertionError):
    """A sharder that fails a check; `.check` is the check's name."""

    check: str = ""


@dataclass(frozen=True)
class _Subject:
    """What is checked: the arguments of `check_sharder`, and what they give."""

    sharder: ModuleSharder
    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Sequence[Any]]
    env: ShardingEnv

    def infos(self) -> dict[str, ParameterInfo]:
        """Parameters that the sharder takes, by full name."""
        return {name: info for name, (_, info) in plan_parameters(self.make_module(), [self.sharder]).items()}

    def wrap(self, plan: _Plan, module: nn.Module | None = None) -> DistributedModelParallel:
        """The module, a fresh one by default, on the mesh by `plan`."""
        module = self.make_module() if module is None else module
        return DistributedModelParallel(module, env=self.env, plan=plan, sharders=[self.sharder])

    def own_batch(self, step: int) -> tuple[Any, ...]:
        """This rank's arguments; ranks along tensor axes share them."""
        return tuple(self.make_batch(self.env.data_rank, step))

    def batches(self, step: int) -> list[tuple[Any, ...]]:
        """Every data rank's arguments."""
        return [tuple(self.make_batch(rank, step)) for rank in range(self.env.data_size)]


@dataclass(frozen=True)
class _Case:
    """A plan, and the one that comes after it."""

    plan: _Plan = field(default_factory=dict)
    other: _Plan = field(default_factory=dict)

    def __str__(self) -> str:
        return " with " + ", ".join(f"{n} {layout}" for n, layout in list(self.plan.items())[:4]) if self.plan else ""


_Check = Callable[[_Subject, _Case], Iterator[str]]


def check_sharder(
    sharder: ModuleSharder,
    make_module: Callable[[], nn.Module],
    make_batch: Callable[[int, int], Sequence[Any]],
    env: ShardingEnv | None = None,
) -> None:
    """Run every check on every layout that `sharder` offers; all ranks of `env` call it.

    Parameters may carry an in-backward optimizer with torch's numbers (SGD, Adagrad); without one, all are checked with
    SGD. Modules and batches should be small: some fifty models are made.

    Args:
        sharder: to be checked.
        make_module: builds the unsharded module, or a model around it, with the same values at every call and rank.
        make_batch: (data rank, step) -> the arguments of that rank's forward, the same at every call and rank.
        env: where to run; the default process group, or one process when there is none.

    Raises:
        SharderCheckError: on every rank: the check, the plan, the parameter, what was expected, what came.

    Example:
        >>> check_sharder(EmbeddingSharder(), lambda: nn.Embedding.from_pretrained(torch.ones(9, 4), freeze=False),
        ...     lambda rank, step: (torch.arange(3) + rank + step,))
    """
    if env is None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        env = ShardingEnv.single() if world is None else ShardingEnv.from_process_group(world)
    subject = _Subject(sharder, make_module, make_batch, env)
    group = _group_of_verdicts(env)
    for check in _ONCE:
        _run(check, subject, _Case(), group)
    plans = list(_plans(subject))
    cases = [_Case(plan, plans[(i + 1) % len(plans)]) for i, plan in enumerate(plans)]
    for checks in (_LOCAL, _PER_PLAN):
        for case in cases:
            for check in checks:
                _run(check, subject, case, group)
    for check in _LAST:
        _run(check, subject, cases[0], group)


def _group_of_verdicts(env: ShardingEnv) -> dist.ProcessGroup | None:
    """A group of the same ranks that waits longer than theirs does; None for one rank."""
    group = env.group()
    return None if group is None or env.size == 1 else _patient(group)


@lru_cache(maxsize=64)
def _patient(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Made once: a second group of the same ranks would meet at the first one's address."""
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, _PATIENCE, backend="gloo", use_local_synchronization=True)
    return made


def _run(check: _Check, subject: _Subject, case: _Case, group: dist.ProcessGroup | None) -> None:
    """Run a check on every rank, and raise on every rank what the first of them found."""
    cause: Exception | None = None
    try:
        with torch.random.fork_rng(devices=[]):
            problems = list(check(subject, case))
    except Exception as error:
        cause, problems = error, [f"raised {type(error).__name__}: {error}"]
    found = [(problems, time.time())]
    if group is not None:
        found = [([], 0.0)] * subject.env.size
        dist.all_gather_object(found, (problems, time.time()), group=group)
    failed = [(at, rank) for rank, (texts, at) in enumerate(found) if texts]
    if not failed:
        return
    rank = next(rank for at, rank in failed if at < min(failed)[0] + _TOGETHER_S)  # the others only waited for it
    texts = found[rank][0]
    shown = "; ".join(texts[:_SHOWN]) + (f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
    name = check.__name__.removeprefix("check_")
    raised = SharderCheckError(
        f"{type(subject.sharder).__name__} fails check {name!r}{case} on rank {rank} of {len(found)}: {shown}. "
        f"{(check.__doc__ or '').splitlines()[0]}"
    )
    raised.check = name
    raise raised from cause


# ---- what a sharder says; the first line of a docstring ends the error, and says what to do ----


def check_protocol(subject: _Subject, case: _Case) -> Iterator[str]:
    """A sharder is an object with `module_type` (a class of nn.Module), `parameters`, `layouts` and `shard`."""
    sharder: Any = subject.sharder
    if isinstance(sharder, type):
        yield f"expected an object; got the class {sharder.__name__}"
    module_type = getattr(sharder, "module_type", None)
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        yield f"expected module_type to be a class of nn.Module; got {module_type!r}"
    for name in ("parameters", "layouts", "shard"):
        if not callable(getattr(sharder, name, None)):
            yield f"expected a method {name}; got {getattr(sharder, name, None)!r}"


def check_module(subject: _Subject, case: _Case) -> Iterator[str]:
    """`make_module` gives the same values at every call and on every rank, so seed it, and has something to shard."""
    first, second = subject.make_module().state_dict(), subject.make_module().state_dict()
    for name, value in first.items():
        if not torch.equal(value, second[name]):
            yield f"two calls of make_module give other values of {name!r}"
    everyone: list[Any] = [first]
    if subject.env.size > 1:
        everyone = [None] * subject.env.size
        dist.all_gather_object(everyone, {n: v.cpu() for n, v in first.items()}, group=subject.env.group())
    for name, value in everyone[0].items():
        if not torch.equal(value, first[name].cpu()):
            yield f"make_module gives rank 0 other values of {name!r} than this rank"
    if not any(isinstance(m, subject.sharder.module_type) for m in subject.make_module().modules()):
        yield f"make_module gives no {subject.sharder.module_type.__name__}"


def check_parameters(subject: _Subject, case: _Case) -> Iterator[str]:
    """`parameters` names parameters of the module with their shapes and dtypes, also of one on meta, and only looks."""
    module = subject.make_module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    taken = 0
    for path, site in _sites(subject, module):
        given = subject.sharder.parameters(site)
        if not isinstance(given, Mapping):
            yield f"expected a mapping name -> ParameterInfo; got {type(given).__name__}"
            continue
        real = dict(site.named_parameters())
        for name, info in given.items():
            taken += 1
            if not isinstance(info, ParameterInfo):
                yield f"expected a ParameterInfo for {name!r}; got {type(info).__name__}"
            elif name not in real:
                yield f"names {name!r}, which {type(site).__name__} {path!r} does not have; it has {sorted(real)}"
            elif (tuple(info.shape), info.dtype) != (tuple(real[name].shape), real[name].dtype):
                expected = tuple(real[name].shape), real[name].dtype
                yield f"expected shape and dtype {expected} of {name!r}; got {tuple(info.shape), info.dtype}"
        again = subject.sharder.parameters(copy.deepcopy(site).to("meta"))
        if {n: i.shape for n, i in again.items()} != {n: i.shape for n, i in given.items()}:
            yield f"expected the same parameters of a module on meta, {sorted(given)}; got {sorted(again)}"
    if not taken:
        yield "takes no parameter of what make_module gives"
    for name, value in module.state_dict().items():
        if name not in before or not torch.equal(value, before[name]):
            yield f"changed {name!r} by looking"


def check_layouts(subject: _Subject, case: _Case) -> Iterator[str]:
    """`layouts` offers at least one layout that covers the parameter on this mesh, and the same without processes."""
    env, sharder = subject.env, subject.sharder
    for name, info in subject.infos().items():
        offered = list(sharder.layouts(info, env))
        if not offered:
            yield f"offers no layout for {name!r} of shape {info.shape}"
        for layout in offered:
            if not isinstance(layout, Layout):
                yield f"expected layouts such as row_wise() for {name!r}; got {layout!r}"
                continue
            try:
                layout.shards(info.shape, env)
            except ShardError as error:
                yield f"offers {layout} for {name!r}, which does not fit: {error}"
            if not _accepts(sharder, info, layout, env):
                yield f"offers {layout} for {name!r}, and its accepts() refuses it"
        absent = list(sharder.layouts(info, _abstract(env)))
        if absent != offered:
            yield f"offers {name!r} {_listed(absent)} on the same mesh without processes, {_listed(offered)} here"


# ---- what it makes, for every plan ----


def check_shard(subject: _Subject, case: _Case) -> Iterator[str]:
    """`shard` runs every layout that `layouts` offers, on any ranks, or `accepts` says which it does not run."""
    for _, site, entries in _planned_sites(subject, case):
        new = subject.sharder.shard(site, entries, subject.env, subject.env.device)
        if not isinstance(new, nn.Module):
            yield f"expected a module; got {type(new).__name__}"


def check_names(subject: _Subject, case: _Case) -> Iterator[str]:
    """A sharded module has the parameters and buffers of the plain one by name, dtype and requires_grad, no others."""
    for path, site, entries in _planned_sites(subject, case):
        before = {kind: dict(getattr(site, kind)()) for kind in ("named_parameters", "named_buffers")}
        new = subject.sharder.shard(site, entries, subject.env, subject.env.device)
        for kind, expected in before.items():
            got = dict(getattr(new, kind)())
            if set(got) != set(expected):
                missing, added = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
                yield f"{kind} of {path!r}: missing {missing}, new {added}"
            for name in set(got) & set(expected):
                for what in ("dtype", "requires_grad"):
                    have, want = getattr(got[name], what), getattr(expected[name], what)
                    if have != want:
                        yield f"expected {what} {want} of {name!r}; got {have}"
                if got[name].device.type != subject.env.device_type:
                    yield f"expected {name!r} on {subject.env.device}; got {got[name].device}"


def check_pieces(subject: _Subject, case: _Case) -> Iterator[str]:
    """`chunked_state` gives, as views of the local parameter, exactly the plan's rectangles of this rank."""
    for _, site, entries in _planned_sites(subject, case):
        shapes = {name: tuple(p.shape) for name, p in site.named_parameters()}
        new = subject.sharder.shard(site, entries, subject.env, subject.env.device)
        local = dict(new.named_parameters())
        state = {**local, **(new.chunked_state() if isinstance(new, ShardedModule) else {})}
        for name, entry in entries.items():
            shards = entry.layout.shards(shapes[name], subject.env)
            mine = [s for s in shards if s.rank == subject.env.table_rank]
            yield from _compare_places(name, state[name], shapes[name], mine)
            for offset, piece in _pieces(state[name]):
                storage = _local(local[name]).untyped_storage()
                if piece.numel() and piece.untyped_storage().data_ptr() != storage.data_ptr():
                    yield f"the piece of {name!r} at {offset} is not a view of the local parameter, but a copy"


def check_values(subject: _Subject, case: _Case) -> Iterator[str]:
    """Values that the module has before it is sharded are kept, and so are the names and the order of its state."""
    state, plain = subject.wrap(case.plan).state_dict(), subject.make_module().state_dict()
    if list(state) != list(plain):
        yield f"expected the state dict's keys {list(plain)}; got {list(state)}"
    yield from _compare_state(subject.wrap(case.plan), subject.make_module(), "")


def check_forward(subject: _Subject, case: _Case) -> Iterator[str]:
    """Forward gives what the plain module gives on the same batch: structure, shapes, dtypes, values."""
    model, plain = subject.wrap(case.plan).eval(), subject.make_module().eval()
    for step in range(2):
        with torch.no_grad():
            got, expected = model(*subject.own_batch(step)), plain(*subject.own_batch(step))
        yield from _compare_outputs(got, expected, f"batch {step}")


def check_gradients(subject: _Subject, case: _Case) -> Iterator[str]:
    """Gradients are means over the data ranks (`env.data_size`), of the plain module's on all their batches."""
    model, plain = subject.wrap(case.plan), subject.make_module()
    _backward([model(*subject.own_batch(0))], 1)
    _backward([plain(*batch) for batch in subject.batches(0)], subject.env.data_size)
    yield from _compare_gradients(model, plain)


def check_two_forwards(subject: _Subject, case: _Case) -> Iterator[str]:
    """Two forwards before one backward give the sum of their gradients: keep what backward needs with each call."""
    model, plain = subject.wrap(case.plan), subject.make_module()
    if model.fused_optimizer.fused:
        return  # updated once for each call, as documented
    _backward([model(*subject.own_batch(step)) for step in range(2)], 1)
    _backward([plain(*batch) for step in range(2) for batch in subject.batches(step)], subject.env.data_size)
    yield from _compare_gradients(model, plain)


def check_training(subject: _Subject, case: _Case) -> Iterator[str]:
    """Some steps of SGD give the outputs and weights of the plain module on the global batch."""
    model, plain = subject.wrap(case.plan), subject.make_module()
    optimizers = [torch.optim.SGD(m.parameters(), lr=_LR) for m in (model, plain)]
    for step in range(_STEPS):
        got = model(*subject.own_batch(step))
        expected = [plain(*batch) for batch in subject.batches(step)]
        yield from _compare_outputs(got, expected[subject.env.data_rank], f"step {step}")
        _backward([got], 1)
        _backward(expected, subject.env.data_size)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield from _compare_state(model, plain, f" after step {step}")


def check_load(subject: _Subject, case: _Case) -> Iterator[str]:
    """A plain state dict of whole tensors loads, is left as it was, and is what forward then uses."""
    model, plain = subject.wrap(case.plan), _moved(subject.make_module())
    given = {name: value.clone() for name, value in plain.state_dict().items()}
    model.load_state_dict(given)
    for name, value in plain.state_dict().items():
        if not torch.equal(given[name], value):
            yield f"loading changed {name!r} of the state dict that was given"
    yield from _compare_state(model, plain, " after loading")
    with torch.no_grad():
        yield from _compare_outputs(model(*subject.own_batch(0)), plain(*subject.own_batch(0)), "after loading")


def check_round_trip(subject: _Subject, case: _Case) -> Iterator[str]:
    """State that is put together from all ranks' pieces loads under another plan, and gives the same outputs."""
    first, second = subject.wrap(case.plan), subject.wrap(case.other)
    first.load_state_dict(_moved(subject.make_module()).state_dict())
    whole = {}
    for name, value in first.state_dict().items():
        whole[name], problem = _whole(value, subject.env)
        if problem:
            yield f"{name!r}: {problem}"
    second.load_state_dict(whole)
    batch = subject.own_batch(0), subject.own_batch(0)
    with torch.no_grad():
        yield from _compare_outputs(second(*batch[0]), first(*batch[1]), f"under {_Case(case.other)}")


def check_deepcopy(subject: _Subject, case: _Case) -> Iterator[str]:
    """A deep copy shares no storage with its original and runs on its own: make views anew in `__deepcopy__`."""
    model, plain, moved = subject.wrap(case.plan), subject.make_module(), _moved(subject.make_module())
    twin = copy.deepcopy(model)
    if {n for n, _ in twin.named_parameters()} != {n for n, _ in model.named_parameters()}:
        yield "the copy has other parameters"
    twin.load_state_dict(moved.state_dict())
    yield from _compare_state(model, plain, " of the original, after its copy was loaded,")
    yield from _compare_state(twin, moved, " of the copy, after it was loaded,")
    with torch.no_grad():
        yield from _compare_outputs(model(*subject.own_batch(0)), plain(*subject.own_batch(0)), "of the original")
    with torch.enable_grad():
        result = twin(*subject.own_batch(0))
        yield from _compare_outputs(result, moved(*subject.own_batch(0)), "of the copy")
        _backward([result], 1)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"backward of the copy gave the original's {name!r} a gradient"


def check_meta_init(subject: _Subject, case: _Case) -> Iterator[str]:
    """Parameters on meta are allocated by `shard` and get the same values on every mesh and plan (see `init_fn`)."""
    alone = ShardingEnv.single(subject.env.device_type)
    plan = {name: next(iter(subject.sharder.layouts(info, alone))) for name, info in subject.infos().items()}
    module = subject.make_module().to("meta")
    torch.manual_seed(1)
    expected = DistributedModelParallel(copy.deepcopy(module), env=alone, plan=plan, sharders=[subject.sharder])
    model = subject.wrap(case.plan, module)
    state = model.state_dict()
    for name, value in expected.state_dict().items():
        if state[name].is_meta or any(piece.is_meta for _, piece in _pieces(state[name])):
            yield f"{name!r} is still on meta"
        else:
            whole, _ = _whole(value, alone)
            yield from _compare_pieces(f"initial value of {name!r}", state[name], whole)


def check_unsharded(subject: _Subject, case: _Case) -> Iterator[str]:
    """`unsharded()`, where there is one, gives a plain module of the same names and shapes."""
    for path, site, entries in _planned_sites(subject, case):
        expected = {name: tuple(value.shape) for name, value in site.state_dict().items()}
        make = getattr(subject.sharder.shard(site, entries, subject.env, subject.env.device), "unsharded", None)
        if make is not None:
            got = {name: tuple(value.shape) for name, value in make().state_dict().items()}
            if got != expected:
                yield f"unsharded() of {path!r} has {got}, expected {expected}"


def check_refusal(subject: _Subject, case: _Case) -> Iterator[str]:
    """A plan that cannot be run is an error that is raised before anything of the module is changed."""
    name = next(iter(case.plan))
    nowhere = Layout("table_wise", (("rank", subject.env.table_size),))
    without = {n: layout for n, layout in case.plan.items() if n != name}
    for plan in ({**case.plan, name: nowhere}, {**case.plan, "no.such.parameter": nowhere}, without):
        module = subject.make_module()
        modules, values = dict(module.named_modules()), {n: v.clone() for n, v in module.state_dict().items()}
        try:
            subject.wrap(plan, module)
        except ValueError:
            if dict(module.named_modules()) != modules:
                yield f"a refused plan changed modules: {plan}"
            for key, value in module.state_dict().items():
                if key not in values or not torch.equal(value, values[key]):
                    yield f"a refused plan changed {key!r}: {plan}"
        else:
            yield f"a plan that fits neither module nor mesh was taken: {plan}"


_ONCE: tuple[_Check, ...] = (check_protocol, check_module, check_parameters, check_layouts)
_LOCAL: tuple[_Check, ...] = (check_shard, check_names, check_pieces, check_unsharded)
_PER_PLAN: tuple[_Check, ...] = (
    check_values,
    check_forward,
    check_gradients,
    check_two_forwards,
    check_training,
    check_load,
    check_round_trip,
    check_deepcopy,
    check_meta_init,
)
_LAST: tuple[_Check, ...] = (check_refusal,)


# ---- plans ----


def _plans(subject: _Subject) -> Iterator[_Plan]:
    """Each kind of layout for all parameters, where it is offered and on other ranks; then all kinds mixed."""
    env, seen = subject.env, set()
    offers: dict[str, list[Layout]] = {}
    for name, info in subject.infos().items():
        offered = list(subject.sharder.layouts(info, env))
        shifted = [_shifted(layout, info, env) for layout in offered]
        extra = [_uneven(info, env)] if hasattr(subject.sharder, "accepts") else []
        accepted = [x for x in [*shifted, *extra] if x is not None and _accepts(subject.sharder, info, x, env)]
        offers[name] = list(dict.fromkeys([*offered, *accepted]))
    for i in range(max(len(choices) for choices in offers.values())):
        for step in (0, 1):
            plan = {name: choices[(i + step * k) % len(choices)] for k, (name, choices) in enumerate(offers.items())}
            key = tuple(plan.values())
            if key not in seen and (step == 0 or i == 0):
                seen.add(key)
                yield plan


def _shifted(layout: Layout, info: ParameterInfo, env: ShardingEnv) -> Layout | None:
    """The same kind of layout with every rank one further; None where it cannot be."""
    size = env.table_size

    def shift(key: str, value: Any) -> Any:
        if key == "shards":
            return tuple((offsets, sizes, (rank + 1) % size) for offsets, sizes, rank in value)
        if isinstance(value, tuple):
            return tuple(shift(key, v) for v in value)
        if value is None and key == "ranks":
            return tuple((rank + 1) % size for rank in range(size))
        if isinstance(value, int) and key in ("rank", "ranks"):
            return (value + 1) % size
        return (value + 1) % env.table_shape[0] if isinstance(value, int) and key == "host" else value

    moved = Layout(layout.name, tuple((key, shift(key, value)) for key, value in layout.args))
    try:
        moved.shards(info.shape, env)
    except (ShardError, TypeError):
        return None
    return moved


def _uneven(info: ParameterInfo, env: ShardingEnv) -> Layout | None:
    """The first row alone on the last rank, the rest on the first."""
    shape = tuple(info.shape)
    if not shape or shape[0] < 2:
        return None
    rest = (shape[0] - 1, *shape[1:])
    zeros = (0,) * (len(shape) - 1)
    return rectangles([((0, *zeros), (1, *shape[1:]), env.table_size - 1), ((1, *zeros), rest, 0)])


def _accepts(sharder: Any, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
    return bool(sharder.accepts(info, layout, env)) if hasattr(sharder, "accepts") else True


def _abstract(env: ShardingEnv) -> ShardingEnv:
    roles = {role: env.axes(role) for role in ("replicate", "shard", "tensor")}
    return ShardingEnv.abstract(env.shape, env.names, env.device_type, **roles)


def _listed(layouts: Sequence[Layout]) -> str:
    return ", ".join(str(layout) for layout in layouts) or "nothing"


def _sites(subject: _Subject, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, child in module.named_modules():
        if isinstance(child, subject.sharder.module_type):
            yield path, child


def _planned_sites(subject: _Subject, case: _Case) -> Iterator[tuple[str, nn.Module, dict[str, ParameterSharding]]]:
    """(path, fresh module, its part of the plan with relative names) of every module that the sharder takes."""
    for path, site in list(_sites(subject, subject.make_module())):
        names = {name: f"{path}.{name}" if path else name for name in subject.sharder.parameters(site)}
        if names and all(name in case.plan for name in names.values()):
            yield path, site, {name: ParameterSharding(case.plan[full]) for name, full in names.items()}


# ---- state ----


def _is_dtensor(value: torch.Tensor) -> bool:
    return hasattr(value, "placements") and hasattr(value, "device_mesh")


def _local(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.detach().to_local() if _is_dtensor(value) else value.detach()
    return local


def _pieces(value: Any) -> _Pieces:
    if isinstance(value, ChunkedTensor):
        return list(zip(value.offsets, value.chunks, strict=True))
    if _is_dtensor(value):
        local = _local(value)
        return [(tuple(c.offsets), local) for c in value.__create_chunk_list__()] if local.numel() else []
    return [((0,) * value.dim(), value.detach())]


def _part(whole: torch.Tensor, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]


def _whole(value: Any, env: ShardingEnv) -> tuple[torch.Tensor, str]:
    """The tensor put together from all ranks' pieces, and what is wrong with them, if anything."""
    mine = [(offset, piece.cpu()) for offset, piece in _pieces(value)]
    everyone = [mine]
    if env.size > 1:
        everyone = [[]] * env.size
        dist.all_gather_object(everyone, mine, group=env.group())
    whole = torch.zeros(tuple(value.shape), dtype=value.dtype)
    known = torch.zeros(tuple(value.shape), dtype=torch.bool)
    for pieces in everyone:
        for offset, piece in pieces:
            target, is_known = _part(whole, offset, piece.shape), _part(known, offset, piece.shape)
            if not torch.equal(target[is_known], piece[is_known]):
                return whole, f"ranks that hold the same elements of the piece at {offset} differ"
            target.copy_(piece)
            is_known.fill_(True)
    missing = int((~known).sum())
    return whole, f"no rank holds {missing} of {known.numel()} elements" if missing else ""


def _moved(module: nn.Module) -> nn.Module:
    """The module with other values, the same on every rank."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(torch.linspace(-1, 1 + i, parameter.numel()).view(parameter.shape).to(parameter))
    return module


# ---- comparisons ----


def _difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """What differs, in words; empty when nothing does."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"expected {tuple(expected.shape)} {expected.dtype}, got {tuple(got.shape)} {got.dtype}"
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if not got.is_floating_point():
        return "" if torch.equal(got, expected) else "integers differ"
    tolerance = _TOLERANCE.get(got.dtype, 1e-5)
    if torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
        return ""
    gap = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    at = tuple(int(i) for i in (gap == gap.max()).nonzero()[0])
    text = f"expected {float(expected[at]):.6g} at {at}, got {float(got[at]):.6g}"
    square = float((expected.double() ** 2).sum())
    ratio = float((got.double() * expected.double()).sum()) / square if square else 1.0
    if torch.allclose(got, expected * ratio, rtol=tolerance, atol=tolerance):
        text += f" (all of it is {ratio:.4g} times what is expected)"
    return text


def _compare_places(name: str, value: Any, shape: tuple[int, ...], mine: Sequence[Shard]) -> Iterator[str]:
    """Whether the pieces of this rank lie where `mine` does."""
    if tuple(value.shape) != shape:
        yield f"{name!r}: expected pieces of a tensor of shape {shape}; got {type(value).__name__} {tuple(value.shape)}"
        return
    expected, held = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for s in mine:
        _part(expected, s.offsets, s.sizes).add_(1)
    for offset, piece in _pieces(value):
        _part(held, offset, piece.shape).add_(1)
    wrong = (held != expected).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        yield (
            f"{name!r}: {len(wrong)} of {held.numel()} elements are not held as planned; the first is {at}, "
            f"expected {int(expected[at])} times on this rank, got {int(held[at])}"
        )


def _compare_pieces(what: str, value: Any, expected: torch.Tensor) -> Iterator[str]:
    if tuple(value.shape) != tuple(expected.shape):
        yield f"{what}: expected shape {tuple(expected.shape)}, got {tuple(value.shape)}"
        return
    for offset, piece in _pieces(value):
        different = _difference(piece, _part(expected, offset, piece.shape))
        if different:
            yield f"{what}, piece at {offset}: {different}"


def _compare_state(model: DistributedModelParallel, plain: nn.Module, when: str) -> Iterator[str]:
    state = model.state_dict()
    for name, expected in plain.state_dict().items():
        if name in state:
            yield from _compare_pieces(f"{name!r}{when}", state[name], expected)
        else:
            yield f"{name!r} is missing from the state dict{when}"


def _compare_gradients(model: DistributedModelParallel, plain: nn.Module) -> Iterator[str]:
    """Of every parameter that has no in-backward optimizer."""
    state, fused = model.state_dict(), model.fused_optimizer.fused
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if name in fused or not parameter.requires_grad:
            continue
        grad, expected = parameter.grad, wanted[name].grad
        expected = torch.zeros_like(wanted[name]) if expected is None else expected
        grad = torch.zeros_like(parameter) if grad is None else grad
        grad, expected = (g.to_dense() if g.is_sparse else g for g in (grad, expected))
        local, of_grad = _local(parameter), _local(grad).contiguous()
        for offset, piece in _pieces(state[name]):
            start = piece.storage_offset() - local.storage_offset() + of_grad.storage_offset()
            part = of_grad.as_strided(piece.shape, piece.stride(), start)
            different = _difference(part, _part(expected, offset, piece.shape))
            if different:
                yield f"gradient of {name!r}, piece at {offset}: {different}"


def _compare_outputs(got: Any, expected: Any, when: str) -> Iterator[str]:
    given, wanted = list(_tensors(got, "")), list(_tensors(expected, ""))
    if [place for place, _ in given] != [place for place, _ in wanted]:
        shown = [[place or "a tensor" for place, _ in side] for side in (wanted, given)]
        yield f"{when}: expected outputs {shown[0]}, got {shown[1]}"
        return
    for (place, a), (_, b) in zip(given, wanted, strict=True):
        different = _difference(a, b)
        if different:
            yield f"output{place} {when}: {different}"


def _tensors(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a result with its place; keyed and jagged ones by their values and lengths, in order of keys."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{place}[{i}]")
    elif callable(getattr(value, "values", None)):
        keys = f"{value.keys()}" if callable(getattr(value, "keys", None)) else ""
        yield f"{place}{keys}.values()", value.values()
        if callable(getattr(value, "lengths", None)):
            yield f"{place}{keys}.lengths()", value.lengths()


def _backward(outputs: Sequence[Any], num_ranks: int) -> None:
    """Backward of the outputs' losses, divided by `num_ranks`; in a loss every element counts differently."""
    total: Any = 0.0
    for output in outputs:
        for i, (_, tensor) in enumerate(_tensors(output, "")):
            if tensor.requires_grad:
                weight = torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device).view(tensor.shape) + 0.1 * i
                total = total + (tensor * weight).sum() / num_ranks + 0.3 * (tensor * tensor).sum() / num_ranks
    if isinstance(total, torch.Tensor):
        total.backward()
