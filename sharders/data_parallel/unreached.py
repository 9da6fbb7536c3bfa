"""Gradients averaged whichever parameters the loss reaches, on whichever rank: of copies, of chunks, of scalars.

[Note: unreached] DDP averages a bucket when every parameter in it has a gradient. One that the loss does not reach (a
branch not taken, a dummy) keeps its bucket local, without a word in the first step. torch's two answers do not fit all
models: `static_graph` takes the first step's branch for every step's, `find_unused_parameters` walks the graph and
exchanges a bitmap at every step, and does not see through reentrant checkpoints. So at the end of the backward pass,
when it is known what was reached, a gradient of -0.0 is accumulated for the rest. Numbers are the same with it, for
x + -0.0 is x to the bit; and where the mean comes back as -0.0 everywhere, no rank has reached the parameter, and its
gradient is None again, as in one process. When all are reached, the cost is a hook on the output and an append for
each parameter. FSDP2 leaves such a parameter out of its unit's exchange, which then fits no other rank's; asked to, it
takes zeros, which are -0.0 here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from dmp import RanksError, ShardError, local_of, ranks, tensors_of
from sharders.data_parallel.asked import RETURN_THE_LOSS, hear_of_copies
from sharders.data_parallel.buffers import Buffers
from sharders.data_parallel.fsdp_units import OfWeights, be_too, weights_below
from sharders.data_parallel.later_hooks import LaterHooks, rest
from sharders.data_parallel.pass_end import PassEnd
from sharders.data_parallel.sparse_rows import OwnRowsDDP, average_rows, no_rows
from sharders.data_parallel.thawed import AfterGradient, can_thaw, hear_thawed
from sharders.data_parallel.unfinished import refuse_steps
from sharders.data_parallel.updated import Updated

_AFTER_RAISED = "averaging gradients after a backward pass that raised"


class AnyReachDDP(OwnRowsDDP):
    """`DistributedDataParallel` that needs no word on unused parameters, see [Note: unreached].

    A forward outside `no_sync` is averaged in its own backward: two forwards may be followed by two backwards. So is a
    backward that no forward of this module is behind, but one of `module` itself or of its parts, in one exchange at
    its end: torch's leaves each rank its own gradients there. Parameters may be frozen later. `torch.autograd.grad`
    through the output averages nothing. After a backward pass that raised on all ranks, others may follow, with
    `zero_grad` or on top of what it left in gradients: torch's would end in an assertion, or in wrong means.
    Parameters with an optimizer in the backward pass are updated when it is averaged, see updated.py.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buffer_sync = Buffers(self.process_group) if self.modules_buffers else None
        self._trained = [p for p in self._module_parameters if p.requires_grad]
        self._frozen = [p for p in self._module_parameters if can_thaw(p)]
        self._nodes = [get_gradient_edge(p).node for p in self._trained]
        self._reached: list[torch.Tensor] = []
        self._is_awaited = self._is_local = self._has_left = self.has_local = False
        self.has_averaged = self.process_group.size() == 1  # there is nothing to
        self._end = PassEnd()
        self._later, self._updated = LaterHooks(), Updated([*self._trained, *self._frozen])
        self._turn: Callable[[bool], AbstractContextManager[Any]] = nullcontext
        self._reach = _Reached(self._reached.append, weakref.ref(self))
        handles = [p.register_post_accumulate_grad_hook(self._reach) for p in self._trained]
        handles += hear_thawed(self._frozen, _Reached(_nowhere, weakref.ref(self)))
        weakref.finalize(self, _remove, handles)
        hear_of_copies(self, attrgetter("_trained"))
        refuse_steps(self, attrgetter("is_unaveraged"), attrgetter("_trained"))

    def take_turns(self, everyone: dist.ProcessGroup) -> None:
        """Have a pass that will be averaged be one on all ranks, see [Note: turns] in dmp/ranks/turns.py."""
        what = f"the average of gradients of the model that was wrapped at call {ranks.calls_so_far(everyone)}"
        # DDP's exchange and our own are of one size: of some ranks each, they would be added up all the same.
        names = (f"{what}, past its forward", what)
        self._turn = lambda by_ddp: ranks.take_turn(names[by_ddp], everyone, ends_pass=True)

    def _take_turn(self, by_ddp: bool) -> None:
        if not self._join_config.enable:
            with self._turn(by_ddp):
                pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; its backward averages gradients, unless inside `no_sync`."""
        if torch.is_grad_enabled():
            self._recover()
        output = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            self._reached.clear()
            self._later.take(self._trained, self._reach)
            # DDP averages in the next backward pass, whichever forward it is of: some may have none, as for logging.
            self._is_local = not (self.require_backward_grad_sync or self._is_awaited)
            if not self._is_local:
                self._is_awaited = True
                for tensor in with_graph(output):
                    tensor.register_hook(self._begin)
        return output

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What DDP exchanges first: plain memory, inside of torch.func's `jvp`, `vmap` and their like, too."""
        try:
            with temporarily_clear_interpreter_stack():
                return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "initialize_buckets" not in str(error):
                raise
            raise ShardError(
                f"the first backward pass of {type(self.module).__name__} ran inside of its forward, and none came "
                f"behind it, which DDP waits for: {RETURN_THE_LOSS}"
            ) from error

    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        """Buffers, see buffers.py."""
        assert self._buffer_sync is not None
        if not self._buffer_sync.have_changed(tensors):
            return
        gradients, self.process_group = self.process_group, self._buffer_sync.group
        # Views without dims of size 1, whose strides may be anything: torch takes them for memory that overlaps.
        views = [t.squeeze() for t in tensors]
        try:  # by torch's own frame, in which the watchdog knows a wait
            super()._distributed_broadcast_coalesced(views, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]
        finally:
            self.process_group = gradients
        self._buffer_sync.were_sent(tensors)

    def _begin(self, _: torch.Tensor) -> None:
        """A backward pass comes by the output: have `_complete` run at its end."""
        if self._end.is_queued or not self._accumulates():
            return
        self._recover()
        self._take_turn(True)
        self._end.queue(self._complete)
        self._later.open()
        if not self._is_awaited:  # averaged since the forward: two forwards, then two backwards
            self._reached.clear()
            self.reducer._rebuild_buckets()  # as each forward does; it wants to once, after the first
            self.reducer.prepare_for_backward([])
            self._is_awaited = True

    def _accumulates(self) -> bool:
        """Whether this backward pass gives any parameter a gradient; `torch.autograd.grad` does not."""
        # Private: nothing public tells the two apart.
        executes = torch._C._will_engine_execute_node
        try:
            if any(map(executes, self._nodes)):
                return True
            others = [p for p in self.module.parameters() if p.requires_grad]  # tables alone, on this rank
            with temporarily_clear_interpreter_stack():
                return any(executes(get_gradient_edge(p).node) for p in others)
        except RuntimeError:  # which torch raises of a parameter that `torch.autograd.grad` is asked for
            return False

    def _complete(self) -> None:
        """At the end of the backward pass: gradients for what it did not reach, with which DDP finishes."""
        ids = {id(p) for p in self._reached}
        if len(ids) < len(self._reached):  # by passes within this one, of which the last came after DDP had averaged
            raise RuntimeError("a parameter has been marked as ready twice")  # as DDP's own, which is explained
        if len(ids) < len(self._trained):
            _accumulate_nothing([p for p in self._trained if id(p) not in ids], self._sparse)
        if thawed := [p for p in self._frozen if p.requires_grad]:  # since the forward, and reached past it
            average_gradients(thawed, self.process_group)
        self._is_awaited = self._has_left = self.has_local = False
        self.has_averaged = True
        self._end.clear()
        self._reached.clear()
        if self._later.waiting or self._updated.any:  # behind DDP's own last callback, which is queued by now
            Variable._execution_engine.queue_callback(self._run_later)
        else:
            self._later.run()

    def _run_later(self) -> None:
        self._later.run()
        self._updated.step()

    def _setup_in_backward_optimizers(self) -> None:
        """Nothing: torch's way is each bucket's own, and asks CPUs for a stream of an accelerator."""

    def begin_past(self) -> None:
        """A backward pass has come to a parameter, and not from a forward of this module: average at its end."""
        if self._end.is_queued:
            return
        if not (self._is_awaited or (self.require_backward_grad_sync and not self._is_local)):
            self.has_local = True
            return
        self._recover()
        self._take_turn(self._is_awaited)
        # A forward that nobody has gone back from, as for logging: DDP awaits this pass in its place.
        self._end.queue(self._complete if self._is_awaited else self._average)
        self._later.open()

    def _average(self) -> None:
        trained = [p for p in (*self._trained, *self._frozen) if p.requires_grad]
        dense, rows = ([p for p in trained if (id(p) in self._sparse) is is_sparse] for is_sparse in (False, True))
        given = [*average_gradients(dense, self.process_group), *average_rows(rows, self.process_group)]
        self._has_left = self.has_local = False
        self.has_averaged = True
        self._end.clear()
        self._reached.clear()
        self._later.run(given)
        self._updated.step()

    @property
    def is_unaveraged(self) -> bool:
        """Whether a backward pass has raised, and none after it has averaged what it left."""
        return self._has_left or self._end.has_raised

    def _recover(self) -> None:
        """After a backward pass that raised: have DDP wait for it no longer; collective there.

        Raises:
            RanksError: ranks have come to different points of it: some wait for what others never sent.
            ShardError: gradients are DDP's own memory, where some of them are divided by the ranks already.
        """
        if not self._end.has_raised:
            return
        is_kept = self.gradient_as_bucket_view and any(p.grad is not None and p.grad.any() for p in self._trained)
        group: Any = self.process_group  # which does not declare it; private, as `_reset_state`: there is no other way
        sent = group._get_sequence_number_for_group()
        said = ranks.compare_facts({"sent": str(sent), "is kept": str(is_kept)}, self.process_group, _AFTER_RAISED)
        if said is not None:
            numbers = ", ".join(f"rank {rank}: {each['sent']}" for rank, each in enumerate(said))
            raise RanksError(
                f"{_AFTER_RAISED}: it was not at the same point on all ranks, which have begun different numbers of "
                f"exchanges ({numbers}), or have cleared gradients on some: end the processes, start from a checkpoint"
            )
        if is_kept:
            raise ShardError(
                f"{_AFTER_RAISED}: with gradient_as_bucket_view=True some gradients that it left are divided by the "
                "number of ranks and others are not: call zero_grad() before the next forward"
            )
        dist.barrier(self.process_group, device_ids=self.device_ids)  # what was sent by then is still written to
        self.reducer._reset_state()
        self._is_awaited, self._has_left = False, True
        self._end.clear()
        self._reached.clear()


