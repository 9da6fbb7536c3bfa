"""What a sharded module's tables carry along when their plan changes: each tensor in its old and its new chunks.

A tensor is shaped as the local parameter, as the whole one's rows (row-wise state), or is a number that every rank has.
Weights and state of the backward pass are here; what others keep beside tables is in beside.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dmp.chunked import ChunkedTensor, as_chunks, chunk_views
from dmp.contracts import FusedModule, FusedParameter, Resharded, ShardedModule
from dmp.errors import ShardError
from dmp.names import join_name
from dmp.wrap.earlier.parameter_hooks import carry_hooks
from dmp.wrap.optimizers.column_blocks import is_blocked


@dataclass(frozen=True)
class Carried:
    """One tensor.

    Args:
        key: the same on all ranks: the parameter's name, and what it is of it.
        old, new: this rank's chunks; those of `new` are to be filled.
        old_widths, new_widths: of the column blocks, of row-wise state; see column_blocks.py.
    """

    key: str
    old: ChunkedTensor
    new: ChunkedTensor
    old_widths: tuple[int, ...] | None = None
    new_widths: tuple[int, ...] | None = None

    def check(self) -> None:
        """Raise `ShardError` where the one cannot become the other."""
        rows = self.old.size()[:1] == self.new.size()[:1]
        if self.old.dtype != self.new.dtype or not (self.old.size() == self.new.size() or (rows and self.is_row_wise)):
            raise ShardError(
                f"{self.key} is of {tuple(self.old.size())} {self.old.dtype}, and would be of "
                f"{tuple(self.new.size())} {self.new.dtype} under the other plan"
            )

    @property
    def is_row_wise(self) -> bool:
        """Whether it is row-wise state whose column blocks change."""
        if self.old.size() != self.new.size():
            return self.old_widths is not None or self.new_widths is not None
        blocked = self.old_widths is not None and is_blocked(self.old, self.old_widths)
        return blocked and self.old_widths != self.new_widths


@dataclass(frozen=True)
class Parameter:
    """A parameter in its old and its new form.

    Args:
        name: fully-qualified.
        old, new: the local parameters.
        old_chunks, new_chunks: of them, where they are cut; None where they are whole.
        stays: its layout does.
    """

    name: str
    old: nn.Parameter
    new: nn.Parameter
    old_chunks: ChunkedTensor | None
    new_chunks: ChunkedTensor | None
    stays: bool

    def value(self) -> Carried:
        """The weights."""
        return Carried(self.name, _chunks(self.old, self.old_chunks), _chunks(self.new, self.new_chunks))

    def beside(self, what: str, value: torch.Tensor, of: str = "") -> tuple[Carried, torch.Tensor]:
        """A tensor of the old one's local shape, such as its gradient, and room for it in the new one's shape.

        Raises:
            ShardError: another shape.
        """
        if value.shape != self.old.shape or value.is_sparse:
            kind = "a sparse tensor" if value.is_sparse else f"{tuple(value.shape)}"
            raise ShardError(
                f"{what} of {self.name!r} is {kind}; expected the local parameter's {tuple(self.old.shape)}, which "
                "alone can be cut as the parameter is"
            )
        room = torch.zeros_like(self.new.detach(), dtype=value.dtype)
        old, new = (
            self._like(value.contiguous(), self.old, self.old_chunks),
            self._like(room, self.new, self.new_chunks),
        )
        return Carried(f"{what} of {self.name!r}{of}", old, new), room

    @staticmethod
    def _like(value: torch.Tensor, parameter: nn.Parameter, chunks: ChunkedTensor | None) -> ChunkedTensor:
        return as_chunks(value) if chunks is None else chunk_views(value, parameter.detach(), chunks)

    def take_over(self) -> None:
        """Have the new parameter be known by what the old one was: flags, attributes, hooks."""
        self.new.requires_grad_(self.old.requires_grad)
        for name, value in vars(self.old).items():
            if not name.startswith("_dmp_"):
                setattr(self.new, name, value)
        carry_hooks(self.old, self.new)

    def leave(self) -> None:
        """Let the old parameter go: who still holds it keeps no memory, and reads or trains nothing of before."""
        nothing = torch.nan if self.old.is_floating_point() else 0
        self.old.grad = None
        self.old.data = self.old.data.new_full((1,), nothing).expand(self.old.shape)
        if self.old.requires_grad:
            self.old.register_hook(partial(_refuse, self.name))  # which holds no chunks


def _refuse(name: str, _: torch.Tensor) -> None:
    raise ShardError(
        f"{name!r} is given a gradient by a forward from before model.reshard(plan), which has moved it: finish the "
        "backward pass first, or run the forward again"
    )


def parameters_of(path: str, module: nn.Module, new: Resharded, staying: Container[str]) -> list[Parameter]:
    """The parameters of a sharded module at `path`; `staying` are names of those whose layouts do."""
    before = module.chunked_state() if isinstance(module, ShardedModule) else {}
    after, own = new.chunked_state(), dict(module.named_parameters())
    return [
        Parameter(
            join_name(path, name), own[name], p, before.get(name), after.get(name), join_name(path, name) in staying
        )
        for name, p in new.parameters().items()
    ]


def fused_state(path: str, module: nn.Module, new: Resharded) -> Iterator[Carried]:
    """State of the optimizers that run in the module's backward pass."""
    after = {f.name: f for f in new.fused_parameters()}
    for f in module.fused_parameters() if isinstance(module, FusedModule) else ():
        yield from _state_of(join_name(path, f.name), f, after[f.name])


def _state_of(name: str, old: FusedParameter, new: FusedParameter) -> Iterator[Carried]:
    room = new.state()
    for key, value in old.state().items():
        what = f"optimizer state {key!r} of {name!r}"
        yield Carried(what, as_chunks(value), as_chunks(room[key]), old.widths, new.widths)


def _chunks(parameter: nn.Parameter, chunks: ChunkedTensor | None) -> ChunkedTensor:
    return as_chunks(parameter) if chunks is None else chunks
