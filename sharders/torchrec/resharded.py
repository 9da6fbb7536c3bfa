"""A sharded module of TorchRec's under another plan: another of theirs, made by the same sharder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from dmp import ChunkedTensor, FusedParameter, ShardError
from sharders.torchrec.making import Made


class ReshardedTheirs:
    """One of theirs beside the one in force; a `dmp.Resharded`.

    Args:
        module: the `TorchRecModule` whose it will be.
        make: makes one; all ranks make them together.
        named: parameters that the plan places.

    Raises:
        ShardError: a module with parameters that no plan places.
    """

    def __init__(self, module: Any, make: Callable[[], Made], named: Mapping[str, Any]) -> None:
        others = sorted(module._made.parameters.keys() - named.keys())
        if others:
            raise ShardError(
                f"{module.module_path!r} is TorchRec's {type(module._theirs).__name__}, which has {others[0]!r} beside "
                "its tables, and cannot change its plan in a running model: save_checkpoint(path, model), wrap a new "
                "model with that plan, load_checkpoint(path, model)"
            )
        self._module, self._make, self._made = module, make, make()
        if self._made.fused is not None:
            self._made.fused.follow(module._made.fused)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Theirs."""
        return self._made.parameters

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """This rank's chunks of what is cut, as views."""
        return self._made.chunked

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """Tables that are updated in the backward pass; they keep their param groups."""
        made = self._made
        return [] if made.fused is None else made.fused.parameters(made.parameters, made.chunked)

    def take_place(self) -> nn.Module:
        """The module, which is the same as before, runs this one from now on."""
        made: nn.Module = self._module.run_by(self._make, self._made)
        return made
