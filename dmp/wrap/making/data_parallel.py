"""The data-parallel part of a wrapped model: checked beforehand, started, started again where it has lost hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.contracts import DataParallelWrapper, hook
from dmp.errors import ShardError
from dmp.names import join_name
from dmp.places import is_dtensor
from dmp.plans.check import Resolved
from dmp.plans.kept_places import kept_beside
from dmp.ranks import raise_on_all
from dmp.registry import replicating_wrapper
from dmp.wrap.making.agreement import check_agreement, sync_from_first_rank
from dmp.wrap.making.assembly import Assembly
from dmp.wrap.making.ddp_watch import SplitWatch, Watch
from dmp.wrap.values.since_split import SinceSplit
from dmp.wrap.values.skeleton import all_tensors, skeleton_of
from dmp.wrap.values.state_hooks import take_wholes

_ADVICE = "after wrapping too, every rank must do the same to its model"


def check_beforehand(wrapper: DataParallelWrapper, resolved: Resolved) -> None:
    """Raise what the data-parallel part will not run of what is left to it, as far as it says beforehand."""
    module, env = resolved.found.module, resolved.found.env
    for name, parameter in module.named_parameters():
        _check_not_lazy(name, parameter)
    in_place = hook(wrapper, "shards_in_place")
    if resolved.found.split or (in_place is not None and in_place(env, False)):
        _check_not_scripted(module)
    check = hook(wrapper, "check")
    if check is not None:
        paths = [(path, site.module) for site in resolved.sites for path in site.aliases]
        taken = frozenset(join_name(path, name) for path, each in paths for name, _ in all_tensors(each))
        check(module, env, resolved.found.split, taken)


def start(made: Assembly) -> Assembly:
    """The model with gradients of what no sharder owns averaged; collective.

    Raises:
        ShardError: a parameter is still lazy, or on meta.
    """
    in_place, sharded = made.shards_in_place, made.sharded_names()
    whole = left_whole(made, in_place, sharded)
    for name, parameter in made.module.named_parameters():
        _check_not_lazy(name, parameter)
        if name not in sharded:
            _check_leaf(name, parameter)
        if parameter.is_meta and (name in whole or not in_place):
            raise ShardError(f"parameter {name!r} is on meta: pass init_parameters=True, or load values first")
    skeleton = made.skeleton
    if in_place and skeleton is None:
        _check_not_scripted(made.module)
        skeleton = skeleton_of(made.module, made.sharded)
    with torch.inference_mode(False), torch.enable_grad():  # again in an evaluation, where something was frozen before
        running = _averaged(made, in_place, sharded, whole)
    take_wholes(made.module)
    is_watched = running is not made.module or (made.env.size > 1 and not in_place)
    watch = Watch(made.module, made.sharded_names) if is_watched else None
    split_watch = made.split_watch or (None if skeleton is None else SplitWatch(made.module, made.env.size > 1))
    since = made.since_split
    if since is None and skeleton is not None:
        since = SinceSplit(made.module, skeleton, [path for each in made.owned for path in each.aliases])
    made = replace(made, running=running, skeleton=skeleton, watch=watch, is_data_parallel=True)
    return replace(made, split_watch=split_watch, since_split=since)


def start_later(made: Assembly) -> Assembly:
    """As `start`, of values that ranks have made apart, as lazy modules draw theirs: they become rank 0's."""
    split = {name for name, p in made.module.named_parameters(remove_duplicate=False) if is_dtensor(p)}
    sync_from_first_rank(made.module, made.env, made.sharded_names() | split)
    return start(made)


def stopped(made: Assembly) -> Assembly:
    """The same without what a wrapper has around it: its hooks are on parameters that have been replaced."""
    return replace(made, running=made.module, watch=None, is_data_parallel=False)


def check_split(made: Assembly) -> None:
    """Before a forward: whether weights that are split are still of their dtype, and those that are trained known.

    Collective where some were frozen or unfrozen: gloo ends the process where ranks average different ones.

    Raises:
        PlanError, RanksError: other ranks have not done the same.
        ShardError: a weight was cast, or added; the other ranks are told.
    """
    if made.split_watch is not None and made.is_data_parallel:
        try:
            changed = made.split_watch.check(made.sharded_names)
        except ShardError as error:
            raise_on_all(error, made.env.everyone, "the forward pass")
        if changed:
            check_agreement(made.split_watch.facts(), made.env, f"the forward pass, as {changed}", _ADVICE)


def check_cast(made: Assembly) -> None:
    """After a forward that a backward pass may follow: that the model has not cast weights itself meanwhile, as Switch
    Transformers' routers cast theirs. Hooks that were to average their gradients never run then.

    Raises:
        ShardError: it has; on all ranks.
    """
    for watch in (made.watch, made.split_watch if made.is_data_parallel else None):
        for path, was, is_ in () if watch is None else watch.cast():
            error = ShardError(
                f"{path!r} was cast from {was} to {is_} by the forward of the model, which ranks have together: "
                f"cast its module before wrapping, by .to({is_}), so that this changes nothing"
            )
            raise_on_all(error, made.env.everyone, "the forward pass")


