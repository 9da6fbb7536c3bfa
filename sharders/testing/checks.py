"""The checks: each yields what is wrong in words, and the first line of its docstring, which ends the error, says what
to do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dmp import (
    DistributedModelParallel,
    Layout,
    ParameterInfo,
    ShardedModule,
    ShardError,
    ShardingEnv,
    hook,
    local_of,
    ranks,
    table_wise,
    tensors_of,
    type_name,
)
from sharders.testing import compare
from sharders.testing.subject import Case, Subject, accepts, sharded_sites, sites, with_other_values, without_processes

Check = Callable[[Subject, Case], Iterator[str]]
_STEPS = 3
_LR = 0.1

# ---- what a sharder says ----


def check_protocol(subject: Subject, case: Case) -> Iterator[str]:
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


def check_module(subject: Subject, case: Case) -> Iterator[str]:
    """`make_module` gives the same values at every call and on every rank, so seed it, and has something to shard."""
    first, second = subject.make_module().state_dict(), subject.make_module().state_dict()
    for name, value in first.items():
        if not torch.equal(value, second[name]):
            yield f"two calls of make_module give other values of {name!r}"
    mine = {name: value.cpu() for name, value in first.items()}
    everyone = ranks.gather_objects("comparing what make_module gives", mine, subject.env.group())
    for name, value in everyone[0].items():
        if not torch.equal(value, first[name].cpu()):
            yield f"make_module gives rank 0 other values of {name!r} than this rank"
    if not any(isinstance(m, subject.sharder.module_type) for m in subject.make_module().modules()):
        yield f"make_module gives no {subject.sharder.module_type.__name__}"


def check_parameters(subject: Subject, case: Case) -> Iterator[str]:
    """`parameters` names parameters of the module with their shapes and dtypes, also of one on meta, and only looks."""
    module = subject.make_module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    taken = 0
    for path, site in sites(subject, module):
        given = subject.sharder.parameters(site)
        if not isinstance(given, Mapping):
            yield f"expected a mapping name -> ParameterInfo; got {type_name(given)}"
            continue
        real = dict(site.named_parameters())
        for name, info in given.items():
            taken += 1
            if not isinstance(info, ParameterInfo):
                yield f"expected a ParameterInfo for {name!r}; got {type_name(info)}"
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


def check_layouts(subject: Subject, case: Case) -> Iterator[str]:
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
            if not accepts(sharder, info, layout, env):
                yield f"offers {layout} for {name!r}, and its accepts() refuses it"
        absent = list(sharder.layouts(info, without_processes(env)))
        if absent != offered:
            yield f"offers {name!r} {_listed(absent)} on the same mesh without processes, {_listed(offered)} here"


def _listed(layouts: Sequence[Layout]) -> str:
    return ", ".join(str(layout) for layout in layouts) or "nothing"


# ---- what it makes, for every plan ----


def check_shard(subject: Subject, case: Case) -> Iterator[str]:
    """`shard` runs every layout that `layouts` offers, on any ranks, or `accepts` says which it does not run."""
    for _, _, new, _ in sharded_sites(subject, case):
        if not isinstance(new, nn.Module):
            yield f"expected a module; got {type_name(new)}"


def check_names(subject: Subject, case: Case) -> Iterator[str]:
    """A sharded module has the parameters and buffers of the plain one by name, dtype and requires_grad, no others."""
    for path, plain, new, _ in sharded_sites(subject, case):
        for kind in ("named_parameters", "named_buffers"):
            got, expected = (dict(getattr(module, kind)()) for module in (new, plain))
            if got.keys() != expected.keys():
                missing, added = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
                yield f"{kind} of {path!r}: missing {missing}, new {added}"
            for name in got.keys() & expected.keys():
                for what in ("dtype", "requires_grad"):
                    have, want = getattr(got[name], what), getattr(expected[name], what)
                    if have != want:
                        yield f"expected {what} {want} of {name!r}; got {have}"
                if got[name].device.type != subject.env.device_type:
                    yield f"expected {name!r} on {subject.env.device}; got {got[name].device}"


def check_pieces(subject: Subject, case: Case) -> Iterator[str]:
    """`chunked_state` gives, as views of the local parameter, exactly the plan's rectangles of this rank."""
    for _, plain, new, plan in sharded_sites(subject, case):
        local = dict(new.named_parameters())
        state = {**local, **(new.chunked_state() if isinstance(new, ShardedModule) else {})}
        for name, layout in plan.items():
            shape = tuple(plain.get_parameter(name).shape)
            mine = [s for s in layout.shards(shape, subject.env) if s.rank == subject.env.table_rank]
            yield from compare.places(name, state[name], shape, mine)
            for offset, piece in compare.pieces_of(state[name]):
                storage = local_of(local[name]).untyped_storage()
                if piece.numel() and piece.untyped_storage().data_ptr() != storage.data_ptr():
                    yield f"the piece of {name!r} at {offset} is not a view of the local parameter, but a copy"