class _Reached(AfterGradient):
    """What torch calls when a parameter has a gradient."""

    __slots__ = ("_append", "_of")

    def __init__(self, append: Callable[[torch.Tensor], None], of: weakref.ref[AnyReachDDP]) -> None:
        self._append, self._of = append, of

    def __call__(self, p: torch.Tensor) -> None:
        self._append(p)
        of = self._of()
        if of is not None:
            of.begin_past()


def _nowhere(p: torch.Tensor) -> None:
    """Of what DDP does not wait for."""


def reduce_unreached_chunks(module: Any) -> None:
    """Have FSDP2's units exchange something for every trained parameter, see [Note: unreached], and call its hooks.

    Args:
        module: the root, after `fully_shard`.
    """
    module.set_reduce_scatter_unused_params(True)
    be_too(_AnyReach, weights_below(module))


def hook_hidden(module: Any, output: Any) -> None:
    """Have the backward pass of a unit begin at tensors of its output that torch does not look for."""
    if isinstance(output, torch.Tensor):
        return
    from torch.distributed.fsdp._common_utils import collect_grad_tensors

    found = {id(each) for t in collect_grad_tensors(output) for each in (t, t._base)}
    hidden = [t for t in with_graph(output) if id(t) not in found]
    if hidden:
        module._get_fsdp_state()._register_pre_backward_hook(hidden)


