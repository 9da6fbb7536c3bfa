"""Tables that TorchRec's module updates in its own backward pass: the optimizers in it, by torch.optim's names.

Theirs runs FBGEMM's TBE: several tables of one optimizer, each by its rectangles on this rank. The learning rate is one
for all tables of a TBE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from dmp import ChunkedTensor, FusedParameter, Shard, ShardError
from sharders.embedding.exchange.placement import of_blocks
from sharders.embedding.lookup.optimizers import OptimizerSpec


class _Piece(NamedTuple):
    """A rectangle of a table in a TBE: its state tensors there by name."""

    at: tuple[int, int]
    width: int
    state: Mapping[str, torch.Tensor]


class FusedTables:
    """The tables that a sharded module of theirs updates, with options that are read at every forward and backward.

    Args:
        theirs: the module.
        shards: parameter name -> the plan's rectangles on all ranks.
        parameter_of: their name of a table -> parameter name.
        given: parameter name -> its optimizer; ranks that hold nothing of a table have no TBE that says so.
    """

    def __init__(
        self,
        theirs: nn.Module,
        shards: Mapping[str, Sequence[Shard]],
        parameter_of: Mapping[str, str],
        given: Mapping[str, OptimizerSpec],
    ) -> None:
        self._shards, self._specs = shards, given
        self._pieces: dict[str, list[_Piece]] = {name: [] for name in given}
        self._steps = {name: torch.zeros((), dtype=torch.float32) for name in given}
        self._tbes: list[tuple[Any, dict[str, Any]]] = []
        groups: dict[OptimizerSpec, dict[str, Any]] = {}  # tables of one optimizer are one group
        self.options = {name: groups.setdefault(spec, spec.param_group()) for name, spec in given.items()}
        for kernel in _fused_kernels(theirs):
            tables, tbe = kernel.config.embedding_tables, kernel.emb_module
            names = [parameter_of[table.name] for table in tables]
            states = tbe.get_optimizer_state() if given[names[0]].optimizer.state else [{}] * len(tables)
            for name, table, state in zip(names, tables, states, strict=True):
                place = table.local_metadata
                self._pieces[name].append(_Piece(tuple(place.shard_offsets), place.shard_sizes[1], state))
            self._tbes.append((tbe, self.options[names[0]]))

    def set_rates(self) -> None:
        """Have the next update take the learning rate of the options as they are now."""
        for tbe, options in self._tbes:
            tbe.set_learning_rate(float(options["lr"]))

    def count(self) -> None:
        """One update more of every table."""
        for step in self._steps.values():
            step += 1

    def follow(self, other: FusedTables) -> None:
        """Be read by the param groups of another of the same tables, whatever the places."""
        groups = {id(own): other.options[name] for name, own in self.options.items()}
        self._tbes = [(tbe, groups[id(own)]) for tbe, own in self._tbes]
        self.options = dict(other.options)

    def take(self, other: FusedTables) -> None:
        """Options, steps and state of another of the same tables and places."""
        for name in self._specs:
            self.options[name].update((k, v) for k, v in other.options[name].items() if k != "params")
            self._steps[name].copy_(other._steps[name])
            for mine, theirs in zip(self._pieces[name], other._pieces[name], strict=True):
                for key, value in theirs.state.items():
                    mine.state[key].copy_(value)

    def parameters(self, held: Mapping[str, nn.Parameter], chunked: Mapping[str, Any]) -> Iterator[FusedParameter]:
        """As the wrapper asks for them."""
        for name in self._specs:
            size = tuple(chunked[name].size())
            starts = sorted({s.offsets[1] for s in self._shards[name]})
            widths = tuple(b - a for a, b in pairwise([*starts, size[1]])) if len(starts) > 1 else None
            yield FusedParameter(name, held[name], self.options[name], self._state_of(name, size, starts), widths)

    def _state_of(self, name: str, size: tuple[int, int], starts: list[int]) -> Callable[[], dict[str, torch.Tensor]]:
        """Live state in the unsharded shape; row-wise state of a table whose columns are cut: (rows, column blocks)."""
        kept = self._specs[name].optimizer.state

        def state() -> dict[str, torch.Tensor]:
            result: dict[str, torch.Tensor] = {"step": self._steps[name]} if kept else {}
            for key, tensor in kept.items():
                views = [p.state[key] for p in self._pieces[name]]
                offsets: list[tuple[int, ...]] = [p.at for p in self._pieces[name]]
                shape: tuple[int, ...] = size
                places: Sequence[Shard] = self._shards[name]
                if tensor.is_row_wise and len(starts) == 1:
                    shape, offsets = size[:1], [at[:1] for at in offsets]
                elif tensor.is_row_wise:
                    shape, views = (size[0], len(starts)), [view.unsqueeze(1) for view in views]
                    offsets, places = [(at[0], starts.index(at[1])) for at in offsets], of_blocks(places, starts)
                result[key] = ChunkedTensor(shape, views, offsets, places=places)
            return result

        return state


def attach(parameter: nn.Parameter, spec: OptimizerSpec, who: str) -> None:
    """Leave on a parameter what `apply_optimizer_in_backward` would, so that TorchRec's module runs that optimizer.

    Raises:
        ShardError: an optimizer or an option that FBGEMM has no update of on a CPU.
    """
    import torchrec

    classes = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": torchrec.optim.RowWiseAdagrad}
    usual = OptimizerSpec.make(spec.kind).param_group()
    others = {k: v for k, v in spec.options if k not in ("lr", "eps") and v != usual[k]}
    if spec.kind not in classes or others:
        raise ShardError(
            f"{who}: TorchRec's module runs {', '.join(classes)} in the backward pass, with lr and eps alone; got "
            f"{spec.kind} with {others}. Use one of these, or pass the table to an ordinary optimizer"
        )
    parameter._optimizer_classes = [classes[spec.kind]]  # type: ignore[attr-defined]
    parameter._optimizer_kwargs = [{k: v for k, v in spec.options if k in ("lr", "eps")}]  # type: ignore[attr-defined]


def apply_in_backward(parameter: nn.Parameter, spec: OptimizerSpec, who: str) -> None:
    """Have an ordinary parameter be updated in the backward pass.

    Raises:
        ShardError: as of `attach`.
    """
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

    attach(parameter, spec, who)
    kinds, options = parameter._optimizer_classes, parameter._optimizer_kwargs  # type: ignore[attr-defined]
    del parameter._optimizer_classes, parameter._optimizer_kwargs  # type: ignore[attr-defined]
    _apply_optimizer_in_backward(kinds[0], [parameter], options[0])


def _fused_kernels(module: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """What holds a TBE in their module, wherever it is kept: theirs are in lists that torch does not look into."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if hasattr(module, "fused_optimizer") and hasattr(module, "emb_module") and hasattr(module, "config"):
        yield module
        return
    held = [*vars(module).values(), *module._modules.values()]
    for each in held:
        for inner in each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else [each]:
            if isinstance(inner, nn.Module):
                yield from _fused_kernels(inner, seen)