def check_values(subject: Subject, case: Case) -> Iterator[str]:
    """Values that the module has before it is sharded are kept, and so are the names and the order of its state."""
    state, plain = subject.wrap(case.plan).state_dict(), subject.make_module().state_dict()
    if list(state) != list(plain):
        yield f"expected the state dict's keys {list(plain)}; got {list(state)}"
    yield from compare.state(subject.wrap(case.plan), subject.make_module(), "")


def check_forward(subject: Subject, case: Case) -> Iterator[str]:
    """Forward gives what the plain module gives on the same batch: structure, shapes, dtypes, values."""
    model, plain = subject.wrap(case.plan).eval(), subject.make_module().eval()
    for step in range(2):
        yield from _compare_forwards(subject, model, plain, f"batch {step}", step)


def check_gradients(subject: Subject, case: Case) -> Iterator[str]:
    """Gradients are means over the data ranks (`env.data_size`), of the plain module's on all their batches."""
    yield from _compare_backwards(subject, subject.wrap(case.plan), range(1))


def check_two_forwards(subject: Subject, case: Case) -> Iterator[str]:
    """Two forwards before one backward give the sum of their gradients: keep what backward needs with each call."""
    model = subject.wrap(case.plan)
    if not model.fused_optimizer.fused:  # they are updated once for each call, as documented
        yield from _compare_backwards(subject, model, range(2))


def check_training(subject: Subject, case: Case) -> Iterator[str]:
    """Some steps of SGD give the outputs and weights of the plain module on the global batch."""
    model, plain = subject.wrap(case.plan), subject.make_module()
    optimizers = [torch.optim.SGD(m.parameters(), lr=_LR) for m in (model, plain)]
    for step in range(_STEPS):
        got = model(*subject.own_batch(step))
        expected = [plain(*batch) for batch in subject.batches(step)]
        yield from compare.outputs(got, expected[subject.env.data_rank], f"step {step}")
        _backward([got], 1)
        _backward(expected, subject.env.data_size)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield from compare.state(model, plain, f" after step {step}")


def check_load(subject: Subject, case: Case) -> Iterator[str]:
    """A plain state dict of whole tensors loads, is left as it was, and is what forward then uses."""
    model, plain = subject.wrap(case.plan), with_other_values(subject.make_module())
    given = {name: value.clone() for name, value in plain.state_dict().items()}
    model.load_state_dict(given)
    for name, value in plain.state_dict().items():
        if not torch.equal(given[name], value):
            yield f"loading changed {name!r} of the state dict that was given"
    yield from compare.state(model, plain, " after loading")
    yield from _compare_forwards(subject, model, plain, "after loading")


def check_round_trip(subject: Subject, case: Case) -> Iterator[str]:
    """State that is put together from all ranks' pieces loads under another plan, and gives the same outputs."""
    first, second = subject.wrap(case.plan), subject.wrap(case.other)
    first.load_state_dict(with_other_values(subject.make_module()).state_dict())
    whole = {}
    for name, value in first.state_dict().items():
        whole[name], problem = compare.whole_of(value, subject.env)
        if problem:
            yield f"{name!r}: {problem}"
    second.load_state_dict(whole)
    yield from _compare_forwards(subject, second, first, f"under {Case(case.other)}")


