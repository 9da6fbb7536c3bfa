"""Steps of ordinary optimizers: made by all ranks alike, or told.

A step that one rank alone passes over (`if loss.isfinite(): optimizer.step()`), or makes with another learning rate,
lets copies part, and of split weights updates a part, without a word. Where a model has tables, ranks compare what
steps they have made in the header of the next lookup, which costs nothing. Of others, each step is a turn, see
[Note: turns] in ranks/turns.py: one with other options than the last, as of a schedule, is compared while ranks go on,
and one that is passed over leaves the next pass to follow what it does not. Steps inside a backward pass are made by
hooks on gradients, which some ranks may have in other orders: they are not looked at.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dmp import live_models as live
from dmp.ranks import take_turn
from dmp.wrap.earlier.earlier_optimizers import num_changes
from dmp.wrap.optimizers.drifted import OF_NO_MODEL, look_for_drift
from dmp.wrap.optimizers.fused import FusedOptimizer
from dmp.wrap.optimizers.keyed import is_wrapper
from dmp.wrap.optimizers.repeated_samples import compare_samples

_OPTIONS = ("lr", "betas", "momentum", "weight_decay", "eps", "alpha", "dampening", "nesterov", "amsgrad", "maximize")
_SHOWN = 80
_ADVICE = (
    "Whether a step is made, and with which learning rate, must be decided on all ranks alike, as by a loss that is "
    "averaged over them"
)


_inner: WeakSet[Optimizer] = WeakSet()
"""Of others, as of torch's `ZeroRedundancyOptimizer`, which has a part of the parameters on each rank."""


class _Known:
    """Of an optimizer: whose parameters it holds, and its options in words.

    Attributes:
        mark: by which it is told that others may be held.
        models: that have more than one rank.
        held: in words, which of their parameters.
        others: places of what it trains beside them, which is no wrapped model's.
        num_steps: so far.
    """

    def __init__(self, optimizer: Optimizer, mark: tuple[int, int, int], num_steps: int) -> None:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.mark, self.num_steps = mark, num_steps
        self.models = [ref(m) for m in live.models if m.env.size > 1 and any(id(p) in ids for p in m.parameters())]
        _inner.update(each for each in vars(optimizer).values() if isinstance(each, Optimizer))
        alike = [] if optimizer in _inner else [name for of in self.models for name in _held_alike(of(), ids)]
        self.held = _described(alike)
        wrapped = {id(p) for m in live.models for p in m.parameters()} if alike else ids
        groups = [group["params"] for group in optimizer.param_groups]
        self.others = [(g, i) for g, of in enumerate(groups) for i, p in enumerate(of) if id(p) not in wrapped]
        self._options: list[Any] = []
        self._text = ""

    def text(self, optimizer: Optimizer) -> str:
        """The step, the same on all ranks."""
        options = [[_plain(group[name]) for name in _OPTIONS if name in group] for group in optimizer.param_groups]
        if options != self._options or not self._text:
            named = [
                {name: _plain(group[name]) for name in _OPTIONS if group.get(name)} for group in optimizer.param_groups
            ]
            texts = dict.fromkeys(", ".join(f"{name}={value}" for name, value in each.items()) for each in named)
            with_what = f" with {' and '.join(texts)}"
            self._options, self._text = options, f"{type(optimizer).__name__}.step(){with_what}{self.held}"
        return self._text


def _held_alike(model: Any, ids: set[int]) -> list[str]:
    """Names of a model's parameters that are in an optimizer, but for tables', of which a rank may have no part."""
    owned = model._made.sharded_names()
    return [name for name, p in model.named_parameters() if id(p) in ids and name not in owned]


def _described(names: list[str]) -> str:
    """Which they are: other words for others."""
    text = ", ".join(sorted(names))
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}... ({len(names)} with the checksum {zlib.crc32(text.encode()):08x})"
    return f" on {text}" if text else ""


def _plain(value: Any) -> Any:
    """A number of the host's, or None of what is on a device, which nobody waits for here."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value


_known: WeakKeyDictionary[Optimizer, _Known] = WeakKeyDictionary()


@cache
def agree_on_steps() -> None:
    """From now on."""
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: Optimizer, *_: Any) -> None:
    if isinstance(optimizer, FusedOptimizer) or is_wrapper(optimizer) or torch._C._current_graph_task_id() >= 0:
        return
    mark = num_changes(), len(live.models), sum(len(group["params"]) for group in optimizer.param_groups)
    known = _known.get(optimizer)
    if known is None or known.mark != mark:
        known = _known[optimizer] = _Known(optimizer, mark, known.num_steps if known else 0)
    num_steps, known.num_steps = known.num_steps, known.num_steps + 1
    for model in (found for of in known.models if (found := of()) is not None):
        text, calls = known.text(optimizer), model._calls
        if _is_joining(model.running):
            continue
        if has_turns := calls.num_compared < model.env.size:
            what, detail = f"{type(optimizer).__name__}.step() of {calls.model}", f"{text}, of {calls.model}"
            with take_turn(what, model.env.everyone, detail=detail, advice=_ADVICE):
                pass
        # Along a tensor axis each rank has computed the gradients of its copies, maybe to other last bits; and with
        # tables, ranks may have their optimizers in different orders.
        is_first, often = calls.num_steps == 0, has_turns and model.env.tensor_size == 1
        if is_first:
            compare_samples(model)
        if is_first or (often and calls.num_steps & (calls.num_steps - 1) == 0):
            owned = model._made.sharded_names()
            copied = ((n, p) for n, p in model.named_parameters() if n not in owned and (is_first or p.requires_grad))
            look_for_drift(copied, model.env, f"the steps of optimizers on {calls.model}")
        if known.others and often and num_steps & (num_steps - 1) == 0:
            kind, groups = type(optimizer).__name__, [group["params"] for group in optimizer.param_groups]
            others = ((f"parameter {i} of param_groups[{g}] of {kind}", groups[g][i]) for g, i in known.others)
            look_for_drift(others, model.env, f"the steps of optimizers on {calls.model}", OF_NO_MODEL)
        calls.note_step(text)


def _is_joining(running: Any) -> bool:
    """Whether torch's `Join` has ranks make different numbers of steps."""
    return bool(getattr(getattr(running, "_join_config", None), "enable", False))


def agree_on_forward(model: Any) -> None:
    """Before a forward that will be trained, of weights that are split and averaged by nobody."""
    env, compared = model.env, model._calls.num_compared
    if compared < env.size and env.data_size == 1 and model.skeleton is not None and torch.is_grad_enabled():
        with take_turn(f"the forward of {model._calls.model}", env.everyone, ends_pass=True):
            pass
