"""A table's weight keeps its form: torch's parametrizations, pruning and norms of weights would be of a rank's part.

They put tensors of their own in the place of a weight. The lookup reads the part that it holds, so that they would do
nothing; and what they work out, as a largest singular value, or which entries are smallest, is of the whole table. A
module that was given a plain class would look rows up in its part.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dmp import ShardError


class SameForm(nn.Module):
    """Holds tables' parameters, in whose place nothing else is put."""

    _tables: dict[str, int]

    def __init__(self) -> None:
        nn.Module.__init__(self)  # past a class of torch's that a subclass is of, which would make a weight of its own

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's, but none that is made of a table's."""
        for table in self.__dict__.get("_tables", ()):
            if name in (f"{table}_orig", f"{table}_g"):  # of pruning and spectral_norm, of weight_norm
                raise _refusal(table)
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and not issubclass(value, type(self)):  # FSDP2 and others put subclasses there
            raise ShardError(
                f"a sharded module is no {value.__name__} by its class: each rank has a part of its tables, of which "
                "a plain forward would read rows. to_unsharded(model) has plain modules"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """As torch's, but none of a table's, which parametrizations take away first."""
        if name in self.__dict__.get("_tables", ()):
            raise _refusal(name)
        super().__delattr__(name)

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` asks for, which would end in the name of a class of ours."""
        tables = ", ".join(self.__dict__.get("_tables", ()))
        raise ShardError(
            f"the sharded table {tables!r} is not compiled by torch.jit.script: what ranks exchange is no part of a "
            "graph. dmp.to_unsharded(model), on all ranks, is a plain module with the same weights, which can be"
        )


def _refusal(name: str) -> ShardError:
    return ShardError(
        f"the {name} of a sharded table cannot be taken away, parametrized, pruned or normed: each rank has a part of "
        "it, which the table's lookup reads as it is. Do that to the plain model, as to_unsharded(model) gives it"
    )