def check_data(made: Assembly) -> None:
    """Before a look at the state.

    Raises:
        ShardError: a weight that is split was given other values in a way of which nothing came.
    """
    if made.split_watch is not None:
        made.split_watch.check_data()


def has_lost_hold(made: Assembly) -> bool:
    """Before a forward: whether the data-parallel part is to be made again, as parameters are others than they were.

    Collective where it is: ranks compare what they have now, for who has changed nothing goes on to collectives of
    torch's, in which it would wait.

    Raises:
        PlanError: ranks have changed their models in different ways.
        RanksError: some have not changed theirs.
        ShardError: a sharder's module was replaced; the other ranks are told.
    """
    watch = made.watch
    try:
        if watch is None or not watch.is_lost():
            return False
    except ShardError as error:
        raise_on_all(error, made.env.everyone, "the forward pass")
    check_agreement(watch.facts(), made.env, f"averaging gradients anew, as {watch.what_is_lost()}", _ADVICE)
    return True


def unknown(made: Assembly) -> list[tuple[str, torch.Tensor]]:
    """Those that were added, by name, and that no forward of the model has met: nobody averages their gradients."""
    if made.split_watch is not None and made.is_data_parallel:
        return made.split_watch.unknown(made.sharded_names)
    return [] if made.watch is None else made.watch.unknown()


def left_whole(made: Assembly, in_place: bool, sharded: frozenset[str]) -> frozenset[str]:
    """Names, under every alias, of weights that are not split with the rest where the mesh splits: replicated by the
    plan, inside a sharder's module, kept by the model beside their places, or of sparse gradients, which FSDP2 has no
    way to reduce. They are not taken on meta.

    Args:
        in_place, sharded: the assembly's `shards_in_place` and `sharded_names()`, which go through the whole model.
    """
    module, chosen = made.module, set[str]()
    if made.env.fully_sharded_axes:
        chosen = {name for name, e in made.plan.items() if e.layout.is_dense and e.layout.is_copied}
    kept = _aliases(module, {id(p) for name, p in module.named_parameters() if name in chosen} if chosen else ())
    if in_place:
        embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        others = {*kept_beside(module), *(id(m.weight) for m in embeddings if m.sparse)}
        split = {id(p) for p in module.parameters() if is_dtensor(p)}
        kept |= made.unnamed() | (_aliases(module, others - split) - sharded)
    return kept


def _aliases(module: nn.Module, ids: Collection[int]) -> frozenset[str]:
    """Names, under every alias, of these parameters."""
    named = module.named_parameters(remove_duplicate=False) if ids else ()
    return frozenset(name for name, p in named if id(p) in ids)


def _averaged(made: Assembly, in_place: bool, sharded: frozenset[str], kept: frozenset[str]) -> nn.Module:
    """The module with gradients averaged; what is left whole apart."""
    owned = sharded if in_place else sharded - made.unnamed()
    is_split = in_place and made.split_watch is not None  # it cannot be twice
    wrapped = made.module if is_split else made.wrapper.wrap(made.module, made.env, made.device, owned | kept)
    if kept:
        others = frozenset(name for name, _ in all_tensors(made.module)) - kept
        wrapped = replicating_wrapper().wrap(wrapped, made.env, made.device, others)
    return wrapped


def _check_leaf(name: str, parameter: torch.Tensor) -> None:
    if torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        raise ShardError(
            f"in the place of parameter {name!r} is a tensor of torch.func, as grad, vmap or jacrev make them: a "
            "wrapped model averages gradients in loss.backward() alone, and these would be each rank's own. "
            "dmp.to_unsharded(model) can be called with them"
        )
    if not parameter.is_leaf:
        raise ShardError(
            f"in the place of parameter {name!r} is the result of a computation, as torch.func.functional_call, or "
            "copy.deepcopy of a module of torch.jit, puts it there: its gradient would be averaged by nobody. Copy "
            "values into parameters under torch.no_grad(), or call dmp.to_unsharded(model) with them"
        )


def _check_not_scripted(module: nn.Module) -> None:
    for path, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule) and any(True for _ in all_tensors(each)):
            raise ShardError(
                f"module {path!r} is a {type(each).__name__}, compiled by torch.jit: its code computes with the plain "
                "tensors that it was made with, and cannot on a mesh that splits dense weights. Wrap the model with "
                "the module itself in this place, and compile to_unsharded(model) where it is needed; or use a mesh "
                "whose axes copy dense weights ('dp', 'replicate')"
            )


def _check_not_lazy(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ShardError(
            f"parameter {name!r} of a lazy module has no shape yet: pass init_data_parallel=False, run one "
            "forward, then call init_data_parallel()"
        )