def check_deepcopy(subject: Subject, case: Case) -> Iterator[str]:
    """A deep copy shares no storage with its original and runs on its own: make views anew in `__deepcopy__`."""
    model, plain, moved = subject.wrap(case.plan), subject.make_module(), with_other_values(subject.make_module())
    twin = copy.deepcopy(model)
    if {n for n, _ in twin.named_parameters()} != {n for n, _ in model.named_parameters()}:
        yield "the copy has other parameters"
    twin.load_state_dict(moved.state_dict())
    yield from compare.state(model, plain, " of the original, after its copy was loaded,")
    yield from compare.state(twin, moved, " of the copy, after it was loaded,")
    yield from _compare_forwards(subject, model, plain, "of the original")
    with torch.enable_grad():
        result = twin(*subject.own_batch(0))
        yield from compare.outputs(result, moved(*subject.own_batch(0)), "of the copy")
        _backward([result], 1)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"backward of the copy gave the original's {name!r} a gradient"


def check_meta_init(subject: Subject, case: Case) -> Iterator[str]:
    """Parameters on meta are allocated by `shard` and get the same values on every mesh and plan (see `init_fn`)."""
    alone = ShardingEnv.single(subject.env.device_type)
    plan = {name: next(iter(subject.sharder.layouts(info, alone))) for name, info in subject.infos().items()}
    module = subject.make_module().to("meta")
    torch.default_generator.manual_seed(1)
    expected = DistributedModelParallel(copy.deepcopy(module), env=alone, plan=plan, sharders=[subject.sharder])
    model = subject.wrap(case.plan, module)
    state = model.state_dict()
    for name, value in expected.state_dict().items():
        if state[name].is_meta or any(piece.is_meta for _, piece in compare.pieces_of(state[name])):
            yield f"{name!r} is still on meta"
        else:
            whole, _ = compare.whole_of(value, alone)
            yield from compare.pieces(f"initial value of {name!r}", state[name], whole)


def check_unsharded(subject: Subject, case: Case) -> Iterator[str]:
    """`unsharded()`, where there is one, gives a plain module of the same names and shapes."""
    for path, plain, new, _ in sharded_sites(subject, case):
        expected = {name: tuple(value.shape) for name, value in plain.state_dict().items()}
        if make := hook(new, "unsharded"):
            got = {name: tuple(value.shape) for name, value in make().state_dict().items()}
            if got != expected:
                yield f"unsharded() of {path!r} has {got}, expected {expected}"


def check_refusal(subject: Subject, case: Case) -> Iterator[str]:
    """A plan that cannot be run is an error that is raised before anything of the module is changed."""
    name = next(iter(case.plan))
    nowhere = table_wise(subject.env.table_size)
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


def _compare_forwards(subject: Subject, model: nn.Module, other: nn.Module, when: str, step: int = 0) -> Iterator[str]:
    """What two models give on equal batches, without gradients."""
    with torch.no_grad():
        got, expected = model(*subject.own_batch(step)), other(*subject.own_batch(step))
    yield from compare.outputs(got, expected, when)


def _compare_backwards(subject: Subject, model: DistributedModelParallel, steps: Sequence[int]) -> Iterator[str]:
    """The gradients of one backward after a forward for each step."""
    plain = subject.make_module()
    _backward([model(*subject.own_batch(step)) for step in steps], 1)
    _backward([plain(*batch) for step in steps for batch in subject.batches(step)], subject.env.data_size)
    yield from compare.gradients(model, plain)


def _backward(outputs: Sequence[Any], num_ranks: int) -> None:
    """Backward of the outputs' losses, divided by `num_ranks`; in a loss every element counts differently."""
    total: Any = 0.0
    for output in outputs:
        for i, (_, tensor) in enumerate(tensors_of(output)):
            if tensor.requires_grad:
                weight = torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device).view(tensor.shape) + 0.1 * i
                total = total + (tensor * weight).sum() / num_ranks + 0.3 * (tensor * tensor).sum() / num_ranks
    if isinstance(total, torch.Tensor):
        total.backward()


ONCE: tuple[Check, ...] = (check_protocol, check_module, check_parameters, check_layouts)
LOCAL: tuple[Check, ...] = (check_shard, check_names, check_pieces, check_unsharded)
PER_PLAN: tuple[Check, ...] = (
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
LAST: tuple[Check, ...] = (check_refusal,)
