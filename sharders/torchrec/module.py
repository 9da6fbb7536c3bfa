"""`TorchRecModule`: a sharded module of TorchRec's in a wrapped model, under the unsharded module's names.

Theirs is kept out of torch's sight, for it has names, buffers and process groups of its own. What torch, optimizers and
checkpoints see are its parameters, in plain modules under the names that they had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from dmp import ChunkedTensor, FusedParameter, InputError, ParameterSharding, ShardError, join_name, ranks, tensors_of
from sharders.embedding.batches.input_faults import Fault
from sharders.embedding.torchrec_form import make_known
from sharders.torchrec.batches import in_unsharded_order, prepared
from sharders.torchrec.making import Made, Recipe
from sharders.torchrec.resharded import ReshardedTheirs


class TorchRecModule(nn.Module):
    """Runs a sharded module of TorchRec's. Results, gradients and state are the unsharded module's.

    Gradients are means over the data ranks. A table with an in-backward optimizer is updated once for each backward
    through a forward, with the learning rate of that forward: FBGEMM reads it there.

    Args:
        make: gives a new one of theirs, with values that are yet to be set; the same on every rank.
        original: the module in whose place this one stands, whose values are kept.
    """

    module_path = ""
    """In the model, for messages; set by the wrapper."""

    likeness = None
    """It stands for no class of TorchRec's but `ShardedModule`."""

    _made: Made

    def __init__(self, make: Recipe, original: nn.Module) -> None:
        super().__init__()
        make_known(type(self))
        self._make = make
        self._hold(make(), original)
        self._fill({**dict(original.named_parameters()), **dict(original.named_buffers())})

    def _hold(self, made: Made, original: nn.Module) -> None:
        """Put its parameters and buffers under the names that `original` has them under."""
        self.__dict__["_made"] = made  # not as a child
        self._who = type(original).__name__
        for path, module in original.named_modules():
            if path:
                parent, _, name = path.rpartition(".")
                kind = next((k for k in (nn.ModuleDict, nn.ModuleList) if isinstance(module, k)), nn.Module)
                self.get_submodule(parent).add_module(name, kind())
        for name, parameter in made.parameters.items():
            path, _, own = name.rpartition(".")
            self.get_submodule(path).register_parameter(own, parameter)
        persistent = original.state_dict().keys()
        for name, buffer in made.buffers.items():
            path, _, own = name.rpartition(".")
            self.get_submodule(path).register_buffer(own, buffer, persistent=name in persistent)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take values over: whole tensors, or chunks of the same places."""
        for name, target in {**self._made.parameters, **self._made.buffers, **self._made.chunked}.items():
            given = values[name].detach()
            if given.is_meta:
                continue
            if isinstance(target, ChunkedTensor):
                target.fill_from(given)
            else:
                target.copy_(given)

    @property
    def _theirs(self) -> Any:
        return self._made.theirs

    @_disable_dynamo  # as of tables
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """As the unsharded module's."""
        made, where = self._made, self.module_path or "the model"
        with ranks.entry(f"the forward of {where!r}", made.env.table_group):
            given: list[Any] = []

            def ready() -> int:
                self._check_parameters()
                values, size = self._prepared([*inputs, *keywords.values()], where)
                given.extend(values)
                return size

            sizes = ranks.numbers_of_all(f"the batch of {where!r}", ready, made.env.table_group)
            if made.needs_equal_sizes and len({*sizes}) > 1:
                raise InputError(
                    f"{where!r} is given batches of {[int(size) for size in sizes]} samples on its ranks; TorchRec's "
                    f"{type(self._theirs).__name__} needs equal ones where rows of a table are cut"
                )
            if made.fused is not None:
                made.fused.set_rates()
            result = self._theirs(*given[: len(inputs)], **dict(zip(keywords, given[len(inputs) :], strict=True)))
            result = result.wait() if hasattr(result, "wait") else result
            result = in_unsharded_order(result, made.collections)
        self._watch(result)
        return result

    def _prepared(self, values: list[Any], where: str) -> tuple[list[Any], int]:
        made = self._made
        try:
            return prepared(values, made.collections, made.takes_weights)
        except Fault as fault:
            names = [name for c in made.collections for name in c.features]
            raise fault.error(names, where, made.env.table_rank) from None

    def _check_parameters(self) -> None:
        for name, parameter in self._made.parameters.items():
            path, _, own = name.rpartition(".")
            if self.get_submodule(path)._parameters.get(own) is not parameter:
                raise ShardError(
                    f"the parameter {name!r} of {self.module_path!r} was replaced, and TorchRec's module still has the "
                    "old one; copy values into that (model.load_state_dict takes whole tensors)"
                )

    def _watch(self, result: Any) -> None:
        """Count the update of a backward pass when that begins."""
        made, begun = self._made, False
        fused = made.fused

        def begins(_: torch.Tensor) -> None:
            nonlocal begun
            if made is not self._made:
                raise ShardError(
                    f"{self.module_path!r} is asked for gradients of a forward from before model.reshard(plan), which "
                    "has moved its tables: their update would be lost. Finish the backward pass first, or run the "
                    "forward again"
                )
            if fused is not None and not begun:
                begun = True
                fused.count()

        for tensor in [t for _, t in tensors_of(result, as_held=True) if t.requires_grad]:
            tensor.register_hook(begins)

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """This rank's chunks of what is cut, as views."""
        return self._made.chunked

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """Tables that are updated in the backward pass."""
        made = self._made
        return [] if made.fused is None else made.fused.parameters(made.parameters, made.chunked)

    def unsharded(self) -> nn.Module:
        """A plain module of the same structure, on meta."""
        return copy.deepcopy(self._made.plain)

    def resharded(self, plan: Mapping[str, ParameterSharding]) -> ReshardedTheirs:
        """Another of theirs under another plan: see `dmp.Resharded`. Made by all ranks together."""
        self._check_parameters()
        recipe = replace(self._make, layouts={name: entry.layout for name, entry in plan.items()})
        return ReshardedTheirs(self, recipe, plan)

    def run_by(self, make: Recipe, made: Made) -> TorchRecModule:
        """Have another of theirs in place of the one that there is, in the same modules."""
        old, self._make = self._made, make
        self.__dict__["_made"] = made
        for name, parameter in made.parameters.items():
            path, _, own = name.rpartition(".")
            self.get_submodule(path)._parameters[own] = parameter
        for name, buffer in made.buffers.items():
            path, _, own = name.rpartition(".")
            self.get_submodule(path)._buffers[own] = buffer.copy_(old.buffers[name])
        return self.train(self.training)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of what the plan places."""
        for name in self._make.names:
            yield join_name(prefix, name)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Class of the module in whose place this one stands."""
        return type(self._made.plain)

    def create_context(self, *_: Any, **__: Any) -> Any:
        """Refused, as `preprocess_input` and `input_dist`: it is what TorchRec's train pipelines begin with.

        Raises:
            ShardError: always.
        """
        raise ShardError(
            f"TorchRec's train pipelines do not run {type(self).__name__}, {self.module_path!r}: import the pipeline "
            "of the same name from dmp (TrainPipelineSparseDist, ...), and give it the wrapped model"
        )

    preprocess_input = input_dist = create_context

    def train(self, mode: bool = True) -> TorchRecModule:
        """Theirs too."""
        self._theirs.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TorchRecModule:
        """Nothing, for what changes nothing.

        Raises:
            ShardError: a move or a cast.
        """
        for name, parameter in self._made.parameters.items():
            probe = fn(parameter.detach().new_empty(0))
            if probe.dtype != parameter.dtype or probe.device != parameter.device:
                raise ShardError(
                    f"{name!r} of {self.module_path!r} is in TorchRec's {type(self._theirs).__name__}, which stays on "
                    f"{parameter.device} in {parameter.dtype}; cast or move the module before it is wrapped"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchRecModule:
        """Another module of theirs with the same values; collective, as making it is."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        nn.Module.__init__(new)
        shared = ("_made", "_make", "_parameters", "_buffers", "_modules")
        new.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in shared}, memo))
        new._make = self._make
        new._hold(self._make(), self._made.plain)
        new._fill({**self._made.parameters, **self._made.buffers, **self._made.chunked})
        if new._made.fused is not None and self._made.fused is not None:
            new._made.fused.take(self._made.fused)
        memo.update((id(old), new._made.parameters[name]) for name, old in self._made.parameters.items())
        return new.train(self.training)
