"""A state dict into a wrapped model: checked on all ranks before anything is filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from dmp.bits import checksum
from dmp.calls import Calls
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.dtensor_pieces import ONE_RANKS, is_of_another_rank
from dmp.errors import CheckpointError, DmpError
from dmp.foreign import type_name
from dmp.inference_mode import outside_inference_mode
from dmp.places import is_dtensor, restore_ties, tied_places
from dmp.ranks import results_of_all
from dmp.wrap.making.assembly import Assembly
from dmp.wrap.values.skeleton import all_tensors
from dmp.wrap.values.taken import Times, compare_times, times_of


@outside_inference_mode()
def load(
    made: Assembly,
    calls: Calls,
    state_dict: Mapping[str, Any],
    prefix: str | bool = "",
    strict: bool = True,
    assign: bool = False,
) -> _IncompatibleKeys:
    """Fill the model; arguments, result and errors as of `DistributedModelParallel.load_state_dict`.

    With `assign` the data-parallel part may have lost hold of parameters afterwards.
    """
    if isinstance(prefix, bool):  # code that knows nn.Module alone, as Transformers' Trainer, has `strict` there
        strict, prefix = prefix, ""
    if made.device.type == "meta":
        raise CheckpointError("load_state_dict: the model was wrapped with device='meta', which holds no values")
    own, group = made.module.state_dict(), made.env.everyone
    held = dict(made.module.named_parameters(remove_duplicate=False))
    given: dict[str, Any] = {}

    def checked() -> _Told:
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(f"expected a state dict, name -> tensor; got {type_name(state_dict)}")
        given.update((k[len(prefix) :], v) for k, v in state_dict.items() if k.startswith(prefix))
        # A table's own parameter is a part of it: torch's set_state_dict hands on those of names that it has not got.
        given.update((k, own[k]) for k in given.keys() & held.keys() & own.keys() if given[k] is held[k])
        missing, unexpected = _check(made, own, given, prefix, strict, assign)
        if group is None:
            return _Told(missing, unexpected, {}, frozenset())
        return _Told(missing, unexpected, _checksums(made, own, given), times_of(calls, own, given))

    found = results_of_all(checked, group, "load_state_dict")
    missing, unexpected, *_ = found[made.env.rank if group is not None else 0]
    _compare(found)
    ties = tied_places(made.module) if assign else []
    if assign:  # which gives storage to what is on meta, as in torch
        own = {k: torch.empty_like(v, device=made.device) if _is_split_on_meta(v) else v for k, v in own.items()}
    try:
        made.module.load_state_dict(_with_local_shards(own, given), strict=False, assign=assign)
    except DmpError as error:
        raise CheckpointError(str(error)) from error
    restore_ties(ties)
    return _IncompatibleKeys(missing, unexpected)


_LOOKED_AT = 4096
"""Elements of a tensor that is cut, where ranks compare what they were given."""


class _Told(NamedTuple):
    """What ranks tell each other of the state dicts that they were given.

    Args:
        missing, unexpected: names.
        checksums: of values, by name.
        times: at which the rank's parts were taken.
    """

    missing: list[str]
    unexpected: list[str]
    checksums: dict[str, int]
    times: Times


def _checksums(made: Assembly, own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """Of whole parameters, as they will be; of what is cut, of the first rows, for each rank takes other rows of what
    must be one tensor. Buffers may differ."""
    copied = {name for name, entry in made.plan.items() if entry.layout.is_copied}
    found: dict[str, int] = {}
    for name, _ in made.module.named_parameters(remove_duplicate=False):
        value, to = given.get(name), own.get(name)
        if not isinstance(value, torch.Tensor) or to is None or is_lazy(to) or value.is_meta:
            continue
        if isinstance(value, ChunkedTensor) or is_dtensor(value):
            continue
        if (isinstance(to, ChunkedTensor) or is_dtensor(to)) and name not in copied and value.dim():
            value = value[: 1 + _LOOKED_AT // max(1, value[:1].numel())]
        found[name] = checksum(value.to(to.dtype))
    return found


def _compare(told: Sequence[_Told]) -> None:
    """Raise what is not the same on all ranks, and would have copies drift apart."""
    compare_times([each.times for each in told])
    for rank, each in enumerate(told):
        if each[:2] != told[0][:2]:
            raise CheckpointError(
                "load_state_dict: expected the same names on every rank; rank 0 has (missing, unexpected) "
                f"{told[0][:2]}, rank {rank} {each[:2]}; copies would drift apart"
            )
        first = told[0].checksums
        for name in sorted(first.keys() ^ each.checksums.keys()):
            raise CheckpointError(
                f"load_state_dict: {name!r} is given as a whole on rank {0 if name in first else rank}, and not on "
                f"rank {rank if name in first else 0}: give every rank the same state dict"
            )
        for name, value in first.items():
            if each.checksums[name] != value:
                raise CheckpointError(
                    f"load_state_dict: {name!r} has other values on rank {rank} than on rank 0: give every rank the "
                    "same state dict, else copies drift apart, and of what is split each rank takes a part of another"
                )


def loaded(model: Any, state_dict: dict[str, Any], prefix: str, missing: list[str] | None) -> None:
    """After the wrapper was loaded as a part of a parent: torch, which comes to its children next, finds them loaded.

    Args:
        model: the wrapper.
        state_dict: of the parent; changed.
        missing: takes the root's own names that are not in it, to which torch does not come; None where nobody asks.
    """
    given = {name for name in state_dict if name.startswith(prefix)}
    held = dict(all_tensors(model))
    own = model.module.state_dict()
    own.update((k, held[k]) for k, v in own.items() if k in held and not isinstance(v, ChunkedTensor))
    for name in own:
        if "." not in name:
            if missing is not None and prefix + name not in given:
                missing.append(prefix + name)
            state_dict.pop(prefix + name, None)
        elif prefix + name in given:
            state_dict[prefix + name] = own[name]


def _check(
    made: Assembly, own: Mapping[str, Any], given: Mapping[str, Any], prefix: str, strict: bool, assign: bool
) -> tuple[list[str], list[str]]:
    """Missing and unexpected names; raises what does not fit, before anything is filled."""
    missing = [prefix + k for k in own if k not in given]
    unexpected = [prefix + k for k in given if k not in own]
    reasons = {k: _why_not_loaded(own[k], given[k]) for k in own if k in given}
    if not any(reasons.values()):
        in_place = made.sharded_names() | {k for k, v in own.items() if is_dtensor(v)}
        reasons = {k: _why_not_filled(own[k], given[k], assign) for k in own if k in given and k in in_place}
    wrong = [f"{prefix}{k} {reason}" for k, reason in reasons.items() if reason]
    if (strict and (missing or unexpected)) or wrong:
        unknown = [f"missing keys: {missing}"] * bool(missing) + [f"unexpected keys: {unexpected}"] * bool(unexpected)
        shown = "; ".join((unknown + _of_prefix(missing, unexpected)) * strict + wrong)
        raise CheckpointError(f"state dict does not fit {type(made.module).__name__}: {shown}")
    return missing, unexpected


def _of_prefix(missing: list[str], unexpected: list[str]) -> list[str]:
    """What to do where one prefix more or less is all that names differ by, as of a model in DDP or a compiled one."""
    for names, others, how in (
        (
            unexpected,
            missing,
            "all names begin with {0!r}: give {{k.removeprefix({0!r}): v for k, v in d.items()}}",
        ),
        (missing, unexpected, "none of its names begins with {0!r}: give {{{0!r} + k: v for k, v in d.items()}}"),
    ):
        for short in others:
            prefix = names[0].removesuffix(short) if names and names[0].endswith("." + short) else ""
            if prefix and {prefix + name for name in others} == set(names):
                return [how.format(prefix)]
    return []


def _why_not_loaded(own: Any, given: Any) -> str:
    """Why `given` cannot be loaded where `own` is, or nothing."""
    if not isinstance(own, torch.Tensor) or is_lazy(own):
        return ""
    if not isinstance(given, torch.Tensor):
        return f"is a {type_name(given)}, expected a tensor of shape {tuple(own.shape)}"
    if is_dtensor(given) and not (
        is_dtensor(own) and (given.device_mesh, given.placements) == (own.device_mesh, own.placements)
    ):
        return "is a DTensor of another mesh or plan: use save_checkpoint and load_checkpoint, or full_state_dict"
    if is_dtensor(given) and is_dtensor(own) and is_of_another_rank(given, own):
        return ONE_RANKS
    if hasattr(given, "local_shards") and not isinstance(given, ChunkedTensor):
        return (
            f"is a {type_name(given)}, of which each rank has a part, as in the state dict of TorchRec's wrapper: "
            "torch.distributed.checkpoint.save it, and load_checkpoint(folder) reads it on any plan"
        )
    if given.shape != own.shape:
        return f"has shape {tuple(given.shape)}, expected {tuple(own.shape)}"
    if isinstance(given, ChunkedTensor) and (not isinstance(own, ChunkedTensor) or own.lacks(given) is not None):
        return "is in pieces of another plan: use save_checkpoint and load_checkpoint, or full_state_dict"
    return ""


def _why_not_filled(own: torch.Tensor, given: torch.Tensor, assign: bool) -> str:
    """Why a value that fits a sharded parameter cannot go where that lies, or nothing."""
    if given.is_meta and not own.is_meta:
        return "is on meta in the state dict, which holds no values"
    if assign and given.dtype != own.dtype:
        return f"has dtype {given.dtype}, expected {own.dtype}: what is sharded is filled in place; cast one of them"
    if not assign and _is_split_on_meta(own):
        return "is on meta and would stay empty: pass assign=True, or init_parameters=True when wrapping"
    return ""


def _with_local_shards(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, but DTensors filled here where it has whole tensors: torch would not load the one as the other."""
    result = dict(given)
    for name, value in given.items():
        mine = own.get(name)
        if isinstance(mine, torch.Tensor) and is_dtensor(mine) and not is_dtensor(value):
            as_chunks(mine).fill_from(value)
            result[name] = mine
    return result


def _is_split_on_meta(value: Any) -> bool:
    return is_dtensor(value) and value.is_meta
