"""More habits of programs: what scripts do to gradients, copies, optimizers and passes by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dmp
from dmp import TrainPipeline
from tests.fuzz.outcome import Wrong

if TYPE_CHECKING:
    from tests.fuzz.programs import Program

_PARTS = ("blocks", "head", "words", "users", "items", "mix")


def pipeline(program: Program) -> None:
    """Some batches, in the middle of which another thing is done."""
    count, first = program.rng.randint(0, 3), program.batch
    mid = program.rng.choice(("", "evaluate", "learning_rate", "reshard", "load_what_is_there"))
    program.note(f"{count} batches, {mid}")
    program.batch += count

    def at(batch: Any) -> tuple[torch.Tensor, None]:
        program.batch = first + int(batch)
        return program.loss(program.model), None

    trained = TrainPipeline(program.model, program.optimizer, forward=at)
    for i, _ in enumerate(trained(torch.arange(count))):
        program.batch = first + i
        program.of_whole.zero_grad()
        program.mean(lambda rank: program.loss(program.whole, rank)).backward()
        program.of_whole.step()
        if mid and i == 0:
            getattr(program, mid)()
    program.batch = first + count
    _clear(program)


def groups_added(program: Program) -> None:
    """A part is given to the optimizer later, as in gradual unfreezing."""
    names = [n for n, p in zip(_names(program), program.own(program.whole), strict=True) if p.requires_grad]
    late = program.rng.sample(names, len(names) // 2)
    kind = program.rng.choice((torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad))
    for group in (sorted({*names} - {*late}), late):
        for side, module in (("optimizer", program.model), ("of_whole", program.whole)):
            of = dict(module.named_parameters())
            if group is late:
                getattr(program, side).add_param_group({"params": [of[n] for n in group], "lr": 0.03})
            elif group:
                setattr(program, side, kind([of[n] for n in group], lr=0.01))
        if names:
            _train(program)
            program.batch += 1
    program.renew(program.optimizer_name)


def by_hand(program: Program) -> None:
    """A step without an optimizer."""
    how = program.rng.choice(("sub_", "data", "lerp_", "copy_"))
    program.note(how)
    program.backward()
    for module in (program.model, program.whole):
        for p in (p for p in module.parameters() if p.grad is not None):
            with torch.no_grad():
                if how == "sub_":
                    p.sub_(0.1 * p.grad)
                elif how == "data":
                    p.data.add_(p.grad, alpha=-0.1)
                elif how == "lerp_":
                    p.lerp_(p - p.grad, 0.1)
                else:
                    p.copy_(p - 0.1 * p.grad)
        module.zero_grad()


def other_norms(program: Program) -> None:
    kind = program.rng.choice((float("inf"), 1.0, 3.0))
    program.backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.2, norm_type=kind) for m in (program.model, program.whole)]
    program.alike(f"the norm of {kind}", _whole(norms[0]), norms[1])
    _step(program)


def steps_between(program: Program) -> None:
    """Two backward passes and two steps, and nothing cleared between them."""
    program.backward()
    for of in (program.optimizer, program.of_whole):
        of.step()
    program.batch += 1
    _train(program)


def closure(program: Program) -> None:
    for of, loss in (
        (program.optimizer, lambda: program.loss(program.model)),
        (program.of_whole, lambda: program.mean(lambda rank: program.loss(program.whole, rank))),
    ):

        def closed(of: Any = of, loss: Callable[[], torch.Tensor] = loss) -> torch.Tensor:
            of.zero_grad()
            made = loss()
            made.backward()
            return made

        of.step(closed)
    _clear(program)


def raises_in_a_pass(program: Program) -> None:
    """In the middle of a forward or a backward pass, on all ranks; the loop goes on with the next batch."""
    part = program.model.module.get_submodule(program.rng.choice(("blocks.0", "blocks.0.up", "mix", "head")))
    in_forward = program.rng.random() < 0.5

    def fail(*_: Any) -> None:
        raise KeyError("the loop's own")

    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if in_forward:
            fail()
        elif output.requires_grad:
            output.register_hook(fail)

    handle = part.register_forward_hook(hook)
    with suppress(KeyError):
        program.loss(program.model).backward()
    handle.remove()
    _clear(program)


def keeps_gradients(program: Program) -> None:
    """Of activations, by a hook, as Grad-CAM does."""
    name = program.rng.choice(("blocks.0", "blocks.0.up", "blocks.0.down", "mix", "head"))
    program.note(name)
    found: list[list[torch.Tensor]] = []
    for module in (program.model, copy.deepcopy(program.whole)):
        kept = list[torch.Tensor]()
        part = getattr(module, "module", module).get_submodule(name)

        def keep(_: nn.Module, __: Any, output: torch.Tensor, kept: list[torch.Tensor] = kept) -> None:
            if output.requires_grad:
                output.retain_grad()
                kept.append(output)

        handle = part.register_forward_hook(keep)
        program.loss(module).backward()
        handle.remove()
        found.append([x.grad for x in kept if x.grad is not None])
    if len(found[0]) != len(found[1]):
        raise Wrong(f"{len(found[0])} and {len(found[1])} gradients of {name}")
    for ours, theirs in zip(*found, strict=True):
        program.alike(f"the gradient of {name}", ours, theirs)
    program.mean(lambda rank: program.loss(program.whole, rank)).backward()
    program.finish()


def one_part(program: Program) -> None:
    """All else is frozen for a step, as where parts are trained in turns."""
    part = program.rng.choice(_PARTS)
    program.note(part)
    with _thawed(program, lambda name: name.startswith(part)):
        if not program.spec.again:  # a reentrant checkpoint of what needs no gradient has none
            program.backward()
            program.finish()


def teacher(program: Program) -> None:
    """A copy follows by `lerp_`, and the loss is of what it gives."""
    if program.kept is None or program.kept[0].plan != program.model.plan:
        program.kept = copy.deepcopy(program.model), copy.deepcopy(program.whole)
    pairs = list(zip(program.kept, (program.model, program.whole), strict=True))
    for kept, module in pairs:
        kept.requires_grad_(False)
        with torch.no_grad():
            for p, q in zip(kept.parameters(), module.parameters(), strict=True):
                p.lerp_(q, 0.3)

    def loss(pair: tuple[nn.Module, nn.Module], rank: int) -> torch.Tensor:
        ids, target = program.samples(rank)
        with torch.no_grad():
            soft = pair[0](ids)
        made: torch.Tensor = (pair[1](ids) - 0.5 * target - 0.5 * soft).square().mean()
        return made

    loss(pairs[0], program.env.data_rank).backward()
    program.mean(lambda rank: loss(pairs[1], rank)).backward()
    program.finish()


@contextmanager
def _thawed(program: Program, is_trained: Callable[[str], bool]) -> Iterator[None]:
    for module in (program.model, program.whole):
        for name, p in module.named_parameters():
            p.requires_grad_(is_trained(name))
    yield
    for module in (program.model, program.whole):
        for name, p in module.named_parameters():
            p.requires_grad_(name not in program.frozen)


def _names(program: Program) -> list[str]:
    own = {id(p) for p in program.own(program.whole)}
    return [name for name, p in program.whole.named_parameters() if id(p) in own]


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if dmp.is_dtensor(norm) else norm


def _train(program: Program) -> None:
    program.backward()
    _step(program)


def _step(program: Program) -> None:
    for of in (program.optimizer, program.of_whole):
        of.step()
    for module in (program.model, program.whole):
        module.zero_grad()


def _clear(program: Program) -> None:
    for of in (program.model, program.whole, program.optimizer, program.of_whole):
        of.zero_grad()


BY_OPTIMIZER = (pipeline,)
"""Habits of programs whose tables may have an optimizer in the backward pass."""

OF_GRADIENTS = (
    *(groups_added, by_hand, other_norms, steps_between, closure, raises_in_a_pass, keeps_gradients),
    *(one_part, teacher),
)
"""Habits of those that have none."""