class _AnyReach(OfWeights):  # type: ignore[misc]
    is_unreached = is_relaying = False
    is_kept_wide = False  # since a pass in `no_sync`: gradients are kept in the dtype in which they are averaged
    is_trained: bool | None = None  # as it was gathered
    earlier: Any = None  # a gradient to which torch would add without a look at what

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """As torch's, which each average begins with; what one kept back that came to no sum over all ranks."""
        if self.earlier is not None:
            self.sharded_param.grad, self.earlier = self.earlier, None
        super().accumulate_unsharded_grad_if_needed()

    def to_unsharded(self) -> None:
        """As torch's; what is gathered calls the hooks of the chunks, as DDP would, of this rank's own gradient."""
        super().to_unsharded()
        self.is_trained = self.sharded_param.requires_grad
        if self.sharded_param._backward_hooks and not self.is_relaying:
            self.is_relaying = True
            self._unsharded_param.register_hook(self._relay)

    def to_sharded(self) -> None:
        """As torch's; what was frozen while it was gathered, or thawed, as between a forward and its backward pass,
        stays so."""
        super().to_sharded()
        if self.is_trained is not None and self._unsharded_param.requires_grad != self.is_trained:
            self.sharded_param.requires_grad_(not self.is_trained)
        self.is_trained = None

    def _relay(self, gradient: torch.Tensor) -> torch.Tensor:
        for hook in list((self.sharded_param._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def to_accumulated_grad_if_needed(self) -> None:
        """As torch's, which leaves what has no gradient yet to come in another dtype than the others."""
        super().to_accumulated_grad_if_needed()
        self.is_kept_wide = self.reduce_dtype is not None

    def _reached(self, gradient: torch.Tensor) -> torch.Tensor:
        self.is_unreached = False  # of a pass before, whose mean was added to a gradient that was there
        return self._as_others(gradient)

    def _as_others(self, gradient: torch.Tensor) -> torch.Tensor:
        is_kept_wide, self.is_kept_wide = self.is_kept_wide, False
        return gradient.to(self.reduce_dtype) if is_kept_wide else gradient

    @property
    def unsharded_grad_data(self) -> torch.Tensor:
        if self.sharded_param._backward_hooks and not self.is_relaying:  # put on since it was gathered
            self.unsharded_param.grad = self._relay(self.unsharded_param.grad)
        return self._reached(super().unsharded_grad_data)

    @property
    def unsharded_accumulated_grad_data(self) -> torch.Tensor:
        return self._reached(super().unsharded_accumulated_grad_data)

    @property
    def unsharded_zero_grad_data(self) -> torch.Tensor:
        self.is_unreached = True
        if self.sharded_param._post_accumulate_grad_hooks:
            self.earlier, self.sharded_param.grad = self.sharded_param.grad, None
        nothing = torch.full_like(self.unsharded_param, -0.0)
        return self._as_others(self._get_grad_inner_tensor(nothing))

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> Any:
        """As torch's; for the mean of nothing what was there, which is what becomes of the gradient."""
        if self.is_unreached:
            self.is_unreached = False
            if self.grad_offload_event is not None:
                self.grad_offload_event.synchronize()
            earlier, self.earlier = self.earlier, None
            if _is_nothing(tensor):
                rest(self.sharded_param)
                return earlier
            if earlier is not None:
                local_of(earlier).add_(tensor)
                return earlier
        return super().to_sharded_dtensor(tensor)


def average_gradients(trained: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Average the gradients of parameters in one exchange.

    Returns:
        Those that have a gradient now and had none.
    """
    if not trained:
        return []
    gradients = [_nothing(p.detach()) if p.grad is None else p.grad for p in trained]
    local = [local_of(g) for g in gradients]
    wide = reduce(torch.promote_types, [g.dtype for g in local], torch.float32)
    mean = torch.cat([g.reshape(-1).to(wide) for g in local])
    dist.all_reduce(mean, group=group)
    mean.div_(group.size())
    means, given = mean.split([g.numel() for g in local]), []
    for p, gradient, part, value in zip(trained, gradients, local, means, strict=True):
        part.copy_(value.view_as(part))
        if p.grad is None and not _is_nothing(value):
            p.grad = gradient
            given.append(p)
    return given


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def with_graph(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an output that a backward pass may begin at, whatever holds them."""
    for _, tensor in tensors_of(value, as_held=True):
        if tensor.requires_grad:
            # An in-place operation on a view takes the view's hooks out of the graph, not its base's.
            base = tensor._base
            yield tensor if base is None or not base.requires_grad else base


def _accumulate_nothing(unreached: Sequence[torch.Tensor], sparse: Container[int]) -> None:
    """A gradient of -0.0, or of no rows, for each; None again, once averaged, where no rank had one."""
    frozen = [p for p in unreached if not p.requires_grad]  # since DDP was made: it waits for them all the same
    without = [p for p in unreached if p.grad is None]
    for p in frozen:
        p.requires_grad_(True)
    torch.autograd.backward(unreached, [no_rows(p) if id(p) in sparse else _nothing(p) for p in unreached])
    for p in frozen:
        p.requires_grad_(False)
    for p in without:
        if p.grad is not None and _is_nothing(p.grad):
            p.grad = None


def _nothing(p: torch.Tensor) -> torch.Tensor:
    return torch.full_like(p, -0.0)


def _is_nothing(gradient: torch.Tensor) -> bool:
    if gradient.is_sparse:
        return not gradient.coalesce().indices().numel()
    return bool((torch.signbit(gradient) & (gradient == 0)).all())
